"""Content scores of a search: against the model's own anchors, `TreeSum` and `LexicalScores`; codes on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import trees
from torch import Tensor

from nci.anchors import TreeSum
from nci.errors import DataError
from nci.lexical import LexicalScores
from nci.model import NCIModel
from nci.postings import Postings
from nci.records import SemanticId
from nci.search.content import Content, DocumentVectors, LevelSums
from nci.trie import Trie

MakeModel = Callable[..., NCIModel]
MakeTrie = Callable[..., Trie]
Vectors = Callable[..., NDArray[np.float32]]

WORDS = ["red", "green", "blue", "cat", "dog", "bird", "runs", "over", "sun", "moon"]
texts = st.lists(st.sampled_from([*WORDS, "unknown", "the", ""]), max_size=6).map(" ".join)


def queries(count: int, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(count, 16, generator=generator), dim=-1)


# ---- vectors


@settings(max_examples=40, deadline=None, derandomize=True)
@given(documents=st.integers(1, 40), width=st.integers(1, 20), seed=st.integers(0, 99))
def test_codes_are_within_half_a_step(documents: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((documents, width)) * 10.0 ** rng.integers(-3, 3, (documents, 1))).astype(np.float32)
    values[0] = 0
    coded = DocumentVectors(values).quantised()
    assert coded.codes is not None
    assert coded.scales is not None
    assert coded.codes.dtype == np.int8
    largest = np.abs(values).max(1, keepdims=True)
    error = np.abs(coded.codes * coded.scales[:, None] - values)
    assert (error <= 0.5 / 127 * largest * 1.0001 + 1e-9).all()
    assert (np.abs(coded.codes).max(1)[1:] == 127).all(), "the whole range is used"
    assert coded.quantised() is coded


def test_codes_of_many_documents_are_those_of_each(monkeypatch: pytest.MonkeyPatch, unit_vectors: Vectors) -> None:
    whole = DocumentVectors(unit_vectors(23)).quantised()
    monkeypatch.setattr("nci.search.content._DOCUMENTS_AT_ONCE", 5)
    parts = DocumentVectors(unit_vectors(23)).quantised()
    np.testing.assert_array_equal(parts.codes, whole.codes)
    np.testing.assert_array_equal(parts.scales, whole.scales)


def test_vectors_on_disk(tmp_path: Path, unit_vectors: Vectors) -> None:
    values = unit_vectors(9)
    DocumentVectors(values).save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["codes.npy", "scales.npy", "vectors.npy"]
    again = DocumentVectors.load(tmp_path)
    read = [array for name, array in vars(again).items() if name not in ("bias", "moves")]
    assert all(isinstance(array, np.memmap) for array in read), "nothing is read before it is needed"
    assert again.bias is None
    assert again.moves is None
    np.testing.assert_array_equal(again.values, values.astype(np.float16))
    fresh = DocumentVectors(values).quantised()
    np.testing.assert_array_equal(again.codes, fresh.codes)
    np.testing.assert_array_equal(again.scales, fresh.scales)
    assert again.quantised().codes is again.codes, "stored codes are used as they are"
    bias = np.arange(9, dtype=np.float32)
    DocumentVectors(values, bias=bias).save(tmp_path)
    np.testing.assert_array_equal(DocumentVectors.load(tmp_path).bias, bias)
    assert DocumentVectors(values, bias=bias).quantised().bias is bias


def test_moves_are_vectors_of_their_own(tmp_path: Path, unit_vectors: Vectors) -> None:
    values, moves = unit_vectors(9), 0.5 * unit_vectors(9)[::-1]
    DocumentVectors(values, moves=DocumentVectors(moves)).save(tmp_path)
    again = DocumentVectors.load(tmp_path)
    np.testing.assert_array_equal(again.values, values.astype(np.float16))
    np.testing.assert_array_equal(again.codes, DocumentVectors(values).quantised().codes)
    assert again.moves is not None
    np.testing.assert_array_equal(again.moves.values, moves.astype(np.float16))
    np.testing.assert_array_equal(again.moves.codes, DocumentVectors(moves).quantised().codes)


@pytest.mark.parametrize("name", ["codes", "scales", "vectors", "bias", "moves/vectors", "moves"])
def test_refuses_vectors_that_do_not_fit(tmp_path: Path, unit_vectors: Vectors, name: str) -> None:
    fewer = DocumentVectors(unit_vectors(8 if name == "moves" else 9))
    DocumentVectors(unit_vectors(9), bias=np.zeros(9, np.float32), moves=fewer).save(tmp_path)
    if name != "moves":
        np.save(tmp_path / f"{name}.npy", np.load(tmp_path / f"{name}.npy")[:-1])
    with pytest.raises(DataError, match="do not fit"):
        DocumentVectors.load(tmp_path)


# ---- sums up the tree


@settings(max_examples=60, deadline=None, derandomize=True)
@given(ids=trees(leaves=25), count=st.integers(1, 4), size=st.sampled_from([1.0, 200.0]), seed=st.integers(0, 99))
def test_level_sums_equal_tree_sum(
    make_trie: MakeTrie, ids: list[SemanticId], count: int, size: float, seed: int
) -> None:
    """Also for scores whose exponential does not fit into a float."""
    trie = make_trie(ids)
    generator = torch.Generator().manual_seed(seed)
    scores = size * torch.randn(trie.documents, count, generator=generator)
    before = scores.clone()
    found = LevelSums(trie, "cpu")(scores)
    assert found.shape == (trie.nodes, count)
    torch.testing.assert_close(found.T, TreeSum(trie)(scores.T), atol=1e-4, rtol=1e-5)
    for node in range(trie.nodes):  # and both equal the definition
        below = scores[int(trie.first_document[node]) : int(trie.last_document[node])].double()
        torch.testing.assert_close(found[node].double(), below.logsumexp(0), atol=1e-3, rtol=1e-5)
    assert torch.equal(scores, before)


# ---- lexical scores


@settings(max_examples=60, deadline=None, derandomize=True)
@given(documents=st.lists(texts, min_size=1, max_size=12), asked=st.lists(texts, min_size=1, max_size=5))
def test_postings_equal_lexical_scores(documents: list[str], asked: list[str]) -> None:
    """Unknown words, words asked twice, no words at all."""
    lexical = LexicalScores.build(documents)
    found = Postings(lexical, "cpu").normalised(asked)
    assert found.shape == (len(asked), len(documents))
    np.testing.assert_allclose(found.numpy(), lexical.normalised(asked), atol=1e-6)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    documents=st.lists(texts, min_size=1, max_size=6),
    asked=st.lists(
        st.tuples(texts, st.just(np.nan) | st.floats(0, 3, width=32), st.integers(0, 5)), min_size=1, max_size=5
    ),
)
def test_one_document_of_each_query_may_have_another_score(
    documents: list[str], asked: list[tuple[str, float, int]]
) -> None:
    lexical = LexicalScores.build(documents)
    columns = lexical.columns([text for text, _, _ in asked])
    own = np.array([score for _, score, _ in asked], np.float32)
    which = np.array([document % len(documents) for _, _, document in asked])
    wanted = lexical.score_columns(columns)
    for row, (score, document) in zip(wanted, zip(own, which, strict=True), strict=True):
        if not np.isnan(score):
            row[document] = score
        row /= row.max() or 1.0
    np.testing.assert_allclose(lexical.normalised_columns(columns, own=own, documents=which), wanted, atol=1e-6)
    words = np.concatenate(columns).astype(np.int64)
    found = Postings(lexical, "cpu").add(
        torch.as_tensor(words),
        torch.tensor([len(each) for each in columns]),
        lexical.count_postings(words),
        own=torch.as_tensor(own),
        documents=torch.as_tensor(which),
    )
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-6)


def test_a_word_asked_twice_counts_twice() -> None:
    postings = Postings(LexicalScores.build(["red cat", "red", "cat dog"]), "cpu")
    once, twice = postings.normalised(["red cat", "red red red cat"])
    assert not torch.allclose(once, twice, atol=1e-3)


# ---- anchors


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    ids=trees(),
    anchor=st.sampled_from(["exact", "mean"]),
    lexical=st.booleans(),
    asked=st.lists(texts, min_size=1, max_size=4),
    on_gpu=st.booleans(),
    biased=st.booleans(),
    moved=st.booleans(),
    data=st.data(),
)
def test_anchors_equal_those_of_the_model(
    make_model: MakeModel,
    unit_vectors: Vectors,
    ids: list[SemanticId],
    anchor: str,
    lexical: bool,
    asked: list[str],
    on_gpu: bool,
    biased: bool,
    moved: bool,
    data: st.DataObject,
) -> None:
    model = make_model(ids, anchor=anchor, kappa=7.0, lexical=3.0)
    trie, vectors = model.tables.trie, unit_vectors(len(ids))
    bias = np.linspace(-3, 3, len(ids)).astype(np.float32) if biased else None
    moves = -0.7 * vectors[::-1] if moved else None
    model.bind(trie, vectors, bias=bias, moves=moves)
    stored = DocumentVectors(vectors, bias=bias, moves=None if moves is None else DocumentVectors(moves))
    words = None
    if lexical:
        words = LexicalScores.build(data.draw(st.lists(texts, min_size=len(ids), max_size=len(ids))))
    content = Content(model, trie, stored, words, precision="fp32", device="cpu")
    assert content.exact == (anchor == "exact")
    if on_gpu and content.lexical is not None:  # what a GPU adds up itself
        content.postings = Postings(content.lexical, "cpu")
    asked_with = queries(len(asked))
    before = asked_with.clone()
    exact_words = words is not None and anchor == "exact"
    scores = torch.as_tensor(words.normalised(asked)) if exact_words and words is not None else None
    with torch.no_grad():
        wanted = model.anchors(asked_with, scores)
    assert wanted is not None
    for _ in range(2):  # nothing that is kept is written over
        torch.testing.assert_close(content.anchors(asked_with, content.words(asked)), wanted, atol=1e-4, rtol=1e-5)
    assert torch.equal(asked_with, before)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("anchor", ["exact", "mean"])
@pytest.mark.parametrize(("precision", "atol"), [("fp32", 2e-3), ("bf16", 1e-2), ("int8", 0.12)])
def test_rounded_anchors_are_near(
    tmp_path: Path,
    make_model: MakeModel,
    unit_vectors: Vectors,
    precision: Any,
    atol: float,
    anchor: str,
    stored: bool,
) -> None:
    """kappa is 10 and similarities are below 1: an error of 0.12 is 1.2 % of the range. Stored vectors are float16."""
    model = make_model(anchor=anchor, kappa=10.0, trained=False)
    vectors = DocumentVectors(unit_vectors())
    if stored:
        vectors.save(tmp_path)
        vectors = DocumentVectors.load(tmp_path)
    content = Content(model, model.tables.trie, vectors, None, precision=precision, device="cpu")
    asked = queries(5)
    with torch.no_grad():
        wanted = model.anchors(asked)
    assert wanted is not None
    found = content.anchors(asked)
    assert found.shape == wanted.shape
    assert found.dtype == torch.float32
    error = float((found - wanted).abs().max())
    assert error < atol
    if precision != "fp32" and anchor == "exact":
        assert error > 1e-5, "nothing was rounded"


@pytest.mark.parametrize("width", [2, 7, 16, 65])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_int8_products_of_any_shape(make_model: MakeModel, unit_vectors: Vectors, width: int, count: int) -> None:
    model = make_model(anchor="exact", kappa=1.0, trained=False, encoder_width=16, d_content=width)
    vectors = unit_vectors(11, width)
    content = Content(model, model.tables.trie, DocumentVectors(vectors), None, precision="int8", device="cpu")
    asked = torch.tensor(unit_vectors(count, width, seed=8))
    leaves = torch.as_tensor(model.tables.trie.leaves).long()
    found = content.anchors(asked)[:, leaves]
    np.testing.assert_allclose(found.numpy(), asked.numpy() @ vectors.T, atol=0.02)
