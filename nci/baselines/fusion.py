"""Several searchers in, one out: by ranks (reciprocal rank fusion) or by weighted scores. No torch.

Knows nothing of what the searchers are. Weights are fitted on calibration queries that none of the searchers was trained
on: a searcher that has seen them (BM25 over training queries, a trained encoder) would look perfect and take it all. So
they are fitted with searchers made without these queries, and used with others that were made of everything.
"""

from __future__ import annotations

import logging
import math
import zlib
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from nci.baselines import Baseline, Searcher, folder
from nci.errors import ConfigError, DataError
from nci.fuse import merge_hits
from nci.records import Hit, Hits

log = logging.getLogger("nci")

WEIGHTS = np.linspace(0.0, 3.0, 31)
UNSEEN = np.linspace(-1.0, 1.0, 41)


class _Fusion(Baseline):
    """Searchers by name, each asked for its best `depth`."""

    def __init__(self, searchers: Mapping[str, Searcher], *, depth: int, name: str) -> None:
        if depth < 1:
            raise ConfigError(f"the depth of a fusion is the number of hits each system gives, not {depth}")
        self.name = name
        self._searchers = dict(searchers)
        self._depth = depth

    def _answer(self, texts: list[str], k: int) -> list[Hits]:
        lists = ask(self._searchers, texts, max(k, self._depth))
        found = []
        for i in range(len(texts)):
            own = [lists[each][i] for each in lists]
            found.append(Hits(self._fused(own, k), sum(hits.documents_scored for hits in own)))
        return found

    @abstractmethod
    def _fused(self, hit_lists: Sequence[Sequence[Hit]], k: int) -> list[Hit]:
        """One list out of those of all searchers."""


class RankFusion(_Fusion):
    """Reciprocal rank fusion: the sum of 1 / (60 + rank) over the systems that find a document.

    Args:
        searchers: Systems by name.
        depth: Hits each system gives, more where more are asked for.
        name: What hits say they come from; "rrf:A+B" if None.
    """

    def __init__(self, searchers: Mapping[str, Searcher], *, depth: int = 100, name: str | None = None) -> None:
        if len(searchers) < 2:
            raise ConfigError(f"a fusion by ranks needs two systems or more, not {', '.join(searchers) or 'none'}")
        super().__init__(searchers, depth=depth, name=name or "rrf:" + "+".join(searchers))

    def _fused(self, hit_lists: Sequence[Sequence[Hit]], k: int) -> list[Hit]:
        return [hit._replace(source=self.name) for hit in merge_hits(hit_lists, k=k)]


@dataclass(frozen=True)
class FusionSettings:
    """How scores are added up; weights are by name of the system.

    Args:
        depth: Hits each system gives, more where more are asked for.
        weights: What each system counts; `train` fits them.
        unseen: Added to the score of a document without any training query, which systems trained on such queries
            hold back; `train` fits it, too.
        found: R@1 of the queries that all this was fitted on, those of seen and of unseen documents counting the same.
    """

    depth: int = 100
    weights: Mapping[str, float] = field(default_factory=dict)
    unseen: float = 0.0
    found: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if any(not math.isfinite(weight) or weight < 0 for weight in self.weights.values()):
            raise ConfigError(f"weights of a fusion are finite and not negative: {dict(self.weights)}")
        if not math.isfinite(self.unseen):
            raise ConfigError(f"what a fusion adds to unseen documents is finite, not {self.unseen}")


