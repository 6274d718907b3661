from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nci.errors import ConfigError
from nci.fuse import merge_hits, paper_rank, reciprocal_rank
from nci.records import Hit

rankings = st.lists(st.lists(st.sampled_from("abcdefgh"), unique=True), max_size=4)


def test_reciprocal_rank_by_eye() -> None:
    fused = reciprocal_rank([["a", "b"], ["b", "c"]])
    assert fused == [("b", 1 / 62 + 1 / 61), ("a", 1 / 61), ("c", 1 / 62)]
    assert reciprocal_rank([["a", "b"]], k=1) == [("a", 1 / 2), ("b", 1 / 3)]


def test_paper_rank_by_eye() -> None:
    fused = paper_rank([["a", "b", "c"], ["c"]])
    assert fused == [("c", 1 / (2 / 5 + 1) + 1), ("a", 1.0), ("b", 1 / (1 / 5 + 1))]
    assert paper_rank([["a", "b"]], step=1) == [("a", 1.0), ("b", 0.5)]


def test_ties_go_to_the_smaller_doc_id() -> None:
    assert [doc_id for doc_id, _ in reciprocal_rank([["b", "a"], ["a", "b"]])] == ["a", "b"]
    assert [doc_id for doc_id, _ in paper_rank([["z"], ["y"]])] == ["y", "z"]


def test_a_repeated_doc_id_counts_once_at_its_best_rank() -> None:
    assert reciprocal_rank([["a", "a", "b"]]) == reciprocal_rank([["a", "b"]])


@given(rankings)
def test_the_order_of_the_rankings_does_not_matter(lists: list[list[str]]) -> None:
    for fuse in (reciprocal_rank, paper_rank):
        expected = fuse(lists)
        assert all(fuse(list(order)) == expected for order in permutations(lists))


@given(rankings)
def test_fusion_equals_its_formula(lists: list[list[str]]) -> None:
    everything = {doc_id for ranking in lists for doc_id in ranking}
    fused, paper = dict(reciprocal_rank(lists, k=7)), dict(paper_rank(lists, step=3))
    assert fused.keys() == paper.keys() == everything
    for doc_id in everything:
        ranks = [ranking.index(doc_id) for ranking in lists if doc_id in ranking]
        assert fused[doc_id] == pytest.approx(sum(1 / (7 + rank + 1) for rank in ranks))
        assert paper[doc_id] == pytest.approx(sum(1 / (rank / 3 + 1) for rank in ranks))


def test_merge_hits_joins_what_the_lists_know() -> None:
    generative = [Hit(1, "a", -0.1, semantic_id=(3, 1)), Hit(2, "b", -2.0, semantic_id=(0,))]
    lexical = [Hit(1, "b", 9.0, "B", "text of b", source="bm25"), Hit(2, "c", 1.0, "C", "text of c", source="bm25")]
    merged = merge_hits([generative, lexical], k=2)
    assert merged == [
        Hit(1, "b", 1 / 62 + 1 / 61, "B", "text of b", (0,), "nci+bm25"),
        Hit(2, "a", 1 / 61, "", "", (3, 1), "nci"),
    ]
    assert [hit.doc_id for hit in merge_hits([generative, lexical])] == ["b", "a", "c"]
    assert merge_hits([lexical, generative], k=1)[0].source == "bm25+nci"


def test_merge_hits_uses_the_asked_method_and_fills_an_unnamed_source() -> None:
    merged = merge_hits(
        [[Hit(1, "a", 1.0, source="")], [Hit(1, "b", 1.0), Hit(2, "a", 0.5, source="")]], method="paper"
    )
    assert [(hit.doc_id, hit.score, hit.source) for hit in merged] == [
        ("a", 1 + 1 / (1 / 5 + 1), "ensemble"),
        ("b", 1.0, "nci"),
    ]


def test_nothing_in_nothing_out() -> None:
    assert merge_hits([]) == merge_hits([[], []]) == []
    assert reciprocal_rank([]) == []


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: reciprocal_rank([], k=-1), "-1"),
        (lambda: paper_rank([], step=0), "step"),
        (lambda: merge_hits([], k=0), "-k"),
        (lambda: merge_hits([], method="sum"), "rrf"),  # type: ignore[arg-type]
    ],
)
def test_impossible_settings_are_named(call: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        call()
