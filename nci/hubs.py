"""Queries with their documents -> how strongly each document draws queries that ask for others: hubs.

    hub(d) = mean over the queries it draws most of log p(d | q, not the documents that q asks for), less the mean of all d

A long document, or one of common words, is near to everything and takes the first place from what was asked for. What it
takes from training queries it will take from others: calibration finds how much of it is to be taken away. p is that of
the content score. Knows no decoder and no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nci.search import EncodedQueries, Engine

MOST = 6000  # queries that are asked
DRAWN = 20  # queries of the mean
_LEAST = -20.0  # log p of what a query is far from; how far says nothing
_AT_ONCE = 2**26  # scores
_CHARACTERS = 2**16  # read together: 64 queries of 256 word pieces


class ContentParts(NamedTuple):
    """The parts of the content score of some queries, each (queries, documents), before their weights."""

    dense: Tensor  # cosine
    lexical: Tensor | None  # as a share of the highest
    late: Tensor | None  # above the worst candidate
    moves: Tensor | None = None  # by which the cosine would change if documents moved all the way, see `nci.rocchio`
    nearer: Tensor | None = None  # by how much a window behind the opening is nearer

    def scores(
        self,
        kappa: float | Tensor,
        lexical: float | Tensor,
        late: float | Tensor,
        moves: float | Tensor = 0.0,
        further: float | Tensor = 0.0,
    ) -> Tensor:
        """All parts with their weights; `moves` is how far documents have moved, `further` the share of nearer windows."""
        total = kappa * (self.dense if self.moves is None else self.dense + moves * self.moves)
        total = total if self.lexical is None else total + lexical * self.lexical
        if self.late is None:
            return total
        return total + late * (self.late if self.nearer is None else self.late + further * self.nearer)


def read_content(
    engine: Engine, texts: Sequence[str], moves: Tensor | None = None
) -> tuple[EncodedQueries, ContentParts]:
    """Some queries as the model reads them, and how near each document is to them, and its `moves` (documents, width)."""
    vectors = engine.reference.tables.vectors
    queries, stored = engine.encode(texts), engine.stored_vectors(texts, len(texts))
    asked = queries.vectors if stored is None else stored
    assert vectors is not None and asked is not None
    lexical = None
    if engine.lexical is not None:
        lexical = torch.as_tensor(engine.lexical.normalised(texts), device=vectors.device)
    towards = None if moves is None else asked.float() @ moves.T
    return queries, ContentParts(asked.float() @ vectors.T, lexical, queries.late, towards, queries.nearer)


def in_batches(texts: Sequence[str], most: int) -> Iterator[slice]:
    """Neighbours that are read together, at most so many, and fewer where they are long, since all are padded.

    >>> [list(range(4))[part] for part in in_batches(["short", "texts", "x" * 60_000, "y" * 60_000], most=3)]
    [[0, 1], [2], [3]]
    """
    start = longest = 0
    for i, text in enumerate(texts):
        longest = max(longest, len(text))
        if i > start and (i - start == most or (i - start + 1) * longest > _CHARACTERS):
            yield slice(start, i)
            start, longest = i, len(text)
    if texts:
        yield slice(start, len(texts))


@torch.no_grad()
def find_hubs(
    engine: Engine,
    pairs: Iterable[tuple[str, int]],
    weights: Sequence[float],
    moves: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """(documents,) in leaf order, 0 on average.

    Args:
        engine: Searches with a trained model.
        pairs: Texts and the leaves they ask for.
        weights: Of the parts of the content score: dense, lexical, late, how far documents have moved, nearer windows.
        moves: (documents, width) by what they move.
    """
    asked: dict[str, set[int]] = {}
    for text, leaf in pairs:
        asked.setdefault(text, set()).add(leaf)
    texts, documents = list(asked), engine.trie.documents
    step = max(1, min(256, _AT_ONCE // documents))
    best = torch.empty(0, documents, device=engine.device)  # (drawn, documents)
    moved = None if moves is None else torch.as_tensor(moves, device=engine.device)
    # those of one length together, since they are padded
    chosen = sorted((texts[i] for i in np.random.default_rng(0).permutation(len(texts))[:MOST]), key=len)
    for batch in in_batches(chosen, step):
        part = chosen[batch]
        scores = read_content(engine, part, moved)[1].scores(*weights)
        own = torch.tensor([(row, leaf) for row, text in enumerate(part) for leaf in asked[text]]).T
        scores[own[0], own[1]] = -torch.inf
        log_probs = scores.log_softmax(1).nan_to_num(nan=_LEAST)  # nan: it asks for every document there is
        both = torch.cat([best, log_probs.clamp(min=_LEAST)])
        best = both.topk(min(DRAWN, len(both)), dim=0).values
    hubs = best.mean(0) if len(best) else torch.zeros(documents)
    return np.asarray((hubs - hubs.mean()).float().cpu())