class ScoreFusion(_Fusion):
    """Weighted sum of scores, each query's scores of each system scaled to run from 0 (its last hit) to 1 (its first).

    A document that a system did not find gets 0 from it. Of one system alone only the constant of unseen documents matters.

    Args:
        searchers: Systems by name.
        settings: A weight for every system.
        seen: The documents with training queries; none means all.
        name: What hits say they come from; "sum:A+B" if None, "const:A" of one system.
    """

    def __init__(
        self,
        searchers: Mapping[str, Searcher],
        *,
        settings: FusionSettings,
        seen: Collection[str] | None = None,
        name: str | None = None,
    ) -> None:
        kind = "sum:" if len(searchers) > 1 else "const:"
        super().__init__(searchers, depth=settings.depth, name=name or kind + "+".join(searchers))
        if settings.weights.keys() != searchers.keys():
            raise ConfigError(f"the fusion of {', '.join(searchers)} has weights for {', '.join(settings.weights)}")
        self.settings = settings
        self.withheld = settings.found
        self._weights = np.array([settings.weights[each] for each in searchers])
        self._seen = seen

    @classmethod
    def train(
        cls,
        searchers: Mapping[str, Searcher],
        pairs: Sequence[tuple[str, str]],
        *,
        out: Path,
        settings: FusionSettings | None = None,
        seen: Collection[str] | None = None,
        fewer: float = 1.0,
        name: str | None = None,
    ) -> Self:
        """Fits the weights on calibration queries and keeps them in the folder `out`.

        Args:
            searchers: Systems by name.
            pairs: Queries with the doc_ids they ask for, unknown to every system; those of seen and of unseen documents
                count the same, however many there are of each. Queries of one kind do not say how far it should be ahead
                of the other: then the constant stays 0.
            out: Where the weights are kept.
            settings: Depth; its weights are not used.
            seen: The documents with training queries that these systems know; none means all.
            fewer: Which share of the unseen documents stays when a query does not ask for them, the others being chosen by
                lot: where these systems know more unseen documents than those that the weights are for.
            name: What hits say they come from.
        """
        depth = (settings or FusionSettings()).depth
        relevant: dict[str, set[str]] = {}
        for query, doc_id in pairs:
            relevant.setdefault(query, set()).add(doc_id)
        if not searchers or not pairs:
            raise ConfigError("weights of a fusion are fitted on one system or more, and on one query or more")
        lists = ask(searchers, list(relevant), depth)
        examples = []
        for i, gains in enumerate(_gains(list(relevant.values()), seen)):
            doc_ids, scores = _scaled([lists[each][i] for each in lists])
            gain = np.array([gains.get(doc_id, 0.0) for doc_id in doc_ids])
            unseen = _unseen(doc_ids, seen)
            stays = ~unseen | (gain > 0) | np.array([_lot(doc_id) < fewer for doc_id in doc_ids], bool)
            examples.append((scores[stays], unseen[stays], gain[stays]))
        kinds = {_is_unseen(doc_id, seen) for wanted in relevant.values() for doc_id in wanted}
        weights, constant, share = fit(examples, constant=len(kinds) > 1)
        fitted = FusionSettings(depth, dict(zip(searchers, weights.tolist(), strict=True)), constant, share)
        shown = ", ".join(f"{each} {weight:.3f}" for each, weight in fitted.weights.items())
        said = "%-10s %s, unseen %+.3f: R@1 %.1f on %d queries, seen and unseen documents counting the same"
        log.info(said, "weights", shown, constant, 100 * share, len(examples))
        folder.begin(out)
        folder.finish(out, "fusion", fitted)
        return cls(searchers, settings=fitted, seen=seen, name=name)

    @classmethod
    def load(
        cls,
        out: Path,
        searchers: Mapping[str, Searcher],
        *,
        seen: Collection[str] | None = None,
        name: str | None = None,
    ) -> Self:
        """Opens what `train` wrote; the same systems are needed, by the same names, and the same seen documents."""
        return cls(searchers, settings=folder.read(out, "fusion", FusionSettings), seen=seen, name=name)

    def _fused(self, hit_lists: Sequence[Sequence[Hit]], k: int) -> list[Hit]:
        doc_ids, scaled = _scaled(hit_lists)
        parts = np.column_stack([scaled * self._weights, _unseen(doc_ids, self._seen) * self.settings.unseen])
        # fsum: exact, so that the order of the systems never decides a tie
        scores = [math.fsum(row) for row in parts.tolist()]
        best = sorted(zip(scores, doc_ids, strict=True), key=lambda each: (-each[0], each[1]))[:k]
        known = {hit.doc_id: hit for hit in merge_hits(hit_lists, k=max(len(doc_ids), 1))}
        return [
            known[doc_id]._replace(rank=rank, score=score, source=self.name)
            for rank, (score, doc_id) in enumerate(best, 1)
        ]


def ask(searchers: Mapping[str, Searcher], queries: list[str], depth: int) -> dict[str, list[Hits]]:
    """The best hits of every system for every query."""
    return {name: searcher.search(queries, k=depth) for name, searcher in searchers.items()}


