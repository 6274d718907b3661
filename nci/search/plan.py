"""Tree and beam -> how many rows each level of a search has. No tensors, no model.

A level decodes `rows` prefixes per query, looks at their children and keeps the best `keep`. All sizes are fixed before
the first query is read, so that a GPU can run a whole search without asking the host anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nci.errors import ConfigError
from nci.trie import Trie

MOST_FIRST_ROWS = 64


@dataclass(frozen=True)
class Level:
    """One step down the tree.

    Args:
        rows: Prefixes decoded per query.
        keep: Children kept per query: the beam, or all of them where there are fewer.
        fanout: Children of the widest node of the level.
        digits: Digits of an id that ends here.
    """

    rows: int
    keep: int
    fanout: int
    digits: int


@dataclass(frozen=True)
class Plan:
    """A search, decided.

    Args:
        levels: From the root down.
        k: Results per query.
        length_penalty: Scores are log p / (digits + 1) ** length_penalty.
        first_children: Inner children of the root where they are decoded together with it, else nothing.
        longest: Digits of the longest id.
        fixed: Every level has the shape that the plan says, whatever the queries are; otherwise rows without hope go.
        certain: No level has fewer rows than the beam may need. Where it has, a query that needed more says so.
        cut: The levels end above the deepest leaves, since hardly a path goes on there; a query with one says so.
        whole: Levels end with leaves. Otherwise the search stops above them and finds clusters.
    """

    levels: tuple[Level, ...]
    k: int
    length_penalty: float
    first_children: tuple[int, ...]
    longest: int
    fixed: bool
    certain: bool
    cut: bool
    whole: bool

    @property
    def rows(self) -> int:
        """Rows decoded per query."""
        return sum(level.rows for level in self.levels)


def make_plan(
    trie: Trie,
    *,
    beam: int | Sequence[int],
    k: int,
    length_penalty: float = 0.0,
    stop_depth: int | None = None,
    fixed: bool = False,
    certain: bool = True,
    least: int = 8,
) -> Plan:
    """The plan of a search.

    Args:
        beam: Prefixes kept per level; of several numbers the last one goes on.
        stop_depth: Stop after so many digits and return clusters.
        fixed: Shapes that do not depend on the queries.
        certain: Give every level all rows it may need. Otherwise a level where few prefixes are expected to go on gets
            four times as many as expected, and the search of a query that needs more is done again.
        least: Rows of such a level at least; with 0 the search ends above a level where less than half a row is expected.
    """
    beams = (beam,) if isinstance(beam, int) else tuple(beam)
    if not beams or min(beams) < 1:
        raise ConfigError(f"--beam is at least 1 at every level, not {','.join(map(str, beams)) or 'nothing'}")
    if stop_depth is not None and stop_depth < 1:
        raise ConfigError(f"--stop-depth is at least 1, not {stop_depth}")
    counts = np.diff(trie.child_start)
    depth = min(stop_depth or trie.positions, trie.positions)
    levels: list[Level] = []
    rows, enough, cut = 1, True, False
    for level in range(depth):
        start, stop = trie.level_start[level : level + 2]
        below = trie.level_start[level + 1 : level + 3]
        fanout = int(counts[start:stop].max())
        wide = beams[min(level, len(beams) - 1)]
        keep = min(wide, rows * fanout, below[1] - below[0])
        levels.append(Level(rows, keep, fanout, level + 1))
        inner = int((counts[below[0] : below[1]] > 0).sum())
        rows = min(keep, inner)
        if not certain and level and inner:
            expected = keep * inner / (below[1] - below[0])
            if not least and expected < 0.5 and level + 1 < depth:
                enough, cut = False, True
                break
            likely = 8 * max(1, int(np.ceil(4 * expected / 8)))
            rows, enough = min(rows, likely), enough and likely >= rows
    children = np.arange(*trie.level_start[1:3]) if depth > 1 else np.zeros(0, dtype=int)
    first = children[counts[children] > 0]
    if len(first) > max(MOST_FIRST_ROWS, beams[0]):
        first = first[:0]
    if len(first):  # rows of children that the beam drops are decoded all the same
        levels[1] = replace(levels[1], rows=len(first))
    return Plan(
        tuple(levels),
        k,
        length_penalty,
        tuple(int(node) for node in first),
        trie.positions,
        fixed,
        enough,
        cut,
        depth == trie.positions,
    )
