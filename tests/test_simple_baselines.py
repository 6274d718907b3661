"""BM25 as in rank_bm25, dense search by cosine and by graph, nearest training queries: each against a naive version."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_bm25 import BM25Okapi  # type: ignore[import-untyped]

from nci.baselines import Searcher
from nci.baselines.bm25 import BM25
from nci.baselines.dense import Dense, DenseSettings
from nci.baselines.dense_hnsw import DenseHnsw, HnswSettings
from nci.baselines.knn import Knn, KnnSettings
from nci.baselines.okapi import okapi_scores
from nci.encoders import TextEncoder
from nci.errors import ConfigError, DataError, IndexCorruptError, IndexNotFoundError, MissingPackageError
from nci.records import Document

WORDS = ["The", "the", "tree", "Tree,", "search", "of", "of", "neural", "x", "é"]
TEXT = st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join)


class Lookup:
    """An encoder that knows its texts by heart."""

    def __init__(self, vectors: dict[str, npt.NDArray[Any]]) -> None:
        self.vectors = vectors

    def encode(self, texts: list[str], /, *, batch_size: int) -> npt.NDArray[Any]:
        return np.stack([self.vectors[text] for text in texts])


# ---- rank_bm25


@settings(deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=8).filter(lambda texts: any(texts)), TEXT)
def test_okapi_scores_are_those_of_rank_bm25(texts: list[str], query: str) -> None:
    for options in ({}, {"k1": 0.7, "b": 0.3, "epsilon": 0.6}):
        theirs = BM25Okapi([text.lower().split() for text in texts], **options).get_scores(query.lower().split())
        np.testing.assert_allclose(okapi_scores(texts, **options).scores([query])[0], theirs, rtol=1e-5, atol=1e-5)


def test_a_search_with_rank_bm25_ranks_as_the_package_does() -> None:
    documents = tiny.make_documents()
    queries = [query for query, _ in tiny.make_queries(documents, seed=5)]
    package = BM25Okapi([document.content.lower().split() for document in documents])
    searcher: Searcher = BM25.rank_bm25(documents)
    for query, hits in zip(queries, searcher.search(queries, k=5), strict=True):
        scores = package.get_scores(query.lower().split())
        theirs = {document.doc_id: float(score) for document, score in zip(documents, scores, strict=True)}
        # In the package's order, but for what a 32-bit float cannot tell apart.
        assert [hit.score for hit in hits] == pytest.approx([theirs[hit.doc_id] for hit in hits], rel=1e-5)
        assert [theirs[hit.doc_id] for hit in hits] == pytest.approx(sorted(theirs.values())[:-6:-1], rel=1e-5)
        assert len(hits) == 5
        assert {hit.source for hit in hits} == {"bm25-okapi"}


def test_rank_bm25_takes_words_as_they_come_and_extra_queries() -> None:
    documents = [Document("a", "Running, shoes"), Document("b", "the the"), Document("c", "cars"), Document("e", "")]
    plain, more = BM25.rank_bm25(documents), BM25.rank_bm25(documents, extra={"c": ["fast wheels"]}, name="qg")
    assert plain.search("running") == plain.search("shoe") == []
    assert [hit.doc_id for hit in plain.search("RUNNING, x")] == ["a"]
    assert [hit.doc_id for hit in plain.search("the")] == ["b"]  # no stop words
    assert [(hit.doc_id, hit.source) for hit in more.search("wheels")] == [("c", "qg")]
    assert BM25.rank_bm25([]).search("x") == BM25.rank_bm25([Document("a", "")]).search("x") == []
    assert more.index_bytes > plain.index_bytes > 0
    common = [*documents, Document("f", "the x"), Document("g", "the"), Document("h", "the y z")]
    for epsilon in (0.25, 0.9):  # what a word in most documents counts
        theirs = BM25Okapi([document.text.lower().split() for document in common], epsilon=epsilon)
        hits = BM25.rank_bm25(common, epsilon=epsilon).search("the")
        assert hits[0].score == pytest.approx(theirs.get_scores(["the"]).max(), rel=1e-5)
    with pytest.raises(ConfigError, match="b=2"):
        BM25.rank_bm25(documents, b=2)


# ---- dense


@pytest.mark.parametrize("backend", ["faiss", "numpy"])
def test_cosine_equals_its_formula(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    if backend == "numpy":
        monkeypatch.setitem(sys.modules, "faiss", None)
    rng = np.random.default_rng(0)
    documents = [Document(f"d{i}", f"text {i}") for i in range(40)]
    vectors = rng.normal(size=(40, 6)) * rng.uniform(0.1, 9, (40, 1))
    vectors[7] = 0
    queries = {f"q{i}": 3 * rng.normal(size=6) for i in range(5)}
    found = Dense(documents, Lookup(queries), vectors, similarity="cosine", name="brute").search(list(queries), k=40)
    dot = Dense(documents, Lookup(queries), vectors).search(list(queries), k=40)
    for query, hits, other in zip(queries.values(), found, dot, strict=True):
        lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(query)
        cosine = np.divide(vectors @ query, lengths, out=np.zeros(40), where=lengths > 0)
        assert [hit.doc_id for hit in hits] == [f"d{i}" for i in np.argsort(-cosine)]
        np.testing.assert_allclose([hit.score for hit in hits], np.sort(cosine)[::-1], atol=1e-6)
        assert [hit.doc_id for hit in other] != [hit.doc_id for hit in hits]
        assert hits[0].source == "brute"


def test_the_backend_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [Document(f"d{i}", f"text {i}") for i in range(9)]
    vectors = np.random.default_rng(1).normal(size=(9, 4))
    lookup = Lookup({"q": np.ones(4)})
    plain = Dense(documents, lookup, vectors, backend="numpy")
    by_faiss = Dense(documents, lookup, vectors, backend="faiss")
    assert (plain._faiss is None, by_faiss._faiss is None) == (True, False)
    assert [hit.doc_id for hit in plain.search("q", 3)] == [hit.doc_id for hit in by_faiss.search("q", 3)]
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert Dense(documents, lookup, vectors)._faiss is None
    with pytest.raises(MissingPackageError, match="faiss-cpu"):
        Dense(documents, lookup, vectors, backend="faiss")


@pytest.fixture(scope="module")
def prompted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder that wants a word before queries and another before documents."""
    plain = TextEncoder.load(tiny.make_encoder(tmp_path_factory.mktemp("plain")))
    prompts = {"query": "sea ", "document": "law "}
    settings = dataclasses.replace(plain.settings, prompts=prompts, normalise=False, pooling="cls")
    folder = tmp_path_factory.mktemp("prompted")
    TextEncoder(plain.model, plain.tokenizer, settings, max_length=32).save(folder)
    return folder


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_build_takes_an_encoder_by_folder_with_its_prompts(prompted: Path, tmp_path: Path, similarity: Any) -> None:
    documents = tiny.make_documents(20)
    chosen = DenseSettings(str(prompted), similarity=similarity)
    built = Dense.build(documents, out=tmp_path, settings=chosen, name="bert")
    again = Dense.build(documents, out=tmp_path, settings=chosen, name="bert")
    encoder = TextEncoder.load(prompted)
    there = encoder.encode(["law " + document.content for document in documents])
    asked = encoder.encode(["sea apple pear"])[0]
    if similarity == "cosine":
        there, asked = there / np.linalg.norm(there, axis=1, keepdims=True), asked / np.linalg.norm(asked)
    scores = there @ asked
    hits = built.search("apple pear", k=20)
    assert [hit.doc_id for hit in hits] == [documents[i].doc_id for i in np.argsort(-scores)]
    np.testing.assert_allclose([hit.score for hit in hits], np.sort(scores)[::-1], rtol=1e-4)
    assert again.search("apple pear", k=20) == hits
    assert hits[0].source == "bert"
    assert built.index_bytes == 20 * tiny.WIDTH * 4


