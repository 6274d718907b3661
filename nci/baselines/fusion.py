"""Several searchers in, one out: by ranks (reciprocal rank fusion) or by weighted scores. No torch.

Knows nothing of what the searchers are. Weights are fitted on calibration queries that none of the searchers was trained
on: a searcher that has seen them (BM25 over training queries, a trained encoder) would look perfect and take it all.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from nci.baselines import Baseline, Searcher, folder
from nci.errors import ConfigError, DataError
from nci.fuse import merge_hits
from nci.records import Hit


class _Fusion(Baseline):
    """Searchers by name, each asked for its best `depth`."""

    def __init__(self, searchers: Mapping[str, Searcher], *, depth: int, name: str) -> None:
        if len(searchers) < 2:
            raise ConfigError(f"a fusion needs two systems or more, not {', '.join(searchers) or 'none'}")
        if depth < 1:
            raise ConfigError(f"the depth of a fusion is the number of hits each system gives, not {depth}")
        self.name = name
        self._searchers = dict(searchers)
        self._depth = depth

    def _answer(self, texts: list[str], k: int) -> list[list[Hit]]:
        lists = ask(self._searchers, texts, max(k, self._depth))
        return [self._fused([lists[each][i] for each in lists], k) for i in range(len(texts))]

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
        super().__init__(searchers, depth=depth, name=name or "rrf:" + "+".join(searchers))

    def _fused(self, hit_lists: Sequence[Sequence[Hit]], k: int) -> list[Hit]:
        return [hit._replace(source=self.name) for hit in merge_hits(hit_lists, k=k)]


@dataclass(frozen=True)
class FusionSettings:
    """How scores are added up; weights are by name of the system.

    Args:
        depth: Hits each system gives, more where more are asked for.
        weights: What each system counts; `train` fits them.
    """

    depth: int = 100
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(not math.isfinite(weight) or weight < 0 for weight in self.weights.values()):
            raise ConfigError(f"weights of a fusion are finite and not negative: {dict(self.weights)}")


class ScoreFusion(_Fusion):
    """Weighted sum of scores, each query's scores of each system scaled to run from 0 (its last hit) to 1 (its first).

    A document that a system did not find gets 0 from it.

    Args:
        searchers: Systems by name.
        settings: A weight for every system.
        name: What hits say they come from; "sum:A+B" if None.
    """

    def __init__(self, searchers: Mapping[str, Searcher], *, settings: FusionSettings, name: str | None = None) -> None:
        super().__init__(searchers, depth=settings.depth, name=name or "sum:" + "+".join(searchers))
        if settings.weights.keys() != searchers.keys():
            raise ConfigError(f"the fusion of {', '.join(searchers)} has weights for {', '.join(settings.weights)}")
        self.settings = settings
        self._weights = np.array([settings.weights[each] for each in searchers])

    @classmethod
    def train(
        cls,
        searchers: Mapping[str, Searcher],
        pairs: Sequence[tuple[str, str]],
        *,
        out: Path,
        settings: FusionSettings | None = None,
        name: str | None = None,
    ) -> Self:
        """Fits the weights on calibration queries and keeps them in the folder `out`.

        Args:
            searchers: Systems by name.
            pairs: Queries with the doc_ids they ask for, unknown to every system.
            out: Where the weights are kept.
            settings: Depth; its weights are not used.
            name: What hits say they come from.
        """
        depth = (settings or FusionSettings()).depth
        relevant: dict[str, set[str]] = {}
        for query, doc_id in pairs:
            relevant.setdefault(query, set()).add(doc_id)
        if len(searchers) < 2 or not pairs:
            raise ConfigError("weights of a fusion are fitted on two systems or more, and on one query or more")
        lists = ask(searchers, list(relevant), depth)
        examples = []
        for i, wanted in enumerate(relevant.values()):
            doc_ids, scores = _scaled([lists[each][i] for each in lists])
            examples.append((scores, np.array([doc_id in wanted for doc_id in doc_ids], bool)))
        weights = fit_weights(examples)
        fitted = FusionSettings(depth, dict(zip(searchers, weights.tolist(), strict=True)))
        folder.begin(out)
        folder.finish(out, "fusion", fitted)
        return cls(searchers, settings=fitted, name=name)

    @classmethod
    def load(cls, out: Path, searchers: Mapping[str, Searcher], *, name: str | None = None) -> Self:
        """Opens what `train` wrote; the same systems are needed, by the same names."""
        return cls(searchers, settings=folder.read(out, "fusion", FusionSettings), name=name)

    def _fused(self, hit_lists: Sequence[Sequence[Hit]], k: int) -> list[Hit]:
        doc_ids, scaled = _scaled(hit_lists)
        # fsum: exact, so that the order of the systems never decides a tie
        scores = [math.fsum(row) for row in (scaled * self._weights).tolist()]
        best = sorted(zip(scores, doc_ids, strict=True), key=lambda each: (-each[0], each[1]))[:k]
        known = {hit.doc_id: hit for hit in merge_hits(hit_lists, k=max(len(doc_ids), 1))}
        return [
            known[doc_id]._replace(rank=rank, score=score, source=self.name)
            for rank, (score, doc_id) in enumerate(best, 1)
        ]


def ask(searchers: Mapping[str, Searcher], queries: list[str], depth: int) -> dict[str, list[list[Hit]]]:
    """The best hits of every system for every query."""
    return {name: searcher.search(queries, k=depth) for name, searcher in searchers.items()}


def _scaled(hit_lists: Sequence[Sequence[Hit]]) -> tuple[list[str], npt.NDArray[np.float64]]:
    """All documents found, and their scaled scores, (documents, systems)."""
    rows: dict[str, int] = {}
    for hits in hit_lists:
        for hit in hits:
            rows.setdefault(hit.doc_id, len(rows))
    scaled = np.zeros((len(rows), len(hit_lists)))
    for column, hits in enumerate(hit_lists):
        if not hits:
            continue
        scores = np.array([hit.score for hit in hits], np.float64)
        spread = np.ptp(scores)
        values = (scores - scores.min()) / spread if spread > 0 else np.ones(len(scores))
        scaled[[rows[hit.doc_id] for hit in hits], column] = values
    return list(rows), scaled


def fit_weights(
    examples: Sequence[tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]],
    *,
    penalty: float = 1e-3,
    steps: int = 2000,
) -> npt.NDArray[np.float64]:
    """Weights, not negative and summing to 1, under which the relevant documents stand out most.

    Maximises the mean log share of the relevant documents in a softmax of the weighted sums over the documents found,
    less penalty / 2 |w|^2; with one relevant document per query this has one maximum. Its length is the sharpness of
    the softmax and no part of a ranking.

    Args:
        examples: Per query the scores, (documents, systems), and which documents are relevant, (documents,).
        penalty: Keeps weights finite where the calibration queries are answered perfectly.
        steps: At most this many steps of accelerated, projected gradient ascent.
    """
    usable = [(scores, relevant) for scores, relevant in examples if relevant.any() and not relevant.all()]
    if not usable:
        raise DataError("no weights can be fitted: no system finds a relevant document for any calibration query")
    sizes = np.array([len(relevant) for _, relevant in usable])
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    scores = np.concatenate([each for each, _ in usable])  # (all documents found, systems)
    relevant = np.concatenate([each for _, each in usable])
    # The curvature is at most the largest squared length of a row of scores.
    rate = 1 / (float((scores**2).sum(axis=1).max()) + penalty)
    weights = ahead = np.full(scores.shape[1], 1.0)
    momentum = 1.0
    for _ in range(steps):
        logits = scores @ ahead
        logits -= np.repeat(np.maximum.reduceat(logits, starts), sizes)
        share = np.exp(logits)
        right = share * relevant
        share /= np.repeat(np.add.reduceat(share, starts), sizes)
        # A relevant document far below all others has no share left to follow: the smallest number keeps 0 / 0 away.
        right /= np.repeat(np.maximum(np.add.reduceat(right, starts), np.finfo(float).tiny), sizes)
        slope = scores.T @ (right - share) / len(sizes) - penalty * ahead
        moved = np.maximum(ahead + rate * slope, 0.0)
        faster = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        ahead = moved + (momentum - 1) / faster * (moved - weights)
        change = float(np.abs(moved - weights).max())
        weights, momentum = moved, faster
        if change < 1e-7:
            break
    if not weights.any():
        raise DataError("no weights can be fitted: on the calibration queries every system is worse than chance")
    fitted: npt.NDArray[np.float64] = weights / weights.sum()
    return fitted
