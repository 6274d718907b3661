from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]

from nci.errors import ConfigError, DataError
from nci.evaluate import paired_test
from nci.significance import (
    Comparison,
    Judged,
    compare,
    compare_means,
    document_groups,
    holm,
    paired_bootstrap,
    randomisation_test,
)


def named(values: np.ndarray | list[float]) -> dict[str, float]:
    return {f"q{i}": float(value) for i, value in enumerate(values)}


def zeros(values: dict[str, float]) -> dict[str, float]:
    return dict.fromkeys(values, 0.0)


# ---- randomisation


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([1, 1, 1, 1, 1], 2 / 32),
        ([1, 2, 3, -4], 14 / 16),  # only 1 + 4 = 2 + 3 cancels to less than the 2 observed, in two ways
        ([1, 0, 0, -1], 1.0),
        ([3, 0, 1], 2 / 4),
        ([0, 0], 1.0),
    ],
)
def test_randomisation_by_hand(differences: list[float], p: float) -> None:
    a = named(differences)
    assert randomisation_test(a, zeros(a)) == pytest.approx(p)
    assert randomisation_test(zeros(a), a) == pytest.approx(p)


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.1, 1 / 3, 1.0]), min_size=2, max_size=9))
def test_exact_randomisation_equals_every_way_to_swap(differences: list[float]) -> None:
    a = named(differences)
    observed = abs(sum(differences))
    ways = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in _signs(len(differences))]
    assert randomisation_test(a, zeros(a)) == pytest.approx(np.mean([way >= observed - 1e-9 for way in ways]))


def _signs(count: int) -> itertools.product[tuple[int, ...]]:
    return itertools.product((1, -1), repeat=count)  # type: ignore[arg-type]


def test_sampled_randomisation_is_near_the_exact_one_and_near_scipy() -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(0.2, 1, 12)
    a = named(values)
    exact = randomisation_test(a, zeros(a), samples=2**12)
    theirs = stats.permutation_test((values,), np.sum, permutation_type="samples", n_resamples=np.inf).pvalue
    assert exact == pytest.approx(theirs)
    assert 0.01 < exact < 0.6
    sampled = randomisation_test(a, zeros(a), samples=4000)
    assert sampled != exact
    assert sampled == pytest.approx(exact, abs=0.03)
    assert randomisation_test(a, zeros(a), samples=4000) == sampled
    assert randomisation_test(a, zeros(a), samples=4000, seed=1) != sampled


def test_groups_are_swapped_together() -> None:
    a = named([1.0] * 10)
    groups = {f"q{i}": "one" if i < 5 else "two" for i in range(10)}
    assert randomisation_test(a, zeros(a), groups=groups) == 0.5
    assert randomisation_test(a, zeros(a)) == 2 / 2**10


# ---- bootstrap


def test_bootstrap_without_groups_agrees_with_the_t_test_and_with_scipy() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.normal(0.15, 1, 300), rng.normal(0, 0.5, 300)
    ours = paired_bootstrap(named(a), named(b), samples=20_000)
    assert ours.difference == pytest.approx((a - b).mean())
    assert ours.p_value == pytest.approx(paired_test(named(a), named(b)), abs=0.015)
    assert 0.005 < ours.p_value < 0.3
    theirs = stats.bootstrap((a - b,), np.mean, method="percentile", n_resamples=20_000, rng=rng).confidence_interval
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.01)
    narrow = paired_bootstrap(named(a), named(b), confidence=0.5)
    assert ours.low < narrow.low < ours.difference < narrow.high < ours.high


def test_queries_of_one_document_are_drawn_together() -> None:
    rng = np.random.default_rng(4)
    # 40 documents with 10 queries that all behave alike: 400 queries, but 40 draws.
    effects = np.repeat(rng.normal(0.2, 1, 40), 10)
    a = named(effects)
    groups = {f"q{i}": f"d{i // 10}" for i in range(400)}
    kept, loose = paired_bootstrap(a, zeros(a), groups=groups), paired_bootstrap(a, zeros(a))
    assert (kept.high - kept.low) / (loose.high - loose.low) == pytest.approx(np.sqrt(10), rel=0.1)
    alone = named(effects[::10])
    assert kept.p_value == pytest.approx(paired_bootstrap(alone, zeros(alone), seed=9).p_value, abs=0.02)
    assert kept.p_value > 5 * loose.p_value


