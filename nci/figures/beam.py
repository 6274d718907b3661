"""Latency against recall by beam, measured on the queries of the split: one at a time for the time, all for recall.

Times are taken in rounds over all beams, and the quietest round of each counts: other work on the machine would else
bend the line.
"""

from __future__ import annotations

from math import inf

from tqdm import tqdm

from nci.bench.timing import device_name, measure
from nci.evaluate import evaluate
from nci.figures.scene import Scene, spread
from nci.figures.style import COLOURS, MARKERS, Drawing, canvas, label_points, legend_below, round_values
from nci.progress import hide_bars

BEAMS = (1, 3, 10, 30, 100, 300)
METRICS = ("R@1", "R@10", "R@100")
ROUNDS = 5
SECONDS = 0.3  # of each measurement of time
_MOST = 1000  # queries searched per beam
_DEPTH, _TIMED = 100, 10  # hits for recall, and for the time


def draw(scene: Scene) -> Drawing:
    queries, qrels = scene.judged()
    queries = [queries[i] for i in spread(len(queries), _MOST)]
    asked = {query.query_id: qrels[query.query_id] for query in queries}
    texts = [query.text for query in queries]
    index = scene.index
    points = [
        {"beam": beam, "ms": inf, **evaluate(index.run(queries, _DEPTH, beam=beam), asked, METRICS)}
        for beam in tqdm(BEAMS, desc="beams", disable=hide_bars())
    ]
    for point in points * ROUNDS:

        def search(batch: list[str], beam: int = int(point["beam"])) -> object:
            return index.search(batch, _TIMED, beam=beam)

        point["ms"] = min(point["ms"], measure(search, texts, batch=1, seconds=SECONDS).p50_ms)
    device = device_name(index.engine.device)
    title = f"{scene.name}, {len(queries):,} queries of {scene.split}: recall and time by beam"
    figure, (axes,) = canvas(title)
    times = [point["ms"] for point in points]
    for number, metric in enumerate(METRICS):
        heights = [100 * point[metric] for point in points]
        axes.plot(times, heights, color=COLOURS[number], marker=MARKERS[number], label=metric)
    axes.set(xscale="log", ylabel="recall (%)", xlabel=f"ms per query, median of one at a time\n{device}")
    axes.margins(x=0.08, y=0.12)
    axes.locator_params(axis="y", nbins=10)
    round_values(axes.xaxis, times)
    legend_below(figure, axes, columns=len(METRICS), title="numbers at the points: beam")
    label_points(axes, [(str(point["beam"]), (point["ms"], 100 * point[METRICS[-1]])) for point in points], size=9)
    return Drawing(figure, {"device": device, "split": scene.split, "queries": len(queries), "points": points})
