"""Several rankings in, one out. Knows ranks only: scores of different systems are never compared.

A tie is broken by doc_id. Sums are exact (math.fsum), so that the order of the rankings never decides one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from nci.errors import ConfigError
from nci.records import Hit


def _fuse(rankings: Sequence[Sequence[str]], weight: Callable[[int], float]) -> list[tuple[str, float]]:
    shares: dict[str, list[float]] = {}
    for ranking in rankings:
        for rank, doc_id in enumerate(dict.fromkeys(ranking)):  # a repeated doc_id counts at its best rank
            shares.setdefault(doc_id, []).append(weight(rank))
    fused = [(doc_id, math.fsum(share)) for doc_id, share in shares.items()]
    return sorted(fused, key=lambda pair: (-pair[1], pair[0]))


def reciprocal_rank(rankings: Sequence[Sequence[str]], *, k: float = 60) -> list[tuple[str, float]]:
    """Reciprocal rank fusion: the sum of 1 / (k + rank) over the rankings that hold a document, ranks from 1."""
    if k < 0:
        raise ConfigError(f"k of reciprocal rank fusion is 0 or more, not {k}")
    return _fuse(rankings, lambda rank: 1 / (k + rank + 1))


def paper_rank(rankings: Sequence[Sequence[str]], *, step: float = 5) -> list[tuple[str, float]]:
    """The ensemble of the paper's authors: the sum of 1 / (rank / step + 1), ranks from 0."""
    if step <= 0:
        raise ConfigError(f"step of the paper's ensemble is positive, not {step}")
    return _fuse(rankings, lambda rank: 1 / (rank / step + 1))


def merge_hits(
    hit_lists: Sequence[Sequence[Hit]], *, method: Literal["rrf", "paper"] = "rrf", k: int = 10
) -> list[Hit]:
    """The best k hits of several lists, each list best first.

    Args:
        hit_lists: One list per system. Title, text and semantic id come from the first list that has them.
        method: "rrf" for reciprocal rank fusion, "paper" for the authors' ensemble.
        k: How many hits to return.
    """
    if method not in ("rrf", "paper"):
        raise ConfigError(f"the fusion method is rrf or paper, not {method!r}")
    if k < 1:
        raise ConfigError(f"-k is the number of results and at least 1, not {k}")
    rankings = [[hit.doc_id for hit in hits] for hits in hit_lists]
    fused = reciprocal_rank(rankings) if method == "rrf" else paper_rank(rankings)
    known: dict[str, list[Hit]] = {}
    for hits in hit_lists:
        for hit in hits:
            known.setdefault(hit.doc_id, []).append(hit)
    return [_joined(known[doc_id], rank, score) for rank, (doc_id, score) in enumerate(fused[:k], 1)]


def _joined(hits: list[Hit], rank: int, score: float) -> Hit:
    return Hit(
        rank=rank,
        doc_id=hits[0].doc_id,
        score=score,
        title=next((hit.title for hit in hits if hit.title), ""),
        text=next((hit.text for hit in hits if hit.text), ""),
        semantic_id=next((hit.semantic_id for hit in hits if hit.semantic_id), ()),
        source="+".join(dict.fromkeys(hit.source for hit in hits if hit.source)) or "ensemble",
    )
