"""Fusion of searchers: against formulas, and weights against all of a grid."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nci.baselines import Searcher
from nci.baselines.fusion import FusionSettings, RankFusion, ScoreFusion, fit
from nci.errors import ConfigError, DataError, IndexNotFoundError
from nci.fuse import reciprocal_rank
from nci.records import Hit, Hits

Example = tuple[np.ndarray, np.ndarray, np.ndarray]
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
        found = []
        for query in queries:
            best = enumerate(self.results[query][:k], 1)
            found.append(Hits((Hit(i, d, s, f"title {d}", source=self.name) for i, (d, s) in best), len(self.name) + 3))
        return found


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
    assert [hits.documents_scored for hits in found] == [8, 8, 8], "four by each"
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


def random_examples(seed: int, useful: list[float], *, held_back: float = 0.0) -> list[Example]:
    """Queries whose relevant document stands out by so much in each system; unseen documents are held back."""
    rng = np.random.default_rng(seed)
    examples = []
    for _ in range(80):
        count = int(rng.integers(3, 12))
        relevant = np.arange(count) == rng.integers(count)
        unseen = rng.uniform(size=count) < 0.4
        scores = rng.uniform(size=(count, len(useful))) + np.outer(relevant, useful) - held_back * unseen[:, None]
        examples.append((scores, unseen, relevant.astype(float)))
    return examples


def first_is_right(examples: list[Example], weights: Sequence[float], constant: float) -> float:
    """Mean R@1, one query at a time."""
    right = []
    for scores, unseen, gain in examples:
        sums = [sum(w * s for w, s in zip(weights, row, strict=True)) for row in scores.tolist()]
        totals = [each + constant * bool(flag) for each, flag in zip(sums, unseen, strict=True)]
        right.append(gain[totals.index(max(totals))])
    return float(np.mean(right))


def test_fitted_numbers_are_nearly_as_good_as_all_on_a_grid() -> None:
    examples = random_examples(0, [0.5, 0.2], held_back=0.3)
    weights, constant, share = fit(examples)
    assert share == pytest.approx(first_is_right(examples, weights.tolist(), constant))
    assert weights.sum() == pytest.approx(1)
    grid = [(w, 1 - w, c) for w in np.linspace(0, 1, 11) for c in np.linspace(-0.5, 0.5, 11)]
    best = max(first_is_right(examples, [a, b], c) for a, b, c in grid)
    assert share >= best - 0.02
    assert share > first_is_right(examples, [0.5, 0.5], 0.0) + 0.05
    assert weights[0] > weights[1]
    assert constant > 0.1, "what is held back is brought forward"


def test_without_a_gain_weights_stay_equal() -> None:
    perfect = (np.array([[1.0, 0.5], [0.0, 0.5]]), np.zeros(2, bool), np.array([1.0, 0.0]))
    weights, constant, share = fit([perfect] * 5)
    assert (weights.tolist(), constant, share) == ([0.5, 0.5], 0.0, 1.0)


def test_queries_without_a_relevant_hit_count_as_lost() -> None:
    examples = random_examples(1, [0.4, 0.3])
    lost = [(np.zeros((5, 2)), np.zeros(5, bool), np.zeros(5)), (np.zeros((0, 2)), np.zeros(0, bool), np.zeros(0))]
    weights, constant, share = fit([lost[0], *examples, *lost])
    alone = fit(examples)
    assert (weights.tolist(), constant) == (alone[0].tolist(), alone[1])
    assert share == pytest.approx(alone[2] * 80 / 83)
    with pytest.raises(DataError, match="no system finds"):
        fit(lost)


def test_unseen_documents_get_a_constant(tmp_path: Path) -> None:
    settings = FusionSettings(weights={"A": 0.25, "B": 0.75}, unseen=0.5)
    found = ScoreFusion(searchers(), settings=settings, seen={"x", "z"}).search("q")
    assert [(hit.doc_id, hit.score) for hit in found] == [("z", 0.75), ("y", 0.625), ("w", 0.5), ("x", 0.25)]
    everything = ScoreFusion(searchers(), settings=settings).search("q")
    assert [hit.doc_id for hit in everything] == ["z", "x", "y", "w"], "without a list all documents count as seen"
    # Both systems know queries of "a" only and put it first; the other documents are asked for as often.
    names = [f"d{number}" for number in range(6)]
    results = {f"q{i}": [("a", 1.0), (names[i], 0.9), *((n, 0.1) for n in names if n != names[i])] for i in range(6)}
    systems = {"one": Fixed("one", results), "two": Fixed("two", results)}
    pairs = [(f"q{i}", names[i]) for i in range(6)]
    made = ScoreFusion.train(systems, pairs, out=tmp_path / "unseen", seen={"a"})
    assert made.settings.unseen == 0.0, "nothing would hold them back, and the others would never be found again"
    results["old"] = [("a", 1.0), *((name, 0.1) for name in names)]
    made = ScoreFusion.train(systems, [*pairs, ("old", "a")], out=tmp_path, seen={"a"})
    assert made.settings.unseen > 0.1
    stored = json.loads((tmp_path / "settings.json").read_text())
    fitted = {"weights": {"one": 0.5, "two": 0.5}, "unseen": made.settings.unseen, "found": made.withheld}
    assert stored == {"depth": 100, **fitted}
    assert made.withheld == 1.0, "every query finds its document with it"
    loaded = ScoreFusion.load(tmp_path, systems, seen={"a"})
    assert [hits[0].doc_id for hits in loaded.search([query for query, _ in pairs])] == names


def test_some_of_the_unseen_documents_may_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every query for a seen document finds an unseen one first; it is found itself where that is left out."""
    caplog.set_level("INFO", "nci")
    names = [f"n{number}" for number in range(200)]
    results = {f"s{i}": [(name, 0.9), ("old", 0.5), ("last", 0.0)] for i, name in enumerate(names)}
    results |= {f"u{i}": [(name, 0.9), ("old", 0.5), ("last", 0.0)] for i, name in enumerate(names)}
    pairs = [(f"s{i}", "old") for i in range(200)] + [(f"u{i}", name) for i, name in enumerate(names)]
    one = {"A": Fixed("A", results)}

    for fewer, wanted in ((1.0, 50), (0.5, 75), (0.0, 100)):
        made = ScoreFusion.train(one, pairs, out=tmp_path / str(fewer), seen={"old", "last"}, fewer=fewer)
        assert made.settings.unseen == 0.0, "a constant helps one kind as much as it costs the other"
        found = re.search(r"R@1 ([\d.]+) on 400 queries", caplog.messages[-1])
        assert found
        assert float(found[1]) == pytest.approx(wanted, abs=5)


