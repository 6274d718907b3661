"""Semantic ids -> prefix tree as flat arrays; no objects, no torch.

Nodes are numbered breadth first, so the children of node u are the nodes child_start[u] .. child_start[u + 1] - 1 in
the order of their digits, and the edge into a node carries the node's own number: an edge table has one row per node.
Documents are numbered in leaf order (depth first), so the documents below any node are one slice.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nci.errors import DataError
from nci.records import SemanticId

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Trie:
    """The tree of all semantic ids.

    Args:
        child_start: First child of each node, one entry more than nodes.
        value: Digit on the edge into each node; -1 for the root.
        parent: Parent of each node; -1 for the root.
        first_document: First document (in leaf order) below each node.
        last_document: One past the last document below each node.
        leaves: Node of each document, in leaf order.
    """

    child_start: Ints  # (nodes + 1,)
    value: Ints  # (nodes,)
    parent: Ints  # (nodes,)
    first_document: Ints  # (nodes,)
    last_document: Ints  # (nodes,)
    leaves: Ints  # (documents,)

    @classmethod
    def from_paths(cls, paths: Ints) -> tuple[Trie, NDArray[np.int64]]:
        """The trie of `paths` (documents, positions), padded with -1, and the row of `paths` behind each leaf.

        >>> trie, order = Trie.from_paths(np.array([[1, 0], [0, -1]], dtype=np.int32))
        >>> trie.semantic_id(0), order.tolist()
        ((0,), [1, 0])
        """
        if paths.ndim != 2 or not len(paths):
            raise DataError(f"a trie needs at least one semantic id, got an array of shape {paths.shape}")
        order = np.lexsort(paths.T[::-1])
        rows = paths[order]
        documents, positions = rows.shape
        values, parents, firsts, lasts = [np.array([-1])], [np.array([-1])], [np.array([0])], [np.array([documents])]
        node_of_row = np.zeros(documents, dtype=np.int64)
        fresh = np.zeros(documents, dtype=bool)
        fresh[0] = True
        nodes = 1
        for position in range(positions):
            digit = rows[:, position]
            fresh[1:] |= digit[1:] != digit[:-1]
            open_rows = digit >= 0
            first = np.flatnonzero(fresh & open_rows)
            if not len(first):
                break
            number = np.cumsum(fresh & open_rows) - 1  # running number of the node within this level
            size = np.bincount(number[open_rows], minlength=len(first))
            values.append(digit[first])
            parents.append(node_of_row[first])
            firsts.append(first)
            lasts.append(first + size)
            node_of_row = np.where(open_rows, nodes + number, node_of_row)
            nodes += len(first)
        parent = np.concatenate(parents).astype(np.int32)
        counts = np.bincount(parent[1:], minlength=nodes)
        child_start = np.concatenate([[1], 1 + np.cumsum(counts)]).astype(np.int32)
        if counts[node_of_row].any() or len(np.unique(node_of_row)) != documents:
            raise DataError(
                "semantic ids are not unique and prefix-free: two documents share a path; build the tree again"
            )
        as_int32 = [np.concatenate(parts).astype(np.int32) for parts in (values, firsts, lasts)]
        return cls(child_start, as_int32[0], parent, as_int32[1], as_int32[2], node_of_row.astype(np.int32)), order

    def with_end_token(self, values: int) -> Trie:
        """The same tree with one more step below each leaf, whose digit `values` stands for the end of an id."""
        paths = np.full((self.documents, self.positions + 1), -1, dtype=np.int32)
        paths[:, :-1] = self.paths
        length = (self.paths >= 0).sum(axis=1)
        paths[np.arange(self.documents), length] = values
        trie, _ = Trie.from_paths(paths)
        return trie

    @property
    def nodes(self) -> int:
        return len(self.value)

    @property
    def documents(self) -> int:
        return len(self.leaves)

    @cached_property
    def depth(self) -> Ints:
        """Depth of each node; the root has depth 0."""
        depth = np.zeros(self.nodes, dtype=np.int32)
        for level, (start, stop) in enumerate(zip(self.level_start[:-1], self.level_start[1:], strict=True)):
            depth[start:stop] = level
        return depth

    @cached_property
    def level_start(self) -> list[int]:
        """First node of each level, and the number of nodes as the last entry."""
        starts = [0]
        stop = 1
        while starts[-1] < self.nodes:
            starts.append(stop)
            stop = int(self.child_start[stop]) if stop < self.nodes else self.nodes
        return starts

    @property
    def positions(self) -> int:
        """Digits of the longest semantic id."""
        return len(self.level_start) - 2

    @cached_property
    def fanout(self) -> int:
        """Children of the widest node."""
        return int(np.diff(self.child_start).max())

    @cached_property
    def path_nodes(self) -> Ints:
        """Nodes from the root to each document's leaf, padded with -1: (documents, positions + 1)."""
        table = np.full((self.documents, self.positions + 1), -1, dtype=np.int32)
        node, depth = self.leaves.copy(), self.depth[self.leaves]
        for _ in range(self.positions + 1):
            table[np.arange(self.documents), depth] = node
            node, depth = np.where(depth > 0, self.parent[node], node), np.maximum(depth - 1, 0)
        return table

    @cached_property
    def paths(self) -> Ints:
        """Semantic ids in leaf order, padded with -1: (documents, positions)."""
        nodes = self.path_nodes[:, 1:]
        return np.where(nodes >= 0, self.value[nodes], -1).astype(np.int32)

    def semantic_id(self, document: int) -> SemanticId:
        """The path of one document (a number in leaf order)."""
        return tuple(int(v) for v in self.paths[document] if v >= 0)

    def children(self, node: int) -> range:
        """The nodes below `node`, in the order of their digits."""
        return range(int(self.child_start[node]), int(self.child_start[node + 1]))

    def check(self) -> None:
        """Raise DataError unless the arrays describe a tree whose leaves are exactly the documents."""
        nodes = self.nodes
        counts = np.diff(self.child_start)
        ok = (
            nodes > 0
            and len(self.child_start) == nodes + 1
            and all(len(a) == nodes for a in (self.parent, self.first_document, self.last_document))
            and self.child_start[0] == 1
            and self.child_start[-1] == nodes
            and bool((counts >= 0).all())
            and self.parent[0] == -1
            and bool((self.parent[1:] == np.repeat(np.arange(nodes), counts)).all())
            and bool((self.parent[1:] < np.arange(1, nodes)).all())
        )
        if ok:
            leaf = counts == 0
            brothers = self.parent[1:-1] == self.parent[2:]
            ok = (
                bool((np.sort(self.leaves) == np.flatnonzero(leaf)).all() if leaf.sum() == self.documents else False)
                and bool((self.value[1:] >= 0).all())
                and bool((self.value[2:][brothers] > self.value[1:-1][brothers]).all())
                and bool((self.first_document[self.leaves] == np.arange(self.documents)).all())
                and bool((self.last_document[self.leaves] == np.arange(1, self.documents + 1)).all())
                and (self.first_document[0], self.last_document[0]) == (0, self.documents)
                and bool((self.first_document[2:][brothers] == self.last_document[1:-1][brothers]).all())
                and bool((self.first_document[~leaf] == self.first_document[self.child_start[:-1][~leaf]]).all())
                and bool((self.last_document[~leaf] == self.last_document[self.child_start[1:][~leaf] - 1]).all())
            )
        if not ok:
            raise DataError("the trie is damaged: its arrays do not describe one tree with one leaf per document")

    def save(self, path: Path) -> None:
        """Write the arrays as one safetensors file."""
        from safetensors.numpy import save_file

        save_file({f.name: np.ascontiguousarray(getattr(self, f.name)) for f in fields(self)}, path)

    @classmethod
    def load(cls, path: Path) -> Trie:
        """Read and check what `save` wrote."""
        from safetensors.numpy import load_file

        arrays = load_file(path)
        missing = {f.name for f in fields(cls)} - set(arrays)
        if missing:
            raise DataError(f"{path.name} is damaged: the arrays {sorted(missing)} are missing")
        trie = cls(**{f.name: arrays[f.name].astype(np.int32, copy=False) for f in fields(cls)})
        trie.check()
        return trie
