"""What a search does besides matrix products, in plain PyTorch: the reference, and the backend of CPUs.

`kernels.py` has the same methods as Triton kernels for GPUs. Rows of all queries stand below each other: row r of query b
at level t is line b * rows + r. Knows no encoder and no weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from nci.search.fold import EdgeTable
from nci.trie import Trie

_NUMBERS_AT_ONCE = 2**20  # gathered from the edge table at a time: what a cache holds, in float32


@dataclass(frozen=True)
class Start:
    """The root and some of its children: where every search of a batch begins."""

    nodes: Tensor  # (queries, rows) the root first
    places: Tensor  # (queries * rows, 2) lines of the root and of the row itself
    leaves: Tensor  # (n,) children of the root that are leaves
    states: Tensor  # (rows, d)
    asks: Tensor  # (rows, d)


@dataclass(frozen=True)
class SearchTree:
    """The tree as a device holds it."""

    trie: Trie
    table: EdgeTable
    child_start: Tensor  # (nodes + 1,)
    counts: Tensor  # (nodes,) children
    number: Tensor  # (nodes,) place among the inner nodes, -1 for a leaf
    leaf_children: Tensor  # (inner nodes,) children that are leaves
    starts: dict[tuple[tuple[int, ...], int], Start] = field(default_factory=dict)

    @classmethod
    def on(cls, device: str, trie: Trie, table: EdgeTable, dtype: torch.dtype | None = None) -> SearchTree:
        """`dtype` is that of the table; as it is by default, which leaves a mapped file unread."""
        child_start = torch.as_tensor(trie.child_start, dtype=torch.long)
        inner = child_start[1:] > child_start[:-1]
        number = torch.where(inner, inner.cumsum(0) - 1, -1)
        leaves_before = torch.nn.functional.pad((~inner).cumsum(0), (1, 0))[child_start]
        leaf_children = (leaves_before[1:] - leaves_before[:-1])[inner]
        return cls(
            trie,
            table.to(device, dtype),
            child_start.to(device),
            child_start.diff().to(device),
            number.to(device),
            leaf_children.to(device),
        )

    def start(self, children: tuple[int, ...], batch: int) -> Start:
        """The root and these of its children; kept, since a recorded search cannot wait for it to be made."""
        key = (children, batch)
        if key not in self.starts:
            device = self.number.device
            nodes = torch.tensor([0, *children], device=device)
            number = self.number[nodes]
            line = torch.arange(batch * len(nodes), device=device)
            root = line - line % len(nodes)
            merged = set(children)
            below = [node for node in range(1, int(self.trie.child_start[1])) if merged and node not in merged]
            self.starts[key] = Start(
                nodes.repeat(batch, 1),
                torch.stack([root, line], dim=1),  # the root sees itself twice, which is the same as once
                torch.tensor(below, device=device, dtype=torch.long),
                self.table.states[number],
                self.table.asks[number],
            )
        return self.starts[key]


@dataclass(frozen=True)
class Children:
    """Children that a level kept: (queries, keep) each."""

    nodes: Tensor  # the root where the path ended or nothing was there
    parents: Tensor  # row of the parent within its query
    scores: Tensor  # -inf there
    found: Tensor  # the node where a path ended, else -1
    found_scores: Tensor


class TorchOps:
    """Plain PyTorch."""

    def rms_norm(self, x: Tensor, eps: float) -> Tensor:
        """x over its root mean square; the weight of the norm is part of the layer behind it."""
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return torch.div(x, size.square_().div_(x.shape[-1]).add_(eps).sqrt_().to(x.dtype))

    def layer_norm(self, x: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Norm of x + shift."""
        return F.layer_norm(x if shift is None else x + shift, (x.shape[-1],), weight, bias, eps)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        lengths: Tensor | None,
        bias: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """q (batch, rows, d) looks at the first `lengths` of k and v (batch, n, d); bias (heads, rows, n) is added."""
        q, k, v = (x.view(*x.shape[:2], heads, -1).transpose(1, 2) for x in (q, k, v))
        mask = bias
        if lengths is not None:
            seen = torch.arange(k.shape[2], device=k.device) < lengths.view(-1, 1, 1, 1)
            mask = seen if bias is None else bias.masked_fill(~seen, -torch.inf)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        return mixed.transpose(1, 2).flatten(-2)

    def ancestors(self, cache: Tensor, first: int, places: Tensor, heads: int) -> Tensor:
        """Lines first .. of the cache (lines, 3 d) look at the lines `places` (rows, steps) of it."""
        rows, steps = places.shape
        d = cache.shape[1] // 3
        q = cache[first : first + rows, :d].view(rows, heads, 1, -1)
        lines = cache[:, d:].index_select(0, places.flatten()).view(rows, steps, 2, heads, -1)
        k, v = lines.permute(2, 0, 3, 1, 4)  # (rows, heads, steps, d / heads) each
        return F.scaled_dot_product_attention(q, k, v).flatten(1)

    def child_scores(
        self, h: Tensor, nodes: Tensor, scores: Tensor, tree: SearchTree, anchors: Tensor | None, fanout: int
    ) -> tuple[Tensor, int]:
        """Scores of the children of every row: (queries, rows * fanout), -inf where there is none, and the fanout used.

        Args:
            h: (lines, d) decoder states.
            nodes: (queries, rows).
            scores: (queries, rows) of the rows themselves; a row at -inf has no children.
            anchors: (queries, nodes of the tree).
        """
        first, count = tree.child_start[nodes], tree.counts[nodes]
        fanout = min(fanout, int(count.max())) if count.device.type == "cpu" else fanout
        slots = torch.arange(fanout, device=h.device)
        child = (first.unsqueeze(-1) + slots).clamp_(max=len(tree.number) - 1)  # (queries, rows, fanout)
        flat, chunk = child.view(-1, fanout), max(1, _NUMBERS_AT_ONCE // (fanout * h.shape[1]))
        pieces = zip(torch.split(flat, chunk), torch.split(h, chunk), strict=True)
        logits = [
            torch.matmul(states.unsqueeze(1), _rows(tree.table.vectors, part).to(states.dtype).mT).squeeze(1)
            for part, states in pieces
        ]
        total = (torch.cat(logits) if len(logits) > 1 else logits[0]).float().view(child.shape) + tree.table.bias[child]
        if anchors is not None:
            total = total + anchors.gather(1, child.flatten(1)).view(child.shape)
        # A dead row stands at the root, which has children: no softmax is empty.
        log_probs = total.masked_fill_(slots >= count.unsqueeze(-1), -torch.inf).log_softmax(-1)
        return log_probs.add_(scores.unsqueeze(-1)).flatten(1), fanout

    def select(self, total: Tensor, keep: int, nodes: Tensor, fanout: int, tree: SearchTree, last: bool) -> Children:
        """The `keep` best children in `total`, as `child_scores` gave it, in any order; on the last level all paths end."""
        best, index = total.topk(keep, dim=1, sorted=False)
        parents = index // fanout
        child = tree.child_start[nodes.gather(1, parents)] + index % fanout
        live = best > -torch.inf
        child = child.where(live, 0)
        ends = live if last else live & (tree.number[child] < 0)
        return Children(
            child.masked_fill(ends, 0),
            parents,
            best.masked_fill(ends, -torch.inf),
            child.where(ends, -1),
            best.masked_fill(~ends, -torch.inf),
        )

    def descend(
        self, nodes: Tensor, parents: Tensor, places: Tensor, first: int, tree: SearchTree, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the next level starts from: the lines of every row's ancestors and itself, its state, its question.

        Args:
            nodes, parents: (queries, rows).
            places: (queries * rows above, steps) of the level above.
            first: Line of the first new row.
        """
        batch, rows = nodes.shape
        above = len(places) // batch
        line = (parents + torch.arange(batch, device=nodes.device).unsqueeze(1) * above).flatten()
        own = torch.arange(first, first + batch * rows, device=nodes.device).unsqueeze(1)
        number = tree.number[nodes.flatten()]
        return (
            torch.cat([places[line], own], dim=1),
            _rows(tree.table.states, number).to(dtype),
            _rows(tree.table.asks, number).to(dtype),
        )


def _rows(table: Tensor, index: Tensor) -> Tensor:
    return table.index_select(0, index.flatten()).view(*index.shape, table.shape[1])
