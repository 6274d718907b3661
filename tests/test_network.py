"""The packed network: linear layers against `F.linear`, encoders against Hugging Face, batches against single queries."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, cast, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import batch_of, batches
from torch import Tensor

from nci.model import NCIModel
from nci.search.linear import Precision, make_linear
from nci.search.network import Layout, Network, _Biases
from nci.search.ops import TorchOps

MakeModel = Callable[..., NCIModel]
Batch = dict[str, Tensor]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
# Largest error over the largest number of the result; int8 rounds weights and inputs to 1/254 of their largest.
ERRORS: dict[str, float] = {"fp32": 1e-5, "bf16": 2e-2, "int8": 3e-2}


def near(found: Tensor, wanted: Tensor, precision: str) -> None:
    error = float((found.float() - wanted).abs().max() / wanted.abs().max())
    assert error <= ERRORS[precision], f"{precision}: {error}"


# ---- linear layers


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 40),
    inner=st.sampled_from([1, 3, 16, 33, 64]),
    outer=st.sampled_from([1, 5, 16, 48]),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize(("precision", "old"), [("fp32", False), *itertools.product(("bf16", "int8"), (False, True))])
def test_linear_layers(
    precision: Precision, old: bool, rows: int, inner: int, outer: int, biased: bool, seed: int
) -> None:
    """Also as on a CPU without instructions for bf16 and int8."""
    torch.manual_seed(seed)
    weight, x = torch.randn(outer, inner), torch.randn(rows, inner)
    bias = 3 * torch.randn(outer) if biased else None
    with pytest.MonkeyPatch.context() as patch:
        if old:
            patch.setattr("nci.search.linear.has_bf16", lambda: False)
            patch.setattr("nci.search.linear.int8_overflows", lambda: True)
        layer = make_linear(weight, bias, precision, "cpu")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    given_x, product, wanted = x.to(dtype), F.linear(x, weight), F.linear(x, weight, bias)
    near(layer(given_x), wanted, precision)
    size = float(wanted.abs().max())
    for activation, function in (("gelu", F.gelu), ("relu", F.relu)):
        found = getattr(layer, activation)(given_x).float()
        assert float((found - function(wanted)).abs().max()) <= ERRORS[precision] * size, activation
    residual = 2 * torch.randn(rows, outer)
    near(layer.add_to(residual.to(dtype).clone(), given_x), residual + product, precision)  # without the bias
    room = torch.full((rows + 2, outer), 9.0, dtype=dtype)
    layer.into(room[1:-1], given_x)
    assert float((room[1:-1].float() - product).abs().max()) <= ERRORS[precision] * size
    assert (room[0] == 9).all()
    assert (room[-1] == 9).all()
    assert torch.equal(given_x, x.to(dtype)), "the input is left alone"


def test_rounding_is_there() -> None:
    """Three precisions, not one three times."""
    torch.manual_seed(0)
    weight, x = torch.randn(16, 32), torch.randn(8, 32)
    wanted = F.linear(x, weight)
    errors = {}
    for precision in PRECISIONS:
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        errors[precision] = float(
            (make_linear(weight, None, precision, "cpu")(x.to(dtype)).float() - wanted).abs().max()
        )
    assert errors["fp32"] < 1e-5
    assert min(errors["bf16"], errors["int8"]) > 1e-3


@pytest.mark.parametrize("inner", [2, 3, 64, 385])
def test_int8_does_not_overflow(inner: int) -> None:
    """All products as large as can be; where a CPU adds two of them in 16 bits, half of the sum would be lost."""
    layer = make_linear(torch.ones(5, inner), None, "int8", "cpu")
    torch.testing.assert_close(layer(torch.ones(3, inner)), torch.full((3, 5), float(inner)), rtol=0.01, atol=0)
    torch.testing.assert_close(layer(-torch.ones(3, inner)), torch.full((3, 5), -float(inner)), rtol=0.01, atol=0)


def test_int8_has_a_scale_per_row() -> None:
    """A row of small weights is as exact as one of large weights."""
    torch.manual_seed(0)
    weight, x = torch.randn(2, 64), torch.randn(5, 64)
    weight[1] *= 1e-3
    found, wanted = make_linear(weight, None, "int8", "cpu")(x), F.linear(x, weight)
    for row in range(2):
        near(found[:, row], wanted[:, row], "int8")


@pytest.mark.parametrize("bf16", [True, False])
def test_int8_beside_outliers(monkeypatch: pytest.MonkeyPatch, bf16: bool) -> None:
    """Numbers beside one that is a thousand times larger, and that the layer does not even read."""
    monkeypatch.setattr("nci.search.linear.uses_bf16", lambda *_: bf16)
    torch.manual_seed(0)
    weight, bias, x = torch.randn(16, 32), torch.randn(16), torch.randn(8, 32)
    weight[:, 3], x[:, 3] = 0, 1000
    wanted, size = F.linear(x, weight, bias), float(F.linear(x, weight, bias).abs().max())
    rounded = make_linear(weight, bias, "int8", "cpu")
    assert float((rounded(x) - wanted).abs().max()) > 0.3 * size
    layer = make_linear(weight, bias, "int8", "cpu", outliers=True)
    most = ERRORS["bf16" if bf16 else "fp32"] * size
    assert layer(x).dtype == layer.gelu(x).dtype == torch.float32
    assert float((layer(x) - wanted).abs().max()) <= most
    assert float((layer.gelu(x) - F.gelu(wanted)).abs().max()) <= most
    assert float((layer.add_to(torch.ones(8, 16), x) - wanted + bias - 1).abs().max()) <= most


def test_a_row_of_zeros_is_no_problem() -> None:
    found = make_linear(torch.zeros(4, 8), None, "int8", "cpu")(torch.randn(3, 8))
    assert torch.equal(found, torch.zeros(3, 4))


# ---- relative positions


def test_few_tables_of_relative_positions_are_kept() -> None:
    def make(tokens: int) -> Tensor:
        places = torch.arange(tokens)
        return (places - places[:, None]).expand(1, 3, tokens, tokens)

    biases = _Biases(make, lambda table: table)
    for tokens in range(1, 70):
        assert torch.equal(biases(tokens), make(tokens)[0])
        assert biases(tokens).is_contiguous()
    assert set(biases.kept) == {16, 32, 64, 128}


# ---- layout


@settings(max_examples=50, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), extra=st.integers(0, 2))
def test_a_layout_holds_what_is_in_use(lengths: list[int], extra: int) -> None:
    tokens = max(lengths) + extra
    x = torch.randn(len(lengths), tokens, 3)
    layout = Layout(torch.tensor(lengths), tokens, packed=True)
    wanted = torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)])
    packed = layout.pack(x)
    assert torch.equal(packed, wanted)
    back = layout.pad(packed)
    assert back.shape == x.shape
    for row, (own, length) in enumerate(zip(back, lengths, strict=True)):
        assert torch.equal(own[:length], x[row, :length])
        assert not own[length:].any()
    assert (layout.lengths is None) == all(length == tokens for length in lengths)
    whole = Layout(torch.tensor(lengths), tokens, packed=False)
    assert torch.equal(whole.pad(whole.pack(x)), x)


# ---- encoders


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    batch=batches(),
    encoder=st.sampled_from(["bert", "mpnet", "t5", "t5-gated", "bert-relu"]),
    layers=st.integers(1, 3),
    width=st.sampled_from([8, 16]),
    pooling=st.sampled_from(["mean", "cls", "max", "lasttoken"]),
    seed=st.integers(0, 9),
)
def test_encoders_equal_those_of_hugging_face(
    make_model: MakeModel, batch: Batch, encoder: str, layers: int, width: int, pooling: str, seed: int
) -> None:
    model = make_model(
        encoder=encoder, encoder_layers=layers, encoder_width=width, pooling=pooling, moved=True, seed=seed
    )
    network = Network(model, precision="fp32", device="cpu", ops=TorchOps())
    mask = batch["attention_mask"].bool()
    with torch.inference_mode():
        wanted, vectors = model.encode(**batch)
        found, own = network.encode(batch["input_ids"], mask.sum(1))
    torch.testing.assert_close(found[mask], wanted[mask], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(own, vectors, atol=1e-4, rtol=0)


@pytest.mark.parametrize("encoder", ["bert", "mpnet", "t5"])
def test_an_encoder_does_not_see_other_queries(make_model: MakeModel, encoder: str) -> None:
    model = make_model(encoder=encoder, encoder_layers=2, moved=True)
    network = Network(model, precision="fp32", device="cpu", ops=TorchOps())
    lengths = [7, 1, 4, 6]
    batch = batch_of(lengths)
    with torch.inference_mode():
        together, vectors = network.encode(batch["input_ids"], torch.tensor(lengths))
        for number, length in enumerate(lengths):
            alone, vector = network.encode(batch["input_ids"][number : number + 1, :length], torch.tensor([length]))
            torch.testing.assert_close(together[number, :length], alone[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(vectors[number], vector[0], atol=1e-5, rtol=0)


def test_places_of_mpnet(make_model: MakeModel) -> None:
    """A text that names the padding gives it no place of its own; and relative positions far apart share a row."""
    model = make_model(encoder="mpnet", encoder_layers=2, moved=True)
    network = Network(model, precision="fp32", device="cpu", ops=TorchOps())
    batch = batch_of([30, 17, 5, 9])
    batch["input_ids"][0, [3, 4, 20]] = batch["input_ids"][2, 0] = 1
    mask = batch["attention_mask"].bool()
    with torch.inference_mode():
        wanted, _ = model.encode(**batch)
        found, _ = network.encode(batch["input_ids"], mask.sum(1))
    torch.testing.assert_close(found[mask], wanted[mask], atol=1e-4, rtol=1e-4)


def test_mpnet_has_outliers(make_model: MakeModel) -> None:
    """Large numbers in the middle of a layer cost int8 nothing else."""
    model = make_model(encoder="mpnet", encoder_layers=2, moved=True)
    with torch.no_grad():
        for layer in cast(Any, model.encoder).encoder.layer:
            layer.intermediate.dense.bias[0], layer.output.dense.weight[:, 0] = 1000.0, 0.0
    batch = batch_of([3, 6, 5, 2])
    network = Network(model, precision="int8", device="cpu", ops=TorchOps())
    with torch.inference_mode():
        _, wanted = model.encode(**batch)
        _, found = network.encode(batch["input_ids"], batch["attention_mask"].sum(1))
    assert float((found * wanted).sum(1).min()) > 0.98


@pytest.mark.parametrize("encoder", ["bert", "mpnet", "t5", "t5-gated", "bert-relu"])
@pytest.mark.parametrize(("precision", "cosine"), [("bf16", 0.999), ("int8", 0.98)])
def test_rounded_encoders_are_near(make_model: MakeModel, precision: Any, cosine: float, encoder: str) -> None:
    model = make_model(encoder=encoder, encoder_layers=2, moved=True)
    batch = batch_of([3, 6, 5, 2])
    network = Network(model, precision=precision, device="cpu", ops=TorchOps())
    with torch.inference_mode():
        _, wanted = model.encode(**batch)
        _, found = network.encode(batch["input_ids"], batch["attention_mask"].sum(1))
    assert found.dtype == torch.float32
    assert float((found * wanted).sum(1).min()) > cosine
    if encoder != "bert-relu":  # run as Hugging Face wrote it, in float32
        assert not torch.allclose(found, wanted, atol=1e-6)
