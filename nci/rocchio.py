"""Training queries -> by what each document's vector moves towards those that ask for it.

    r(d) = n / (n + 1) * m / |m|,  m the mean vector of the n training queries that ask for d; 0 where there is none

It is Rocchio's rule from the document's side. A vector is made of a text, and says little about which questions people bring
to it; those they have brought say more, the more of them there are. How far documents move is for calibration to find.
Knows no weights and no files.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from nci.hubs import in_batches
from nci.search import Engine

_AT_ONCE = 128  # queries at most


@torch.no_grad()
def query_means(engine: Engine, pairs: Iterable[tuple[str, int]]) -> NDArray[np.float32]:
    """(documents, width) r of each, in leaf order, by the vectors that the engine reads queries with.

    Args:
        pairs: Texts and the leaves they ask for; a pair that comes twice counts twice.
    """
    known = list(pairs)
    texts = sorted({text for text, _ in known}, key=len)  # those of one length together, since they are padded
    place = {text: row for row, text in enumerate(texts)}
    vectors = [engine.query_vectors(texts[batch]) for batch in in_batches(texts, _AT_ONCE)]
    stored = engine.reference.tables.vectors
    assert stored is not None
    sums = torch.zeros_like(stored)
    if not known:
        return sums.cpu().numpy()
    leaves = torch.tensor([leaf for _, leaf in known], device=sums.device)
    rows = torch.tensor([place[text] for text, _ in known], device=sums.device)
    sums.index_add_(0, leaves, torch.cat(vectors)[rows])
    counts = torch.bincount(leaves, minlength=len(sums)).unsqueeze(1)
    return (torch.nn.functional.normalize(sums, dim=1) * (counts / (counts + 1))).cpu().numpy()
