"""Word pieces of documents: against one document at a time, on disk, in shards, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny import WIDTH, make_documents

from nci import embed
from nci.config import Config, EmbedConfig, ModelConfig, SearchConfig
from nci.embed import embed_documents
from nci.encoders import TextEncoder
from nci.errors import ConfigError, DataError
from nci.pieces import UNIT, PieceVectors, find_projection
from nci.records import Document

NUMBERS = 8  # per piece


@pytest.fixture
def config(encoder: Path) -> EmbedConfig:
    return EmbedConfig(encoder=str(encoder), max_length=20, batch_size=7, shard_size=25, pieces=NUMBERS, windows=1)


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    """Of one word to more than are read, so that batches are padded and texts are cut."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, 60)
    return [
        replace(document, title="", text=" ".join(document.text.split()[:length]))
        for document, length in zip(make_documents(), lengths, strict=True)
    ]


def files(folder: Path) -> dict[str, bytes]:
    """What an embedding leaves, but for its shards."""
    found = [folder / "vectors.npy", *(folder / "pieces").iterdir()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def of_document(pieces: PieceVectors, number: int) -> NDArray[np.int8]:
    return np.array(pieces.codes[pieces.first[number] : pieces.first[number] + pieces.lengths[number]])


# ---- documents into pieces


def test_vectors_are_those_without_pieces(tmp_path: Path, config: EmbedConfig, documents: list[Document]) -> None:
    """More documents than a shard holds, from a stream."""
    plain = embed_documents(documents, tmp_path / "plain", replace(config, pieces=0))
    found = embed_documents(iter(documents), tmp_path / "pieces", config)
    assert len(list((tmp_path / "pieces" / "shards").glob("*.ok"))) == 3
    np.testing.assert_allclose(found, plain, atol=1e-5)
    assert not (tmp_path / "plain" / "pieces").exists()
    assert not list(tmp_path.rglob("*.tmp"))
    half = embed_documents(documents, tmp_path / "half", config, dtype="float16")
    assert half.dtype == np.float16
    np.testing.assert_array_equal(half, np.asarray(found).astype(np.float16))


@pytest.mark.parametrize("changes", [{}, {"pooling": "cls"}, {"normalise": False}], ids=str)
def test_pooling_and_scaling_are_those_of_the_encoder(
    tmp_path: Path, config: EmbedConfig, documents: list[Document], changes: dict[str, Any]
) -> None:
    settings = replace(config, **changes)
    plain = embed_documents(documents[:9], tmp_path / "plain", replace(settings, pieces=0))
    np.testing.assert_allclose(embed_documents(documents[:9], tmp_path, settings), plain, atol=1e-5)


def test_codes_are_those_of_each_document_alone(tmp_path: Path, config: EmbedConfig, documents: list[Document]) -> None:
    embed_documents(documents, tmp_path, config)
    pieces = PieceVectors.load(tmp_path / "pieces")
    encoder = TextEncoder.load(config.encoder, max_length=20)
    rows = encoder.tokenize([document.content for document in documents])
    assert pieces.lengths.tolist() == [len(row) for row in rows]
    assert len(set(pieces.lengths.tolist())) > 5
    assert max(pieces.lengths) == 20
    assert pieces.codes.dtype == np.int8
    assert pieces.codes.shape == (sum(map(len, rows)), NUMBERS)
    # every number is rounded by at most one half
    assert np.abs(np.linalg.norm(pieces.codes.astype(float), axis=1) - UNIT).max() < 0.5 * np.sqrt(NUMBERS) + 1e-3
    for number, row in enumerate(rows):
        with torch.no_grad():
            states = encoder.model(input_ids=torch.tensor([row])).last_hidden_state[0].double().numpy()
        small = states @ pieces.projection.astype(np.float64)
        wanted = UNIT * small / np.linalg.norm(small, axis=1, keepdims=True)
        assert np.abs(of_document(pieces, number) - wanted).max() < 0.51


def test_the_projection_keeps_what_differs_most(config: EmbedConfig, documents: list[Document]) -> None:
    encoder = TextEncoder.load(config.encoder, max_length=20)
    texts = [document.content for document in documents]
    found = find_projection(encoder, texts, NUMBERS)
    assert found.shape == (WIDTH, NUMBERS)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found.T @ found, np.eye(NUMBERS), atol=1e-5)
    assert (found[np.abs(found).argmax(0), np.arange(NUMBERS)] > 0).all(), "a sign that does not depend on the machine"
    states = []
    for row in encoder.tokenize(texts):
        with torch.no_grad():
            states.append(encoder.model(input_ids=torch.tensor([row])).last_hidden_state[0].numpy())
    units = np.concatenate(states)
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    best = (np.linalg.svd(units, compute_uv=False)[:NUMBERS] ** 2).sum()
    assert ((units @ found) ** 2).sum() == pytest.approx(best, rel=1e-4)
    # as wide as the encoder it turns vectors and loses nothing
    whole = find_projection(encoder, texts, WIDTH)
    np.testing.assert_allclose((units @ whole) @ (units @ whole).T, units @ units.T, atol=1e-4)


