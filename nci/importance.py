"""Trained model + training queries -> what each word piece of a query counts in late interaction.

"How many", "the" and a question mark find their like in any document; "california" does not. A linear function of a
piece's state says which it is: one number more than a state has, learned from how well the pieces of training queries tell
their own document from the best others. What else a score has takes no part. Knows no stages and no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nci.pieces import UNIFORM, shares
from nci.search import Engine
from nci.search.late import Asked

_CANDIDATES = 64  # documents that each query chooses from
_READ = 256  # queries read together, at most
_SCORES = 2**26  # of documents, held at once
_COMPARED = 2**33  # scores of documents, in all
_EPOCHS, _BATCH = 3, 128
_RATE, _SCALE_RATE = 2e-3, 0.3
_SCALE = 30.0  # of the mean of cosines in the softmax, at first


@dataclass(frozen=True)
class Compared:
    """Some queries, and how similar their pieces are to their candidates."""

    asked: Asked
    cosines: Tensor  # (queries, candidates, tokens), the right candidate first
    missing: Tensor  # (queries, candidates) true where there were fewer


def learn_importance(
    engine: Engine, pairs: Sequence[tuple[str, int]], *, most: int, seed: int = 0
) -> NDArray[np.float32]:
    """(width + 1,) for `nci.pieces.shares`.

    Args:
        engine: Searches with the trained model, by late interaction too.
        pairs: Texts, each with a leaf that it should find; other leaves of the same text are not held against it.
        most: Pairs that are read; others are left out by lot, and more of them where there are very many documents.
    """
    assert engine.late is not None
    relevant: dict[str, list[int]] = {}
    for text, leaf in pairs:
        relevant.setdefault(text, []).append(leaf)
    random = np.random.default_rng(seed)
    chosen = random.permutation(len(pairs))[: max(1, min(most, _COMPARED // engine.trie.documents))].tolist()
    chosen.sort(key=lambda pair: len(pairs[pair][0]))  # queries of similar length together
    step = max(1, min(_READ, _SCORES // engine.trie.documents))
    read = [
        _compare(engine, [pairs[i] for i in chosen[start : start + step]], relevant)
        for start in range(0, len(chosen), step)
    ]
    return learn(read, engine.late.special, random)


@torch.no_grad()
def _compare(engine: Engine, pairs: list[tuple[str, int]], relevant: dict[str, list[int]]) -> Compared:
    assert engine.late is not None
    asked, scores = engine.candidates_of([text for text, _ in pairs])
    own = [(row, leaf) for row, (text, _) in enumerate(pairs) for leaf in relevant[text]]
    rows, leaves = (torch.tensor(each, device=scores.device) for each in zip(*own, strict=True))
    scores[rows, leaves] = float("-inf")
    best = scores.topk(min(_CANDIDATES, scores.shape[1]) - 1, dim=1)
    targets = torch.tensor([[leaf] for _, leaf in pairs], device=scores.device)
    missing = torch.cat([torch.zeros_like(targets, dtype=torch.bool), best.values.isneginf()], dim=1)
    cosines = engine.late.cosines(asked, torch.cat([targets, best.indices], dim=1))
    return Compared(asked._replace(states=asked.states.half()), cosines.half(), missing)


def learn(read: Sequence[Compared], special: Tensor, random: np.random.Generator) -> NDArray[np.float32]:
    """The same from queries that have been compared; `special` tokens are no pieces."""
    device, width = read[0].cosines.device, read[0].asked.states.shape[-1]
    weights = torch.zeros(width + 1, device=device)
    weights[-1] = UNIFORM
    weights.requires_grad_(True)
    scale = torch.tensor(_SCALE, device=device, requires_grad=True)
    optimiser = torch.optim.AdamW([{"params": [weights], "lr": _RATE}, {"params": [scale], "lr": _SCALE_RATE}])
    batches = _batches([len(each.cosines) for each in read])
    for _ in range(_EPOCHS):
        for place in random.permutation(len(batches)).tolist():
            optimiser.zero_grad()
            total = sum(part.stop - part.start for _, part in batches[place])
            for number, part in batches[place]:
                each = read[number]
                asked = Asked(*(tensor[part] for tensor in each.asked))
                counts = shares(asked.ids, asked.mask, special, asked.states, weights)
                logits = scale * torch.einsum("qdt,qt->qd", each.cosines[part].float(), counts)
                likely = logits.masked_fill(each.missing[part], float("-inf")).log_softmax(1)[:, 0]
                (-likely.sum() / total).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return weights.detach().cpu().numpy()


def _batches(sizes: Sequence[int]) -> list[list[tuple[int, slice]]]:
    """Queries of one step each, as parts of what was read together.

    >>> _batches([130, 1])
    [[(0, slice(0, 128, None))], [(0, slice(128, 130, None)), (1, slice(0, 1, None))]]
    """
    out: list[list[tuple[int, slice]]] = []
    space = 0
    for number, size in enumerate(sizes):
        start = 0
        while start < size:
            if not space:
                out.append([])
                space = _BATCH
            stop = min(size, start + space)
            out[-1].append((number, slice(start, stop)))
            space -= stop - start
            start = stop
    return out
