"""Content scores on the tree: what the edges know about a query before any training.

In: one score per document, or the query's vector. Out: one number per node, added to the logit of the edge into it.
`exact` is the log-sum-exp of the documents' scores below a node, so that the softmax over children telescopes to the
softmax over all documents; `mean` is log n + kappa q . mean, which needs no pass over the documents.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nci.trie import Trie


def node_means(trie: Trie, vectors: NDArray[np.floating]) -> NDArray[np.float32]:
    """Mean of the document vectors below each node; `vectors` (documents, width) in leaf order."""
    sums = np.zeros((trie.nodes, vectors.shape[1]), dtype=np.float32)  # (nodes, width)
    sums[trie.leaves] = vectors
    for start, stop in zip(trie.level_start[-2:0:-1], trie.level_start[:1:-1], strict=True):
        np.add.at(sums, trie.parent[start:stop], sums[start:stop])
    return sums / node_sizes(trie)[:, None]


def node_sizes(trie: Trie) -> NDArray[np.float32]:
    """Documents below each node."""
    return (trie.last_document - trie.first_document).astype(np.float32)


class TreeSum(nn.Module):
    """Log-sum-exp of leaf scores up the tree, level by level, for whole batches."""

    def __init__(self, trie: Trie) -> None:
        super().__init__()
        self.levels = len(trie.level_start) - 1
        has_children = np.diff(trie.child_start) > 0
        document = np.full(trie.nodes, -1)
        document[trie.leaves] = np.arange(trie.documents)
        for level, (start, stop) in enumerate(zip(trie.level_start[:-1], trie.level_start[1:], strict=True)):
            inner = np.flatnonzero(has_children[start:stop])
            ordinal = np.cumsum(has_children[start:stop]) - 1
            leaves = np.flatnonzero(~has_children[start:stop])
            below = trie.level_start[level + 1 : level + 3]
            parents = trie.parent[below[0] : below[1]] - start if len(below) == 2 else np.zeros(0, dtype=int)
            # Columns of [leaves' scores, sums of inner nodes] in the order of the nodes of this level.
            place = np.empty(stop - start, dtype=np.int64)
            place[leaves] = np.arange(len(leaves))
            place[inner] = len(leaves) + np.arange(len(inner))
            for name, values in (
                ("documents", document[start:stop][leaves]),
                ("segment", ordinal[parents]),
                ("place", place),
            ):
                self.register_buffer(f"{name}_{level}", torch.as_tensor(values, dtype=torch.long), persistent=False)

    def forward(self, scores: Tensor) -> Tensor:
        """(queries, documents) in leaf order -> (queries, nodes)."""
        outs: list[Tensor] = []
        below: Tensor | None = None
        for level in reversed(range(self.levels)):
            documents, segment, place = (
                self.get_buffer(f"{name}_{level}") for name in ("documents", "segment", "place")
            )
            parts = [scores.index_select(1, documents)]
            if below is not None and len(segment):
                groups = len(place) - len(documents)
                index = segment.expand(len(scores), -1)
                empty = scores.new_full((len(scores), groups), -torch.inf)
                peak = empty.scatter_reduce(1, index, below.detach(), "amax")
                total = torch.zeros_like(peak).index_add(1, segment, (below - peak.gather(1, index)).exp())
                parts.append(peak + total.log())
            below = torch.cat(parts, dim=1).index_select(1, place)
            outs.append(below)
        return torch.cat(outs[::-1], dim=1)
