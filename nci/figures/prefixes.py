"""Probability of the retrieved documents over prefixes of their semantic ids, for two groups of similar queries.

Similar queries should put their probability on the same prefixes, and the two groups on different ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import exp

from nci.figures.scene import Scene
from nci.figures.style import COLOURS, Drawing, canvas, legend_below, short
from nci.records import Hit, SemanticId

DIGITS = 4
_SHOWN, _LEAST = 12, 0.005  # prefixes per group, and the probability that one needs


def draw(scene: Scene) -> Drawing:
    masses = {name: prefix_mass(hits) for name, hits in scene.found.items()}
    figure, panels = canvas(
        f"{scene.name}, {scene.asked}: probability of retrieved documents by id prefix", panels=2, width=11, height=5.2
    )
    colour = iter(COLOURS)
    for axes, group, letter in zip(panels, scene.groups, "AB", strict=True):
        best = Counter[SemanticId]()
        for query in group:
            best |= Counter(masses[query.query_id])  # the larger of both
        likely = [prefix for prefix, mass in best.most_common(_SHOWN) if mass >= _LEAST]
        shown = sorted(likely or [prefix for prefix, _ in best.most_common(_SHOWN)])
        width = 0.8 / len(group)
        for number, query in enumerate(group):
            places = [place + (number - (len(group) - 1) / 2) * width for place in range(len(shown))]
            heights = [masses[query.query_id].get(prefix, 0.0) for prefix in shown]
            label = f"{query.query_id}: {short(query.text)}"
            axes.bar(places, heights, width, color=next(colour), label=label)
        axes.set_xticks(range(len(shown)), [written(prefix) for prefix in shown], rotation=60, ha="right")
        axes.grid(axis="x", visible=False)
        axes.set(title=f"group {letter}", xlabel=f"first digits of the semantic id, {DIGITS} at most")
        axes.set(ylabel="probability", ylim=(0, None))
        legend_below(figure, axes, side="left" if letter == "A" else "right")
    figure.align_xlabels(panels)
    numbers = {
        "queries": scene.group_numbers(),
        "probability": {name: {written(p): mass for p, mass in by.items()} for name, by in masses.items()},
    }
    return Drawing(figure, numbers)


def prefix_mass(hits: Iterable[Hit]) -> dict[SemanticId, float]:
    """Probability of the hits below each prefix, in the order of the tree; scores are logarithms."""
    mass: dict[SemanticId, float] = {}
    for hit in hits:
        prefix = hit.semantic_id[:DIGITS]
        mass[prefix] = mass.get(prefix, 0.0) + exp(hit.score)
    return dict(sorted(mass.items()))


def written(prefix: SemanticId) -> str:
    return "-".join(map(str, prefix))