def test_groups_of_different_size_count_by_their_queries() -> None:
    a = named([1.0, 1.0, 1.0, 0.0])
    groups = {"q0": "x", "q1": "x", "q2": "x", "q3": "y"}
    found = paired_bootstrap(a, zeros(a), groups=groups, samples=4000, confidence=0.9)
    # Draws are xx (mean 1), xy (3/4) and yy (0), with chances 1/4, 1/2 and 1/4: only yy is 3/4 away from 3/4.
    assert (found.difference, found.low, found.high) == (0.75, 0.0, 1.0)
    assert found.p_value == pytest.approx(0.25, abs=0.03)


def test_equal_systems_and_one_query_are_never_significant() -> None:
    a = named([0.0, 1.0, 0.5])
    assert paired_bootstrap(a, a) == Comparison(0.0, 0.0, 0.0, 1.0, 1.0)
    assert randomisation_test({"q": 1.0}, {"q": 0.0}) == 1.0


def test_queries_without_a_difference_leave_the_test_exact() -> None:
    a = named([1.0] * 6 + [0.0] * 500)
    assert randomisation_test(a, zeros(a)) == 2 / 2**6


def test_no_p_value_is_smaller_than_the_samples_allow() -> None:
    a = named(np.random.default_rng(8).normal(9, 1, 40))
    assert randomisation_test(a, zeros(a), samples=99) == 1 / 100
    assert paired_bootstrap(a, zeros(a), samples=99).p_value == 1 / 100


def test_false_alarms_are_as_rare_as_promised() -> None:
    rng = np.random.default_rng(5)
    alarms = {"bootstrap": 0, "randomisation": 0}
    for number in range(200):
        a = named(np.repeat(rng.choice([-1.0, 0.0, 1.0], 30), 3))
        groups = {f"q{i}": f"d{i // 3}" for i in range(90)}
        alarms["bootstrap"] += paired_bootstrap(a, zeros(a), groups=groups, samples=400, seed=number).p_value <= 0.05
        alarms["randomisation"] += randomisation_test(a, zeros(a), groups=groups, samples=400, seed=number) <= 0.05
    # 10 of 200 are expected; without groups there would be about 50.
    assert all(1 <= count <= 22 for count in alarms.values()), alarms


def test_a_seed_decides_and_blocks_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    a = named(np.random.default_rng(6).normal(0.2, 1, 50))
    whole = paired_bootstrap(a, zeros(a), samples=500)
    assert paired_bootstrap(a, zeros(a), samples=500) == whole
    assert paired_bootstrap(a, zeros(a), samples=500, seed=1) != whole
    sampled = randomisation_test(a, zeros(a), samples=500)
    monkeypatch.setattr("nci.significance._CELLS_AT_ONCE", 120)
    # a product of another shape may differ in the last bit
    assert astuple(paired_bootstrap(a, zeros(a), samples=500)) == pytest.approx(astuple(whole), rel=1e-12)
    assert randomisation_test(a, zeros(a), samples=500) == sampled


# ---- Holm, groups, many systems


def test_holm_by_hand() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})
    assert holm({"a": 0.6, "b": 0.5}) == {"a": 1.0, "b": 1.0}
    assert holm({"a": 0.02}) == {"a": 0.02}
    assert holm({}) == {}
    assert list(holm({"z": 0.5, "a": 0.1})) == ["z", "a"]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_decides_as_its_steps_do(values: list[float]) -> None:
    p_values = {str(i): value for i, value in enumerate(values)}
    corrected = holm(p_values)
    for level in (0.01, 0.05, 0.4):
        rejected = set()
        for done, (name, value) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
            if value * (len(values) - done) > level:
                break
            rejected.add(name)
        assert {name for name, value in corrected.items() if value <= level} == rejected


def test_groups_join_queries_that_share_a_relevant_document() -> None:
    qrels = {
        "q1": {"a": 1},
        "q2": {"a": 1, "b": 2},
        "q3": {"b": 1},
        "q4": {"c": 1, "a": 0},
        "q5": {"c": 1},
        "a": {"z": 1},
        "q6": {},
    }
    groups = document_groups(qrels)
    together = {frozenset(q for q in qrels if groups[q] == group) for group in groups.values()}
    assert together == {frozenset(x) for x in (["q1", "q2", "q3"], ["q4", "q5"], ["a"], ["q6"])}