def test_wrong_settings_of_dense_search_are_named() -> None:
    with pytest.raises(ConfigError, match="euclid"):
        DenseSettings(similarity="euclid")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="euclid"):
        Dense([], Lookup({}), np.zeros((0, 2)), similarity="euclid")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="batch_size"):
        DenseSettings(batch_size=0)
    with pytest.raises(ConfigError, match="2 neighbours"):
        HnswSettings(neighbours=1)


# ---- HNSW


def random_vectors(count: int, width: int = 16) -> npt.NDArray[np.float32]:
    return np.random.default_rng(1).normal(size=(count, width)).astype(np.float32)


def test_a_graph_finds_nearly_all_that_exact_search_finds_with_the_same_scores() -> None:
    documents = [Document(f"d{i:04d}", f"text {i}") for i in range(1500)]
    vectors, asked = random_vectors(1500), random_vectors(1600)[1500:]
    encoder = Lookup({f"q{i}": vector for i, vector in enumerate(asked)})
    queries = list(encoder.vectors)
    exact = Dense(documents, encoder, vectors, similarity="cosine").search(queries)
    graph = DenseHnsw(documents, encoder, vectors)
    narrow = DenseHnsw(documents, encoder, vectors, hnsw=HnswSettings(neighbours=2, build_width=2, search_width=1))

    def recall(searcher: Searcher) -> float:
        pairs = zip(exact, searcher.search(queries), strict=True)
        return float(np.mean([len({h.doc_id for h in a} & {h.doc_id for h in b}) / 10 for a, b in pairs]))

    assert recall(graph) > 0.97 > recall(narrow)
    best = [({hit.doc_id: hit.score for hit in a}, b[0]) for a, b in zip(exact, graph.search(queries), strict=True)]
    assert all(hit.score == pytest.approx(scores[hit.doc_id], abs=1e-5) for scores, hit in best if hit.doc_id in scores)
    # What a thin graph does not reach is missing; nothing stands in its place.
    reached = [[hit.doc_id for hit in hits] for hits in narrow.search(queries, k=1500)]
    assert all(len(set(doc_ids)) == len(doc_ids) for doc_ids in reached)
    assert min(map(len, reached)) < 1500
    sizes = {"neighbours": 4, "search_width": 10}
    hasty, careful = (
        DenseHnsw(documents, encoder, vectors, hnsw=HnswSettings(build_width=n, **sizes)) for n in (1, 200)
    )
    assert recall(hasty) < recall(careful) - 0.05
    assert {hit.source for hit in graph.search(queries[0])} == {"dense-hnsw"}
    assert graph.search(queries[0]) == graph.search(queries)[0]
    again = DenseHnsw(documents, encoder, vectors)
    assert again.search(queries, k=30) == graph.search(queries, k=30)
    assert graph.index_bytes > vectors.nbytes