def test_the_first_documents_say_how_all_are_made_smaller(
    tmp_path: Path, config: EmbedConfig, documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embed, "_SAMPLE", 10)
    found = embed_documents(iter(documents), tmp_path / "sample", config)
    assert len(found) == len(PieceVectors.load(tmp_path / "sample" / "pieces")) == len(documents)
    np.testing.assert_allclose(
        found, embed_documents(documents, tmp_path / "plain", replace(config, pieces=0)), atol=1e-5
    )
    encoder = TextEncoder.load(config.encoder, max_length=20)
    wanted = find_projection(encoder, [document.content for document in documents[:10]], NUMBERS)
    np.testing.assert_array_equal(np.load(tmp_path / "sample" / "pieces" / "projection.npy"), wanted)
    # documents behind the sample change nothing of those before them
    embed_documents(documents[:50], tmp_path / "fewer", config)
    whole, fewer = (PieceVectors.load(tmp_path / name / "pieces") for name in ("sample", "fewer"))
    assert len(fewer.codes) < len(whole.codes)
    np.testing.assert_array_equal(fewer.codes, whole.codes[: len(fewer.codes)])


def test_prompts_for_documents_are_part_of_the_pieces(
    tmp_path: Path, config: EmbedConfig, documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = documents[:5]
    embed_documents(some, tmp_path / "plain", config)
    monkeypatch.setattr(TextEncoder, "prompt", lambda self, role: {"document": "the of "}[role])
    embed_documents(some, tmp_path / "prompted", replace(config, max_length=48))
    plain, prompted = (PieceVectors.load(tmp_path / name / "pieces").lengths for name in ("plain", "prompted"))
    short = plain < 20
    assert short.any()
    assert (prompted[short] == plain[short] + 2).all()


# ---- reruns


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The texts of every shard that is really encoded; where the projection is found, "projection" stands among them."""
    calls: list[list[str]] = []

    def counting(name: str, say: Callable[[Any], list[str]]) -> None:
        original = getattr(embed, name)

        def call(encoder: Any, texts: Any, *others: Any, **options: Any) -> Any:
            calls.append(say(texts))
            return original(encoder, texts, *others, **options)

        monkeypatch.setattr(embed, name, call)

    counting("encode_pieces", list)
    counting("find_projection", lambda _: ["projection"])
    return calls


def test_a_rerun_makes_what_is_missing_and_the_same_bytes(
    tmp_path: Path, config: EmbedConfig, documents: list[Document], encoded: list[list[str]]
) -> None:
    embed_documents(documents, tmp_path, config)
    assert [len(texts) for texts in encoded] == [1, 25, 25, 10]
    whole = files(tmp_path)
    encoded.clear()
    embed_documents(documents, tmp_path, config)
    assert encoded == []
    (tmp_path / "shards" / "shard-00001.safetensors").unlink()
    embed_documents(documents, tmp_path, config)
    assert encoded == [[document.content for document in documents[25:50]]]
    assert files(tmp_path) == whole
    assert set(whole) == {"vectors.npy", "pieces/codes.npy", "pieces/lengths.npy", "pieces/projection.npy"}


def test_an_interrupted_run_ends_as_an_uninterrupted_one(
    tmp_path: Path,
    config: EmbedConfig,
    documents: list[Document],
    encoded: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(embed, "_SAMPLE", 30)
    embed_documents(documents, tmp_path / "whole", config)

    def stopping() -> Iterator[Document]:
        yield from documents[:40]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embed_documents(stopping(), tmp_path / "parts", config)
    assert not (tmp_path / "parts" / "pieces").exists()
    encoded.clear()
    embed_documents(documents, tmp_path / "parts", config)
    assert [len(texts) for texts in encoded] == [25, 10], "the projection and the first shard are kept"
    assert files(tmp_path / "parts") == files(tmp_path / "whole")


def test_a_changed_document_redoes_all_that_depends_on_it(
    tmp_path: Path,
    config: EmbedConfig,
    documents: list[Document],
    encoded: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of those that say how pieces are made smaller: everything; another one: its shard."""
    monkeypatch.setattr(embed, "_SAMPLE", 10)
    embed_documents(documents, tmp_path / "old", config)
    for number, redone in ((30, [25]), (3, [1, 25, 25, 10])):
        changed = [*documents]
        changed[number] = replace(documents[number], text="choir drum")
        again = Path(shutil.copytree(tmp_path / "old", tmp_path / f"again{number}"))
        encoded.clear()
        embed_documents(changed, again, config)
        assert [len(texts) for texts in encoded] == redone
        embed_documents(changed, tmp_path / f"fresh{number}", config)
        assert files(again) == files(tmp_path / f"fresh{number}")


def test_another_number_of_numbers_redoes_everything(
    tmp_path: Path, config: EmbedConfig, documents: list[Document], encoded: list[list[str]]
) -> None:
    embed_documents(documents, tmp_path, config)
    encoded.clear()
    embed_documents(documents, tmp_path, replace(config, pieces=NUMBERS + 1))
    assert [len(texts) for texts in encoded] == [1, 25, 25, 10]
    assert PieceVectors.load(tmp_path / "pieces").codes.shape[1] == NUMBERS + 1


# ---- on disk


def random_pieces(lengths: list[int], width: int, seed: int) -> PieceVectors:
    rng = np.random.default_rng(seed)
    sizes = np.array(lengths, np.int64)
    codes = rng.integers(-127, 128, (sum(lengths), width)).astype(np.int8)
    projection = rng.standard_normal((width + 2, width)).astype(np.float32)
    return PieceVectors(codes, np.cumsum(sizes) - sizes, sizes, projection)


def assert_same(one: PieceVectors, other: PieceVectors) -> None:
    assert len(one) == len(other)
    np.testing.assert_array_equal(one.projection, other.projection)
    for number in range(len(one)):
        np.testing.assert_array_equal(of_document(one, number), of_document(other, number))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    width=st.integers(1, 5),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_another_order_is_the_same_pieces_and_is_written_one_after_the_other(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], width: int, seed: int, data: st.DataObject
) -> None:
    pieces = random_pieces(lengths, width, seed)
    folder = tmp_path_factory.mktemp("pieces")
    pieces.save(folder / "same")
    assert_same(PieceVectors.load(folder / "same"), pieces)
    np.testing.assert_array_equal(np.load(folder / "same" / "codes.npy"), pieces.codes)
    order = np.array(data.draw(st.permutations(range(len(lengths)))))
    moved = pieces.in_order(order)
    for place, number in enumerate(order):
        np.testing.assert_array_equal(of_document(moved, place), of_document(pieces, number))
    moved.save(folder / "moved")
    again = PieceVectors.load(folder / "moved")
    assert_same(again, moved)
    assert again.first.tolist() == [0, *np.cumsum(again.lengths)[:-1].tolist()]
    np.testing.assert_array_equal(again.codes, np.concatenate([of_document(pieces, number) for number in order]))


