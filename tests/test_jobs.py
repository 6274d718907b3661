"""Several processes at once: stages, the same results as one process, failures by name."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tiny import tiny_config, tiny_values

from nci.corpus import open_dataset
from nci.errors import NciError
from nci.jobs import in_order, rank_in_parallel
from nci.querygen_steps import Recipe
from nci.systems import needs
from nci.workbench import Workbench

Nci = Callable[..., tuple[int, str, str]]
Ok = Callable[..., str]


@pytest.fixture
def flags(tmp_path: Path, encoder: Path) -> list[str]:
    """Of nci compare: tiny settings, a folder of its own."""
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tiny_values(encoder, train={"epochs": 0.5})))
    return ["--preset", str(tmp_path / "c.yaml"), "-o", str(tmp_path / "out"), "--quiet", "--device", "cpu"]


def test_what_others_need_comes_first(beir: Path, tmp_path: Path, encoder: Path) -> None:
    dataset = open_dataset(beir)
    assert dataset is not None
    bench = Workbench(dataset, tmp_path, tiny_config(encoder), generated_from=Recipe(), seeds=2)
    wanted = [("rerank:rrf:bm25+dense", 0), ("nci-zeroed", 1), ("nci-ensemble", 0), ("knn", 0)]
    order = in_order(bench, wanted)
    assert set(order[:2]) == {("generated queries", 0), ("untrained index", 0)}
    assert len(set(order)) == len(order) == 11
    for place, task in enumerate(order):
        assert set(needs(bench, *task)) <= set(order[:place])
    assert set(wanted) <= set(order)
    assert in_order(bench, []) == []


@pytest.mark.slow
def test_two_processes_find_what_one_finds(ok: Ok, run: Nci, beir: Path, tmp_path: Path, flags: list[str]) -> None:
    names = ["--systems", "bm25,nci,nci-zeroed,rrf:bm25+dense", "--seeds", "2", "--split", "test,dev"]
    ok("compare", beir, *names, *flags, "--jobs", "2", "--json", tmp_path / "two.json")
    ok("compare", beir, *names, *flags, "-o", tmp_path / "alone", "--json", tmp_path / "one.json")
    one, two = (json.loads((tmp_path / f"{name}.json").read_text())["splits"] for name in ("one", "two"))
    for split in ("test", "dev"):
        for what in ("systems", "spread", "seeds", "index_bytes", "p_values"):
            assert one[split][what].keys() == two[split][what].keys()
        for name, row in one[split]["systems"].items():
            assert two[split]["systems"][name] == pytest.approx(row), name
        assert all(ms > 0 for ms in two[split]["latency_ms"].values()), "measured afterwards"


@pytest.mark.slow
def test_a_failure_in_a_process_names_the_system(
    run: Nci, ok: Ok, beir: Path, tmp_path: Path, flags: list[str]
) -> None:
    command = ["compare", beir, *flags, "--systems", "bm25,knn,rrf:bm25+knn", "--jobs", "2"]
    code, out, err = run(*command, "--knn.encoder", str(tmp_path / "nowhere"))
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert "knn: " in err
    assert "nowhere" in err
    assert "rrf:" not in err, "what needs it is not tried"
    assert [path.name.split("-")[0] for path in (tmp_path / "out" / "runs").glob("*.json")] == ["bm25"]


def test_one_process_spawns_none(ok: Ok, beir: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiprocessing.get_context", lambda *_: pytest.fail("a process was spawned"))
    ok("compare", beir, *flags, "--systems", "bm25", "--jobs", "1")


@pytest.mark.slow
def test_what_died_is_tried_again_alone(
    beir: Path, tmp_path: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that kills its process, as one without memory would: it is named, and what does not need it is done."""
    dataset = open_dataset(beir)
    assert dataset is not None
    bench = Workbench(dataset, tmp_path, tiny_config(encoder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "class Loader:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'nci.baselines.dense_hnsw': os._exit(9)\n"
        "if 'spawn_main' in ' '.join(sys.orig_argv): sys.meta_path.insert(0, Loader())\n"
    )
    names = ["bm25", "dense-hnsw", "rrf:bm25+dense-hnsw", "rrf:bm25+trainq+dense"]
    with pytest.raises(NciError, match=r"^dense-hnsw: its process died; .* is kept\)$"):
        rank_in_parallel(bench, names, ["test"], tmp_path, jobs=2)
    found = {path.name.rpartition("-0-test")[0] for path in (tmp_path / "runs").glob("*.json")}
    assert found == {"bm25", "rrf_bm25_trainq_dense"}
