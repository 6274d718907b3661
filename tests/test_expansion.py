"""Documents with their queries in BM25: against the plain formula, and from the build to the batches of training."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import make_documents, make_queries, tiny_config

from nci.analyser import Analyser
from nci.config import LexicalConfig
from nci.errors import IndexCorruptError
from nci.expansion import Appended, OwnScores, appended_queries, expanded_scores
from nci.index import Index
from nci.lexical import LexicalScores
from nci.pairs import SOURCES, BatchPlan, Pair
from nci.pipeline import build

REAL, SPAN, GENERATED = map(SOURCES.index, ("real", "span", "generated"))
WORDS = ["red", "greens", "blue", "cats", "dog", "runs", "the", "Ähre", "x", "!", "red_cats"]
READER = Analyser(runs=True)
texts = st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join)


@st.composite
def collections(draw: st.DrawFn) -> tuple[list[str], Appended]:
    """Documents, perhaps empty, and queries of some of them; few words, so that queries come twice."""
    contents = draw(st.lists(texts, min_size=1, max_size=6))
    rows = st.integers(0, len(contents) - 1)
    return contents, draw(st.lists(st.tuples(texts, rows), max_size=8))


SEPARATOR = "\x1f"  # no word has it, and no phrase goes across it


def joined(contents: list[str], appended: Appended) -> list[str]:
    return [
        SEPARATOR.join([text, *(query for query, of in appended if of == row)]) for row, text in enumerate(contents)
    ]


def terms(text: str) -> list[str | tuple[str, str]]:
    """Words, and pairs of neighbours."""
    parts = READER.words(text.split(SEPARATOR))
    return [*chain(*parts), *(pair for words in parts for pair in pairwise(words))]


def plain(texts: list[str], **parameters: float) -> LexicalScores:
    """BM25 of words alone."""
    return LexicalScores.from_words(READER.words(texts), analyser=READER, **({"k1": 0.9, "b": 0.4} | parameters))


def naive(
    texts: list[str], query: str, row: int, config: LexicalConfig, *, without: bool, known: Sequence[str] = ()
) -> float:
    """Lucene's BM25 of one query for one document, which may lack the query's own words once.

    What many of the known queries ask for counts less.
    """
    documents, asked = [terms(text) for text in texts], terms(query)
    held = [set(terms(text)) for text in set(known)]
    mean = np.mean([len(document) for document in documents])
    length = len(documents[row]) - without * len(asked)
    score = 0.0
    for term in asked:
        df = sum(term in document for document in documents)
        tf = documents[row].count(term) - without * asked.count(term)
        if tf:
            weight = config.phrases if isinstance(term, tuple) else 1.0
            frequent = math.log(1 + sum(term in each for each in held)) / math.log(2 + max(len(held), 1000))
            weight *= (1 - frequent) ** config.rarity
            idf = math.log(1 + (len(texts) - df + 0.5) / (df + 0.5))
            score += weight * idf * tf / (tf + config.k1 * (1 - config.b + config.b * length / mean))
    return score


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    made=collections(),
    k1=st.sampled_from([0.0, 0.9, 2.0]),
    b=st.sampled_from([0.0, 0.4, 1.0]),
    phrases=st.sampled_from([0.3, 2.0]),
    rarity=st.sampled_from([0.0, 0.5, 1.0]),
    known=st.lists(texts, max_size=6),
)
def test_scores_with_and_without_the_query_follow_the_formula(
    made: tuple[list[str], Appended], k1: float, b: float, phrases: float, rarity: float, known: list[str]
) -> None:
    contents, appended = made
    config = LexicalConfig(k1=k1, b=b, phrases=phrases, rarity=rarity)
    lexical, own = expanded_scores(contents, appended, config, known)
    whole = joined(contents, appended)
    assert own.shape == (len(appended),)
    assert own.dtype == np.float32
    for score, (query, row) in zip(own, appended, strict=True):
        assert score == pytest.approx(naive(whole, query, row, config, without=True, known=known), abs=1e-5)
        found = lexical.scores([query])[0, row]
        assert found == pytest.approx(naive(whole, query, row, config, without=False, known=known), abs=1e-5)
        if b == 0:  # else a shorter document may be worth more than the words in it
            assert score <= found + 1e-6


@settings(max_examples=50, deadline=None, derandomize=True)
@given(made=collections())
def test_documents_are_read_with_their_queries_on_lines_of_their_own(made: tuple[list[str], Appended]) -> None:
    contents, appended = made
    lexical, _ = expanded_scores(contents, appended, LexicalConfig(k1=1.2, b=0.7, phrases=0))
    wanted = plain(joined(contents, appended), k1=1.2, b=0.7)
    assert lexical.document_frequencies().tolist() == wanted.document_frequencies().tolist()
    assert all((one == two).all() for one, two in zip(lexical.postings, wanted.postings, strict=True))


def test_a_word_of_many_queries_counts_less() -> None:
    contents = ["which red", "cats red", "dog"]
    known = [f"which number{i}" for i in range(2000)] + ["cats"]
    more, _ = expanded_scores(contents, [], LexicalConfig(rarity=1.0), known)
    less, _ = expanded_scores(contents, [], LexicalConfig(rarity=0.0), known)
    again, _ = expanded_scores(contents, [], LexicalConfig(rarity=1.0), known * 2)
    before, after = less.scores(["which", "cats", "red"]).max(1), more.scores(["which", "cats", "red"]).max(1)
    assert 0 < after[0] < 0.01 * before[0], "nearly all have it; it still finds where nothing else is asked"
    assert 0.9 * before[1] < after[1] < before[1]
    assert after[2] == before[2]
    np.testing.assert_array_equal(again.postings[0], more.postings[0], "the same query twice is one")


def test_old_scores_are_read_as_they_were_built(tmp_path: Path) -> None:
    LexicalScores.build(["castle_name", "v"]).save(tmp_path)
    settings = json.loads((tmp_path / "lexical.json").read_text())
    del settings["analyser"]["runs"]
    (tmp_path / "lexical.json").write_text(json.dumps(settings))
    lexical = LexicalScores.load(tmp_path)
    assert not lexical.analyser.runs
    assert (lexical.scores(["castle_name", "castle"]) > 0).tolist() == [[True, False], [False, False]]


def test_a_script_without_blanks_is_read_character_by_character() -> None:
    lexical, _ = expanded_scores(["東京塔は・高い", "京都の塔", "大阪城 castle"], [], LexicalConfig())
    asked, part, latin, nothing = lexical.scores(["京塔", "東京", "castles", "・"])
    assert not nothing.any()
    assert asked[0] > asked[1] > asked[2] == 0, "neighbours count more"
    assert part.argmax() == 0
    assert latin.argmax() == 2


def test_a_phrase_counts_where_its_words_are_neighbours_in_order_and_in_one_text() -> None:
    contents = ["red cats run", "cats red run", "cats the red dogs", "red green cats run", "red", "unknown"]
    lexical, _ = expanded_scores(contents, [("cats run", 4)], LexicalConfig(phrases=1.0, b=0.0))
    words, _ = expanded_scores(contents, [("cats run", 4)], LexicalConfig(phrases=0.0, b=0.0))
    more = lexical.scores(["red cats", "red unheard cats", "cats"]) - words.scores(
        ["red cats", "red unheard cats", "cats"]
    )
    assert (more[0] > 0).tolist() == [True, False, False, False, False, False]
    assert not more[1:].any(), "a word that nobody knows parts its neighbours, and a word alone is no phrase"
    assert lexical.scores(["cats red"])[0, 2] > words.scores(["cats red"])[0, 2], "stop words are not read"


@given(made=collections(), asked=st.lists(texts, max_size=5), phrases=st.sampled_from([0.0, 0.3]))
@settings(max_examples=60, deadline=None)
def test_columns_of_many_texts_are_those_of_each(
    made: tuple[list[str], Appended], asked: list[str], phrases: float
) -> None:
    lexical, _ = expanded_scores(*made, LexicalConfig(phrases=phrases))
    together = [columns.tolist() for columns in lexical.columns(asked)]
    assert together == [columns.tolist() for text in asked for columns in lexical.columns([text])]
    assert len(together) == len(asked)


def test_phrases_survive_storing_and_renumbering(tmp_path: Path) -> None:
    contents = ["red cats run", "blue cats", "red dogs run red cats"]
    lexical, _ = expanded_scores(contents, [], LexicalConfig(phrases=0.3))
    lexical.save(tmp_path)
    loaded = LexicalScores.load(tmp_path)
    wanted = lexical.scores(["red cats run"])
    assert (loaded.scores(["red cats run"]) == wanted).all()
    turned = loaded.renumbered(np.array([2, 0, 1]))
    assert (turned.scores(["red cats run"])[:, [2, 0, 1]] == wanted).all()
    np.save(tmp_path / "pairs.npy", np.load(tmp_path / "pairs.npy")[::-1].copy())
    with pytest.raises(IndexCorruptError, match="do not fit"):
        LexicalScores.load(tmp_path)


def test_a_query_that_is_appended_twice_is_left_out_once() -> None:
    contents, query = ["red cats", "blue dog", "a dog runs"], ("green dog", 0)
    _, once = expanded_scores(contents, [query], LexicalConfig())
    lexical, twice = expanded_scores(contents, [query, query], LexicalConfig())
    assert once.tolist() == [0], "the text itself has none of its words"
    assert 0 < twice[0] == twice[1] < lexical.scores(["green dog"])[0, 0]


def test_which_queries_are_appended() -> None:
    real, generated = [("a", 0), ("a", 0), ("b", 2)], [("c", 0), ("d", 1), ("e", 0), ("f", 0)]

    def found(**settings: Any) -> Appended:
        return appended_queries(LexicalConfig(**settings), real=real, generated=generated)

    assert found() == generated
    assert found(training=True) == [*real, *generated]
    assert found(training=True, generated=2) == [*real, ("c", 0), ("d", 1), ("e", 0)]
    assert found(training=False, generated=1) == [("c", 0), ("d", 1)]
    assert found(training=False, generated=0) == []


def test_only_pairs_whose_query_is_appended_to_their_document_have_a_score_of_their_own() -> None:
    own = OwnScores([("red cat", 0), ("dog", 1)], np.array([0.25, 0.5], np.float32))
    pairs = [
        Pair("dog", 1, GENERATED),
        Pair("red cat", 0, REAL),
        Pair("red cat", 1, REAL),  # appended to another document
        Pair("red", 0, GENERATED),  # not appended
        Pair("dog", 1, SPAN),  # a piece of the text that reads the same
    ]
    np.testing.assert_array_equal(own(pairs), np.array([0.5, 0.25, np.nan, np.nan, np.nan], np.float32))
    assert own([]).shape == (0,)


# From the build to the batches


def written(out: Path) -> tuple[LexicalScores, BatchPlan]:
    (lexical,), (pairs,) = ((out / "build").glob(f"{name}-*") for name in ("lexical", "pairs"))
    return LexicalScores.load(lexical), BatchPlan(pairs / "plan")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, encoder: Path, beir: Path) -> Path:
    out = tmp_path_factory.mktemp("expanded") / "my.index"
    generated = make_queries(make_documents(), seed=9, each=3)
    build(beir, out, tiny_config(encoder, lexical={"generated": 2}, pairs={"generated": 1.0}), generated=generated)
    return out


def test_the_plan_knows_the_score_of_every_pair_without_itself(finished: Path) -> None:
    documents = make_documents()
    rows = {document.doc_id: row for row, document in enumerate(documents)}
    real = [(text, rows[doc_id]) for text, doc_id in make_queries(documents[::2], seed=2, each=2)]
    generated = [(text, rows[doc_id]) for text, doc_id in make_queries(documents, seed=9, each=3)]
    appended = [*real, *(pair for number, pair in enumerate(generated) if number % 3 < 2)]
    whole = joined([document.content for document in documents], appended)
    lexical, plan = written(finished)
    assert plan.own_lexical is not None
    assert plan.own_lexical.shape == plan.documents.shape
    queries = [*real, *generated]
    assert plan.counts["real"] + plan.counts["generated"] == len(queries)
    for number, (query, row) in enumerate(queries):
        score = float(plan.own_lexical[number])
        if (query, row) in appended:
            wanted = naive(whole, query, row, LexicalConfig(), without=True, known=[text for text, _ in real])
            assert score == pytest.approx(wanted, abs=1e-5)
            assert score < lexical.scores([query])[0, row], "appended, it would find itself"
        else:
            assert np.isnan(score)
    assert np.isnan(plan.own_lexical[len(queries) :]).all(), "pieces of documents"
    assert np.isnan(plan.own_lexical[: len(queries)]).any()


def test_search_reads_all_queries(finished: Path) -> None:
    lexical, _ = written(finished)
    index = Index(finished)
    assert index.engine.lexical is not None
    for text, doc_id in make_queries(make_documents()[:6:2], seed=2, each=2):
        leaf = index.doc_ids.index(doc_id)
        found, wanted = index.engine.lexical.scores([text])[0, leaf], lexical.scores([text])[0, int(doc_id[1:])]
        assert found == wanted > 0


def test_without_queries_the_scores_are_those_of_the_documents(encoder: Path, beir: Path, tmp_path: Path) -> None:
    lexical = {"training": False, "generated": 0, "phrases": 0.0, "rarity": 0.0, "k1": 0.9}
    config = tiny_config(encoder, lexical=lexical, pairs={"generated": 1.0})
    build(beir, tmp_path, config, generated=[("apple", "d1")])
    found, plan = written(tmp_path)
    wanted = plain([document.content for document in make_documents()])
    assert plan.own_lexical is None
    assert found.document_frequencies().tolist() == wanted.document_frequencies().tolist()
    assert all((one == two).all() for one, two in zip(found.postings, wanted.postings, strict=True))


@pytest.mark.slow
def test_other_lexical_settings_redo_the_scores_and_the_plan_only(
    finished: Path, encoder: Path, beir: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(finished, tmp_path / "my.index"))
    before = {path.name for path in (out / "build").iterdir()}
    generated = make_queries(make_documents(), seed=9, each=3)
    config = tiny_config(encoder, lexical={"generated": 2, "k1": 1.5}, pairs={"generated": 1.0})
    build(beir, out, config, generated=generated)
    after = {path.name for path in (out / "build").iterdir()}
    assert {name.split("-")[0] for name in after - before} == {"lexical", "pairs"}
    assert {name.split("-")[0] for name in after & before} >= {"documents", "embed", "tree"}
