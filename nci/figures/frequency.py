"""Recall by how many training queries a relevant document had: seen against unseen, with intervals.

A pair of a query and a relevant document counts as found when the document is among the first k. Documents are drawn with
replacement for the intervals, with all of their queries, since these are no independent draws.
"""

from __future__ import annotations

from typing import Any

from nci.figures.scene import Scene
from nci.figures.style import COLOURS, Drawing, canvas, legend_below
from nci.significance import paired_bootstrap

DEPTHS = (1, 10)
_SAMPLES = 2000
_FEW = 10  # pairs; fewer say little, and an interval over them less


def draw(scene: Scene) -> Drawing:
    queries, qrels = scene.judged()
    trained = scene.trained_on()
    run = scene.index.run(queries, max(DEPTHS))
    found: dict[str, dict[tuple[str, str], int]] = {}  # bin -> (query, document) -> rank, 0 when not found
    starts: dict[str, int] = {}
    for query_id, grades in qrels.items():
        ranked = list(run[query_id])
        for doc_id in (doc_id for doc_id, grade in grades.items() if grade > 0):
            name, start = bin_of(trained.get(doc_id, 0))
            starts[name] = start
            found.setdefault(name, {})[query_id, doc_id] = ranked.index(doc_id) + 1 if doc_id in ranked else 0
    names = sorted(starts, key=starts.__getitem__)
    bins: list[dict[str, Any]] = [{"training_queries": name, **_summary(found[name])} for name in names]
    total = sum(each["pairs"] for each in bins)
    title = f"{scene.name}, {scene.split}: {total:,} pairs of a query and a relevant document"
    figure, (axes,) = canvas(title, width=max(5.5, 1.3 * len(bins) + 2))
    width = 0.8 / len(DEPTHS)
    for number, k in enumerate(DEPTHS):
        places = [place + (number - (len(DEPTHS) - 1) / 2) * width for place in range(len(bins))]
        values = [100 * each[f"found@{k}"] for each in bins]
        bars = axes.bar(places, values, width, color=COLOURS[number], label=f"in the first {k}")
        for place, each, drawn in zip(places, bins, bars, strict=True):
            if each["pairs"] < _FEW:
                drawn.set_alpha(0.35)
                continue
            low, share, high = (100 * each[f"{what}@{k}"] for what in ("low", "found", "high"))
            axes.errorbar(place, share, [[share - low], [high - share]], capsize=3, color="black")
    labels = [f"{each['training_queries']}\nn = {each['pairs']:,}" for each in bins]
    axes.set_xticks(range(len(bins)), labels)
    axes.grid(axis="x", visible=False)
    axes.set(ylim=(0, 105), ylabel="relevant documents found (%)", xlabel="training queries of the relevant document")
    legend_below(figure, axes, columns=len(DEPTHS), title=f"share found, with 95 % intervals; lighter: n < {_FEW}")
    return Drawing(figure, {"split": scene.split, "bins": bins})


def bin_of(count: int) -> tuple[str, int]:
    """Name and first number of the bin: 0, 1, 2, 3-4, 5-8, 9-16 and so on, doubling.

    >>> [bin_of(count)[0] for count in (0, 1, 2, 3, 4, 5, 8, 9)]
    ['0 (unseen)', '1', '2', '3-4', '3-4', '5-8', '5-8', '9-16']
    """
    if count == 0:
        return "0 (unseen)", 0
    last = 1 << (count - 1).bit_length()
    first = last // 2 + 1 if last > 1 else 1
    return (str(last) if first == last else f"{first}-{last}"), first


def _summary(ranks: dict[tuple[str, str], int]) -> dict[str, float]:
    """Share found at each depth with its interval, and how many pairs and documents there are."""
    keys = {pair: f"{number}" for number, pair in enumerate(ranks)}
    groups = {key: doc_id for (_, doc_id), key in keys.items()}
    nothing = dict.fromkeys(groups, 0.0)
    out: dict[str, float] = {"pairs": len(ranks), "documents": len(set(groups.values()))}
    for k in DEPTHS:
        values = {keys[pair]: float(1 <= rank <= k) for pair, rank in ranks.items()}
        test = paired_bootstrap(values, nothing, groups=groups, samples=_SAMPLES)
        out |= {f"found@{k}": test.difference, f"low@{k}": test.low, f"high@{k}": test.high}
    return out
