"""The shape of the tree: how deep documents lie and how many children clusters have. Needs no queries."""

from __future__ import annotations

import numpy as np

from nci.figures.scene import Scene
from nci.figures.style import COLOURS, Drawing, canvas


def draw(scene: Scene) -> Drawing:
    trie = scene.index.trie
    fanout = np.diff(trie.child_start)
    depths = np.bincount(trie.depth[trie.leaves])  # documents by digits of their ids
    # Children of inner nodes, one list per level.
    children = [fanout[(trie.depth == level) & (fanout > 0)] for level in range(trie.positions)]
    title = f"{scene.name}: tree of {trie.documents:,} documents and {trie.nodes:,} nodes"
    figure, (left, right) = canvas(title, panels=2, width=10)
    bars = left.bar(range(len(depths)), depths, color=COLOURS[0], width=0.7)
    left.bar_label(bars, [f"{count:,}" if count else "" for count in depths], padding=2)
    left.set(xlabel="digits of the semantic id", ylabel="documents", title="depth of documents")
    left.set_xticks(range(1, len(depths)))
    left.set_xlim(0.4, len(depths) - 0.4)
    left.margins(y=0.1)
    right.hist(
        children,
        bins=np.arange(0.5, trie.fanout + 1.5).tolist(),
        stacked=True,
        color=[COLOURS[level % len(COLOURS)] for level in range(len(children))],
        label=["the root", *(_level(level, len(each)) for level, each in enumerate(children[1:], 1))],
    )
    right.set(xlabel="children", ylabel="clusters", title="fan-out of clusters")
    right.xaxis.get_major_locator().set_params(integer=True)
    right.yaxis.get_major_locator().set_params(integer=True)
    right.set_xlim(0, trie.fanout + 1)
    right.legend()
    numbers = {
        "documents": trie.documents,
        "nodes": trie.nodes,
        "documents_by_depth": {str(depth): int(count) for depth, count in enumerate(depths) if count},
        "clusters_by_fanout": [
            {str(size): int(count) for size, count in enumerate(np.bincount(each)) if count} for each in children
        ],
    }
    return Drawing(figure, numbers)


def _level(level: int, clusters: int) -> str:
    return f"after {level} digit{'s' if level > 1 else ''}: {clusters:,} cluster{'s' if clusters > 1 else ''}"
