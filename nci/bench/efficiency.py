"""The paper's efficiency table: a tree and sizes of networks in, latency and throughput beside the paper's out.

Weights are random, which cost the same time as trained ones, and there is no content score, which the paper has not.
The paper measured on one NVIDIA V100 with 32 GB; the ratio says how many times better the search here did on this device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nci import store
from nci.bench.compare import Settings, compare_shapes
from nci.bench.shapes import SHAPES, Shape, synthetic_trie
from nci.errors import ConfigError
from nci.trie import Trie

PAPER = {  # Table 5: ms of one query, queries per second
    ("small", 10): (78.46, 58.48),
    ("base", 10): (115.17, 52.55),
    ("large", 10): (188.60, 43.39),
    ("small", 100): (216.01, 6.12),
    ("base", 100): (269.31, 5.62),
    ("large", 100): (356.07, 4.75),
}
SIZES = {**SHAPES, "tiny": Shape("tiny", 1, 1, 32, 2, 64, adapter_layers=1)}
TOKENS = 32  # word pieces of a query
NQ320K = 109_739  # documents
_DEEP = (105, 272)  # clusters of NQ320k's fourth level, and the documents below them; all others end there or before
_HEADER = ("size", "beam", "paper ms", "nci ms", "ratio", "paper q/s", "nci q/s", "batch", "ratio")


@dataclass(frozen=True)
class Line:
    """One size at one beam: median time of one query at a time, throughput at the best batch, and the paper's figures."""

    size: str
    beam: int
    latency_ms: float
    qps: float
    batch: int
    paper_latency_ms: float | None
    paper_qps: float | None

    @property
    def times_faster(self) -> float | None:
        return None if self.paper_latency_ms is None else self.paper_latency_ms / self.latency_ms

    @property
    def times_more(self) -> float | None:
        return None if self.paper_qps is None else self.qps / self.paper_qps


def nq320k_trie() -> Trie:
    """A tree of NQ320k's shape: 30 children a node on three levels, about four documents below, a few one level deeper."""
    clusters, documents = _DEEP
    even = synthetic_trie(NQ320K - documents + clusters)
    deep = np.linspace(0, even.documents - 1, clusters).astype(int)
    copies = np.ones(even.documents, np.int64)
    copies[deep] = [len(part) for part in np.array_split(np.arange(documents), clusters)]
    paths = np.repeat(np.pad(even.paths, ((0, 0), (0, 1)), constant_values=-1), copies, axis=0)
    starts = np.cumsum(copies) - copies
    for document in deep:
        start, count = int(starts[document]), int(copies[document])
        paths[start : start + count, even.positions] = np.arange(count)
    return Trie.from_paths(paths)[0]


def tree_of(index: str | None) -> Trie:
    """The tree of an index, or one of NQ320k's shape."""
    return nq320k_trie() if index is None else Trie.load(store.resolve(Path(index)) / "trie.safetensors")


def measure_sizes(trie: Trie, sizes: Sequence[str], settings: Settings, *, device: str) -> list[Line]:
    """A line per size and beam, in the order of the paper's table: by beam, then by size."""
    unknown = [name for name in sizes if name not in SIZES]
    if unknown or not sizes:
        raise ConfigError(f"--sizes are out of {', '.join(SIZES)}; not {unknown[0] if unknown else 'nothing'!r}")
    settings = replace(settings, batches=sorted({1, *settings.batches}))
    texts = [f"what is the answer to question {n} of about {n * 7919 % 4001}" for n in range(4000)]
    lines = []
    for name in dict.fromkeys(sizes):
        rows = compare_shapes(trie, SIZES[name], texts, settings, device=device, length=TOKENS)
        for beam in settings.beams:
            measured = [row for row in rows if row.beam == beam]
            one = next(row for row in measured if row.batch == 1)
            best = max(measured, key=lambda row: row.qps)
            lines.append(Line(name, beam, one.p50_ms, best.qps, best.batch, *PAPER.get((name, beam), (None, None))))
    return sorted(lines, key=lambda line: list(settings.beams).index(line.beam))


def text(lines: Sequence[Line], trie: Trie, device: str) -> str:
    """For people."""
    rows = [_HEADER, *map(_cells, lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    out = [
        "  ".join(cell.rjust(width) if place else cell.ljust(width) for place, (cell, width) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    notes = [
        f"nci: {device}, {trie.documents:,} documents, {TOKENS} word pieces a query; ms: one query at a time; q/s: best batch.",
        "paper: its Table 5, on an NVIDIA V100 with 32 GB. ratio: how many times better nci is; other hardware is part of it.",
    ]
    return "\n".join([*out, *notes])


def latex(lines: Sequence[Line]) -> str:
    """The same as a tabular."""
    head = " & ".join(_HEADER) + r" \\ \hline"
    rows = [" & ".join(_cells(line)) + r" \\" for line in lines]
    return "\n".join([r"\begin{tabular}{l" + "r" * (len(_HEADER) - 1) + "}", head, *rows, r"\end{tabular}", ""])


def as_json(lines: Sequence[Line], trie: Trie, device: str) -> dict[str, Any]:
    rows = [{**asdict(line), "times_faster": line.times_faster, "times_more": line.times_more} for line in lines]
    return {"device": device, "paper_device": "NVIDIA V100 32 GB", "documents": trie.documents, "rows": rows}


def _cells(line: Line) -> tuple[str, ...]:
    return (
        line.size,
        str(line.beam),
        _number(line.paper_latency_ms),
        _number(line.latency_ms),
        _number(line.times_faster),
        _number(line.paper_qps),
        _number(line.qps),
        str(line.batch),
        _number(line.times_more),
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"
