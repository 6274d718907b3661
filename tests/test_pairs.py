"""Training pairs and the batch plan, against the paper's description and naive counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from nci.config import PairsConfig
from nci.errors import ConfigError
from nci.pairs import SOURCES, BatchPlan, Pair, document_pieces, make_pairs, plan_batches, write_plan
from nci.records import Document

PAPER = PairsConfig(spans=10, terms=64)
EVEN = PairsConfig(real=1, span_share=1, generated=1)


def numbered(count: int) -> Document:
    return Document("d", " ".join(f"w{i}" for i in range(count)))


def tokenize(texts: list[str]) -> list[list[int]]:
    """One number per character, so that reading back can be checked against the text."""
    return [[ord(character) for character in text] or [0] for text in texts]


# Pieces of documents


def test_the_paper_takes_the_first_64_terms_and_10_groups_of_64() -> None:
    words = numbered(100_000).text.split()
    pieces = document_pieces(numbered(100_000), PAPER, number=5)
    assert len(pieces) == 11
    assert pieces[0] == " ".join(words[:64])
    for piece in pieces[1:]:
        terms = piece.split()
        start = int(terms[0][1:])
        assert terms == words[start : start + 64]


def test_every_start_is_possible_and_equally_likely() -> None:
    config = PairsConfig(terms=2, spans=400)
    starts: Counter[str] = Counter()
    for number in range(60):
        starts.update(document_pieces(Document("d", "a b c d e"), PairsConfig(terms=2, spans=1), number=number)[1:])
    assert set(document_pieces(Document("d", "a b c d e"), config, number=0)) == {"a b", "b c", "c d", "d e"}
    assert set(starts) == {"b c", "c d", "d e"}  # the first group is there already
    assert min(starts.values()) > 5


def test_the_same_document_gets_the_same_pieces_and_others_get_others() -> None:
    document = numbered(5000)
    assert document_pieces(document, PAPER, number=3) == document_pieces(document, PAPER, number=3)
    assert document_pieces(document, PAPER, number=3)[1:] != document_pieces(document, PAPER, number=4)[1:]
    assert (
        document_pieces(document, PAPER, number=3)[1:]
        != document_pieces(document, replace(PAPER, seed=1), number=3)[1:]
    )


@pytest.mark.parametrize("count", [1, 2, 63, 64])
def test_a_document_of_one_group_gives_one_piece(count: int) -> None:
    assert document_pieces(numbered(count), PAPER, number=0) == [numbered(count).text]


def test_a_document_without_words_gives_none() -> None:
    assert document_pieces(Document("d", " \n\t "), PAPER, number=0) == []
    assert document_pieces(numbered(100), replace(PAPER, spans=0), number=0) == [" ".join(numbered(64).text.split())]


def test_the_title_is_part_of_the_first_group() -> None:
    document = Document("d", "three four", "one two")
    assert document_pieces(document, PairsConfig(terms=3, spans=0), number=0) == ["one two\nthree"]


def test_scripts_without_blanks_are_counted_by_character() -> None:
    text = "検索エンジンは文書を探すための道具である" * 20
    pieces = document_pieces(Document("d", text), PAPER, number=0)
    assert len(pieces) > 5
    assert all(len(piece) == 64 and piece in text for piece in pieces)
    mixed = document_pieces(Document("d", "Python 3 は 言語です"), PairsConfig(terms=3, spans=0), number=0)
    assert mixed == ["Python 3 は"]
    thai = document_pieces(Document("d", "ภาษาไทย" * 30), PAPER, number=0)
    assert all(len(piece) == 64 for piece in thai)


@given(st.text(max_size=400), st.integers(1, 6), st.integers(0, 5), st.integers(0, 100))
def test_pieces_are_substrings_of_the_right_size(text: str, terms: int, spans: int, number: int) -> None:
    pieces = document_pieces(Document("d", text), PairsConfig(terms=terms, spans=spans), number=number)
    assert len(set(pieces)) <= len(pieces) <= spans + 1
    for piece in pieces:
        assert piece in text
        assert piece == piece.strip()
        assert 1 <= len(piece.split()) <= terms


def test_pairs_come_in_a_fixed_order_with_their_sources() -> None:
    documents = [Document("a", "one two three"), Document("b", "four")]
    real, generated = [("q", 1), ("r", 0)], [("g", 0)]
    config = PairsConfig(terms=2, spans=1)
    pairs = list(make_pairs(documents, config, real=real, generated=generated))
    assert pairs[:3] == [Pair("q", 1, 0), Pair("r", 0, 0), Pair("g", 0, 2)]
    assert all(pair.source == SOURCES.index("span") for pair in pairs[3:])
    assert [pair.document for pair in pairs[3:]] == sorted(pair.document for pair in pairs[3:])
    assert {pair.document for pair in pairs[3:]} == {0, 1}


@pytest.mark.parametrize(("name", "source"), [("real", 0), ("span_share", 1), ("generated", 2)])
def test_a_share_of_0_leaves_the_source_out(name: str, source: int) -> None:
    config = replace(EVEN, **{name: 0})  # type: ignore[arg-type]
    pairs = make_pairs([Document("a", "one two")], config, real=[("q", 0)], generated=[("g", 0)])
    assert {pair.source for pair in pairs} == {0, 1, 2} - {source}


def test_of_many_generated_queries_the_first_are_used() -> None:
    generated = [(f"{document} {number}", document) for number in range(20) for document in (0, 1)]
    generated.append(("only one", 2))
    pairs = list(make_pairs([], replace(EVEN, generated_queries=3), generated=generated))
    assert [pair.text for pair in pairs if pair.document == 1] == ["1 0", "1 1", "1 2"]
    assert Counter(pair.document for pair in pairs) == {0: 3, 1: 3, 2: 1}
    assert not list(make_pairs([], replace(EVEN, generated_queries=0), generated=generated))


# The plan


def plan(
    config: PairsConfig, *, pairs: int = 300, documents: int = 20, batch_size: int = 8, epochs: float = 1, seed: int = 0
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int8], NDArray[np.int32]]:
    rng = np.random.default_rng(seed)
    of = rng.integers(0, documents, pairs).astype(np.int32)
    sources = rng.integers(0, 3, pairs).astype(np.int8)
    lengths = rng.integers(3, 60, pairs).astype(np.int32)
    return plan_batches(of, sources, lengths, config, batch_size=batch_size, epochs=epochs), of, sources, lengths


def counts(batches: NDArray[np.int32], pairs: int) -> NDArray[np.intp]:
    return np.bincount(batches[batches >= 0], minlength=pairs)


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(1, 40), st.integers(1, 3))
def test_by_pair_takes_each_exactly_share_times_per_epoch(
    real: int, spans: int, generated: int, batch: int, n: int
) -> None:
    if not real + spans + generated:
        return
    config = PairsConfig(real=real, span_share=spans, generated=generated)
    batches, _, sources, _ = plan(config, pairs=120, batch_size=batch, epochs=n)
    assert (counts(batches, 120) == n * np.array([real, spans, generated])[sources]).all()
    assert batches.shape[1] == batch
    assert ((batches >= 0).sum(1) > 0).all()


def test_fractional_shares_hold_on_average() -> None:
    config = PairsConfig(real=0.25, span_share=1.5, generated=0)
    batches, _, sources, _ = plan(config, pairs=300, epochs=200)
    per_epoch = counts(batches, 300) / 200
    assert abs(per_epoch[sources == 0].mean() - 0.25) < 0.02
    assert abs(per_epoch[sources == 1].mean() - 1.5) < 0.02
    assert (per_epoch[sources == 2] == 0).all()
    assert (per_epoch[sources == 0] > 0.1).all(), "the lot must fall on every pair"


def test_by_document_gives_every_document_the_same_number() -> None:
    config = PairsConfig(sampling="document", real=3, span_share=1, generated=0)
    batches, documents, sources, _ = plan(config, pairs=400, documents=30, epochs=100)
    taken = counts(batches, 400)
    each = np.bincount(documents, weights=taken)
    assert (each == each[0]).all()
    expected = (np.array([3, 1, 0])[sources]).sum()
    assert abs(taken.sum() / 100 - expected) <= len(each) / 2  # as many pairs as the other way of sampling takes
    assert (taken[sources == 2] == 0).all()
    for document in range(3):
        own = documents == document
        rate = [taken[own & (sources == source)].mean() for source in (0, 1)]
        assert 2 < rate[0] / rate[1] < 4.5, "within a document the shares decide"


def test_by_document_leaves_out_documents_without_pairs_only() -> None:
    documents, sources = np.array([0, 0, 5], dtype=np.int32), np.array([0, 1, 1], dtype=np.int8)
    batches = plan_batches(
        documents,
        sources,
        np.full(3, 4, np.int32),
        PairsConfig(sampling="document", span_share=0),
        batch_size=2,
        epochs=5,
    )
    assert set(batches[batches >= 0].tolist()) == {0}


def test_a_batch_holds_pairs_of_similar_length() -> None:
    batches, _, _, lengths = plan(EVEN, pairs=4000, batch_size=16)
    spread = np.array([np.ptp(lengths[row[row >= 0]]) for row in batches])
    assert np.median(spread) <= 2
    padded = sum(lengths[row[row >= 0]].max() * (row >= 0).sum() for row in batches)
    assert padded < 1.1 * lengths.sum()
    first = np.array([lengths[row[0]] for row in batches])
    assert (np.diff(first) < 0).any(), "batches of one window must not come in the order of length"
    assert (np.diff(first) > 0).any()


def test_epochs_differ_and_a_seed_decides_all() -> None:
    one, two = plan(EVEN, epochs=2)[0], plan(EVEN, epochs=2)[0]
    assert (one == two).all()
    half = len(one) // 2
    assert (one[:half] != one[half:]).any()
    assert (one[:half] == plan(EVEN, epochs=1)[0]).all(), "a longer training begins like a shorter one"
    assert (plan(replace(EVEN, seed=1), epochs=2)[0] != one).any()


@pytest.mark.parametrize(("epochs", "expected"), [(0.5, 150), (1.5, 450), (0.001, 1), (2.0, 600), (0.1, 30)])
def test_fractional_epochs(epochs: float, expected: int) -> None:
    batches = plan(EVEN, epochs=epochs)[0]
    assert (batches >= 0).sum() == expected
    whole = counts(plan(EVEN, epochs=int(epochs))[0], 300)
    assert set((counts(batches, 300) - whole).tolist()) <= {0, 1}


def test_no_epochs_no_batches() -> None:
    assert plan(EVEN, epochs=0)[0].shape == (0, 8)


# Written and read


def write(folder: Path, pairs: list[Pair], **options: Any) -> BatchPlan:
    options = {"batch_size": 4, "epochs": 1, **options}
    return write_plan(folder, pairs, tokenize, options.pop("config", EVEN), **options)


PAIRS = [
    Pair("alpha beta", 2, 0),
    Pair("g", 0, 2),
    Pair("", 1, 1),
    *(Pair(f"text {i}" * i, i, 1) for i in range(1, 20)),
]


def test_the_plan_reads_back_what_was_tokenised(tmp_path: Path) -> None:
    written = write(tmp_path / "plan", PAIRS)
    for read in (written, BatchPlan(tmp_path / "plan")):
        assert len(read) == -(-len(PAIRS) // 4)
        for number, pair in enumerate(PAIRS):
            assert read.pair_tokens(number).tolist() == tokenize([pair.text])[0]
            assert (read.documents[number], read.sources[number]) == (pair.document, pair.source)
        assert sorted(pair for batch in range(len(read)) for pair in read.rows(batch)) == list(range(len(PAIRS)))
        assert not read.has_words
        assert read.vectors is None
        assert read.own_lexical is None
        assert read.counts == {"real": 1, "span": 20, "generated": 1}


def test_words_scores_and_vectors_are_kept_with_their_pair(tmp_path: Path) -> None:
    def words(texts: list[str]) -> list[NDArray[np.int32]]:
        return [np.arange(len(text) % 3, dtype=np.int32) + len(text) for text in texts]  # some have none

    def vectors(texts: list[str]) -> NDArray[np.float32]:
        return np.array([[len(text), hash(text) % 7] for text in texts], dtype=np.float32)

    def own(pairs: list[Pair]) -> NDArray[np.float32]:
        return np.array([pair.document / 4 if pair.source else np.nan for pair in pairs], np.float32)

    read = write(tmp_path / "plan", PAIRS, words=words, vectors=vectors, own_lexical=own)
    assert read.has_words
    assert read.own_lexical is not None
    assert read.own_lexical.dtype == np.float32
    np.testing.assert_array_equal(read.own_lexical, own(PAIRS))
    assert read.vectors is not None
    for number, pair in enumerate(PAIRS):
        assert read.pair_words(number).tolist() == words([pair.text])[0].tolist()
        assert (np.asarray(read.vectors[number]) == vectors([pair.text])[0]).all()


def test_blocks_of_texts_join_without_a_seam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write(tmp_path / "whole", PAIRS)
    monkeypatch.setattr("nci.pairs._BLOCK", 3)
    parts = write(tmp_path / "parts", PAIRS)
    assert (parts.tokens == whole.tokens).all()
    assert (parts.batches == whole.batches).all()
    assert {path.name: path.read_bytes() for path in whole.folder.iterdir()} == {
        path.name: path.read_bytes() for path in parts.folder.iterdir()
    }


def test_a_plan_replaces_an_older_one_and_what_is_left_of_a_killed_one(tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    write(folder, PAIRS, words=lambda texts: [np.zeros(1, np.int32) for _ in texts])
    (tmp_path / "plan.tmp").mkdir()
    (tmp_path / "plan.tmp" / "half.npy").write_bytes(b"half")
    read = write(folder, PAIRS[:3])
    assert not read.has_words, "columns of the old plan must not survive"
    assert sorted(path.name for path in folder.parent.iterdir()) == ["plan"]
    assert not (folder / "half.npy").exists()


def test_nothing_to_train_on_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to train on"):
        write(tmp_path / "plan", [])
    assert not (tmp_path / "plan").exists()


def test_no_file_of_a_plan_needs_pickle(tmp_path: Path) -> None:
    write(tmp_path / "plan", PAIRS)
    for path in (tmp_path / "plan").glob("*.npy"):
        np.load(path, allow_pickle=False)
