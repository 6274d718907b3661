from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bm25s  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
import pytest
import Stemmer  # type: ignore[import-not-found]
from hypothesis import given, settings
from hypothesis import strategies as st

from nci.analyser import _STOPWORDS, Analyser
from nci.baselines import Searcher
from nci.baselines.bm25 import BM25
from nci.baselines.dense import Dense
from nci.errors import ConfigError, DataError, IndexCorruptError, MissingPackageError
from nci.lexical import LexicalScores
from nci.records import Document

WORDS = [
    "search",
    "index",
    "tree",
    "Running",
    "runs",
    "neural",
    "the",
    "of",
    "and",
    "beams",
    "naïve",
    "Straße",
    "x",
    "été",
]
TEXTS = st.lists(
    st.one_of(st.text(max_size=40), st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join)), max_size=8
)


def random_texts(count: int, words: int = 30, vocabulary: int = 400, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    ranks = rng.zipf(1.3, (count, words)) % vocabulary
    return [" ".join(f"{WORDS[i % len(WORDS)]}{i}" for i in row) for row in ranks.tolist()]


def random_documents(count: int) -> list[Document]:
    # Ids whose order is not the order of the rows.
    return [Document(f"d{(i * 37) % 1000:03d}", text, f"title {i % 7}") for i, text in enumerate(random_texts(count))]


def reference(texts: list[str], queries: list[str], k1: float = 0.9, b: float = 0.4) -> npt.NDArray[np.float32]:
    """All scores by bm25s alone, with its own tokeniser."""
    stemmer = Stemmer.Stemmer("english")
    model = bm25s.BM25(k1=k1, b=b, method="lucene")
    model.index(bm25s.tokenize(texts, stopwords="en", stemmer=stemmer, show_progress=False), show_progress=False)
    rows = []
    for query in queries:
        (words,) = bm25s.tokenize(query, stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False)
        known = model.get_tokens_ids(words)
        rows.append(model.get_scores_from_ids(known))
    return np.array(rows)


@settings(deadline=None)
@given(TEXTS)
def test_words_are_those_of_bm25s(texts: list[str]) -> None:
    for stemmer in ("english", None):
        for stopwords in ("en", None):
            theirs = bm25s.tokenize(
                texts,
                stopwords=stopwords or [],
                stemmer=Stemmer.Stemmer(stemmer) if stemmer else None,
                return_ids=False,
                show_progress=False,
            )
            assert Analyser(stemmer, stopwords).words(texts) == theirs


def test_stop_words_are_those_of_bm25s() -> None:
    from bm25s.stopwords import STOPWORDS_EN  # type: ignore[import-untyped]

    assert frozenset(STOPWORDS_EN) == _STOPWORDS


@pytest.mark.parametrize(("k1", "b"), [(0.9, 0.4), (1.5, 0.75), (0.0, 0.0)])
def test_lexical_scores_equal_bm25s_for_every_document(k1: float, b: float) -> None:
    texts = [*random_texts(200), "", "the of"]
    queries = [*random_texts(20, words=6, seed=1), "search1 search1 Running2", "the", "nothing known"]
    scores = LexicalScores.build(texts, k1=k1, b=b).scores(queries)
    assert scores.shape == (len(queries), len(texts))
    assert scores.dtype == np.float32
    assert scores.any(axis=1).sum() >= 20
    np.testing.assert_array_equal(scores, reference(texts, queries, k1, b))


def test_lexical_scores_by_hand() -> None:
    scores = LexicalScores.build(["apple apple pear", "pear"], k1=1.2, b=0.75).scores(["apple", "pear apple"])
    # Lucene: idf = ln(1 + (N - n + 0.5) / (n + 0.5)), tf / (tf + k1 (1 - b + b length / mean length))
    apple = np.log(1 + 1.5 / 1.5) * 2 / (2 + 1.2 * (0.25 + 0.75 * 3 / 2))
    pear = [np.log(1 + 0.5 / 2.5) * 1 / (1 + 1.2 * (0.25 + 0.75 * length / 2)) for length in (3, 1)]
    np.testing.assert_allclose(scores, [[apple, 0], [apple + pear[0], pear[1]]], rtol=1e-6)


def test_normalised_scores_reach_one_and_stay_zero_without_a_match() -> None:
    lexical = LexicalScores.build(random_texts(50))
    queries = [*random_texts(5, words=4, seed=2), "unheard"]
    raw, normalised = lexical.scores(queries), lexical.normalised(queries)
    np.testing.assert_allclose(normalised[:5], raw[:5] / raw[:5].max(axis=1, keepdims=True), rtol=1e-6)
    assert normalised[:5].max(axis=1).tolist() == [1.0] * 5
    assert not normalised[5].any()


@pytest.mark.parametrize("texts", [[], ["", "the"]])
@pytest.mark.parametrize("mmap", [True, False])
def test_a_corpus_without_words_scores_zero(tmp_path: Path, texts: list[str], mmap: bool) -> None:
    LexicalScores.build(texts).save(tmp_path)
    lexical = LexicalScores.load(tmp_path, mmap=mmap)
    assert lexical.scores(["a query"]).tolist() == lexical.normalised(["a query"]).tolist() == [[0.0] * len(texts)]
    assert lexical.scores([]).shape == (0, len(texts))


@pytest.mark.parametrize("mmap", [True, False])
def test_saved_scores_come_back(tmp_path: Path, mmap: bool) -> None:
    texts, queries = random_texts(80), random_texts(10, words=5, seed=3)
    built = LexicalScores.build(texts, stemmer="german", stopwords=None)
    built.save(tmp_path / "lexical")
    loaded = LexicalScores.load(tmp_path / "lexical", mmap=mmap)
    assert loaded.analyser == Analyser("german", None)
    np.testing.assert_array_equal(loaded.scores(queries), built.scores(queries))
    assert {each.suffix for each in (tmp_path / "lexical").iterdir()} == {".npy", ".json"}


def test_the_same_texts_give_the_same_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        LexicalScores.build(random_texts(40)).save(tmp_path / name)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def drop_file(folder: Path) -> None:
    (folder / "indptr.npy").unlink()


def shorten_vocabulary(folder: Path) -> None:
    words = json.loads((folder / "vocabulary.json").read_text())
    (folder / "vocabulary.json").write_text(json.dumps(words[:-1]))


def point_outside(folder: Path) -> None:
    indices = np.load(folder / "indices.npy")
    indices[0] = 10_000
    np.save(folder / "indices.npy", indices)


def cut_array(folder: Path) -> None:
    whole = (folder / "data.npy").read_bytes()
    (folder / "data.npy").write_bytes(whole[: len(whole) // 2])


def put_pickle(folder: Path) -> None:
    np.save(folder / "data.npy", np.array([{}], object), allow_pickle=True)


def change_format(folder: Path) -> None:
    (folder / "lexical.json").write_text('{"format": 99}')


def no_json(folder: Path) -> None:
    (folder / "lexical.json").write_text("[")


@pytest.mark.parametrize(
    "damage", [drop_file, shorten_vocabulary, point_outside, cut_array, put_pickle, change_format, no_json]
)
def test_damage_is_found_on_loading(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    LexicalScores.build(random_texts(10)).save(tmp_path)
    damage(tmp_path)
    with pytest.raises(IndexCorruptError, match="rebuild"):
        LexicalScores.load(tmp_path)


def test_one_query_takes_well_under_a_millisecond() -> None:
    lexical = LexicalScores.build(random_texts(7000, vocabulary=20000))
    queries = random_texts(200, words=10, vocabulary=20000, seed=4)
    took = []
    for query in queries:
        start = time.perf_counter()
        lexical.scores([query])
        took.append(time.perf_counter() - start)
    assert np.median(took) < 1e-3


def test_impossible_lexical_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="klingon"):
        LexicalScores.build(["text"], stemmer="klingon")
    with pytest.raises(ConfigError, match="stopwords"):
        LexicalScores.build(["text"], stopwords="fr")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="b=2"):
        LexicalScores.build(["text"], b=2)


@pytest.mark.parametrize(("module", "package"), [("Stemmer", "PyStemmer"), ("bm25s", "bm25s")])
def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, module: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match=f"pip install {package}"):
        BM25([Document("d", "text")])


def test_bm25_equals_bm25s() -> None:
    documents = random_documents(150)
    queries = random_texts(30, words=5, seed=5)
    expected = reference([document.content for document in documents], queries)
    for hits, scores in zip(BM25(documents).search(queries, k=20), expected, strict=True):
        ranked = sorted(
            (-float(score), document.doc_id) for score, document in zip(scores, documents, strict=True) if score > 0
        )[:20]
        assert [(-hit.score, hit.doc_id) for hit in hits] == ranked
        assert [hit.rank for hit in hits] == list(range(1, len(hits) + 1))
        assert all(hit.source == "bm25" for hit in hits)


def test_bm25_reads_titles_and_extra_queries() -> None:
    documents = [Document("a", "apples", "Fruit"), Document("b", "bears"), Document("c", "cars")]
    plain, more = BM25(documents), BM25(documents, extra={"b": ["honey eaters", "fruit lovers"], "gone": ["fruit"]})
    assert [(hit.doc_id, hit.title, hit.text) for hit in plain.search("fruits")] == [("a", "Fruit", "apples")]
    assert plain.search("honey") == []
    assert [hit.doc_id for hit in more.search("honey")] == ["b"]
    assert {hit.doc_id for hit in more.search("fruit")} == {"a", "b"}
    assert BM25(documents, stemmer=None).search("apple") == []
    assert BM25(documents, stopwords=None).search("") == BM25([]).search("anything") == []
    names = [Document("a", "--file {{castle_name}} -v")]
    assert BM25(names).search("castle") == BM25(names).search("v") == []
    assert [hit.doc_id for hit in BM25(names, runs=True).search(["castle", "v"])[0]] == ["a"]


def test_one_query_or_many_and_ties_by_doc_id() -> None:
    documents = [Document(doc_id, "same words") for doc_id in ("b", "d", "a", "c")]
    searcher: Searcher = BM25(documents)
    one = searcher.search("words", k=2)
    assert [hit.doc_id for hit in one] == ["a", "b"]
    assert searcher.search(["words", "none"], k=2) == [one, []]
    assert searcher.search([]) == []


class Lookup:
    """An encoder that knows its texts by heart."""

    def __init__(self, vectors: dict[str, npt.NDArray[Any]]) -> None:
        self.vectors = vectors

    def encode(self, texts: list[str], /, *, batch_size: int) -> npt.NDArray[Any]:
        assert batch_size == 32
        return np.stack([self.vectors[text] for text in texts])


@pytest.mark.parametrize("backend", ["faiss", "numpy"])
@pytest.mark.parametrize("given_vectors", [True, False])
@pytest.mark.parametrize("k", [1, 7, 100, 120, 500])
def test_dense_equals_argsort(monkeypatch: pytest.MonkeyPatch, backend: str, given_vectors: bool, k: int) -> None:
    if backend == "numpy":
        monkeypatch.setitem(sys.modules, "faiss", None)
    rng = np.random.default_rng(6)
    documents = [Document(f"d{(i * 37) % 120:03d}", f"text {i}", "t") for i in range(120)]
    # Small whole numbers: products are exact, and many documents tie, also at the last place.
    vectors = rng.integers(-1, 2, (120, 4)).astype(np.float32)
    known = {document.content: vector for document, vector in zip(documents, vectors, strict=True)}
    queries = {f"query {i}": rng.integers(-1, 2, 4).astype(np.float16) for i in range(300)}
    searcher: Searcher = Dense(documents, Lookup(queries | known), vectors if given_vectors else None)
    doc_ids = np.array([document.doc_id for document in documents])
    for text, hits in zip(queries, searcher.search(list(queries), k=k), strict=True):
        scores = vectors @ queries[text].astype(np.float32)
        order = np.lexsort((doc_ids, -scores))[:k]
        assert [(hit.doc_id, hit.score) for hit in hits] == [(doc_ids[i], scores[i]) for i in order]
        assert hits.documents_scored == 120
    assert searcher.search("query 0", k=k) == searcher.search(["query 0"], k=k)[0]
    assert searcher.search("query 0", k=k)[0].source == "dense"


def test_dense_refuses_vectors_that_do_not_fit() -> None:
    with pytest.raises(DataError, match=r"2 documents.*\(3, 4\)"):
        Dense([Document("a", "x"), Document("b", "y")], Lookup({}), np.zeros((3, 4)))


def test_wrong_documents_and_wrong_k_are_refused() -> None:
    with pytest.raises(DataError, match="'a'"):
        BM25([Document("b", "x"), Document("a", "x"), Document("a", "y")])
    with pytest.raises(ConfigError, match="-k"):
        BM25([Document("a", "x")]).search("x", k=0)
    with pytest.raises(ConfigError, match="-k"):
        Dense([Document("a", "x")], Lookup({}), np.zeros((1, 2))).search("x", k=-1)
