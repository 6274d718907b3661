"""Figures that the paper prints: its two main tables, row by row, to stand beside one's own. Nothing here was run.

The paper's Recall@k counts a query as found when any of its relevant documents is among the first k: that is Success@k
by its ir-measures name, and equals R@k where every query has one relevant document, as in NQ320k.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nci.errors import ConfigError, DataError

DSI, AR2 = "which has it from DSI's paper", "which has it from AR2's paper"


@dataclass(frozen=True)
class Cited:
    """A row of a table: percentages by the metrics of the table, None where it has none."""

    system: str
    values: tuple[float | None, ...]
    origin: str = ""  # where the paper itself has it from


@dataclass(frozen=True)
class CitedTable:
    """One table of the paper.

    Args:
        number: Where it stands.
        columns: The paper's names of the metrics.
        metrics: ir-measures names of each column, the exact one first.
        rows: In the paper's order.
    """

    number: int
    columns: tuple[str, ...]
    metrics: tuple[tuple[str, ...], ...]
    rows: tuple[Cited, ...]


TABLES = {
    "nq320k": CitedTable(
        1,
        ("Recall@1", "Recall@10", "Recall@100", "MRR@100"),
        (("Success@1", "R@1"), ("Success@10", "R@10"), ("Success@100", "R@100"), ("RR@100",)),
        (
            Cited("NCI (base)", (65.86, 85.20, 92.42, 73.12)),
            Cited("NCI (large)", (66.23, 85.27, 92.49, 73.37)),
            Cited("NCI (ensemble)", (70.46, 89.35, 94.75, 77.82)),
            Cited("NCI w/ qg-ft (base)", (68.91, 88.48, 94.48, 76.17)),
            Cited("NCI w/ qg-ft (large)", (68.65, 88.45, 94.53, 76.10)),
            Cited("NCI w/ qg-ft (ensemble)", (72.78, 91.76, 96.22, 80.12)),
            Cited("DSI (base)", (27.40, 56.60, None, None), DSI),
            Cited("DSI (large)", (35.60, 62.60, None, None), DSI),
            Cited("DSI (XXL)", (40.40, 70.30, None, None), DSI),
            Cited("SEAL (base)", (56.98, 79.97, 91.39, 65.48)),
            Cited("SEAL (large)", (59.93, 81.24, 90.93, 67.70)),
            Cited("ANCE (FirstP)", (51.33, 80.33, 91.78, 61.71)),
            Cited("ANCE (MaxP)", (52.63, 80.38, 91.31, 62.84)),
            Cited("BERT + BruteForce", (28.65, 53.42, 73.16, 36.60)),
            Cited("BERT + ANN (Faiss)", (27.92, 53.63, 73.01, 37.08)),
            Cited("BM25 + DocT5Query", (35.43, 61.83, 76.92, 44.47)),
            Cited("BM25", (15.11, 32.48, 50.54, 21.07)),
        ),
    ),
    "triviaqa": CitedTable(
        2,
        ("Recall@5", "Recall@20", "Recall@100", "R-Precision"),
        (("Success@5", "R@5"), ("Success@20", "R@20"), ("Success@100", "R@100"), ("Rprec",)),
        (
            Cited("NCI (base)", (90.49, 94.45, 96.94, 73.90)),
            Cited("NCI (large)", (91.73, 95.17, 97.44, 74.94)),
            Cited("NCI (ensemble)", (94.60, 96.89, 98.20, 80.84)),
            Cited("SEAL (base)", (86.3, 90.5, 91.5, 68.1)),
            Cited("SEAL (large)", (87.7, 91.8, 92.6, 69.2)),
            Cited("AR2-G", (78.2, 84.4, 87.9, None), AR2),
            Cited("coCondenser", (76.8, 83.2, 87.3, None), AR2),
            Cited("Condenser", (None, 81.9, 86.2, None), AR2),
            Cited("Individual Top-k", (76.8, 83.1, 87.0, None), AR2),
            Cited("Joint Top-k", (74.1, 81.3, 86.3, None), AR2),
            Cited("RDR", (None, 82.5, 87.3, None), AR2),
            Cited("ANCE", (None, 80.3, 85.3, None), AR2),
            Cited("DPR", (None, 79.3, 84.9, None), AR2),
            Cited("GAR", (73.1, 80.4, 85.7, None), AR2),
            Cited("BM25 + DocT5Query", (59.71, 72.06, 82.71, 39.66)),
            Cited("BM25", (56.91, 69.45, 80.24, 37.29)),
        ),
    ),
}


@dataclass(frozen=True)
class Ours:
    """Rows of one's own, in percent, and the columns whose metric is not exactly the paper's."""

    rows: dict[str, tuple[float | None, ...]]
    inexact: tuple[str, ...]
    data: str = ""  # name of the data set, where the file says it
    split: str = ""


def table_of(name: str) -> CitedTable:
    if name not in TABLES:
        raise ConfigError(f"there are tables for {' and '.join(TABLES)}, not {name!r}")
    return TABLES[name]


def read_results(path: Path, table: CitedTable) -> Ours:
    """The rows of a JSON file that `nci compare` or `nci evaluate` wrote."""
    expected = "expected what nci compare or nci evaluate writes with --json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        systems: Mapping[str, Mapping[str, float]] = found.get("systems") or {"nci": found["metrics"]}
        used = [next((m for m in names if any(m in row for row in systems.values())), None) for names in table.metrics]
        rows = {
            name: tuple(None if metric is None or metric not in row else 100 * float(row[metric]) for metric in used)
            for name, row in systems.items()
        }
    except OSError as error:
        raise DataError(f"--beside {path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"--beside {path}: {expected}") from error
    if not any(value is not None for row in rows.values() for value in row):
        raise DataError(f"--beside {path}: holds none of {', '.join(names[0] for names in table.metrics)}; {expected}")
    inexact = [metric for metric, names in zip(used, table.metrics, strict=True) if metric and metric != names[0]]
    data, split = (str(found.get(name) or "") for name in ("data", "split"))
    return Ours(rows, tuple(inexact), data, split)


def is_of(name: str, data: str) -> bool:
    """Whether a data set's name looks like that of a table.

    >>> is_of("nq320k", "NQ-320k.v2"), is_of("triviaqa", "squad")
    (True, False)
    """
    return name in re.sub(r"[^a-z0-9]", "", data.lower())


def text(table: CitedTable, ours: Ours | None = None) -> str:
    """For people: one's own rows first, then the paper's, each with where it comes from."""
    rows: list[tuple[str, ...]] = [("system", *table.columns, "")]
    if ours is not None:
        rows += [(name, *map(_cell, values), "run here") for name, values in ours.rows.items()]
    rows += [(row.system, *map(_cell, row.values), f"cited, not run here: {_source(table, row)}") for row in table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if 0 < place <= len(table.columns) else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    if ours is not None:
        lines.append(f"run here: {ours.data or 'unknown data'}, {ours.split or 'unknown split'}")
    if ours is not None and ours.inexact:
        exact = [names[0] for names in table.metrics if names[0].startswith("Success")]
        lines.append(
            f"{', '.join(ours.inexact)} of the rows run here is the share of a query's relevant documents; the paper counts a "
            f"query as found when any of them is: --metrics {','.join(exact)}. With one relevant document both are equal."
        )
    return "\n".join(lines)


def as_json(table: CitedTable, ours: Ours | None = None) -> dict[str, Any]:
    def row(values: tuple[float | None, ...]) -> dict[str, float | None]:
        return dict(zip(table.columns, values, strict=True))

    cited = [{"system": r.system, "source": _source(table, r), **row(r.values)} for r in table.rows]
    out: dict[str, Any] = {"table": table.number, "cited": cited}
    if ours is not None:
        out |= {"data": ours.data, "split": ours.split}
        out["ours"] = [{"system": name, **row(values)} for name, values in ours.rows.items()]
    return out


def _source(table: CitedTable, row: Cited) -> str:
    return f"Table {table.number}" + (f", {row.origin}" if row.origin else "")


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