def test_compare_corrects_for_the_number_of_systems() -> None:
    rng = np.random.default_rng(7)
    ours = named(rng.normal(0.3, 1, 60))
    others = {"near": named(rng.normal(0.25, 1, 60)), "far": named(rng.normal(-0.6, 1, 60)), "same": ours}
    groups = {f"q{i}": f"d{i // 2}" for i in range(60)}
    found = compare(ours, others, groups=groups, samples=2000)
    alone = {name: paired_bootstrap(ours, values, groups=groups, samples=2000) for name, values in others.items()}
    assert {name: each.p_value for name, each in found.items()} == {n: each.p_value for n, each in alone.items()}
    assert {name: each.corrected for name, each in found.items()} == holm({n: e.p_value for n, e in alone.items()})
    assert found["far"].corrected == pytest.approx(3 * found["far"].p_value)
    assert found["far"].difference > 0
    assert found["far"].low == alone["far"].low


def test_every_set_of_queries_counts_the_same_in_a_mean() -> None:
    rng = np.random.default_rng(8)
    many, few = (named((rng.random(n) < 0.8).astype(float)) for n in (400, 40))
    worse, better = zeros(many), dict.fromkeys(few, 1.0)
    both = compare_means([Judged(many, {"b": worse}), Judged(few, {"b": better})], samples=4000)["b"]
    mean = float(np.mean(list(many.values())))
    assert both.difference == pytest.approx((mean + float(np.mean(list(few.values()))) - 1.0) / 2)
    assert both.low < both.difference < both.high
    # the variance of a mean of two is a quarter of the sum of theirs
    alone = [paired_bootstrap(many, worse, samples=4000), paired_bootstrap(few, better, samples=4000)]
    wanted = sum(((each.high - each.low) / 2) ** 2 for each in alone) ** 0.5 / 2
    assert (both.high - both.low) / 2 == pytest.approx(wanted, rel=0.1)


def test_a_document_in_two_sets_is_drawn_for_both_at_once() -> None:
    a, b = (named(np.random.default_rng(seed).random(60)) for seed in (1, 2))
    groups = {query: f"d{number // 3}" for number, query in enumerate(a)}
    alone = compare(a, {"b": b}, groups=groups)["b"]
    assert compare_means([Judged(a, {"b": b}, groups)] * 2)["b"] == alone, "the same queries twice tell nothing new"
    others = {query: f"e{number // 3}" for number, query in enumerate(a)}
    apart = compare_means([Judged(a, {"b": b}, groups), Judged(a, {"b": b}, others)])["b"]
    assert apart.high - apart.low < 0.85 * (alone.high - alone.low)


def test_one_set_is_its_own_mean() -> None:
    a, b = (named(np.random.default_rng(seed).random(50)) for seed in (1, 2))
    assert compare_means([Judged(a, {"b": b})], samples=500) == compare(a, {"b": b}, samples=500)
    assert compare_means([Judged(a, {})]) == {}


def test_a_win_here_and_a_loss_there_is_no_win() -> None:
    ones, none = named([1.0] * 100), named([0.0] * 100)
    found = compare_means([Judged(ones, {"b": none}), Judged(none, {"b": ones})], samples=500)["b"]
    assert (found.difference, found.p_value) == (0.0, 1.0)


def test_impossible_comparisons_are_named() -> None:
    a = named([1.0, 0.0])
    for call in (paired_bootstrap, randomisation_test):
        with pytest.raises(DataError, match="same queries"):
            call(a, {"q0": 1.0})
        with pytest.raises(DataError, match="same queries"):
            call({}, {})
        with pytest.raises(DataError, match="'q1'"):
            call(a, a, groups={"q0": "d"})
        for samples in (0, -1):
            with pytest.raises(ConfigError, match=f"not {samples}"):
                call(a, a, samples=samples)
    with pytest.raises(ConfigError, match="confidence"):
        paired_bootstrap(a, a, confidence=95)


def test_light_modules_import_nothing_heavy() -> None:
    code = (
        "import sys, nci.significance, nci.baselines.fusion, nci.baselines.knn, nci.baselines.dense_hnsw\n"
        "print({'torch', 'transformers', 'faiss', 'bm25s', 'scipy', 'ir_measures'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
