"""Learning curves: `reports/curve.csv` of one or more indexes in, one line each out. Opens no model.

A curve lies beside the generations of an index, in the folder where it was built; a generation alone has none.
"""

from __future__ import annotations

import csv
import json
import logging
import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from nci import store
from nci.config import Config
from nci.errors import DataError
from nci.figures.scene import CannotDrawError, Scene
from nci.figures.style import COLOURS, MARKERS, Drawing, canvas, legend_below, short

log = logging.getLogger("nci")
Points = list[tuple[float, float]]
_NO_METRICS = ("step", "seconds", "learning_rate", "loss")


class Curve(NamedTuple):
    """Points (step or epoch, value) of one training: its loss, and the metrics on dev by name, in percent."""

    loss: Points
    dev: dict[str, Points]


def draw(scene: Scene) -> Drawing:
    curves: dict[str, Curve] = {}
    metrics: list[str] = []
    for number, folder in enumerate(scene.folders, 1):
        try:
            label, metric, curve = _of_index(Path(folder))
        except CannotDrawError as error:
            if len(scene.folders) == 1:
                raise
            log.warning("curve: left out: %s", error)
            continue
        curves[label if label not in curves else f"{label} [{number}]"] = curve
        metrics.append(metric)
    if not curves:
        raise CannotDrawError("none of these indexes has a learning curve")
    wanted = " or ".join(dict.fromkeys(metrics))
    names = ", ".join(Path(folder).resolve().name for folder in scene.folders)
    figure, (left, right) = canvas(f"{short(names)}: learning curves", panels=2, width=10)
    for number, (label, curve) in enumerate(curves.items()):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        _line(left, curve.dev.get(metrics[number], []), color=colour, marker=marker, label=label)
        _line(right, curve.loss, color=colour, label=label)
    left.set(xlabel="epoch", ylabel=f"{wanted} on dev (%)")
    right.set(xlabel="epoch", ylabel="training loss")
    if not left.lines:
        left.text(0.5, 0.5, "trained without dev queries", ha="center", transform=left.transAxes)
    for axes in (left, right):
        axes.set_xlim(left=0)
    legend_below(figure, left if left.lines else right)
    return Drawing(figure, {"curves": {label: curve._asdict() for label, curve in curves.items()}})


def one_curve(table: Path) -> Any:
    """The figure of a single table over its steps with all of its metrics, as a build draws it."""
    curve = read_curve(table)
    figure, (left, right) = canvas("learning curve", panels=2, width=10)
    _line(left, curve.loss, color=COLOURS[0])
    left.set(xlabel="step", ylabel="training loss", title="loss")
    for number, (name, points) in enumerate(curve.dev.items()):
        _line(right, points, color=COLOURS[number % len(COLOURS)], marker=MARKERS[number % len(MARKERS)], label=name)
    right.set(xlabel="step", ylabel="%", title="search on dev")
    if right.lines:
        right.legend()
    return figure


def read_curve(table: Path, epochs: float | None = None) -> Curve:
    """The points of a table; over steps, or over epochs where their number is given: the last row is the end."""
    try:
        with table.open(newline="", encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream))
        last = max((int(row["step"]) for row in rows), default=1)
        scale = 1.0 if epochs is None else epochs / last

        def points(name: str, factor: float) -> Points:
            return [(scale * int(row["step"]), factor * float(row[name])) for row in rows if row.get(name)]

        names = [name for name in (rows[0] if rows else {}) if name not in _NO_METRICS]
        return Curve(points("loss", 1.0), {name: points(name, 100.0) for name in names})
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise DataError(f"{table} is no learning curve: expected columns step, loss and metrics of numbers") from error


def _of_index(folder: Path) -> tuple[str, str, Curve]:
    """Label, metric of selection and curve of an index."""
    generation = store.resolve(folder)
    manifest = store.read_manifest(generation)
    config = Config.from_dict(manifest["config"])
    if "pairs" not in manifest.get("report", {}):
        raise CannotDrawError(f"{folder} was not trained, so that it has no learning curve")
    table = generation.parent / "reports" / "curve.csv"
    if not table.exists():
        raise CannotDrawError(f"there is no {table}: a learning curve stays in the folder where an index was built")
    encoder = Path(config.model.encoder or config.embed.encoder).name
    millions = parameters(generation / "model.safetensors") / 1e6
    label = f"{folder.resolve().name} ({encoder}, {millions:.3g} M parameters)"
    return label, config.train.metric, read_curve(table, config.train.epochs)


def parameters(weights: Path) -> int:
    """How many numbers a safetensors file holds, by its header alone."""
    with weights.open("rb") as stream:
        header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
    return sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _line(axes: Any, points: Points, **look: Any) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), **look)
