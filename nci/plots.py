"""Pictures of what the stages wrote: files in, PNG out; without matplotlib nothing is drawn and one line says so."""

from __future__ import annotations

import csv
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("nci")


def systems_plot(systems: Mapping[str, Mapping[str, float]], latency_ms: Mapping[str, float], picture: Path) -> bool:
    """R@1 of every system over the time of one query; returns whether it could be drawn."""
    pyplot = _pyplot(picture)
    if pyplot is None:
        return False
    figure, axis = pyplot.subplots(figsize=(7, 4.5), constrained_layout=True)
    for name, metrics in systems.items():
        x, y = max(latency_ms[name], 1e-3), 100 * metrics["R@1"]
        axis.scatter(x, y, s=40, color="tab:red" if name.startswith("nci") else "tab:blue")
        axis.annotate(name, (x, y), textcoords="offset points", xytext=(5, 4), fontsize=8)
    axis.set(xscale="log", xlabel="ms per query, one at a time", ylabel="R@1 (%)", title="quality and cost")
    axis.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
    return True


def _pyplot(picture: Path) -> Any | None:
    try:
        import matplotlib
    except ImportError:
        log.info('no %s: plots need matplotlib: pip install "nci[plot]"', picture.name)
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def learning_curve(table: Path, picture: Path) -> bool:
    """Loss and dev metrics over the steps of `curve.csv`; returns whether it could be drawn."""
    pyplot = _pyplot(picture)
    if pyplot is None:
        return False
    with table.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    names = [name for name in (rows[0] if rows else {}) if name not in ("step", "seconds", "learning_rate", "loss")]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), constrained_layout=True)
    points = [(int(row["step"]), float(row["loss"])) for row in rows if row.get("loss")]
    left.plot(*zip(*points, strict=True)) if points else None
    left.set(xlabel="step", ylabel="training loss", title="loss")
    for name in names:
        points = [(int(row["step"]), 100 * float(row[name])) for row in rows if row.get(name)]
        right.plot(*zip(*points, strict=True), marker="o", label=name) if points else None
    right.set(xlabel="step", ylabel="%", title="search on dev")
    if names:
        right.legend()
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
    return True