def test_codes_are_mapped_and_not_read(tmp_path: Path) -> None:
    random_pieces([3, 1, 2], 4, 0).save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["codes.npy", "lengths.npy", "projection.npy"]
    found = PieceVectors.load(tmp_path)
    assert isinstance(found.codes, np.memmap)
    assert not found.codes.flags.writeable


@pytest.mark.parametrize(
    ("name", "cut"),
    [("codes", np.s_[:-1]), ("lengths", np.s_[:-1]), ("projection", np.s_[:, :-1]), ("codes", np.s_[:, :-1])],
    ids=str,
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, name: str, cut: Any) -> None:
    random_pieces([3, 1, 2], 4, 0).save(tmp_path)
    np.save(tmp_path / f"{name}.npy", np.load(tmp_path / f"{name}.npy")[cut])
    with pytest.raises(DataError, match="do not fit; build the index again") as caught:
        PieceVectors.load(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


# ---- what is refused


def test_more_numbers_than_the_encoder_has(tmp_path: Path, config: EmbedConfig, documents: list[Document]) -> None:
    embed_documents(documents, tmp_path, replace(config, pieces=WIDTH + 1))
    assert np.load(tmp_path / "pieces" / "codes.npy").shape[1] == WIDTH


@pytest.mark.slow
def test_an_encoder_with_layers_of_its_own(
    tmp_path: Path, encoder: Path, config: EmbedConfig, documents: list[Document], caplog: pytest.LogCaptureFixture
) -> None:
    models = pytest.importorskip("sentence_transformers")
    layers = models.sentence_transformer.modules
    parts = [layers.Transformer(str(encoder)), layers.Pooling(WIDTH, "mean"), layers.Dense(WIDTH, 5)]
    folder = tmp_path / "foreign"
    models.SentenceTransformer(modules=parts, device="cpu").save_pretrained(str(folder), create_model_card=False)
    vectors = embed_documents(documents, tmp_path / "out", replace(config, encoder=str(folder)))
    assert len(vectors) == len(documents)
    assert not (tmp_path / "out" / "pieces").exists()
    assert "layers beyond its transformer" in caplog.text


def test_no_documents(tmp_path: Path, config: EmbedConfig) -> None:
    with pytest.raises(DataError, match="no documents to embed"):
        embed_documents([], tmp_path, config)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("section", "changes"),
    [(EmbedConfig, {"pieces": -1}), (SearchConfig, {"candidates": 0}), (ModelConfig, {"late": 0.0})],
    ids=["embed.pieces", "search.candidates", "model.late"],
)
def test_settings_that_make_no_sense(section: Any, changes: dict[str, Any]) -> None:
    name = section.__name__.removesuffix("Config").lower()
    ((key, value),) = changes.items()
    for make in (lambda: section(**changes), lambda: Config.from_dict({name: changes})):
        with pytest.raises(ConfigError, match=rf"--{name}\.{key} .*{value}") as caught:
            make()
        assert "\n" not in str(caught.value)


def test_settings_that_make_sense() -> None:
    made = Config.from_dict({"embed": {"pieces": 1}, "search": {"candidates": 1}, "model": {"late": 0.5}})
    assert (made.embed.pieces, made.search.candidates, made.model.late) == (1, 1, 0.5)
    assert Config().embed.pieces == 0
