from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from nci.config import EmbedConfig
from nci.embed import _shards, embed_documents, fingerprint
from nci.encoders import TextEncoder
from nci.errors import ConfigError, DataError
from nci.records import Document

models: Any = transformers  # its own types are incomplete

WORDS = ["red", "green", "blue", "cat", "dog", "bird", "runs", "sleeps", "over", "under", "the", "a"]


def make_encoder(folder: Path, seed: int) -> Path:
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    models.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(
        folder
    )
    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = models.BertConfig(vocab_size=len(vocabulary), max_position_embeddings=32, initializer_range=0.5, **sizes)
    models.BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"), seed=0)


@pytest.fixture
def config(encoder_folder: Path) -> EmbedConfig:
    return EmbedConfig(encoder=str(encoder_folder), shard_size=4, batch_size=3, max_length=16)


@pytest.fixture
def documents() -> list[Document]:
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, rng.integers(1, 20))) for _ in range(18)]
    return [Document(str(i), text, title="the cat" if i % 3 == 0 else "") for i, text in enumerate(texts)]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The texts of every shard that is really encoded."""
    calls: list[list[str]] = []
    encode = TextEncoder.encode

    def counting(self: TextEncoder, texts: list[str], **options: Any) -> Any:
        calls.append(list(texts))
        return encode(self, texts, **options)

    monkeypatch.setattr(TextEncoder, "encode", counting)
    return calls


def test_row_i_is_the_vector_of_document_i(tmp_path: Path, config: EmbedConfig, documents: list[Document]) -> None:
    vectors = embed_documents(iter(documents), tmp_path, config)
    encoder = TextEncoder.load(config.encoder, max_length=16, normalise=True)
    expected = np.concatenate([encoder.encode([document.content]) for document in documents])
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert isinstance(vectors, np.memmap)
    assert not vectors.flags.writeable
    np.testing.assert_array_equal(np.load(tmp_path / "vectors.npy"), vectors)
    assert not list(tmp_path.rglob("*.tmp"))


def test_half_precision_on_disk(tmp_path: Path, config: EmbedConfig, documents: list[Document]) -> None:
    exact = embed_documents(documents, tmp_path, config)
    half = embed_documents(documents, tmp_path / "half", config, dtype="float16")
    assert half.dtype == np.float16
    np.testing.assert_array_equal(half, np.asarray(exact).astype(np.float16))


def test_documents_are_read_shard_by_shard(tmp_path: Path, config: EmbedConfig, documents: list[Document]) -> None:
    def stream() -> Iterator[Document]:
        for i, document in enumerate(documents):
            assert len(list(tmp_path.glob("shards/*.ok"))) == i // config.shard_size
            yield document

    assert len(embed_documents(stream(), tmp_path, config)) == 18


def test_a_rerun_encodes_nothing(
    tmp_path: Path, config: EmbedConfig, documents: list[Document], encoded: list[list[str]], encoder_folder: Path
) -> None:
    first = np.array(embed_documents(documents, tmp_path / "out", config))
    assert len(encoded) == 5
    np.testing.assert_array_equal(embed_documents(documents, tmp_path / "out", config), first)
    # a copy of the encoder elsewhere is the same encoder, and ids are not part of the vectors
    copied = shutil.copytree(encoder_folder, tmp_path / "copy")
    renamed = [replace(document, doc_id=f"x{document.doc_id}") for document in documents]
    embed_documents(renamed, tmp_path / "out", replace(config, encoder=str(copied)))
    assert len(encoded) == 5


def test_only_a_deleted_or_changed_shard_is_redone(
    tmp_path: Path, config: EmbedConfig, documents: list[Document], encoded: list[list[str]]
) -> None:
    first = np.array(embed_documents(documents, tmp_path, config))
    encoded.clear()
    (tmp_path / "shards" / "shard-00001.safetensors").unlink()
    np.testing.assert_array_equal(embed_documents(documents, tmp_path, config), first)
    assert encoded == [[document.content for document in documents[4:8]]]
    changed = [*documents[:9], replace(documents[9], text="blue bird"), *documents[10:]]
    second = embed_documents(changed, tmp_path, config)
    assert encoded[1:] == [[document.content for document in changed[8:12]]]
    assert (np.abs(second - first).max(axis=1) > 1e-3).nonzero()[0].tolist() == [9]


def test_an_interrupted_run_ends_as_an_uninterrupted_one(
    tmp_path: Path, config: EmbedConfig, documents: list[Document], encoded: list[list[str]]
) -> None:
    embed_documents(documents, tmp_path / "whole", config)

    def stopping() -> Iterator[Document]:
        yield from documents[:10]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embed_documents(stopping(), tmp_path / "parts", config)
    assert not (tmp_path / "parts" / "vectors.npy").exists()
    encoded.clear()
    embed_documents(documents, tmp_path / "parts", config)
    assert len(encoded) == 3
    assert (tmp_path / "parts" / "vectors.npy").read_bytes() == (tmp_path / "whole" / "vectors.npy").read_bytes()


@pytest.mark.parametrize("change", [{"max_length": 5}, {"pooling": "cls"}, {"normalise": False}])
def test_a_changed_setting_redoes_everything(
    tmp_path: Path, config: EmbedConfig, documents: list[Document], encoded: list[list[str]], change: dict[str, Any]
) -> None:
    first = np.array(embed_documents(documents, tmp_path, config))
    encoded.clear()
    second = embed_documents(documents, tmp_path, replace(config, **change))
    assert len(encoded) == 5
    assert np.abs(second - first).max() > 1e-3


def test_other_weights_in_the_same_folder_redo_everything(
    tmp_path: Path, config: EmbedConfig, documents: list[Document], encoded: list[list[str]]
) -> None:
    folder = make_encoder(tmp_path / "encoder", seed=0)
    config = replace(config, encoder=str(folder))
    embed_documents(documents, tmp_path / "out", config)
    before = fingerprint(folder)
    make_encoder(folder, seed=1)
    assert fingerprint(folder) != before
    encoded.clear()
    embed_documents(documents, tmp_path / "out", config)
    assert len(encoded) == 5


def test_a_shorter_corpus_leaves_no_rows_behind(
    tmp_path: Path, config: EmbedConfig, documents: list[Document], encoded: list[list[str]]
) -> None:
    first = np.array(embed_documents(documents, tmp_path, config))
    encoded.clear()
    np.testing.assert_array_equal(embed_documents(documents[:8], tmp_path, config), first[:8])
    assert encoded == []
    assert len(list((tmp_path / "shards").iterdir())) == 4


@given(a=st.lists(st.text(max_size=4), max_size=5), b=st.lists(st.text(max_size=4), max_size=5))
def test_keys_are_equal_for_equal_texts_only(a: list[str], b: list[str]) -> None:
    def keys(texts: list[str]) -> list[str]:
        return [shard.key for shard in _shards([Document("", text) for text in texts], 100, key="settings")]

    assert (keys(a) == keys(b)) == (a == b)


def test_mistakes(tmp_path: Path, config: EmbedConfig, documents: list[Document]) -> None:
    with pytest.raises(DataError, match="no documents to embed"):
        embed_documents([], tmp_path, config)
    with pytest.raises(ConfigError, match=r"--engine 'spark'.*local"):
        embed_documents(documents, tmp_path, replace(config, encoder="./nowhere"), engine="spark")


def test_prompts_for_documents_are_used(
    tmp_path: Path, config: EmbedConfig, documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = np.array(embed_documents(documents, tmp_path / "plain", config))
    monkeypatch.setattr(TextEncoder, "prompt", lambda self, role: {"document": "red "}[role])
    prompted = embed_documents(documents, tmp_path / "prompted", config)
    assert np.abs(prompted - plain).max(axis=1).min() > 1e-4
