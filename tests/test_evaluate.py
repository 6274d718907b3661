from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

import ir_measures
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nci.errors import ConfigError, DataError
from nci.evaluate import DEFAULT_METRICS, evaluate, paired_test, per_query, read_run, table, write_run
from nci.records import Qrels, Run

QRELS: Qrels = {"q1": {"a": 1}, "q2": {"b": 1, "c": 1}, "q3": {"z": 1}}
RUN: Run = {"q1": {"a": 3.0, "b": 2.0, "c": 1.0}, "q2": {"a": 3.0, "b": 2.0, "d": 1.0}, "stray": {"a": 1.0}}

words = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=5)
scores = st.one_of(
    st.floats(-1e37, 1e37, allow_nan=False),
    st.sampled_from([0.0, -0.0, 1.0, 1.0 + 1e-12, 1e-45, -1e-45, 1e37, -1e37]),
)
runs = st.dictionaries(words, st.dictionaries(words, scores, min_size=1, max_size=12), max_size=4)


def test_metrics_by_hand() -> None:
    # q1 finds a at rank 1; q2 finds one of two, at rank 2; q3 has no results and counts as 0; "stray" is not judged.
    values = evaluate(RUN, QRELS)
    assert tuple(values) == DEFAULT_METRICS
    assert values["R@1"] == pytest.approx((1 + 0 + 0) / 3)
    assert values["R@10"] == values["R@100"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert values["RR@100"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert per_query(RUN, QRELS, "R@10") == {"q1": 1.0, "q2": 0.5, "q3": 0.0}


def test_metrics_equal_ir_measures() -> None:
    rng = np.random.default_rng(0)
    documents = [f"d{i}" for i in range(60)]
    qrels: Qrels = {f"q{i}": {str(d): 1 for d in rng.choice(documents, rng.integers(1, 4))} for i in range(40)}
    run: Run = {
        q: dict(zip(rng.permutation(documents)[:50].tolist(), rng.random(50).tolist(), strict=True)) for q in qrels
    }
    names = ["R@1", "R@10", "R@100", "RR@100", "Rprec", "Success@5", "nDCG@10", "P@5", "AP"]
    direct = ir_measures.calc_aggregate([ir_measures.parse_measure(name) for name in names], qrels, run)
    assert evaluate(run, qrels, names) == pytest.approx({str(measure): value for measure, value in direct.items()})


def test_ties_are_broken_by_doc_id_for_every_metric() -> None:
    tied: Run = {"q": {"b": 1.0, "a": 1.0}}
    assert evaluate(tied, {"q": {"a": 1}}, ["R@1", "RR@100", "nDCG@1"]) == {"R@1": 1.0, "RR@100": 1.0, "nDCG@1": 1.0}
    assert evaluate(tied, {"q": {"b": 1}}, ["R@1", "RR@100", "nDCG@1"]) == {"R@1": 0.0, "RR@100": 0.5, "nDCG@1": 0.0}


def test_no_results_at_all_count_as_zero() -> None:
    assert set(evaluate({}, QRELS, [*DEFAULT_METRICS, "Judged@10"]).values()) == {0.0}
    assert per_query({"q1": {}}, QRELS, "RR@100") == {"q1": 0.0, "q2": 0.0, "q3": 0.0}


@pytest.mark.parametrize("name", ["recall", "R", "R@", "R@0", "R@-1", "", "R@1,R@10"])
def test_an_unknown_metric_is_named_with_examples(name: str) -> None:
    with pytest.raises(ConfigError, match=r"R@10.*nDCG@10") as caught:
        evaluate(RUN, QRELS, ["R@1", name])
    assert repr(name) in str(caught.value)


def test_wrong_data_is_refused() -> None:
    with pytest.raises(DataError, match="no judged queries"):
        evaluate(RUN, {})
    with pytest.raises(DataError, match=r"'q1'.*'a'"):
        evaluate({"q1": {"a": math.nan}}, QRELS)


def test_a_written_run_by_eye(tmp_path: Path) -> None:
    path = tmp_path / "run.trec"
    write_run(path, {"q1": {"b": 1.5, "c": 1.5, "a": 2.25}, "q2": {"x": -3.0}}, tag="mine")
    lines = [line.split(" ") for line in path.read_text().splitlines()]
    assert [line[:4] + line[5:] for line in lines] == [
        ["q1", "Q0", "a", "1", "mine"],
        ["q1", "Q0", "b", "2", "mine"],
        ["q1", "Q0", "c", "3", "mine"],
        ["q2", "Q0", "x", "1", "mine"],
    ]
    assert lines[0][4] == "2.25"
    assert 1.49999 < float(lines[2][4]) < float(lines[1][4]) == 1.5
    assert [each.name for each in tmp_path.iterdir()] == ["run.trec"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(runs)
def test_written_scores_fall_strictly_and_keep_the_order(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "run.trec"
    write_run(path, run)
    again = read_run(path)
    assert list(again) == list(run)
    for query_id, ranking in again.items():
        wanted = run[query_id]
        assert list(ranking) == sorted(wanted, key=lambda doc_id: (-wanted[doc_id], doc_id))
        # trec_eval holds a score in a C float.
        written = np.array(list(ranking.values()), np.float32)
        assert (written[:-1] > written[1:]).all()
        assert np.isfinite(written).all()
        assert written == pytest.approx([wanted[doc_id] for doc_id in ranking], rel=1e-5, abs=1e-30)


def test_ir_measures_reads_the_file_as_we_do(tmp_path: Path) -> None:
    tied: Run = {"q": dict.fromkeys("abcdef", 0.5)}
    write_run(tmp_path / "run", tied)
    direct = list(ir_measures.read_trec_run(str(tmp_path / "run")))  # type: ignore[no-untyped-call]
    for name in "abcdef":
        qrels = {"q": {name: 1}}
        for metric in ("R@1", "R@3", "RR@100"):
            measure = ir_measures.parse_measure(metric)
            judged = [ir_measures.Qrel("q", name, 1)]
            assert (
                ir_measures.calc_aggregate([measure], judged, direct)[measure]
                == evaluate(tied, qrels, [metric])[metric]
            )


@pytest.mark.parametrize(
    ("run", "tag", "named"),
    [
        ({"q": {"my file.txt": 1.0}}, "nci", "my file.txt"),
        ({"q 1": {"a": 1.0}}, "nci", "q 1"),
        ({"q": {"": 1.0}}, "nci", "doc_id"),
        ({"q": {"a": 1.0}}, "two words", "two words"),
        ({"q": {"a": math.inf}}, "nci", "inf"),
        ({"q": {"a": math.nan}}, "nci", "not a number"),
    ],
)
def test_what_a_run_cannot_hold_is_refused_and_nothing_changes(tmp_path: Path, run: Run, tag: str, named: str) -> None:
    path = tmp_path / "run.trec"
    path.write_text("before")
    with pytest.raises(DataError, match=named):
        write_run(path, run, tag)
    assert path.read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.trec"
    write_run(path, RUN)
    before = path.read_text()

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("nci.evaluate.os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_run(path, {"q": {"other": 1.0}})
    assert path.read_text() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_reading_a_foreign_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_text("1\tQ0\td1 1 2.5 x\n\n1 Q0 d%20 2 1e-3 x\r\n2 0 d1 7 -4 y\n")
    assert read_run(path) == {"1": {"d1": 2.5, "d%20": 0.001}, "2": {"d1": -4.0}}


@pytest.mark.parametrize("bad", ["q Q0 d 1 0.5", "q Q0 d 1 high tag", "q Q0 a 2 0.1 tag"])
def test_a_bad_line_is_named(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "run"
    path.write_text(f"q Q0 a 1 0.5 tag\n{bad}\n")
    with pytest.raises(DataError, match=r"run, line 2"):
        read_run(path)


def test_a_table_by_eye() -> None:
    rows = {"bm25": {"R@1": 0.5, "R@10": 0.7}, "nci": {"R@1": 1.0, "R@10": 0.70001, "RR@100": 0.123}}
    assert table(rows, ["R@1", "R@10", "RR@100"]).splitlines() == [
        "         R@1    R@10   RR@100",
        "bm25   50.00   70.00*       -",
        "nci   100.00*  70.00*   12.30*",
    ]
    assert table({}, ["R@1"]).split() == ["R@1"]
    assert "-" in table({"nothing": {}}, ["R@1"])


def test_paired_test_equals_the_formula_and_scipy() -> None:
    from scipy import stats  # type: ignore[import-untyped]

    rng = np.random.default_rng(1)
    a = {f"q{i}": float(x) for i, x in enumerate(rng.random(30))}
    b = {q: a[q] + float(x) for q, x in zip(a, rng.normal(0.05, 0.1, 30), strict=True)}
    shuffled = {q: b[q] for q in reversed(b)}
    differences = [a[q] - b[q] for q in a]
    t = mean(differences) / (stdev(differences) / 30**0.5)
    assert paired_test(a, shuffled) == pytest.approx(2 * stats.t.sf(abs(t), 29))
    assert paired_test(a, shuffled) == pytest.approx(stats.ttest_rel(list(a.values()), list(b.values())).pvalue)
    assert paired_test(a, a) == 1.0
    assert paired_test({"q": 1.0}, {"q": 0.0}) == 1.0
    assert paired_test({"q": 1.0, "r": 1.0}, {"q": 0.0, "r": 0.0}) == 0.0
    with pytest.raises(DataError, match="same queries"):
        paired_test({"q": 1.0}, {"r": 1.0})


def test_importing_the_light_modules_imports_nothing_heavy() -> None:
    code = (
        "import sys, nci.evaluate, nci.fuse, nci.lexical, nci.stdlib, nci.baselines.bm25, nci.baselines.dense\n"
        "print({'torch', 'transformers', 'faiss', 'bm25s', 'scipy', 'ir_measures'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
