"""The search itself: query states in, nodes of the tree out; beam search constrained to the tree (Algorithm 2).

One loop for CPU and GPU, over all queries of a batch. Per level the decoder runs once on at most `beam` rows; keys and
values of the cross-attention are made once per query, and self-attention finds the lines of a row's ancestors by number,
so that nothing is reordered. The classifier is one product with the rows of the edge table, its softmax runs over real
children only, and a leaf ends its path. On a GPU every shape is fixed by the plan and nothing comes back to the host
before the end. On a CPU rows that can no longer reach the k best are dropped as soon as that is certain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nci.search.network import Memory, Network
from nci.search.ops import SearchTree
from nci.search.plan import Plan


@dataclass(frozen=True)
class Nodes:
    """Where the best paths ended, best first.

    Args:
        nodes: (queries, k); -1 where there are fewer.
        scores: (queries, k).
        scored: (queries,) leaves whose probability was computed.
        short: (queries,) whether a level had too few rows, so that the search must be done again with a certain plan.
        lines: Rows that the decoder ran on, of all queries together.
    """

    nodes: Tensor
    scores: Tensor
    scored: Tensor
    short: Tensor
    lines: int

    def packed(self) -> Tensor:
        """Everything in one tensor, for one transfer; float64 holds whole numbers and float32 exactly."""
        columns = (self.nodes, self.scores, self.scored.unsqueeze(1), self.short.unsqueeze(1))
        return torch.cat([column.double() for column in columns], dim=1)

    @classmethod
    def unpacked(cls, table: Tensor, lines: int) -> Nodes:
        """What `packed` was made of."""
        k = (table.shape[1] - 2) // 2
        nodes, scores, scored, short = table[:, :k], table[:, k : 2 * k], table[:, -2], table[:, -1]
        return cls(nodes.long(), scores.float(), scored.long(), short.bool(), lines)

    def first(self, queries: int) -> Nodes:
        """Those of the first queries."""
        nodes, scores, scored, short = (x[:queries] for x in (self.nodes, self.scores, self.scored, self.short))
        return Nodes(nodes, scores, scored, short, self.lines)


@torch.inference_mode()
def find(network: Network, tree: SearchTree, plan: Plan, memory: Memory, anchors: Tensor | None = None) -> Nodes:
    """The best paths of each query; `anchors` (queries, nodes of the tree) are content scores on the edges."""
    return _Search(network, tree, plan, memory, anchors).run()


class _Search:
    """One batch on its way down the tree."""

    def __init__(self, network: Network, tree: SearchTree, plan: Plan, memory: Memory, anchors: Tensor | None) -> None:
        self.network, self.ops, self.tree, self.plan = network, network.ops, tree, plan
        self.memory, self.anchors = memory, anchors
        self.batch, self.device = len(memory.lines), memory.lines.device
        self.prunes = not plan.fixed
        self.cache = network.cache(self.batch * plan.rows)
        self.lines = 0  # of the cache, in use
        self.found: list[Tensor] = []
        self.found_scores: list[Tensor] = []
        self.decoded: list[tuple[Tensor, Tensor]] = []
        self.short = torch.zeros(self.batch, dtype=torch.bool, device=self.device)

    def run(self) -> Nodes:
        levels = self.plan.levels
        nodes, scores, places, h = self._begin()
        for number, level in enumerate(levels[1 if self.plan.first_children else 0 :], bool(self.plan.first_children)):
            last = number + 1 == len(levels)
            self.decoded.append((nodes, scores))
            total, fanout = self.ops.child_scores(h, nodes, scores, self.tree, self.anchors, level.fanout)
            keep = min(level.keep, total.shape[1])
            children = self.ops.select(total, keep, nodes, fanout, self.tree, last and not self.plan.cut)
            self._note(children.found, children.found_scores, level.digits)
            if last:
                if self.plan.cut:
                    self.short |= ((children.scores > -torch.inf) & self._hope(children.scores)).any(1)
                break
            nodes, parents, scores = self._survivors(
                children.nodes, children.parents, children.scores, levels[number + 1].rows
            )
            if not nodes.shape[1]:
                break
            places, h = self._decode(nodes, parents, places)
        return self._best()

    def _begin(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The root, and its inner children with it where the plan says so; they are the same for every query."""
        start = self.tree.start(self.plan.first_children, self.batch)
        nodes, rows = start.nodes, start.nodes.shape[1]
        places = start.places if rows > 1 else start.places[:, :1].contiguous()
        x, q = (table.to(self.network.dtype).repeat(self.batch, 1) for table in (start.states, start.asks))
        h = self._step(x, q, places)
        scores = torch.zeros(self.batch, 1, device=self.device)
        if rows == 1:
            return nodes, scores, places, h
        h, top = h.view(self.batch, rows, -1), self.plan.levels[0]
        above = nodes[:, :1].contiguous()
        self.decoded.append((above, scores))
        total, _ = self.ops.child_scores(h[:, 0].contiguous(), above, scores, self.tree, self.anchors, top.fanout)
        if top.keep < int(self.tree.trie.child_start[1]) - 1:
            best, index = total.topk(top.keep, dim=1)
            total = torch.full_like(total, -torch.inf).scatter(1, index, best)
        if len(start.leaves):
            scores = total.index_select(1, start.leaves - 1)
            self._note(start.leaves.expand(self.batch, -1).where(scores > -torch.inf, -1), scores, top.digits)
        scores = total.index_select(1, nodes[0, 1:] - 1)
        places = places.view(self.batch, rows, 2)[:, 1:].flatten(0, 1)
        return nodes[:, 1:].contiguous(), scores, places, h[:, 1:].flatten(0, 1)

    def _decode(self, nodes: Tensor, parents: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        places, x, q = self.ops.descend(nodes, parents, places, self.lines, self.tree, self.network.dtype)
        return places, self._step(x, q, places)

    def _step(self, x: Tensor, q: Tensor, places: Tensor) -> Tensor:
        h = self.network.step(x, q, places, self.lines, self.cache, self.memory)
        self.lines += len(x)
        return h

    def _note(self, nodes: Tensor, scores: Tensor, digits: int) -> None:
        penalty = self.plan.length_penalty
        self.found.append(nodes)
        self.found_scores.append(scores / (digits + 1) ** penalty if penalty else scores)

    def _survivors(self, nodes: Tensor, parents: Tensor, scores: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """The rows that go on, at most `rows`."""
        live = scores > -torch.inf
        if self.prunes:
            live &= self._hope(scores)
            rows = int(live.sum(1).max())
            scores = scores.masked_fill(~live, -torch.inf)
        elif nodes.shape[1] <= rows:
            return nodes, parents, scores
        if not self.plan.certain:
            self.short |= live.sum(1) > rows
        scores, keep = scores.topk(rows, dim=1, sorted=False)
        return nodes.gather(1, keep), parents.gather(1, keep), scores

    def _hope(self, scores: Tensor) -> Tensor:
        """Whether a row may still lead to one of the k best: a probability only falls on its way down."""
        noted = torch.cat(self.found_scores, dim=1)
        if noted.shape[1] < self.plan.k:
            return torch.ones_like(scores, dtype=torch.bool)
        worst = noted.topk(self.plan.k, dim=1).values[:, -1:]
        penalty = self.plan.length_penalty
        # A length penalty shrinks a negative score most for the longest id. Rounding may raise a score by a hair.
        bound = scores / (self.plan.longest + 1) ** penalty if penalty > 0 else scores
        return bound >= worst - 1e-4

    def _best(self) -> Nodes:
        nodes, scores = torch.cat(self.found, dim=1), torch.cat(self.found_scores, dim=1)
        best, index = scores.topk(min(self.plan.k, scores.shape[1]), dim=1)
        asked, alive = (torch.cat(parts, dim=1) for parts in zip(*self.decoded, strict=True))
        scored = torch.where(alive > -torch.inf, self.tree.leaf_children[self.tree.number[asked].clamp(min=0)], 0).sum(
            1
        )
        return Nodes(nodes.gather(1, index), best, scored, self.short, self.lines)
