"""Whether two systems differ: per-query values of both in, p-values and intervals out. numpy only.

Stands beside `evaluate.paired_test`, a t-test that takes every query for an independent draw. Here queries of one
document can be kept together: a system that has learned a document answers all of its queries, so they are one draw, and
counting them one by one makes differences look surer than they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nci.errors import ConfigError, DataError
from nci.records import Qrels

Values = Mapping[str, float]
"""One metric per query id, as `evaluate.per_query` gives it."""

_CELLS_AT_ONCE = 2**22


@dataclass(frozen=True)
class Comparison:
    """How much one system exceeds another.

    Args:
        difference: Mean over the queries of the first minus the second.
        low: Lower end of the interval of the difference.
        high: Upper end.
        p_value: Chance of a difference at least as large, in either direction, between equal systems.
        corrected: The p-value after Holm's correction for the other comparisons made with it.
    """

    difference: float
    low: float
    high: float
    p_value: float
    corrected: float


def document_groups(qrels: Qrels) -> dict[str, str]:
    """The group of each judged query: queries that share a relevant document, directly or through others, are one."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for query_id, judged in qrels.items():
        for doc_id in (doc_id for doc_id, grade in judged.items() if grade > 0):
            # Ids of queries and of documents may be the same words.
            parent[root(f"d{doc_id}")] = root(f"q{query_id}")
    return {query_id: root(f"q{query_id}") for query_id in qrels}


def paired_bootstrap(
    a: Values,
    b: Values,
    *,
    groups: Mapping[str, str] | None = None,
    samples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Comparison:
    """The difference of the means of two systems, with a percentile interval and a two-sided p-value.

    Groups of queries are drawn with replacement, as many as there are. The p-value is the share of draws whose
    difference, moved so that it is 0 on average, is at least as large as the one observed.

    Args:
        a: Values of the first system.
        b: Values of the second, for the same queries.
        groups: A group for every query, such as `document_groups` gives; None draws queries one by one.
        samples: How many draws; the smallest p-value is 1 / (samples + 1).
        confidence: Share of the draws inside the interval.
        seed: Same seed, same result.
    """
    return compare(a, {"": b}, groups=groups, samples=samples, confidence=confidence, seed=seed)[""]


def randomisation_test(
    a: Values, b: Values, *, groups: Mapping[str, str] | None = None, samples: int = 10_000, seed: int = 0
) -> float:
    """The two-sided p-value of Fisher's paired randomisation: under equal systems, who got which value is a coin toss.

    Every way to swap is tried where there are no more than `samples`, and the p-value is exact; else that many are drawn.

    Args:
        a: Values of the first system.
        b: Values of the second, for the same queries.
        groups: Queries of one group are swapped together; None swaps them one by one.
        samples: How many ways to swap are tried.
        seed: Same seed, same result.
    """
    sums, _, _ = _sums(a, b, groups, samples)
    sums = sums[sums != 0]  # to swap equal values changes nothing
    if not len(sums):
        return 1.0
    observed = abs(float(sums.sum()))
    if len(sums) <= 30 and 2 ** len(sums) <= samples:
        bits = np.arange(2 ** len(sums))[:, None] >> np.arange(len(sums)) & 1  # (ways, groups)
        return float(_reached(np.abs((1 - 2 * bits) @ sums), observed).mean())
    rng = np.random.default_rng(seed)
    totals = np.empty(samples)
    for start, end in _blocks(samples, len(sums)):
        totals[start:end] = (1 - 2 * rng.integers(2, size=(end - start, len(sums)))) @ sums
    return _share(np.abs(totals), observed)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's step-down correction: of m p-values the smallest times m, the next times m - 1, never falling, at most 1."""
    corrected: dict[str, float] = {}
    largest = 0.0
    for done, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - done) * p_values[name]))
        corrected[name] = largest
    return {name: corrected[name] for name in p_values}


def compare(
    system: Values,
    others: Mapping[str, Values],
    *,
    groups: Mapping[str, str] | None = None,
    samples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, Comparison]:
    """One system against each of several others by the paired bootstrap, corrected for their number by Holm."""
    return compare_means([Judged(system, others, groups)], samples=samples, confidence=confidence, seed=seed)


class Judged(NamedTuple):
    """What several systems did on one set of queries."""

    system: Values
    others: Mapping[str, Values]
    groups: Mapping[str, str] | None = None


