"""Runs and judgements in; metrics, TREC run files, tables and significance out. No torch, no index, no model.

Metrics go by their ir-measures names and are fractions of 1. Ties are broken by doc_id everywhere: ir-measures itself
breaks them in another way for each of its back ends, so it is given ranks, not scores.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CalledProcessError
from typing import TYPE_CHECKING, cast

import numpy as np

from nci.errors import ConfigError, DataError, MissingPackageError
from nci.records import Qrels, Run

if TYPE_CHECKING:
    import ir_measures

DEFAULT_METRICS = ("R@1", "R@10", "R@100", "RR@100")
# trec_eval reads scores as C floats; well inside their range there is always a next lower one.
LARGEST_SCORE = 1e37


def evaluate(run: Run, qrels: Qrels, metrics: Sequence[str] = DEFAULT_METRICS) -> dict[str, float]:
    """Each metric over all judged queries, by the name it was asked for.

    A judged query without results counts as 0; results of queries that nobody judged do not count.
    """
    measures = {name: _measure(name) for name in metrics}
    values = cast("dict[ir_measures.Measure, float]", _calculate(list(measures.values()), run, qrels).aggregated)
    return {name: float(values[measure]) for name, measure in measures.items()}


def per_query(run: Run, qrels: Qrels, metric: str) -> dict[str, float]:
    """One metric for every judged query, in the order of the judgements."""
    values = {each.query_id: float(each.value) for each in _calculate([_measure(metric)], run, qrels).per_query}
    return {query_id: values.get(query_id, 0.0) for query_id in qrels}


def _calculate(measures: list[ir_measures.Measure], run: Run, qrels: Qrels) -> ir_measures.CalcResults:
    import ir_measures

    if not qrels:
        raise DataError(
            "there are no judged queries: expected at least one query with a relevant document in the qrels"
        )
    try:
        return ir_measures.calc(measures, qrels, _by_rank(run, qrels))
    except CalledProcessError as error:
        names = ", ".join(map(str, measures))
        raise ConfigError(
            f"the external program behind one of {names} failed: expected numbers as query ids"
        ) from error


def check_metric(name: str) -> None:
    """Refuse a name that is no metric, before hours are spent on what it should measure."""
    _measure(name)


def _measure(name: str) -> ir_measures.Measure:
    try:
        import ir_measures
    except ImportError as error:
        raise MissingPackageError("metrics need ir-measures: pip install ir-measures") from error
    try:
        measure = ir_measures.parse_measure(name)
        measure.validate_params()  # type: ignore[no-untyped-call]
        # trec_eval ends the whole process at a cutoff below 1.
        known = measure.params.get("cutoff", 1) >= 1 and ir_measures.DefaultPipeline.supports(measure)  # type: ignore[no-untyped-call]
    except (NameError, ValueError, AssertionError, SyntaxError):
        known = False
    if not known:
        raise ConfigError(
            f"{name!r} is no metric known here; expected an ir-measures name with its cutoff, "
            "such as R@10, RR@100, nDCG@10, P@5, Success@1, Rprec or AP"
        )
    return measure


def _ranked(query_id: str, scores: Mapping[str, float]) -> list[str]:
    for doc_id, score in scores.items():
        if math.isnan(score):
            raise DataError(f"query {query_id!r}: the score of {doc_id!r} is not a number, so it has no rank")
    return sorted(scores, key=lambda doc_id: (-scores[doc_id], doc_id))


def _by_rank(run: Run, qrels: Qrels) -> Run:
    # An empty ranking is left out: some back ends divide by its length, all of them know a missing one.
    ranked = {query_id: _ranked(query_id, run[query_id]) for query_id in qrels if run.get(query_id)}
    return {
        query_id: {doc_id: float(len(doc_ids) - rank) for rank, doc_id in enumerate(doc_ids)}
        for query_id, doc_ids in ranked.items()
    }


def write_run(path: Path | str, run: Run, tag: str = "nci") -> None:
    """Writes a TREC run, `query_id Q0 doc_id rank score tag`, best first, ranks from 1.

    Written scores fall strictly, also as 32-bit floats: trec_eval sorts by score alone and by nothing else, so a tie
    would lose the order. Ids with white space are refused, because the format cannot hold them. The file appears whole
    or not at all.
    """
    path = Path(path)
    _check_word("tag", tag)
    lines: list[str] = []
    for query_id, scores in run.items():
        _check_word("query id", query_id)
        last = np.float32(np.inf)
        for rank, doc_id in enumerate(_ranked(query_id, scores), 1):
            _check_word("doc_id", doc_id)
            if abs(scores[doc_id]) > LARGEST_SCORE:
                raise DataError(f"query {query_id!r}: the score of {doc_id!r} is {scores[doc_id]}, too large for a run")
            last = min(np.float32(scores[doc_id]), np.nextafter(last, np.float32(-np.inf)))
            lines.append(f"{query_id} Q0 {doc_id} {rank} {last} {tag}\n")
    staged = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with staged.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


def _check_word(kind: str, word: str) -> None:
    if word.split() != [word]:
        raise DataError(
            f"{kind} {word!r} is empty or has white space, which separates the columns of a TREC run; "
            "rename it, or write the results as JSON instead"
        )


def read_run(path: Path | str) -> Run:
    """Reads a TREC run of any system; its rank and tag columns are ignored, as trec_eval does."""
    run: Run = {}
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            columns = line.split()
            if not columns:
                continue
            try:
                query_id, _, doc_id, _, score, _ = columns
                value = float(score)
            except ValueError as error:
                raise DataError(
                    f"{path}, line {number}: expected 'query_id Q0 doc_id rank score tag', found {line.rstrip()!r}"
                ) from error
            ranking = run.setdefault(query_id, {})
            if doc_id in ranking:
                raise DataError(f"{path}, line {number}: {doc_id!r} occurs twice for query {query_id!r}")
            ranking[doc_id] = value
    return run


def table(rows: Mapping[str, Mapping[str, float]], columns: Sequence[str] = DEFAULT_METRICS) -> str:
    """Plain text: one line per system, values in percent, the best of several starred, "-" where there is none."""
    cells = {
        name: [f"{100 * row[column]:.2f}" if column in row else "-" for column in columns] for name, row in rows.items()
    }
    for i, column in enumerate(columns):
        best = max((row[column] for row in rows.values() if column in row), default=math.nan)
        for row in cells.values():
            row[i] += "*" if len(rows) > 1 and row[i] == f"{100 * best:.2f}" else " "
    width = max((len(name) for name in cells), default=0)
    widths = [max([len(column) + 1, *(len(row[i]) for row in cells.values())]) for i, column in enumerate(columns)]
    lines = [[" " * width, *(f"{column} ".rjust(w) for column, w in zip(columns, widths, strict=True))]]
    for name, row in cells.items():
        lines.append([name.ljust(width), *(cell.rjust(w) for cell, w in zip(row, widths, strict=True))])
    return "\n".join("  ".join(line).rstrip() for line in lines)


def paired_test(a: Mapping[str, float], b: Mapping[str, float]) -> float:
    """The p-value of a two-sided paired t-test between the per-query values of two systems.

    It is 1 where the test can tell nothing: with fewer than two queries, or without any difference.
    """
    if a.keys() != b.keys():
        raise DataError("a paired test needs both systems on the same queries: evaluate both with the same qrels")
    differences = np.array([a[query_id] - b[query_id] for query_id in a])
    if len(differences) < 2 or not differences.any():
        return 1.0
    if np.ptp(differences) == 0:  # no variance at all: the limit of the test, which scipy only warns about
        return 0.0
    try:
        from scipy import stats  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingPackageError("significance tests need scipy: pip install scipy") from error
    return float(stats.ttest_1samp(differences, 0.0).pvalue)
