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
_EPOCHS, _BATCH = 3, 128
_RATE, _SCALE_RATE = 2e-3, 0.3
_SCALE = 30.0  # of the mean of cosines in the softmax, at first


@dataclass(frozen=True)
class Compared:
    """Some queries, and how similar their pieces are to their candidates."""

    asked: Asked
    cosines: Tensor  # (queries, candidates, tokens), the right candidate first


def learn_importance(
    engine: Engine, texts: Sequence[str], leaves: NDArray[np.integer], *, most: int, seed: int = 0
) -> NDArray[np.float32]:
    """(width + 1,) for `nci.pieces.shares`.

    Args:
        engine: Searches with the trained model, by late interaction too.
        leaves: The leaf that each text should find.
        most: Texts that are read; others are left out by lot.
    """
    random = np.random.default_rng(seed)
    chosen = random.permutation(len(texts))[:most]
    chosen = chosen[np.argsort([len(texts[i]) for i in chosen], kind="stable")]  # queries of similar length together
    step = max(1, min(_READ, _SCORES // engine.trie.documents))
    read = [
        _compare(engine, [texts[i] for i in part], leaves[part])
        for part in np.array_split(chosen, -(-len(chosen) // step))
    ]
    assert engine.late is not None
    return learn(read, engine.late.special, random)


@torch.no_grad()
def _compare(engine: Engine, texts: list[str], leaves: NDArray[np.integer]) -> Compared:
    assert engine.late is not None
    asked, scores = engine.candidates_of(texts)
    targets = torch.as_tensor(leaves, device=scores.device).long().unsqueeze(1)
    best = scores.scatter(1, targets, float("-inf")).topk(min(_CANDIDATES, scores.shape[1]) - 1, dim=1).indices
    cosines = engine.late.cosines(asked, torch.cat([targets, best], dim=1))
    return Compared(asked, cosines.half())


def learn(read: Sequence[Compared], special: Tensor, random: np.random.Generator) -> NDArray[np.float32]:
    """The same from queries that have been compared; `special` tokens are no pieces."""
    device, width = read[0].cosines.device, read[0].asked.states.shape[-1]
    weights = torch.zeros(width + 1, device=device)
    weights[-1] = UNIFORM
    weights.requires_grad_(True)
    scale = torch.tensor(_SCALE, device=device, requires_grad=True)
    optimiser = torch.optim.AdamW([{"params": [weights], "lr": _RATE}, {"params": [scale], "lr": _SCALE_RATE}])
    parts = [(i, part) for i, each in enumerate(read) for part in _split(len(each.cosines))]
    for _ in range(_EPOCHS):
        for place in random.permutation(len(parts)).tolist():
            number, part = parts[place]
            each = read[number]
            asked = Asked(*(tensor[part] for tensor in each.asked))
            counts = shares(asked.ids, asked.mask, special, asked.states, weights)
            logits = scale * torch.einsum("qdt,qt->qd", each.cosines[part].float(), counts)
            loss = -logits.log_softmax(1)[:, 0].mean()
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return weights.detach().cpu().numpy()


def _split(count: int) -> list[slice]:
    return [slice(start, start + _BATCH) for start in range(0, count, _BATCH)]