def compare_means(
    sets: Sequence[Judged], *, samples: int = 10_000, confidence: float = 0.95, seed: int = 0
) -> dict[str, Comparison]:
    """The same for the mean over several sets of queries, each of which counts the same however many queries it has.

    A group that has queries in several sets is drawn for all of them at once.
    """
    names = list(sets[0].others)
    if not names:
        return {}
    sums, sizes = _tables(sets, names, samples)
    means = _drawn_means(sums, sizes, samples=samples, seed=seed)
    differences = (sums.sum(axis=1) / sizes.sum(axis=1)[:, None]).mean(axis=0)
    found = _comparisons(means, differences, confidence)
    corrected = holm({name: each.p_value for name, each in zip(names, found, strict=True)})
    return {name: replace(each, corrected=corrected[name]) for name, each in zip(names, found, strict=True)}


def _tables(
    sets: Sequence[Judged], names: Sequence[str], samples: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Sums of differences (sets, groups, systems) and numbers of queries (sets, groups); the groups are those of all sets."""
    found = [[_sums(one.system, one.others[name], one.groups, samples) for name in names] for one in sets]
    # without groups a query is one of its own, also where another set has one with its id
    labels = [
        [name if one.groups else f"{number} {name}" for name in pairs[0][2]]
        for number, (one, pairs) in enumerate(zip(sets, found, strict=True))
    ]
    rows = {label: row for row, label in enumerate(dict.fromkeys(label for each in labels for label in each))}
    sums, sizes = np.zeros((len(sets), len(rows), len(names))), np.zeros((len(sets), len(rows)))
    for number, pairs in enumerate(found):
        place = [rows[label] for label in labels[number]]
        sums[number, place] = np.stack([each[0] for each in pairs], axis=1)
        sizes[number, place] = pairs[0][1]
    return sums, sizes


def _drawn_means(
    sums: npt.NDArray[np.float64], sizes: npt.NDArray[np.float64], *, samples: int, seed: int
) -> npt.NDArray[np.float64]:
    """Mean differences (samples, systems) of groups drawn with replacement, from what `_tables` gives."""
    rng = np.random.default_rng(seed)
    count = sums.shape[1]
    means = np.zeros((samples, sums.shape[2]))
    for start, end in _blocks(samples, count):
        rows = end - start
        drawn = rng.integers(count, size=(rows, count)) + count * np.arange(rows)[:, None]  # (samples, groups)
        times = np.bincount(drawn.ravel(), minlength=rows * count).reshape(rows, count).astype(np.float64)
        for own, number in zip(sums, sizes, strict=True):
            # a draw without any query of a set says nothing of it
            means[start:end] += times @ own / np.maximum(times @ number, 1)[:, None] / len(sums)
    return means


def _comparisons(
    means: npt.NDArray[np.float64], differences: npt.NDArray[np.float64], confidence: float
) -> list[Comparison]:
    """Of each column of means (samples, systems)."""
    if not 0 < confidence < 1:
        raise ConfigError(f"the confidence of an interval is between 0 and 1, not {confidence}")
    tail = 50 * (1 - confidence)
    out = []
    for column, difference in zip(means.T, differences.tolist(), strict=True):
        low, high = np.percentile(column, [tail, 100 - tail])
        p_value = _share(np.abs(column - difference), abs(difference))
        out.append(Comparison(difference, float(low), float(high), p_value, p_value))
    return out


def _sums(
    a: Values, b: Values, groups: Mapping[str, str] | None, samples: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], list[str]]:
    """Per group the sum of the differences and the number of queries, and its name."""
    if a.keys() != b.keys() or not a:
        raise DataError("a comparison needs both systems on the same queries: evaluate both with the same qrels")
    if samples < 1:
        raise ConfigError(f"a test by resampling needs 1 sample or more, not {samples}")
    if groups is not None and not a.keys() <= groups.keys():
        lost = next(query_id for query_id in a if query_id not in groups)
        raise DataError(f"query {lost!r} has no group: make the groups from the qrels that the systems were judged by")
    names = {query_id: groups[query_id] if groups else query_id for query_id in a}
    rows = {name: row for row, name in enumerate(dict.fromkeys(names.values()))}
    place = np.array([rows[names[query_id]] for query_id in a])
    differences = np.array([a[query_id] - b[query_id] for query_id in a], np.float64)
    return np.bincount(place, differences).astype(np.float64), np.bincount(place).astype(np.float64), list(rows)


def _blocks(samples: int, groups: int) -> list[tuple[int, int]]:
    step = max(1, _CELLS_AT_ONCE // groups)
    return [(start, min(start + step, samples)) for start in range(0, samples, step)]


def _reached(values: npt.NDArray[np.float64], observed: float) -> npt.NDArray[np.bool_]:
    # Sums of the same numbers in another order differ in the last bits; those are ties.
    reached: npt.NDArray[np.bool_] = values >= observed - 1e-9 * max(1.0, observed)
    return reached


def _share(values: npt.NDArray[np.float64], observed: float) -> float:
    # What was observed is one of the ways, so that a p-value is never 0.
    return float((_reached(values, observed).sum() + 1) / (len(values) + 1))
