"""Pictures that other commands make on the side: tables in, one file out; without matplotlib one line says so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nci.errors import MissingPackageError

log = logging.getLogger("nci")


def systems_plot(
    systems: Mapping[str, Mapping[str, float]], latency_ms: Mapping[str, float], picture: Path, *, title: str
) -> bool:
    """R@1 of every system over the time of one query; returns whether it could be drawn."""

    def draw() -> Any:
        from nci.figures.style import COLOURS, canvas, label_points, round_values

        figure, (axes,) = canvas(title, height=max(4.4, 2.5 + 0.15 * len(systems)))
        spots = {name: (max(latency_ms[name], 1e-3), 100 * row["R@1"]) for name, row in systems.items()}
        for name, spot in spots.items():
            axes.scatter(*spot, s=40, color=COLOURS[3] if name.startswith("nci") else COLOURS[0])
        axes.set(xscale="log", xlabel="ms per query, one at a time", ylabel="R@1 (%)")
        axes.margins(x=0.08, y=0.12)
        round_values(axes.xaxis, [time for time, _ in spots.values()])
        label_points(axes, list(spots.items()), size=8)
        return figure

    return _drawn(draw, picture)


def learning_curve(table: Path, picture: Path) -> bool:
    """Loss and dev metrics over the steps of `curve.csv`; returns whether it could be drawn."""

    def draw() -> Any:
        from nci.figures.curve import one_curve

        return one_curve(table)

    return _drawn(draw, picture)


def _drawn(draw: Callable[[], Any], picture: Path) -> bool:
    from nci.figures.style import styled, write

    try:
        with styled():
            write(draw(), picture)
    except MissingPackageError as error:
        log.info("no %s: %s", picture.name, error)
        return False
    return True
