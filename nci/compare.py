"""A data set and names of systems in, one fair table out: `nci compare`.

Every system gets the same documents, the same training pairs and the same queries. What it builds is kept in a folder
named by a hash of everything it depends on, and so is its ranking of a split, so that a second call only prints, and a
killed one goes on. Knows systems by name only; `nci.systems` makes them, `nci.jobs` several at once.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nci import significance
from nci.baselines import Searcher
from nci.config import content_key
from nci.errors import ConfigError, DataError
from nci.evaluate import evaluate, per_query, read_run, table, write_run
from nci.records import Qrels, Query, Run
from nci.systems import SEEDED, check, key, make, seeds_of
from nci.workbench import Workbench, file_name

log = logging.getLogger("nci")

METRICS = ("R@1", "R@5", "R@10", "R@20", "R@100", "RR@100", "Rprec", "Success@1", "Success@10")
SUCCESS_NOTE = (
    "R@k is the share of a query's relevant documents among the first k. The paper's Recall@k counts a query as found when "
    "any of them is: that is Success@k here; the two are equal where every query has one relevant document."
)
Task = tuple[str, int]
"""A system by name, and one of its seeds."""
DEPTH = 100
TIMED = 50  # queries asked one at a time for the latency


@dataclass(frozen=True)
class Ranked:
    """What one system, or one seed of it, did on one split."""

    run: Run
    latency_ms: float
    index_bytes: int


@dataclass
class Result:
    """The table of one split.

    Args:
        systems: Metrics of each system, the mean over its seeds.
        spread: Standard deviation over the seeds, where there are several.
        p_values: Of each system's R@1 against the reference: paired bootstrap over documents (queries of one document are
            drawn together), Holm-corrected for the number of systems.
    """

    split: str
    queries: int
    reference: str
    systems: dict[str, dict[str, float]] = field(default_factory=dict)
    spread: dict[str, dict[str, float]] = field(default_factory=dict)
    p_values: dict[str, float] = field(default_factory=dict)
    latency_ms: dict[str, float] = field(default_factory=dict)
    index_bytes: dict[str, int] = field(default_factory=dict)
    seeds: dict[str, int] = field(default_factory=dict)

    def text(self, columns: Sequence[str] = ("R@1", "R@10", "R@100", "RR@100")) -> str:
        """For people: the metrics, then cost and significance."""
        lines = [f"{self.split}, {self.queries} queries (%)", table(self.systems, columns), ""]
        width = max(map(len, self.systems), default=0)
        lines.append(f"{'':{width}}  ms per query   index MB   seeds   R@1 +-   p of R@1 against {self.reference}")
        for name in self.systems:
            spread = f"{100 * self.spread[name]['R@1']:.2f}" if name in self.spread else "-"
            p = f"{self.p_values[name]:.4f}" if name in self.p_values else "-"
            megabytes = self.index_bytes[name] / 1e6
            lines.append(
                f"{name:{width}}  {self.latency_ms[name]:12.2f} {megabytes:10.1f} {self.seeds[name]:7d} {spread:>8} {p:>8}"
            )
        return "\n".join([*lines, SUCCESS_NOTE])

    def latex(self, columns: Sequence[str] = ("R@1", "R@10", "R@100", "RR@100")) -> str:
        """The metrics as a tabular, the best of each column in bold."""
        best = {c: max((round(100 * row[c], 2) for row in self.systems.values()), default=0.0) for c in columns}
        rows = []
        for name, row in self.systems.items():
            cells = [f"{100 * row[c]:.2f}" for c in columns]
            bold = [
                rf"\textbf{{{cell}}}" if float(cell) == best[c] else cell
                for c, cell in zip(columns, cells, strict=True)
            ]
            rows.append(" & ".join([_escaped(name), *bold]) + r" \\")
        head = " & ".join(["system", *map(_escaped, columns)]) + r" \\ \hline"
        return "\n".join([rf"\begin{{tabular}}{{l{'r' * len(columns)}}}", head, *rows, r"\end{tabular}", ""])

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "note": SUCCESS_NOTE}


def compare(
    bench: Workbench, systems: Sequence[str], split: str, out: Path, *, metrics: Sequence[str] = METRICS
) -> Result:
    """Build what is missing, search a split with every system, and put them side by side.

    Args:
        bench: What systems are made of.
        systems: Names; the first one whose name begins with nci, else the first, is the reference of the tests.
        out: Folder for what is built, rankings and tables.
    """
    check_names(bench, systems)
    queries, qrels = judged(bench, split)
    reference = next((name for name in systems if name.startswith("nci")), systems[0])
    result = Result(split, len(queries), reference)
    values: dict[str, dict[str, float]] = {}
    for name in systems:
        seeds = range(seeds_of(bench, name))
        found = [
            ranked(bench, (name, seed), queries, ranking_file(bench, (name, seed), queries, split, out))
            for seed in seeds
        ]
        _add(result, name, found, qrels, metrics)
        values[name] = _mean([per_query(one.run, qrels, "R@1") for one in found])
    others = {name: value for name, value in values.items() if name != reference}
    tests = significance.compare(values[reference], others, groups=significance.document_groups(qrels))
    result.p_values = {name: test.corrected for name, test in tests.items()}
    return result


def check_names(bench: Workbench, systems: Sequence[str]) -> None:
    """Refuse what cannot be compared, before anything is made."""
    if not systems or len(set(systems)) < len(systems):
        raise ConfigError("--systems names each system once, separated by commas, and at least one")
    for name in systems:
        check(bench, name)


def judged(bench: Workbench, split: str) -> tuple[list[Query], Qrels]:
    """The queries of a split with a relevant document, at least one, and their judgements."""
    queries, qrels = bench.dataset.split(split)
    if not queries:
        raise DataError(
            f"{bench.dataset.folder}: no query of the split {split} has a relevant document (a grade above 0)"
        )
    return queries, qrels


def ranking_file(bench: Workbench, task: Task, queries: Sequence[Query], split: str, out: Path) -> Path:
    """Where the ranking of a system, with one of its seeds, is kept; beside it lies what else is known of it, as .json."""
    name, seed = task
    found = content_key(key(bench, name, seed), split, [tuple(query) for query in queries], DEPTH)
    return out / "runs" / f"{file_name(name)}-{seed}-{split}-{found}.trec"


def ranked(bench: Workbench, task: Task, queries: Sequence[Query], file: Path, *, timed: bool = True) -> Ranked:
    """The ranking of a system, from its file where that is there.

    Without `timed` no latency is measured, since other processes are at work; the next call that is timed does.
    """
    name, seed = task
    facts_file = file.with_suffix(".json")
    facts: dict[str, Any] = {}
    if facts_file.exists() and file.exists():
        facts = json.loads(facts_file.read_text(encoding="utf-8"))
    if not facts or (timed and facts["latency_ms"] is None):
        log.info("%-12s %s%s", "system" if not facts else "latency", name, f", seed {seed}" if name in SEEDED else "")
        searcher, size = make(bench, name, seed)
        if not facts:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_run(file, search_all(searcher, queries), tag=name.replace(" ", "_"))
        latency = latency_ms(searcher, [query.text for query in queries]) if timed else None
        facts = {"system": name, "latency_ms": latency, "index_bytes": size}
        staged = facts_file.with_suffix(".tmp")
        staged.write_text(json.dumps(facts), encoding="utf-8")
        os.replace(staged, facts_file)  # last: it says that the ranking beside it is whole
    return Ranked(read_run(file), facts["latency_ms"] or 0.0, facts["index_bytes"])


def search_all(searcher: Searcher, queries: Sequence[Query], depth: int = DEPTH) -> Run:
    """{query id: {doc_id: score}} of all queries."""
    found = searcher.search([query.text for query in queries], depth)
    pairs = zip(queries, found, strict=True)
    return {query.query_id: {hit.doc_id: hit.score for hit in hits} for query, hits in pairs}


def latency_ms(searcher: Searcher, texts: Sequence[str], k: int = 10) -> float:
    """Median time of one query at a time, after a first one."""
    asked = list(texts[:TIMED])
    if not asked:
        return 0.0
    searcher.search(asked[0], k)
    times = []
    for text in asked:
        started = time.perf_counter()
        searcher.search(text, k)
        times.append(time.perf_counter() - started)
    return round(float(np.median(times)) * 1e3, 3)


def _add(result: Result, name: str, ranked: Sequence[Ranked], qrels: Qrels, metrics: Sequence[str]) -> None:
    rows = [evaluate(one.run, qrels, metrics) for one in ranked]
    result.systems[name] = _mean(rows)
    if len(rows) > 1:
        result.spread[name] = {m: float(np.std([row[m] for row in rows], ddof=1)) for m in metrics}
    result.latency_ms[name] = float(np.mean([one.latency_ms for one in ranked]))
    result.index_bytes[name] = int(np.mean([one.index_bytes for one in ranked]))
    result.seeds[name] = len(rows)


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def _escaped(text: str) -> str:
    return re.sub(r"([&%$#_{}])", r"\\\1", text)