def _scaled(hit_lists: Sequence[Sequence[Hit]]) -> tuple[list[str], npt.NDArray[np.float64]]:
    """All documents found, by doc_id, and their scaled scores, (documents, systems)."""
    rows = {doc_id: row for row, doc_id in enumerate(sorted({hit.doc_id for hits in hit_lists for hit in hits}))}
    scaled = np.zeros((len(rows), len(hit_lists)))
    for column, hits in enumerate(hit_lists):
        if not hits:
            continue
        scores = np.array([hit.score for hit in hits], np.float64)
        spread = np.ptp(scores)
        values = (scores - scores.min()) / spread if spread > 0 else np.ones(len(scores))
        scaled[[rows[hit.doc_id] for hit in hits], column] = values
    return list(rows), scaled


def _is_unseen(doc_id: str, seen: Collection[str] | None) -> bool:
    return seen is not None and doc_id not in seen


def _unseen(doc_ids: Sequence[str], seen: Collection[str] | None) -> npt.NDArray[np.bool_]:
    return np.array([_is_unseen(doc_id, seen) for doc_id in doc_ids], bool)


def _lot(doc_id: str) -> float:
    """A number from 0 to below 1, the same for a document every time."""
    return zlib.crc32(doc_id.encode("utf-8", "surrogatepass")) / 2**32


def _gains(relevant: Sequence[Collection[str]], seen: Collection[str] | None) -> list[dict[str, float]]:
    """What each relevant document of a query brings as its first hit: its share of them, weighted.

    Seen and unseen documents bring the same in all; a query brings 1 on average.
    """
    totals: defaultdict[bool, float] = defaultdict(float)
    for wanted in relevant:
        for doc_id in wanted:
            totals[_is_unseen(doc_id, seen)] += 1 / len(wanted)
    weights = {unseen: len(relevant) / len(totals) / total for unseen, total in totals.items()}
    return [{doc_id: weights[_is_unseen(doc_id, seen)] / len(wanted) for doc_id in wanted} for wanted in relevant]


def fit(
    examples: Sequence[tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.float64]]],
    *,
    constant: bool = True,
) -> tuple[npt.NDArray[np.float64], float, float]:
    """Weights that sum to 1, the constant of unseen documents, and the R@1 they give together.

    A search along one of these numbers at a time, from equal weights and no constant, until none of them helps; among
    values that are equally good the nearest to the one before is taken.

    Args:
        examples: Per query the scaled scores, (documents, systems), which documents are unseen, (documents,), and what each
            would bring as the first hit, (documents,): its share of the relevant documents, weighted or not.
        constant: Whether to fit it; else it is 0.
    """
    usable = [example for example in examples if example[2].any()]
    if not usable:
        raise DataError("no weights can be fitted: no system finds a relevant document for any calibration query")
    systems = usable[0][0].shape[1]
    widest = max(len(gain) for _, _, gain in usable)
    values = np.full((len(usable), widest, systems + 1), -np.inf)  # (queries, documents, systems + constant)
    gains = np.zeros((len(usable), widest))
    for row, (scores, unseen, gain) in enumerate(usable):
        values[row, : len(gain)] = np.column_stack([scores, unseen])
        gains[row, : len(gain)] = gain
    absent = np.isneginf(values[:, :, 0])
    values[absent] = 0.0

    def found(numbers: npt.NDArray[np.float64]) -> float:
        first = np.where(absent, -np.inf, values @ numbers).argmax(axis=1)
        return float(np.take_along_axis(gains, first[:, None], axis=1).sum() / len(examples))

    numbers = np.append(np.ones(systems), 0.0)
    best, improved = found(numbers), True
    while improved:
        improved = False
        for place in range(systems + constant):
            grid = UNSEEN if place == systems else WEIGHTS
            for value in sorted(grid, key=lambda value: abs(value - numbers[place])):
                tried = numbers.copy()
                tried[place] = value
                if tried[:systems].any() and (score := found(tried)) > best + 1e-9:  # a gain, no rounding
                    best, numbers, improved = score, tried, True
    total = numbers[:systems].sum()
    return numbers[:systems] / total, float(numbers[systems] / total), best
