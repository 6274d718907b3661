"""Fusion of searchers: against formulas, and weights against an independent optimiser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize  # type: ignore[import-untyped]

from nci.baselines import Searcher
from nci.baselines.fusion import FusionSettings, RankFusion, ScoreFusion, fit_weights
from nci.errors import ConfigError, DataError, IndexNotFoundError
from nci.fuse import reciprocal_rank
from nci.records import Hit

RESULTS = {
    "A": {"q": [("x", 9.0), ("y", 5.0), ("z", 1.0)], "r": [("y", 2.0)], "s": []},
    "B": {"q": [("z", 0.9), ("w", 0.5)], "r": [("y", 0.3), ("x", 0.3)], "s": []},
}


class Fixed:
    """A searcher with known results that remembers how many hits it was asked for."""

    def __init__(self, name: str, results: dict[str, list[tuple[str, float]]]) -> None:
        self.name, self.results = name, results
        self.asked: list[int] = []

    def search(self, queries: Any, k: int = 10) -> Any:
        if isinstance(queries, str):
            return self.search([queries], k)[0]
        self.asked.append(k)
        return [
            [Hit(i, d, s, f"title {d}", source=self.name) for i, (d, s) in enumerate(self.results[q][:k], 1)]
            for q in queries
        ]


def searchers() -> dict[str, Searcher]:
    return {name: Fixed(name, results) for name, results in RESULTS.items()}


def test_rank_fusion_equals_reciprocal_rank() -> None:
    fusion: Searcher = RankFusion(searchers())
    found = fusion.search(["q", "r", "s"])
    for query, hits in zip("qrs", found, strict=True):
        expected = reciprocal_rank([[doc_id for doc_id, _ in RESULTS[name][query]] for name in RESULTS])
        assert [(hit.doc_id, hit.score) for hit in hits] == expected
        assert [hit.rank for hit in hits] == list(range(1, len(hits) + 1))
    assert found[0][0] == Hit(1, "z", 1 / 63 + 1 / 61, "title z", source="rrf:A+B")
    assert fusion.search("q", k=2) == found[0][:2]
    assert fusion.search([]) == []
    assert RankFusion(searchers(), name="mine").search("q", k=1)[0].source == "mine"


@pytest.mark.parametrize(("depth", "k", "asked"), [(100, 10, 100), (2, 50, 50)])
def test_every_system_is_asked_deep_enough(depth: int, k: int, asked: int) -> None:
    systems = {name: Fixed(name, results) for name, results in RESULTS.items()}
    RankFusion(systems, depth=depth).search(["q", "r"], k=k)
    assert [system.asked for system in systems.values()] == [[asked], [asked]]


def test_score_fusion_by_hand() -> None:
    fusion: Searcher = ScoreFusion(searchers(), settings=FusionSettings(weights={"A": 0.25, "B": 0.75}))
    found = fusion.search(["q", "r", "s"])
    # A: x 1, y 1/2, z 0; B: z 1, w 0
    assert [(hit.doc_id, hit.score) for hit in found[0]] == [("z", 0.75), ("x", 0.25), ("y", 0.125), ("w", 0.0)]
    assert [(hit.doc_id, hit.score) for hit in found[1]] == [("y", 1.0), ("x", 0.75)]  # all alike: all 1
    assert found[2] == []
    assert found[0][0] == Hit(1, "z", 0.75, "title z", source="sum:A+B")
    assert fusion.search("q", k=1) == found[0][:1]


@settings(deadline=None)
@given(
    st.lists(
        st.dictionaries(st.sampled_from("abcdefgh"), st.floats(-50, 50), max_size=8).map(
            lambda scores: sorted(scores.items(), key=lambda item: (-item[1], item[0]))
        ),
        min_size=2,
        max_size=4,
    ),
    st.floats(0.1, 100),
    st.floats(-9, 9),
)
def test_score_fusion_does_not_depend_on_scale_or_order_of_the_systems(
    lists: list[list[tuple[str, float]]], scale: float, shift: float
) -> None:
    def fused(order: list[int], results: list[list[tuple[str, float]]]) -> dict[str, float]:
        systems = {str(i): Fixed(str(i), {"q": results[i]}) for i in order}
        weights = {name: 1 + int(name) / 3 for name in systems}
        hits = ScoreFusion(systems, settings=FusionSettings(weights=weights)).search("q", k=50)
        assert [hit.doc_id for hit in hits] == [h.doc_id for h in sorted(hits, key=lambda h: (-h.score, h.doc_id))]
        return {hit.doc_id: hit.score for hit in hits}

    forward = list(range(len(lists)))
    assert fused(forward, lists) == fused(forward[::-1], lists)
    moved = [[(doc_id, scale * score + shift) for doc_id, score in ranking] for ranking in lists]
    spreads = [np.ptp([score for _, score in ranking]) for ranking in lists if ranking]
    if all(spread == 0 or spread > 1e-3 for spread in spreads):
        assert fused(forward, moved) == pytest.approx(fused(forward, lists), abs=1e-6)


# ---- weights


def random_examples(seed: int, useful: list[float]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Queries whose relevant document stands out by so much in each system."""
    rng = np.random.default_rng(seed)
    examples = []
    for _ in range(80):
        count = int(rng.integers(3, 12))
        relevant = np.arange(count) == rng.integers(count)
        scores = rng.uniform(size=(count, len(useful))) + np.outer(relevant, useful)
        examples.append((scores, relevant))
    return examples


