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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nci import significance
from nci.baselines import Searcher
from nci.config import content_key
from nci.console import writing
from nci.errors import DataError
from nci.evaluate import evaluate, per_query, read_run, table, write_run
from nci.names import INDEXES, kind_of, labelled, one_name, split_outside
from nci.records import Qrels, Query, Run
from nci.system_checks import check
from nci.system_checks import check_names as check_spelling
from nci.systems import key, make, seeds_of

if TYPE_CHECKING:
    from nci.workbench import Workbench

log = logging.getLogger("nci")

METRICS = ("R@1", "R@5", "R@10", "R@20", "R@100", "RR@100", "Rprec", "Success@1", "Success@10")
SUCCESS_NOTE = (
    "R@k is the share of a query's relevant documents among the first k. The paper's Recall@k counts a query as found when "
    "any of them is: that is Success@k here; the two are equal where every query has one relevant document."
)
COST_NOTES = (
    "ms per query: baselines run as their libraries do; nci bench compares encoders on equal terms.",
    "index MB: all that a system keeps; for nci with its network and texts.",
    "scored: documents that get a score, for a query; one that several parts of a system score counts for each.",
    "withheld: R@1 of the queries that its weights were fitted on (dev, and some of train), seen and unseen documents counting "
    "the same, before it was made of everything: what settings may be chosen by.",
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
    scored: float  # documents, for a query
    seconds: float  # for making it, where that was missing, and searching
    withheld: float | None = None  # what it found first of queries that were withheld when it was fitted


@dataclass
class Result:
    """The table of one split.

    Args:
        systems: Metrics of each system, the mean over its seeds.
        spread: Standard deviation over the seeds, where there are several.
        p_values: Of each system's R@1 against the reference: paired bootstrap over documents (queries of one document are
            drawn together), Holm-corrected for the number of systems.
        documents_scored: For a query; a document that several parts of a system score counts for each.
        merged: How many indexes answer together in one row.
        data: Name of the data set's folder.
        per_seed: R@1 of each seed.
        withheld: R@1, before it was made of everything, of the queries that a system was fitted on; only of those that are.
        judged: R@1 of every query, the mean over a system's seeds: what the p-values are made from.
        qrels: What every query asks for.
    """

    split: str
    queries: int
    reference: str
    systems: dict[str, dict[str, float]] = field(default_factory=dict)
    spread: dict[str, dict[str, float]] = field(default_factory=dict)
    p_values: dict[str, float] = field(default_factory=dict)
    latency_ms: dict[str, float] = field(default_factory=dict)
    index_bytes: dict[str, int] = field(default_factory=dict)
    documents_scored: dict[str, float] = field(default_factory=dict)
    seeds: dict[str, int] = field(default_factory=dict)
    merged: dict[str, int] = field(default_factory=dict)
    data: str = ""
    per_seed: dict[str, list[float]] = field(default_factory=dict)
    withheld: dict[str, float] = field(default_factory=dict)
    judged: significance.Judged | None = field(default=None, repr=False)
    qrels: Qrels = field(default_factory=dict, repr=False)

    @property
    def test(self) -> str:
        """What the p values are of."""
        systems = f"{len(self.p_values)} system{'s' * (len(self.p_values) != 1)}"
        return f"paired bootstrap over documents, Holm-corrected over the {systems}"

    def text(self, columns: Sequence[str] = ("R@1", "R@10", "R@100", "RR@100")) -> str:
        """For people: the metrics, then cost and significance; `notes` explains them."""
        lines = [f"{self.data}: {self.split}, {self.queries} queries (%)", table(self.systems, columns), ""]
        width = max(map(len, self.systems), default=0)
        lines.append(
            f"{'':{width}}  ms per query   index MB    scored     seeds  withheld   R@1 +-   p of R@1 against {self.reference}"
        )
        for name in self.systems:
            spread = f"{100 * self.spread[name]['R@1']:.2f}" if name in self.spread else "-"
            p = f"{self.p_values[name]:.4f}" if name in self.p_values else "-"
            megabytes = self.index_bytes[name] / 1e6
            withheld = f"{100 * self.withheld[name]:.2f}" if name in self.withheld else "-"
            seeds = f"{self.merged[name]} merged" if name in self.merged else f"{self.seeds[name]}"
            lines.append(
                f"{name:{width}}  {self.latency_ms[name]:12.2f} {megabytes:10.1f} "
                f"{self.documents_scored[name]:9,.0f} {seeds:>9} {withheld:>9} {spread:>8} {p:>8}"
            )
        return "\n".join(lines)

    def notes(self) -> str:
        """What the columns of `text` mean, the same for every split."""
        tested = [f"p: {self.test}."] if self.p_values else []
        return "\n".join([*tested, *COST_NOTES, SUCCESS_NOTE])

    def latex(self, columns: Sequence[str] = ("R@1", "R@10", "R@100", "RR@100")) -> str:
        """The metrics as a tabular, the best of each column in bold; spread and p where there are any."""
        best = {c: max((round(100 * row[c], 2) for row in self.systems.values()), default=0.0) for c in columns}
        rows = []
        for name, row in self.systems.items():
            cells = [f"{100 * row[c]:.2f}" for c in columns]
            bold = [
                rf"\textbf{{{cell}}}" if float(cell) == best[c] else cell
                for c, cell in zip(columns, cells, strict=True)
            ]
            if self.spread:
                bold.append(f"{100 * self.spread[name]['R@1']:.2f}" if name in self.spread else "--")
            if self.p_values:
                bold.append(f"{self.p_values[name]:.4f}" if name in self.p_values else "--")
            rows.append(" & ".join([_escaped(name), *bold]) + r" \\")
        extra = [r"R@1 $\pm$"] * bool(self.spread) + [f"$p$ against {_escaped(self.reference)}"] * bool(self.p_values)
        head = ["system", *map(_escaped, columns), *extra]
        data = f"{self.data}, {self.split}, {self.queries} queries"
        return "\n".join(
            [
                f"% {' '.join(data.split())} (%)" + (f"; p: {self.test}" if self.p_values else ""),
                rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
                rf"\multicolumn{{{len(head)}}}{{l}}{{{_escaped(data)} (\%)}} \\",
                " & ".join(head) + r" \\ \hline",
                *rows,
                r"\end{tabular}",
                "",
            ]
        )

    def as_json(self) -> dict[str, Any]:
        shown = asdict(replace(self, judged=None, qrels={}))
        del shown["judged"], shown["qrels"]  # something for every query
        return {**shown, "test": self.test, "note": SUCCESS_NOTE}


def compare(
    bench: Workbench,
    systems: Sequence[str],
    split: str,
    out: Path,
    *,
    metrics: Sequence[str] = METRICS,
    append: Path | None = None,
    timed: Result | None = None,
) -> Result:
    """Build what is missing, search a split with every system, and put them side by side.

    Args:
        bench: What systems are made of.
        systems: Names; the first one whose name begins with nci, else the first, is the reference of the tests.
        out: Folder for what is built, rankings and tables.
        append: A file that gets a line of JSON for every row as soon as that is finished, unless it is there.
        timed: The same systems on another split; their latencies stand for this one.
    """
    rows = check_names(bench, systems)
    queries, qrels = judged(bench, split)
    reference = next((row for row, name in rows.items() if name.startswith("nci")), next(iter(rows)))
    result = Result(split, len(queries), reference, data=bench.dataset.folder.resolve().name, qrels=qrels)
    values: dict[str, dict[str, float]] = {}
    for row, name in rows.items():
        found = _all_seeds(bench, name, split, queries, out, timed=timed is None)
        _add(result, row, found, qrels, metrics)
        if timed is not None:
            result.latency_ms[row] = timed.latency_ms[row]
        if name == "nci-ensemble":
            result.merged[row] = bench.seeds
        if append is not None:
            _append(append, bench, result, row, name, sum(one.seconds for one in found))
        values[row] = _mean([per_query(one.run, qrels, "R@1") for one in found])
    others = {row: value for row, value in values.items() if row != reference}
    result.judged = significance.Judged(values[reference], others, significance.document_groups(qrels))
    tests = significance.compare_means([result.judged])
    result.p_values = {name: test.corrected for name, test in tests.items()}
    return result


def append_row(
    bench: Workbench, row: str, name: str, split: str, out: Path, file: Path, *, metrics: Sequence[str] = METRICS
) -> None:
    """The line of a row whose rankings are there, in a file as `compare` appends to it, before the other rows are made."""
    queries, qrels = judged(bench, split)
    result = Result(split, len(queries), row, data=bench.dataset.folder.resolve().name)
    found = _all_seeds(bench, name, split, queries, out, timed=False)
    _add(result, row, found, qrels, metrics)
    _append(file, bench, result, row, name, sum(one.seconds for one in found))


def _all_seeds(
    bench: Workbench, name: str, split: str, queries: Sequence[Query], out: Path, *, timed: bool
) -> list[Ranked]:
    """The rankings of a system, one for each of its seeds; the first is timed."""
    tasks = [(name, seed) for seed in range(seeds_of(bench, name))]
    files = [ranking_file(bench, task, queries, split, out) for task in tasks]
    places = enumerate(zip(tasks, files, strict=True))
    return [ranked(bench, task, split, queries, file, timed=timed and not i) for i, (task, file) in places]


def split_names(text: str) -> list[str]:
    """Names of --systems: separated by commas that stand outside of brackets."""
    return [name.strip() for name in split_outside(text, ",") if name.strip()]


def check_names(bench: Workbench, systems: Sequence[str]) -> dict[str, str]:
    """The system behind each row, by its one name; refuses what cannot be compared, before anything is made."""
    check_spelling(systems)
    rows = dict(map(labelled, systems))
    for name in rows.values():
        check(bench, name)
    return {row: one_name(bench.config, name) for row, name in rows.items()}


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
    from nci.workbench import file_name

    name, seed = task
    found = content_key(key(bench, name, seed), split, [tuple(query) for query in queries], DEPTH)
    short = file_name(name)[:80]  # settings may be long, names of files not
    return out / "runs" / f"{short}-{seed}-{split}-{found}.trec"


def kept_runs(bench: Workbench, name: str, split: str, out: Path) -> list[Run]:
    """The rankings of a system that has been compared, one per seed."""
    queries, _ = judged(bench, split)
    tasks = [(name, seed) for seed in range(seeds_of(bench, name))]
    return [read_run(ranking_file(bench, task, queries, split, out)) for task in tasks]


def ranked(
    bench: Workbench, task: Task, split: str, queries: Sequence[Query], file: Path, *, timed: bool = True
) -> Ranked:
    """The ranking of a system, from its file where that is there.

    Without `timed` no latency is measured, since other processes are at work; the next call that is timed does.
    """
    name, seed = task
    facts_file = file.with_suffix(".json")
    facts: dict[str, Any] = {}
    if facts_file.exists() and file.exists():
        facts = json.loads(facts_file.read_text(encoding="utf-8"))
    if "scored" not in facts or (timed and facts["latency_ms"] is None):
        label = f"{name}, seed {seed}" if kind_of(name) in INDEXES else name
        known = "scored" in facts
        log.info("%-12s %s: %s", "latency" if known else "system", label, split)
        started = time.perf_counter()
        searcher, size = make(bench, name, seed)
        seconds, scored = facts.get("seconds", 0.0), facts.get("scored", 0.0)
        if not known:
            file.parent.mkdir(parents=True, exist_ok=True)
            run, scored = search_all(searcher, queries)
            write_run(file, run, tag=name.replace(" ", "_"))
            seconds = round(time.perf_counter() - started, 1)
        latency = latency_ms(searcher, [query.text for query in queries]) if timed else None
        facts = {"system": name, "latency_ms": latency, "index_bytes": size, "scored": scored, "seconds": seconds}
        facts["withheld"] = searcher.withheld
        staged = facts_file.with_suffix(".tmp")
        staged.write_text(json.dumps(facts), encoding="utf-8")
        os.replace(staged, facts_file)  # last: it says that the ranking beside it is whole
    latency, size, scored, seconds = (facts[name] for name in ("latency_ms", "index_bytes", "scored", "seconds"))
    return Ranked(read_run(file), latency or 0.0, size, scored, seconds, facts.get("withheld"))


def search_all(searcher: Searcher, queries: Sequence[Query], depth: int = DEPTH) -> tuple[Run, float]:
    """{query id: {doc_id: score}} of all queries, and how many documents were scored for one."""
    found = searcher.search([query.text for query in queries], depth)
    pairs = zip(queries, found, strict=True)
    run = {query.query_id: {hit.doc_id: hit.score for hit in hits} for query, hits in pairs}
    return run, float(np.mean([hits.documents_scored for hits in found])) if found else 0.0


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
    result.latency_ms[name] = ranked[0].latency_ms  # the others differ by chance alone
    result.index_bytes[name] = int(np.mean([one.index_bytes for one in ranked]))
    result.documents_scored[name] = round(float(np.mean([one.scored for one in ranked])), 1)
    result.seeds[name] = len(rows)
    if known := [one.withheld for one in ranked if one.withheld is not None]:
        result.withheld[name] = float(np.mean(known))
    result.per_seed[name] = [row["R@1"] for row in rows]


def _append(file: Path, bench: Workbench, result: Result, row: str, name: str, seconds: float) -> None:
    line = json.dumps(
        {
            "data": result.data,
            "row": row,
            "system": name,
            "key": key(bench, name, 0),  # of all its settings: of two lines with the same name
            "split": result.split,
            "metrics": result.systems[row],
            "spread": result.spread.get(row),
            "seeds": result.seeds[row],
            "withheld": result.withheld.get(row),
            "seconds": round(seconds, 1),
        }
    )
    with writing("--append", str(file)), file.open("a+", encoding="utf-8") as stream:
        stream.seek(0)
        if line not in stream.read().splitlines():
            stream.write(line + "\n")


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def _escaped(text: str) -> str:
    return re.sub(r"([&%$#_{}])", r"\\\1", text)
