"""The documents that two groups of similar queries retrieve, laid out by t-SNE of their vectors.

Twice the same points: coloured by the query that gives them the most probability, and by the first digit of their ids.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from nci.figures.scene import CannotDrawError, Scene
from nci.figures.style import COLOURS, GREY, MARKERS, Drawing, canvas, legend_below, short
from nci.records import Hit

_FEWEST = 5  # documents; fewer make no map


def draw(scene: Scene) -> Drawing:
    from sklearn.manifold import TSNE

    best: dict[str, tuple[str, Hit]] = {}  # doc_id -> the query that likes it most
    for name, hits in scene.found.items():
        for hit in hits:
            if hit.doc_id not in best or hit.score > best[hit.doc_id][1].score:
                best[hit.doc_id] = (name, hit)
    if len(best) < _FEWEST:
        raise CannotDrawError(f"these queries retrieve {len(best)} documents: a map needs {_FEWEST} at least")
    place = {doc_id: number for number, doc_id in enumerate(scene.index.doc_ids)}
    vectors = scene.index.vectors()[[place[doc_id] for doc_id in best]]
    perplexity = min(30.0, (len(best) - 1) / 3)
    points = TSNE(metric="cosine", init="random", perplexity=perplexity, random_state=0).fit_transform(vectors)
    by_query = [name for name, _ in best.values()]
    by_digit = [hit.semantic_id[0] for _, hit in best.values()]
    figure, (left, right) = canvas(
        f"{scene.name}, {scene.asked}: {len(best)} documents that they retrieve (t-SNE)", panels=2, width=11, height=6
    )
    queries = [query for group in scene.groups for query in group]
    _scatter(left, points, by_query, {query.query_id: f"{query.query_id}: {short(query.text)}" for query in queries})
    left.set(title="by query")
    legend_below(figure, left, side="left")
    frequent = sorted(digit for digit, _ in Counter(by_digit).most_common(len(COLOURS)))
    _scatter(right, points, by_digit, {digit: str(digit) for digit in frequent})
    right.set(title="by the first digit of the semantic id")
    legend_below(figure, right, side="right", columns=4)
    for axes in (left, right):
        axes.set(xticks=[], yticks=[], xlabel="t-SNE 1 (no unit)", ylabel="t-SNE 2 (no unit)")
    rows = zip(best, points.tolist(), by_query, by_digit, strict=True)
    documents = [{"doc_id": d, "x": x, "y": y, "query": query, "digit": digit} for d, (x, y), query, digit in rows]
    return Drawing(figure, {"queries": scene.group_numbers(), "documents": documents})


def _scatter(axes: Any, points: Any, kinds: list[Any], labels: dict[Any, str]) -> None:
    """Points by kind; kinds without a label are grey."""
    for number, (kind, label) in enumerate(labels.items()):
        chosen = np.array([each == kind for each in kinds])
        look = {"color": COLOURS[number], "marker": MARKERS[number], "edgecolors": "white", "linewidths": 0.4}
        axes.scatter(*points[chosen].T, s=36, label=label, **look)
    others = np.array([kind not in labels for kind in kinds])
    if others.any():
        axes.scatter(*points[others].T, s=22, color=GREY, label="other", zorder=0)
