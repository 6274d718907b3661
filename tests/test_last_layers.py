"""The last layers of an encoder, trained on what those below say: as if all read the texts, and gradients reached these alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import make_encoder
from torch import Tensor

from nci import contrastive, last_layers
from nci.contrastive import read
from nci.contrastive_data import Tokens
from nci.encoders import TextEncoder
from nci.errors import ConfigError
from nci.last_layers import Kept, train_only_last

TEXTS = ["ripe pear", "the wave and the tide of the storm", "ship", "", "a storm and a ship"]
ANY = float("inf")


def parted(folder: Path, kind: str, layers: int) -> TextEncoder:
    encoder = TextEncoder.load(make_encoder(folder, kind=kind, layers=3), normalise=True)
    train_only_last(encoder.model, layers)
    return encoder


def gradients(encoder: TextEncoder, tokens: Tokens, below: Kept | None, keep: float) -> dict[str, Tensor]:
    """Of a sum that depends on every vector and state."""
    encoder.model.zero_grad()
    seen = read(encoder, tokens, np.array([4, 0, 1, 3]), at_once=3, keep=keep, below=below)
    sum((part.vectors[:, 0].sum() + part.states[part.mask].square().sum() for part in seen), torch.zeros(())).backward()  # type: ignore[no-untyped-call]
    return {name: each.grad.clone() for name, each in encoder.model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("keep", [ANY, 0.0], ids=["kept", "read again"])
@pytest.mark.parametrize("layers", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["bert", "mpnet"])
def test_the_same_states_and_gradients_as_of_all_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, layers: int, keep: float
) -> None:
    encoder = parted(tmp_path, kind, layers)
    tokens = Tokens.of(encoder.tokenize(TEXTS))
    wanted = gradients(encoder, tokens, None, keep)
    trained = {name.split("layer.")[1].split(".")[0] for name in wanted}
    assert trained == {str(number) for number in range(3)[-layers:]}
    for at_once in (2**14, 1):
        monkeypatch.setattr(last_layers, "_AT_ONCE", at_once)
        below = Kept.read(encoder, tokens, layers, most=ANY)
        assert below is not None
        with torch.no_grad():
            texts = np.arange(len(TEXTS))
            (one,), (two,) = (read(encoder, tokens, texts, at_once=9, below=each) for each in (None, below))
        torch.testing.assert_close(one.states[one.mask], two.states[one.mask], atol=1e-5, rtol=1e-5)
        found = gradients(encoder, tokens, below, keep)
        assert found.keys() == wanted.keys()
        for name, each in wanted.items():
            torch.testing.assert_close(found[name], each, atol=1e-4, rtol=1e-4, msg=name)


def test_what_cannot_be_kept_is_read_by_all_layers(tmp_path: Path) -> None:
    """Too much for the memory, or layers that other things lie between; its last layers are trained all the same."""
    bert, t5 = (parted(tmp_path / kind, kind, 1) for kind in ("bert", "t5"))
    tokens = Tokens.of(bert.tokenize(TEXTS))
    needed = len(tokens.pieces) * bert.width * 4
    assert Kept.read(bert, tokens, 1, most=needed) is not None
    assert Kept.read(bert, tokens, 1, most=needed - 1) is None
    assert Kept.read(t5, tokens, 1, most=ANY) is None
    assert {".block.2." in name for name in gradients(t5, tokens, None, ANY)} == {True}


def test_training_leaves_the_layers_below_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is the same training whether what they say is kept or computed anew."""
    from test_tune import DOCUMENTS, tuned

    source = make_encoder(tmp_path / "source", layers=2)
    weights = {}
    for name, share in (("kept", contrastive._KEPT), ("not kept", 0.0)):
        monkeypatch.setattr(contrastive, "_KEPT", share)
        folder = tuned(source, tmp_path / name, layers=1, max_length=6, epochs=2, refreshes=1)
        weights[name] = TextEncoder.load(folder).model.state_dict()
    before = TextEncoder.load(source).model.state_dict()
    for name, each in before.items():
        assert torch.equal(weights["kept"][name], each) == ("layer.1." not in name), name
        if name.endswith(
            "key.bias"
        ):  # attention does not depend on it: its gradient is rounding, which AdamW makes large
            continue
        torch.testing.assert_close(weights["kept"][name], weights["not kept"][name], atol=2e-3, rtol=2e-3)
    assert max(len(row) for row in TextEncoder.load(source).tokenize([each.content for each in DOCUMENTS])) > 6


def test_only_so_much_of_a_document_is_read_in_tuning(tmp_path: Path) -> None:
    """Documents that begin alike cannot be told apart; the encoder itself reads as much as before."""
    from dataclasses import replace

    from test_tune import DOCUMENTS, EMBED, tuned

    source = make_encoder(tmp_path / "source")
    longer = [replace(document, text=document.text + " storm") for document in DOCUMENTS]
    one, two, three = (
        TextEncoder.load(
            tuned(source, tmp_path / str(number), documents=documents, max_length=length)
        ).model.state_dict()
        for number, (documents, length) in enumerate(((DOCUMENTS, 4), (longer, 4), (longer, 0)))
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(two[name], three[name]) for name in two)
    assert TextEncoder.load(tmp_path / "0").max_length == EMBED.max_length


def test_an_encoder_whose_layers_share_their_weights_is_refused(tmp_path: Path) -> None:
    """ALBERT has one layer, which it runs several times."""
    import transformers

    config = transformers.AlbertConfig(
        hidden_size=16,
        embedding_size=8,
        num_attention_heads=2,
        intermediate_size=16,
        num_hidden_layers=3,
        vocab_size=20,
    )
    model = transformers.AlbertModel(config)
    with pytest.raises(ConfigError, match=r"--tune\.layers"):
        train_only_last(model, 1)
    assert all(each.requires_grad for each in model.parameters())