def test_weights_are_those_of_an_independent_optimiser() -> None:
    examples = random_examples(0, [0.5, 0.2, -0.3])

    def loss(weights: np.ndarray) -> float:
        parts = [np.log((np.exp(s @ weights) * r).sum() / np.exp(s @ weights).sum()) for s, r in examples]
        return float(-np.mean(parts) + 1e-3 / 2 * weights @ weights)

    best = optimize.minimize(loss, np.ones(3), bounds=[(0, None)] * 3, method="L-BFGS-B", options={"gtol": 1e-9}).x
    weights = fit_weights(examples)
    np.testing.assert_allclose(weights, best / best.sum(), atol=1e-4)
    assert weights[0] > weights[1] > weights[2] == 0
    assert weights.sum() == pytest.approx(1)


def test_queries_that_say_nothing_are_left_out() -> None:
    examples = random_examples(1, [0.4, 0.3])
    lost = [(np.random.default_rng(2).uniform(size=(5, 2)), np.zeros(5, bool)), (np.zeros((0, 2)), np.zeros(0, bool))]
    np.testing.assert_array_equal(fit_weights([lost[0], *examples, *lost]), fit_weights(examples))
    with pytest.raises(DataError, match="no system finds"):
        fit_weights(lost)
    with pytest.raises(DataError, match="worse than chance"):
        fit_weights(random_examples(3, [-0.9, -0.9]))


def test_perfect_answers_give_finite_weights() -> None:
    scores, relevant = np.array([[1.0, 0.5], [0.0, 0.5]]), np.array([True, False])
    weights = fit_weights([(scores, relevant)] * 5)
    np.testing.assert_allclose(weights, [1, 0], atol=0.2)
    assert weights[0] > weights[1]


def test_training_prefers_the_system_that_is_right_and_loads(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    names = [f"d{i}" for i in range(12)]
    good: dict[str, list[tuple[str, float]]] = {}
    bad: dict[str, list[tuple[str, float]]] = {}
    pairs = []
    for i in range(60):
        wanted = names[int(rng.integers(12))]
        pairs.append((f"q{i}", wanted))
        for results, bonus in ((good, 0.6), (bad, 0.0)):
            scores = {name: float(rng.uniform()) + bonus * (name == wanted) for name in names}
            results[f"q{i}"] = sorted(scores.items(), key=lambda item: -item[1])
    systems = {"bad": Fixed("bad", bad), "good": Fixed("good", good)}
    made = ScoreFusion.train(systems, pairs[:40], out=tmp_path / "fusion", settings=FusionSettings(depth=12))
    assert made.settings.weights["good"] > 0.8
    assert made.settings.depth == 12
    held_out = [query for query, _ in pairs[40:]]
    # By name, not by place: the order of the systems may be another one.
    loaded = ScoreFusion.load(tmp_path / "fusion", dict(reversed(systems.items())), name="sum:bad+good")
    assert loaded.search(held_out) == made.search(held_out)
    again = ScoreFusion.train(systems, pairs[:40], out=tmp_path / "again", settings=FusionSettings(depth=12))
    assert again.settings == made.settings

    def right(searcher: Searcher) -> float:
        found = searcher.search(held_out, k=1)
        return float(np.mean([hits[0].doc_id == wanted for hits, (_, wanted) in zip(found, pairs[40:], strict=True)]))

    assert right(made) >= right(systems["good"]) > right(RankFusion(systems)) > right(systems["bad"])
    with pytest.raises(ConfigError, match="bad, other"):
        ScoreFusion.load(tmp_path / "fusion", {"bad": systems["bad"], "other": systems["good"]})


def test_a_query_with_two_documents_has_two_right_answers(tmp_path: Path) -> None:
    # With x alone both systems are equally right; y tells them apart.
    good = Fixed("good", {"q": [("x", 1.0), ("y", 0.9), ("z", 0.0)]})
    other = Fixed("other", {"q": [("x", 1.0), ("z", 0.9), ("y", 0.0)]})
    for number, pairs in enumerate([[("q", "x"), ("q", "y")], [("q", "y"), ("q", "x")]]):
        made = ScoreFusion.train({"good": good, "other": other}, pairs, out=tmp_path / str(number))
        assert made.settings.weights["good"] > made.settings.weights["other"] + 0.1
    assert good.asked == [100, 100]


def test_impossible_fusions_are_named(tmp_path: Path) -> None:
    one = {"A": searchers()["A"]}
    with pytest.raises(ConfigError, match="two systems"):
        RankFusion(one)
    with pytest.raises(ConfigError, match="two systems"):
        ScoreFusion.train(one, [("q", "x")], out=tmp_path)
    with pytest.raises(ConfigError, match="one query"):
        ScoreFusion.train(searchers(), [], out=tmp_path)
    with pytest.raises(ConfigError, match="depth"):
        RankFusion(searchers(), depth=0)
    with pytest.raises(ConfigError, match="-k"):
        RankFusion(searchers()).search("q", k=0)
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="weights"):
            FusionSettings(weights={"A": weight})
    with pytest.raises(IndexNotFoundError, match="COMPLETE"):
        ScoreFusion.load(tmp_path, searchers())
