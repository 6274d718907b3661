"""Rankings of two splits -> how far a system can trade one for the other: `nci compare --tradeoff`.

Documents with training queries are easily preferred to those without, or the other way round. One constant, added to the
scores of all documents without training queries, moves a system along a curve, on which it stands itself at 0. Scores are
the system's own and are not normalised; documents that are not in a ranking stay out.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nci.errors import MissingPackageError
from nci.records import Qrels, Run

if TYPE_CHECKING:
    from nci.workbench import Workbench

log = logging.getLogger("nci")

POINTS = 201  # constants of a curve, one for each half percent of the queries that change
_NEAR = 0.75  # of the best mean: so good is what a picture has to show
_LEGEND = 110  # letters in one line of it


@dataclass(frozen=True)
class Curve:
    """R@1 of both splits, as shares of 1, at each constant; the lowest and the highest change no query any more."""

    constants: list[float]
    seen: list[float]
    unseen: list[float]

    @property
    def operating(self) -> tuple[float, float]:
        """R@1 of both splits as the system is."""
        place = self.constants.index(0.0)
        return self.seen[place], self.unseen[place]


@dataclass(frozen=True)
class _Best:
    """The first document of every query with training queries (known) and without (new): score, doc_id, R@1 with it."""

    known: NDArray[np.float64]  # (queries,) -inf where there is none
    new: NDArray[np.float64]
    new_first: NDArray[np.bool_]  # (queries,) by doc_id, which decides where scores are equal
    known_value: NDArray[np.float64]
    new_value: NDArray[np.float64]

    @classmethod
    def of(cls, run: Run, qrels: Qrels, trained: Collection[str]) -> _Best:
        rows = []
        for query_id, grades in qrels.items():
            relevant = {doc_id for doc_id, grade in grades.items() if grade > 0}
            ranking = sorted(run.get(query_id, {}).items(), key=lambda pair: (-pair[1], pair[0]))
            known = next((pair for pair in ranking if pair[0] in trained), ("", -np.inf))
            new = next((pair for pair in ranking if pair[0] not in trained), ("", -np.inf))
            share = 1 / max(len(relevant), 1)
            values = [share * (doc_id in relevant) for doc_id, _ in (known, new)]
            rows.append((known[1], new[1], new[0] < known[0], *values))
        columns = list(zip(*rows, strict=True))
        floats = [np.array(columns[place], np.float64) for place in (0, 1, 3, 4)]
        return cls(floats[0], floats[1], np.array(columns[2], bool), floats[2], floats[3])

    def thresholds(self) -> NDArray[np.float64]:
        """The constants at which a query's first document changes."""
        both = np.isfinite(self.known) & np.isfinite(self.new)
        return self.known[both] - self.new[both]

    def value(self, constant: float) -> float:
        """R@1 of all queries with a constant added to new documents."""
        new = self.new + constant
        wins = (new > self.known) | ((new == self.known) & self.new_first)
        return float(np.where(wins, self.new_value, self.known_value).mean())


def curve(
    seen: Sequence[Run], seen_qrels: Qrels, unseen: Sequence[Run], unseen_qrels: Qrels, trained: Collection[str]
) -> Curve:
    """The curve of a system: the mean over its seeds, whose constants are the same.

    Args:
        seen: Rankings of the first split, one per seed.
        unseen: The same of the second.
        trained: Documents with training queries.
    """
    first = [_Best.of(run, seen_qrels, trained) for run in seen]
    second = [_Best.of(run, unseen_qrels, trained) for run in unseen]
    changes = np.concatenate([best.thresholds() for best in (*first, *second)])
    constants = np.zeros(1)
    if len(changes):
        margin = 0.02 * float(np.ptp(changes)) or 1.0
        ends = [changes.min() - margin, changes.max() + margin]
        constants = np.unique([0.0, *ends, *np.quantile(changes, np.linspace(0, 1, POINTS - 2))])

    def mean(bests: Sequence[_Best]) -> list[float]:
        return [float(np.mean([best.value(constant) for best in bests])) for constant in constants]

    return Curve(constants.tolist(), mean(first), mean(second))