@pytest.mark.parametrize(("seen_queries", "unseen_queries", "lost"), [(9, 1, 4), (9, 3, 4), (2, 6, 1)])
def test_seen_and_unseen_documents_count_the_same(
    tmp_path: Path, seen_queries: int, unseen_queries: int, lost: int
) -> None:
    """A constant that finds every unseen document loses less than half of the seen ones, however many there are."""
    results, pairs = {}, []
    for i in range(seen_queries):
        results[f"s{i}"] = [("old", 1.0), ("new", 0.9 if i < lost else 0.0), ("last", 0.0)]
        pairs.append((f"s{i}", "old"))
    for i in range(unseen_queries):
        results[f"u{i}"] = [("old", 1.0), ("new", 0.8), ("last", 0.0)]
        pairs.append((f"u{i}", "new"))
    one = {"A": Fixed("A", results)}
    made = ScoreFusion.train(one, pairs, out=tmp_path / "both", seen={"old", "last"})
    assert 0.2 < made.settings.unseen < 1
    assert made.search("u0", k=1)[0].doc_id == "new"
    assert made.search("u0", k=1)[0].source == "const:A"
    # Where there is one kind only, nothing is added, nor where most of the seen ones would be lost.
    alone = ScoreFusion.train(one, pairs[:seen_queries], out=tmp_path / "seen", seen={"old", "last"})
    assert alone.settings == FusionSettings(weights={"A": 1.0})
    new = ScoreFusion.train(one, pairs[seen_queries:], out=tmp_path / "unseen", seen={"old", "last"})
    assert (new.settings.unseen, new.withheld) == (0.0, 0.0), "though every one of them would be found with it"
    dear = {"A": Fixed("A", {**results, **{f"s{i}": results["s0"] for i in range(seen_queries)}})}
    more = [*pairs, *((f"v{i}", "old") for i in range(unseen_queries))]
    dear["A"].results |= {f"v{i}": results["s0"] for i in range(unseen_queries)}
    assert ScoreFusion.train(dear, more, out=tmp_path / "dear", seen={"old", "last"}).settings.unseen == 0


def test_a_query_for_a_seen_and_an_unseen_document_counts_half_for_each(tmp_path: Path) -> None:
    results = {
        "both": [("old", 1.0), ("new", 0.5), ("last", 0.0)],
        "s": [("old", 1.0), ("new", 0.9), ("last", 0.0)],
        "t": [("old", 1.0), ("last", 0.0)],
    }
    pairs = [("both", "old"), ("both", "new"), ("s", "old"), ("t", "old")]
    made = ScoreFusion.train({"A": Fixed("A", results)}, pairs, out=tmp_path, seen={"old", "last"})
    # Without a constant all seen documents are found, one half; with it the unseen one, the other half, and "t".
    assert made.settings.unseen >= 0.5
    assert [hits[0].doc_id for hits in made.search(["both", "s", "t"])] == ["new", "new", "old"]


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
    assert made.settings.weights["good"] > 0.6
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
    # The other system's first hit is never relevant; both of the good one's are.
    good = Fixed("good", {"q": [("x", 1.0), ("y", 0.9), ("a", 0.0)], "r": [("y", 1.0), ("x", 0.9), ("a", 0.0)]})
    other = Fixed("other", {query: [("a", 1.0), ("x", 0.0), ("y", 0.0)] for query in "qr"})
    pairs = [(query, doc_id) for query in "qr" for doc_id in "xy"]
    made = ScoreFusion.train({"other": other, "good": good}, pairs, out=tmp_path)
    assert made.settings.weights["good"] > made.settings.weights["other"]
    assert [hits[0].doc_id for hits in made.search(["q", "r"])] == ["x", "y"]
    assert good.asked[0] == 100


def test_impossible_fusions_are_named(tmp_path: Path) -> None:
    one = {"A": searchers()["A"]}
    with pytest.raises(ConfigError, match="two systems"):
        RankFusion(one)
    with pytest.raises(ConfigError, match="one system"):
        ScoreFusion.train({}, [("q", "x")], out=tmp_path)
    with pytest.raises(ConfigError, match="one query"):
        ScoreFusion.train(searchers(), [], out=tmp_path)
    with pytest.raises(ConfigError, match="depth"):
        RankFusion(searchers(), depth=0)
    with pytest.raises(ConfigError, match="-k"):
        RankFusion(searchers()).search("q", k=0)
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="weights"):
            FusionSettings(weights={"A": weight})
    with pytest.raises(ConfigError, match="unseen"):
        FusionSettings(unseen=float("nan"))
    with pytest.raises(IndexNotFoundError, match="COMPLETE"):
        ScoreFusion.load(tmp_path, searchers())
