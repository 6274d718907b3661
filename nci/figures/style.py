"""How every figure looks, and how it becomes files: titles and sizes in, PNG and SVG out. Knows no index."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterator
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
    digits = (1, 2, 5) if max(values) > 8 * min(values) else (1, 1.5, 2, 3, 4, 5, 6, 8)
    ticks = [digit * 10.0**power for power in range(-4, 8) for digit in digits]
    first = max((n for n, tick in enumerate(ticks) if tick <= min(values)), default=0)
    last = min((n for n, tick in enumerate(ticks) if tick >= max(values)), default=len(ticks) - 1)
    shown = ticks[first : last + 1][:: 1 if last - first < 10 else 3]
    axis.set_ticks(shown, [f"{tick:g}" for tick in shown])
    axis.set_ticks([], minor=True)


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