def curves(bench: Workbench, rows: Mapping[str, str], splits: tuple[str, str], out: Path) -> dict[str, Curve]:
    """The curve of every row of a comparison that has been made; `rows` are names of systems by those of rows."""
    from nci.compare import judged, kept_runs

    trained = {doc_id for _, doc_id in bench.pairs}
    (_, seen), (_, unseen) = (judged(bench, split) for split in splits)
    runs = {row: [kept_runs(bench, name, split, out) for split in splits] for row, name in rows.items()}
    return {row: curve(first, seen, second, unseen, trained) for row, (first, second) in runs.items()}


def as_json(found: Mapping[str, Curve], splits: tuple[str, str]) -> dict[str, Any]:
    """For --json: the points of every curve, and where the systems stand."""
    systems = {
        row: {**asdict(one), "operating": dict(zip(("seen", "unseen"), one.operating, strict=True))}
        for row, one in found.items()
    }
    return {"seen": splits[0], "unseen": splits[1], "metric": "R@1", "systems": systems}


def draw(found: Mapping[str, Curve], splits: tuple[str, str], picture: Path, title: str) -> list[Path]:
    """Write the picture as PNG and as SVG; none without matplotlib, and one line says so.

    It shows what `window` says; where a system beyond that stands is told in the legend.
    """
    from nci.figures.style import COLOURS, MARKERS, canvas, legend_below, save, styled

    horizontal, vertical = window(list(found.values()))
    labels = {}
    for row, one in found.items():
        x, y = one.operating
        inside = horizontal[0] <= x <= horizontal[1] and vertical[0] <= y <= vertical[1]
        labels[row] = row if inside else f"{row}, at {100 * x:.0f} / {100 * y:.0f}"
    columns = min(max(_LEGEND // (max(map(len, labels.values()), default=0) + 8), 1), 3)  # beside each name a line
    height = 4.4 + 0.19 * -(-len(found) // columns)
    try:
        with styled():
            figure, (axes,) = canvas(f"{title}: documents with and without training queries", height=height)
            for number, (row, one) in enumerate(found.items()):
                line, colour = ("-", "--", ":", "-.")[number // len(COLOURS) % 4], COLOURS[number % len(COLOURS)]
                axes.plot([100 * v for v in one.seen], [100 * v for v in one.unseen], line, color=colour, alpha=0.7)
                (x, y), marker, above = one.operating, MARKERS[number % len(COLOURS)], 3 + 1 / (1 + number)
                label = labels[row]
                axes.plot([100 * x], [100 * y], linestyle=line, color=colour, marker=marker, zorder=above, label=label)
            axes.set_xlim(*(100 * limit for limit in horizontal))
            axes.set_ylim(*(100 * limit for limit in vertical))
            axes.set(xlabel=f"R@1 on {splits[0]} (%)", ylabel=f"R@1 on {splits[1]} (%)")
            legend_below(figure, axes, columns=columns, title="marked: the system itself, with nothing added")
            return save(figure, picture.with_suffix(""))
    except MissingPackageError as error:
        log.info("no %s: %s", picture.name, error)
        return []


def window(found: Collection[Curve]) -> tuple[tuple[float, float], tuple[float, float]]:
    """What to show of both axes: where good curves bend and the systems on them stand, not the long ways to both ends.

    A system far behind the best one, or far from its own bend, would make the rest small; it does not count.
    """
    bends = [max(zip(one.seen, one.unseen, strict=True), key=sum) for one in found]
    points = [*bends, *(one.operating for one in found)]
    best = max(map(sum, points), default=0.0)
    near = np.array([point for point in points if sum(point) >= _NEAR * best] or [(0.0, 0.0), (1.0, 1.0)])
    low, high = near.min(0), near.max(0)
    margin = np.maximum(0.08 * (high - low), 0.01)
    low, high = np.maximum(low - margin, 0.0), np.minimum(high + margin, 1.0)
    return (float(low[0]), float(high[0])), (float(low[1]), float(high[1]))
