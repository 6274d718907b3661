"""`nci efficiency` and `nci cited`: the tables are well formed, one's own rows stand beside, mistakes are one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny import tiny_config

import nci
from nci.bench import roofline
from nci.bench.efficiency import PAPER, SIZES, Line, latex, nq320k_trie, text
from nci.bench.shapes import synthetic_trie
from nci.cited import TABLES

Nci = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, as_before: None) -> None:
    """Peaks are measured in no time."""
    monkeypatch.setattr(roofline, "CPU_SIZES", (64,))
    monkeypatch.setattr(roofline, "CPU_COPY", 2**16)


# Efficiency


def test_the_papers_efficiency_is_all_there() -> None:
    assert set(PAPER) == {(size, beam) for size in ("small", "base", "large") for beam in (10, 100)}
    for beam in (10, 100):
        ms, qps = zip(*(PAPER[size, beam] for size in ("small", "base", "large")), strict=True)
        assert sorted(ms) == list(ms), "a larger network is slower"
        assert sorted(qps, reverse=True) == list(qps)
    for size in ("small", "base", "large"):
        assert PAPER[size, 10][0] < PAPER[size, 100][0]
        assert PAPER[size, 10][1] > PAPER[size, 100][1]


def test_a_tree_of_the_papers_shape() -> None:
    trie = nq320k_trie()
    trie.check()
    assert (trie.documents, trie.positions, trie.fanout) == (109_739, 5, 30)
    assert np.bincount(trie.depth)[:4].tolist() == [1, 30, 900, 27_000]
    depths = np.bincount(trie.depth[trie.leaves])
    assert depths.tolist() == [0, 0, 0, 0, 109_739 - 272, 272]
    fanout = np.diff(trie.child_start)
    assert int((fanout[trie.depth == 4] > 0).sum()) == 105


def test_ratios_say_how_many_times_better() -> None:
    lines = [Line("base", 10, 11.517, 1051.0, 64, *PAPER["base", 10]), Line("tiny", 7, 1.0, 12_345.6, 8, None, None)]
    assert lines[0].times_faster == pytest.approx(10)
    assert lines[0].times_more == pytest.approx(20)
    rows = [row.split() for row in text(lines, synthetic_trie(100), "some machine").splitlines()]
    assert rows[1] == ["base", "10", "115.17", "11.52", "10.00", "52.55", "1,051", "64", "20.00"]
    assert rows[2] == ["tiny", "7", "-", "1.00", "-", "-", "12,346", "8", "-"]
    table = latex(lines)
    assert table.count("&") == 3 * 8
    assert r"base & 10 & 115.17 & 11.52 & 10.00 & 52.55 & 1,051 & 64 & 20.00 \\" in table


def test_the_command_measures(run: Nci, tmp_path: Path) -> None:
    flags = ["--sizes", "tiny", "--beams", "2,10", "--batches", "4", "--seconds", "0.01", "--device", "cpu"]
    code, out, err = run("efficiency", *flags, "--json", tmp_path / "e.json", "--latex", tmp_path / "e.tex")
    assert code == 0, err
    found = json.loads((tmp_path / "e.json").read_text())
    assert found["documents"] == 109_739
    assert [(row["size"], row["beam"]) for row in found["rows"]] == [("tiny", 2), ("tiny", 10)]
    for row in found["rows"]:
        assert row["latency_ms"] > 0
        assert row["qps"] > 0
        assert row["batch"] in (1, 4)
        assert row["paper_qps"] is row["times_more"] is None
    assert "paper ms" in out
    assert "V100" in out
    assert (tmp_path / "e.tex").read_text().startswith(r"\begin{tabular}")


def test_the_tree_of_an_index_is_searched(run: Nci, tmp_path: Path, encoder: Path, beir: Path) -> None:
    nci.build(beir, tmp_path / "my.index", tiny_config(encoder, train={"epochs": 0}), device="cpu")
    flags = ["--sizes", "tiny", "--beams", "3", "--batches", "1", "--seconds", "0.01", "--device", "cpu"]
    code, out, err = run("efficiency", tmp_path / "my.index", *flags, "--json", "-")
    assert code == 0, err
    assert json.loads(out)["documents"] == 60


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--sizes", "huge"], 1, "--sizes are out of minilm, small, base, large, tiny; not 'huge'"),
        (["--sizes", ""], 1, "--sizes are out of"),
        (["--beams", "0"], 1, "--beams are at least 1"),
        (["--beams", "ten"], 2, "--beams is a whole number"),
        (["--seconds", "0"], 1, "--seconds is positive"),
        (["--device", "abacus"], 1, "--device is cpu, cuda or cuda:N"),
        (["nowhere"], 1, "nowhere is not an index"),
    ],
)
def test_wrong_efficiency(run: Nci, words: list[str], code: int, said: str) -> None:
    found, out, err = run("efficiency", *words)
    assert (found, out) == (code, "")
    assert len(err.splitlines()) == 1
    assert said in err


def test_sizes_are_the_papers_and_a_tiny_one() -> None:
    assert {"small", "base", "large", "tiny"} <= set(SIZES)
    assert SIZES["tiny"].width < SIZES["small"].width


# Cited


@pytest.mark.parametrize(("name", "number", "rows"), [("nq320k", 1, 17), ("triviaqa", 2, 16)])
def test_a_cited_table_is_well_formed(name: str, number: int, rows: int) -> None:
    table = TABLES[name]
    assert (table.number, len(table.rows)) == (number, rows)
    assert len({row.system for row in table.rows}) == rows
    for row in table.rows:
        assert len(row.values) == len(table.columns) == len(table.metrics) == 4
        recalls = [value for value in row.values[:3] if value is not None]
        assert recalls == sorted(recalls), f"{row.system}: recall grows with k"
        assert all(10 < value < 100 for value in row.values if value is not None)
        if name == "nq320k" and row.values[3] is not None and row.values[0] is not None:
            assert row.values[0] < row.values[3] < recalls[-1], f"{row.system}: MRR is between R@1 and R@100"
    for size in ("base", "large"):
        assert any(row.system == f"NCI ({size})" for row in table.rows)


def test_rows_that_are_only_cited_are_marked(run: Nci) -> None:
    code, out, _ = run("cited", "triviaqa")
    assert code == 0
    lines = {line.split("  ")[0]: line for line in out.splitlines()[1:]}
    starred = ["AR2-G", "coCondenser", "Condenser", "Individual Top-k", "Joint Top-k", "RDR", "ANCE", "DPR", "GAR"]
    assert {name for name, line in lines.items() if "AR2's paper" in line} == set(starred)
    assert all("cited, not run here: Table 2" in line for line in lines.values())
    assert lines["DPR"].split()[1:5] == ["-", "79.30", "84.90", "-"]
    assert lines["NCI (ensemble)"].split()[2:6] == ["94.60", "96.89", "98.20", "80.84"]


def test_own_rows_stand_beside(run: Nci, tmp_path: Path) -> None:
    compared = {"bm25": {"R@1": 0.2, "R@10": 0.4, "Success@10": 0.5, "RR@100": 0.3}, "nci": {"R@1": 0.7}}
    (tmp_path / "c.json").write_text(json.dumps({"data": "nq-320k", "split": "test", "systems": compared}))
    code, out, err = run("cited", "nq320k", "--beside", tmp_path / "c.json")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[-2] == "run here: nq-320k, test"
    assert lines[1].split() == ["bm25", "20.00", "50.00", "-", "30.00", "run", "here"]
    assert lines[2].split() == ["nci", "70.00", "-", "-", "-", "run", "here"]
    assert lines[3].startswith("NCI (base)")
    assert lines[-1].startswith("R@1 of the rows run here is the share")
    assert "--metrics Success@1,Success@10,Success@100" in lines[-1]
    code, out, _ = run("cited", "nq320k", "--beside", tmp_path / "c.json", "--json", "-")
    found = json.loads(out)
    assert found["ours"][0] == {"system": "bm25", "Recall@1": 20, "Recall@10": 50, "Recall@100": None, "MRR@100": 30}
    assert found["cited"][6]["source"] == "Table 1, which has it from DSI's paper"


def test_rows_of_other_data_are_a_warning(run: Nci, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps({"data": "squad", "split": "dev", "systems": {"a": {"R@5": 1}}}))
    code, out, err = run("cited", "triviaqa", "--beside", tmp_path / "c.json", "--json", "-")
    assert code == 0
    assert err == f"--beside {tmp_path / 'c.json'} is of 'squad', which does not look like triviaqa\n"
    assert (json.loads(out)["data"], json.loads(out)["split"]) == ("squad", "dev")


def test_a_row_of_evaluate_stands_beside(run: Nci, tmp_path: Path) -> None:
    metrics = {"Success@5": 0.91, "Success@20": 0.95, "Success@100": 0.97, "Rprec": 0.75}
    (tmp_path / "e.json").write_text(json.dumps({"metrics": metrics, "queries": 3}))
    code, out, _ = run("cited", "triviaqa", "--beside", tmp_path / "e.json")
    assert code == 0
    assert out.splitlines()[1].split()[:5] == ["nci", "91.00", "95.00", "97.00", "75.00"]
    assert "share of" not in out, "these are exactly the paper's metrics"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("no json", "expected what nci compare or nci evaluate writes"),
        ("[]", "expected what nci compare or nci evaluate writes"),
        ('{"queries": []}', "expected what nci compare or nci evaluate writes"),
        ('{"metrics": {"R@1": "high"}}', "expected what nci compare or nci evaluate writes"),
        ('{"metrics": {"nDCG@10": 0.5}}', "holds none of Success@1"),
    ],
)
def test_wrong_rows_are_refused(run: Nci, tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    code, out, err = run("cited", "nq320k", "--beside", tmp_path / "x.json")
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert said in err


def test_an_unknown_table(run: Nci) -> None:
    code, _, err = run("cited", "msmarco")
    assert code == 1
    assert err == "nci cited: there are tables for nq320k and triviaqa, not 'msmarco'\n"
