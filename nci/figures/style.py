"""How every figure looks, and how it becomes files: titles and sizes in, PNG and SVG out. Knows no index."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from nci.errors import MissingPackageError

# Okabe and Ito's colours, which people with any colour vision tell apart; without yellow, which is faint on white.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
GREY = "#B0B0B0"
_STYLE = {
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10,
    "axes.titlesize": 11,
    "figure.titlesize": 12,
    "grid.alpha": 0.3,
    "legend.fontsize": 9,
    "legend.framealpha": 0.9,
    "svg.hashsalt": "nci",  # the same figure is the same file
    "text.parse_math": False,  # a query may hold dollar signs
}


class Drawing(NamedTuple):
    """A drawn figure and the numbers behind it, ready for JSON."""

    figure: Any
    numbers: dict[str, Any]


@contextmanager
def styled() -> Iterator[None]:
    """Everything drawn and saved inside looks alike; refuses where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingPackageError('figures need matplotlib: pip install "nci[plot]"') from error
    # A letter that the font lacks becomes a box, which is no reason for a warning per letter.
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        yield


def canvas(title: str, *, panels: int = 1, width: float = 7.0, height: float = 4.4) -> tuple[Any, list[Any]]:
    """An empty figure and its axes, side by side; belongs to no window and to no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def round_values(axis: Any, values: Collection[float]) -> None:
    """Round ticks of a logarithmic axis around some values, written without powers."""
    from matplotlib.ticker import MaxNLocator

    low, high = min(values), max(values)
    if high < 4 * low:
        around = MaxNLocator(8, steps=[1, 2, 5, 10]).tick_values(min(low, 0.9 * high), high)
        shown = [float(tick) for tick in around if tick > 0]
    else:
        digits = (1, 2, 5) if high > 50 * low else (1, 1.5, 2, 3, 4, 5, 6, 8)
        ticks = [digit * 10.0**power for power in range(-4, 8) for digit in digits]
        first = max((n for n, tick in enumerate(ticks) if tick <= low), default=0)
        last = min((n for n, tick in enumerate(ticks) if tick >= high), default=len(ticks) - 1)
        shown = ticks[first : last + 1][:: 1 if last - first < 14 else 3]
    axis.set_ticks(shown, [f"{tick:g}" for tick in shown])
    axis.set_ticks([], minor=True)


def label_points(axes: Any, labelled: Sequence[tuple[str, tuple[float, float]]], *, size: float) -> None:
    """Write names beside points, each where it covers no other name or point of the axes; call it when all else is drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    figure = axes.figure
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()  # sets the limits, and places the axes
    inside, scale = axes.get_window_extent(renderer), 72 / figure.dpi
    spots = [axes.transData.transform(spot) for _, spot in labelled]
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in spots]
    for (name, spot), (x, y) in zip(labelled, spots, strict=True):
        text = axes.annotate(name, spot, (0, 0), textcoords="offset points", fontsize=size, in_layout=False)
        width, height = text.get_window_extent(renderer).size
        boxes = [
            Bbox.from_bounds(x + right - width * share, y + up, width, height)
            for away in (5, 12, 20, 30, 42, 56)
            for share, right in ((0, away), (1, -away), (0.5, 0))
            for up in (away / 2, -away / 2 - height, away + 2, -away - 2 - height)
        ]
        box = min(boxes, key=lambda box: sum(map(_overlap, [box] * len(taken), taken)) + 2 * _outside(box, inside))
        text.set_position(((box.x0 - x) * scale, (box.y0 - y) * scale))
        text.set_verticalalignment("bottom")
        if max(box.x0 - x, x - box.x1, box.y0 - y, y - box.y1) > 10:
            axes.annotate(
                "",
                spot,
                ((min(max(x, box.x0), box.x1) - x) * scale, (min(max(y, box.y0), box.y1) - y) * scale),
                textcoords="offset points",
                arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0},
                in_layout=False,
            )
        taken.append(box)


def _overlap(one: Any, other: Any) -> float:
    """Area that two boxes share."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return float(max(width, 0) * max(height, 0))


def _outside(box: Any, frame: Any) -> float:
    return float(box.width * box.height) - _overlap(box, frame)


def legend_below(figure: Any, axes: Any, *, side: str = "center", columns: int = 1, title: str = "") -> None:
    """The legend of a panel under the whole figure (center, left or right), where it can hide nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc=f"outside lower {side}", ncols=columns, frameon=False, title=title or None)


def save(figure: Any, stem: Path) -> list[Path]:
    """Write STEM.png and STEM.svg, each whole or not at all."""
    return [write(figure, stem.with_name(f"{stem.name}.{kind}")) for kind in ("png", "svg")]


def write(figure: Any, path: Path) -> Path:
    """Write one picture of the kind that its name ends in, whole or not at all."""
    staged = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    try:
        figure.savefig(staged, dpi=150, metadata=metadata)
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)
    return path


def short(text: str, width: int = 64) -> str:
    """The beginning of a text that fits into a legend."""
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[:width].rsplit(" ", 1)[0] + " …"