def test_a_graph_gives_all_documents_of_a_small_corpus() -> None:
    documents = [Document(f"d{i}", f"text {i}") for i in range(5)]
    vectors = random_vectors(5)
    hits = DenseHnsw(documents, Lookup({"q": vectors[2]}), vectors).search("q", k=50)
    assert hits[0].doc_id == "d2"
    assert {hit.doc_id for hit in hits} == {each.doc_id for each in documents}


def test_a_graph_is_kept_and_made_again_where_it_is_damaged_or_the_vectors_differ(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import faiss

    documents = tiny.make_documents(30)
    chosen = DenseSettings(str(encoder))
    hits = DenseHnsw.build(documents, out=tmp_path, settings=chosen).search("apple pear", k=30)
    exact = Dense.build(documents, out=tmp_path, settings=chosen).search("apple pear", k=30)
    assert [hit.doc_id for hit in hits] == [hit.doc_id for hit in exact]
    (file,) = tmp_path.glob("*.faiss")
    added: list[int] = []
    real = faiss.IndexHNSWFlat.add

    def add(index: faiss.IndexHNSWFlat, vectors: npt.NDArray[np.float32]) -> None:
        added.append(len(vectors))
        real(index, vectors)

    monkeypatch.setattr(faiss.IndexHNSWFlat, "add", add)
    assert DenseHnsw.build(documents, out=tmp_path, settings=chosen).search("apple pear", k=30) == hits
    assert not added
    file.write_bytes(file.read_bytes()[:100])
    assert DenseHnsw.build(documents, out=tmp_path, settings=chosen).search("apple pear", k=30) == hits
    assert added == [30]
    DenseHnsw.build(documents[:20], out=tmp_path, settings=chosen)
    assert added == [30, 20]
    assert len(list(tmp_path.glob("*.faiss"))) == 2


def test_a_graph_needs_faiss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingPackageError, match="pip install faiss-cpu"):
        DenseHnsw([Document("a", "x")], Lookup({}), np.ones((1, 2)))


# ---- nearest training queries


