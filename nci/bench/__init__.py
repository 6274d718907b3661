"""How fast search is, beside other systems on the same tree: measured rows in, one table and one JSON file out.

A system is anything with a name and a `search`. The other modules hold the systems to compare with, the clock, the
limits of the hardware and the shapes; this one imports none of them and knows no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

_HEADER = ("system", "model", "documents", "beam", "p50 ms", "p99 ms", "queries/s", "batch", "roofline", "x nci")
_LEFT = 2  # columns of words, aligned left


class System(Protocol):
    """Something to measure."""

    name: str

    def search(self, texts: list[str], k: int) -> Any:
        """The best k of each text; finished when it returns, with the results on the host."""


@dataclass(frozen=True)
class Row:
    """One measurement: a system at one beam and one batch size.

    Args:
        system: Its name: nci, paper-search, hf-generate, encoder, dense, dense-hnsw or bm25.
        model: Shape of the network, or the name of the index.
        documents: Size of the tree.
        beam: None for systems without one.
        batch: Queries per call.
        p50_ms: Median time of a call.
        p99_ms: 99th percentile of the same.
        qps: Queries per second.
        roofline: Part of the hardware's limit that was reached, at most 1; None where it is not counted.
    """

    system: str
    model: str
    documents: int
    beam: int | None
    batch: int
    p50_ms: float
    p99_ms: float
    qps: float
    roofline: float | None


def table(rows: Sequence[Row]) -> str:
    """One line per system and beam: times at batch 1, throughput at the best batch, and how much faster nci is."""
    groups: dict[tuple[str, str, int, int | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.system, row.model, row.documents, row.beam), []).append(row)
    best = {key: max(measured, key=lambda row: row.qps) for key, measured in groups.items()}
    lines = [_HEADER]
    for (system, model, documents, beam), measured in groups.items():
        one = next((row for row in measured if row.batch == 1), None)
        top = best[system, model, documents, beam]
        # A system without a beam stands beside the cheapest search of nci.
        rivals = [key for key in best if key[:3] == ("nci", model, documents) and (beam is None or key[3] == beam)]
        nci = best[min(rivals, key=lambda key: key[3] or 0)] if rivals else None
        lines.append(
            (
                system,
                model,
                f"{documents:,}",
                "-" if beam is None else str(beam),
                _number(one.p50_ms if one else None),
                _number(one.p99_ms if one else None),
                _number(top.qps),
                str(top.batch),
                "-" if top.roofline is None else f"{100 * top.roofline:.1f} %",
                _number(nci.qps / top.qps if nci and top.qps else None),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(c.ljust(w) if i < _LEFT else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    ]
    text.insert(1, "  ".join("-" * width for width in widths))
    notes = [
        "p50 and p99: one query at a time; queries/s: at the best batch size, which is the next column.",
        "x nci: throughput of nci over that of the system, at the same beam; at nci's smallest where it has none.",
    ]
    return "\n".join(line.rstrip() for line in [*text, *notes])


def as_json(device: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Every measurement; what is no number becomes null, since JSON has no NaN."""
    return {"device": device, "rows": [{k: _finite(v) for k, v in asdict(row).items()} for row in rows]}


def write_json(path: Path, device: str, rows: Sequence[Row]) -> None:
    """Write every measurement into a file."""
    value = as_json(device, rows)
    path.write_text(json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float | None) -> str:
    """Three significant digits below a thousand, thousands separated above."""
    if value is None or not math.isfinite(value):
        return "-"
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