def naive_knn(
    pairs: list[tuple[str, str]], vectors: dict[str, npt.NDArray[Any]], query: str, temperature: float | None
) -> dict[str, float]:
    def cosine(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    scores: dict[str, float] = {}
    for doc_id in {doc_id for _, doc_id in pairs}:
        similar = [cosine(vectors[query], vectors[text]) for text, other in pairs if other == doc_id]
        share = sum(np.exp(each / (temperature or 1)) for each in similar)
        scores[doc_id] = max(similar) if temperature is None else (temperature or 1) * np.log(share)
    return scores


@pytest.mark.parametrize("temperature", [None, 0.05, 0.5])
def test_knn_equals_its_formula_and_never_finds_a_document_without_queries(temperature: float | None) -> None:
    rng = np.random.default_rng(2)
    documents = [Document(f"d{(i * 7) % 20:02d}", f"text {i}") for i in range(20)]
    # Pairs in no order, one to five per document, none for the last five; one query asks for two documents.
    pairs = [(f"t{i}", documents[int(rng.integers(15))].doc_id) for i in range(40)]
    pairs.append(("t0", documents[3].doc_id))
    vectors = {name: rng.normal(size=8) for name in [*(f"t{i}" for i in range(40)), *(f"q{i}" for i in range(70))]}
    weighting = "best" if temperature is None else "softmax"
    chosen = KnnSettings(weighting=weighting, temperature=temperature or 1.0)  # type: ignore[arg-type]
    knn: Searcher = Knn(documents, pairs, Lookup(vectors), settings=chosen)
    queries = [f"q{i}" for i in range(70)]
    for query, hits in zip(queries, knn.search(queries, k=100), strict=True):
        expected = naive_knn(pairs, vectors, query, temperature)
        assert {hit.doc_id for hit in hits} == expected.keys()
        assert [hit.doc_id for hit in hits] == sorted(expected, key=lambda doc_id: (-expected[doc_id], doc_id))
        np.testing.assert_allclose([hit.score for hit in hits], [expected[h.doc_id] for h in hits], atol=1e-5)
    one, many = knn.search("q3", k=4), knn.search(queries, k=4)[3]
    assert [hit.doc_id for hit in one] == [hit.doc_id for hit in many]
    assert len(one) == 4
    assert knn.search("q3", k=1)[0].source == "knn"


def test_the_softmax_lets_several_near_queries_outweigh_one_nearer() -> None:
    near, nearer = np.array([1.0, 0.1]), np.array([1.0, 0.09])
    pairs = [("a1", "a"), ("a2", "a"), ("b1", "b")]
    encoder = Lookup({"a1": near, "a2": near, "b1": nearer, "q": np.array([1.0, 0.0])})
    documents = [Document("a", ""), Document("b", "")]
    for weighting, first in (("best", "b"), ("softmax", "a")):
        chosen = KnnSettings(weighting=weighting)  # type: ignore[arg-type]
        assert Knn(documents, pairs, encoder, settings=chosen).search("q")[0].doc_id == first


def test_ties_of_knn_go_by_doc_id_and_far_documents_keep_their_order() -> None:
    vectors = {"x": np.array([1.0, 0.0]), "far": np.array([-1.0, 0.1]), "farther": np.array([-1.0, 0.0])}
    documents = [Document(doc_id, "") for doc_id in ("b", "a", "z", "y")]
    pairs = [("x", "b"), ("x", "a"), ("farther", "y"), ("far", "z")]
    found = Knn(documents, pairs, Lookup(vectors), settings=KnnSettings(temperature=0.001)).search("x")
    assert [hit.doc_id for hit in found] == ["a", "b", "z", "y"]


def test_knn_trains_and_loads(encoder: Path, tmp_path: Path) -> None:
    documents = tiny.make_documents(24)
    pairs = tiny.make_queries(documents[::2], seed=2, each=2)
    queries = [query for query, _ in tiny.make_queries(documents, seed=4)]
    chosen = KnnSettings(str(encoder), weighting="best", max_length=16)
    made = Knn.train(documents, pairs, out=tmp_path / "knn", settings=chosen)
    loaded = Knn.load(tmp_path / "knn", documents)
    assert loaded.search(queries) == made.search(queries)
    assert made.search(pairs[5][0], k=1)[0].doc_id == pairs[5][1]  # a training query finds itself
    assert loaded.index_bytes == 24 * tiny.WIDTH * 4
    (tmp_path / "knn" / "vectors.npy").write_bytes(b"x")
    with pytest.raises(IndexCorruptError, match="damaged"):
        Knn.load(tmp_path / "knn", documents)
    (tmp_path / "knn" / "COMPLETE").write_text("dual")
    with pytest.raises(IndexCorruptError, match="'dual'"):
        Knn.load(tmp_path / "knn", documents)
    (tmp_path / "knn" / "COMPLETE").unlink()
    with pytest.raises(IndexNotFoundError, match="COMPLETE"):
        Knn.load(tmp_path / "knn", documents)


def test_an_interrupted_training_leaves_nothing_to_load(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents, chosen = tiny.make_documents(6), KnnSettings(str(encoder))
    Knn.train(documents, [("apple", "d0")], out=tmp_path, settings=chosen)

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(np, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        Knn.train(documents, [("pear", "d1")], out=tmp_path, settings=chosen)
    with pytest.raises(IndexNotFoundError, match="train it again"):
        Knn.load(tmp_path, documents)


def test_what_knn_cannot_search_is_named() -> None:
    documents = [Document("a", "x")]
    with pytest.raises(DataError, match="'gone'"):
        Knn(documents, [("q", "gone")], Lookup({}))
    with pytest.raises(DataError, match="there are none"):
        Knn(documents, [], Lookup({}))
    with pytest.raises(DataError, match=r"1 training queries.*\(2, 3\)"):
        Knn(documents, [("q", "a")], Lookup({}), np.zeros((2, 3)))
    for wrong in ({"weighting": "mean"}, {"temperature": 0.0}, {"max_length": 0}):
        with pytest.raises(ConfigError, match="knn"):
            KnnSettings(**wrong)
    with pytest.raises(ConfigError, match="-k"):
        Knn(documents, [("q", "a")], Lookup({}), np.ones((1, 2))).search("q", k=0)
