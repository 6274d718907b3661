"""Several processes at once: stages, the same results as one process, failures by name."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tiny import environment, tiny_config, tiny_values

from nci.corpus import open_dataset
from nci.errors import NciError
from nci.jobs import in_order, rank_in_parallel
from nci.recipe import Recipe
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
    wanted = [("rerank:rrf:bm25+dense", 0), ("nci-zeroed", 1), ("nci-ensemble", 0), ("nci-qg", 0), ("knn", 0)]
    order = in_order(bench, wanted)
    assert set(order[:2]) == {("generated queries", 0), ("untrained index", 0)}
    assert len(set(order)) == len(order) == 12
    for place, task in enumerate(order):
        assert set(needs(bench, *task)) <= set(order[:place])
    assert set(wanted) <= set(order)
    assert in_order(bench, []) == []


@pytest.mark.slow
def test_two_processes_find_what_one_finds(ok: Ok, run: Nci, beir: Path, tmp_path: Path, flags: list[str]) -> None:
    names = ["--systems", "bm25,nci,nci-zeroed,rrf:bm25+dense", "--seeds", "2", "--split", "test,dev"]
    lines = tmp_path / "lines.jsonl"
    ok("compare", beir, *names, *flags, "--jobs", "2", "--json", tmp_path / "two.json", "--append", lines)
    ok("compare", beir, *names, *flags, "-o", tmp_path / "alone", "--json", tmp_path / "one.json")
    one, two = (json.loads((tmp_path / f"{name}.json").read_text())["splits"] for name in ("one", "two"))
    for split in ("test", "dev"):
        for what in ("systems", "spread", "seeds", "index_bytes", "p_values"):
            assert one[split][what].keys() == two[split][what].keys()
        for name, row in one[split]["systems"].items():
            assert two[split]["systems"][name] == pytest.approx(row), name
        assert all(ms > 0 for ms in two[split]["latency_ms"].values()), "measured afterwards"
        assert two[split]["latency_ms"] == two["test"]["latency_ms"], "measured once"
    added = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(added) == 2 * 4, "a line for each row and split, whichever came first"
    for line in added:
        assert line["metrics"] == two[line["split"]]["systems"][line["row"]]


@pytest.mark.slow
def test_a_failure_in_a_process_names_the_system(
    run: Nci, ok: Ok, beir: Path, tmp_path: Path, flags: list[str]
) -> None:
    lines = tmp_path / "lines.jsonl"
    command = ["compare", beir, *flags, "--systems", "bm25,knn,rrf:bm25+knn,same=bm25", "--jobs", "2"]
    code, out, err = run(*command, "--knn.encoder", str(tmp_path / "nowhere"), "--append", lines)
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert "knn: " in err
    assert "nowhere" in err
    assert "rrf:" not in err, "what needs it is not tried"
    assert [path.name.split("-")[0] for path in (tmp_path / "out" / "runs").glob("*.json")] == ["bm25"]
    assert [json.loads(line)["row"] for line in lines.read_text().splitlines()] == ["bm25", "same"], "what is finished"


def test_one_process_spawns_none(ok: Ok, beir: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiprocessing.get_context", lambda *_: pytest.fail("a process was spawned"))
    ok("compare", beir, *flags, "--systems", "bm25", "--jobs", "1")


def bench_that_fails(beir: Path, folder: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> Workbench:
    """A bench whose processes, and not this one, run some code before they import the module `name`."""
    dataset = open_dataset(beir)
    assert dataset is not None
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    (folder / "sitecustomize.py").write_text(
        "import os, pathlib, sys\n"
        "class Loader:\n"
        "    def find_spec(self, name, *_):\n"
        f"{textwrap.indent(code, ' ' * 8)}\n"
        "if 'spawn_main' in ' '.join(sys.orig_argv): sys.meta_path.insert(0, Loader())\n"
    )
    return Workbench(dataset, folder, tiny_config(encoder))


@pytest.mark.slow
def test_what_died_is_tried_again_alone(
    beir: Path, tmp_path: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that kills its process, as one without memory would: it is named, and what does not need it is done."""
    bench = bench_that_fails(beir, tmp_path, encoder, monkeypatch, "if name == 'nci.baselines.dense_hnsw': os._exit(9)")
    names = ["bm25", "dense-hnsw", "rrf:bm25+dense-hnsw", "rrf:bm25+trainq+dense"]
    with pytest.raises(NciError, match=r"^dense-hnsw: its process died; .* is kept\)$"):
        rank_in_parallel(bench, names, ["test"], tmp_path, jobs=2)
    found = {path.name.rpartition("-0-test")[0] for path in (tmp_path / "runs").glob("*.json")}
    assert found == {"bm25", "rrf_bm25_trainq_dense"}


@pytest.mark.slow
def test_what_found_the_gpu_full_is_tried_again_alone(
    beir: Path, tmp_path: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first time that dense search is made, others hold the memory; what is built on it is made as well."""
    fails = f"""mark = pathlib.Path({str(tmp_path / "mark")!r})
if name == 'nci.baselines.dense' and not mark.exists():
    mark.touch()
    import torch
    raise torch.OutOfMemoryError('CUDA out of memory')"""
    bench = bench_that_fails(beir, tmp_path, encoder, monkeypatch, fails)
    rank_in_parallel(bench, ["bm25", "dense", "rrf:bm25+dense"], ["test"], tmp_path, jobs=2)
    assert (tmp_path / "mark").exists()
    found = {path.name.rpartition("-0-test")[0] for path in (tmp_path / "runs").glob("*.json")}
    assert found == {"bm25", "dense", "rrf_bm25_dense"}


def alive(group: int) -> set[int]:
    """Processes of a group that still run."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, its_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it ended meanwhile
            continue
        if int(its_group) == group and state != "Z":
            found.add(int(folder.name))
    return found


def workers(group: int) -> set[int]:
    return {each for each in alive(group) if "spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes().decode()}


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", ["killed", "terminated", "interrupted"])
def test_no_process_outlives_the_command(beir: Path, tmp_path: Path, flags: list[str], how: str) -> None:
    """One works, one waits for work: both end at once; Ctrl-C reaches the whole group, as from a terminal."""
    words = ["--systems", "bm25,nci", "--jobs", "2", "--set", "train.epochs=500"]
    command = [sys.executable, "-m", "nci", "compare", str(beir), *flags, *words]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert wait_until(lambda: len(workers(process.pid)) == 2, 60)
        assert wait_until(lambda: bool(list((tmp_path / "out" / "runs").glob("bm25-*.json"))), 60)
        for each in workers(process.pid):  # which of two is faster, its traceback or its end, would be chance
            blocked = re.search(r"SigBlk:\s*(\w+)", Path(f"/proc/{each}/status").read_text())
            assert blocked is not None
            assert int(blocked[1], 16) & 1 << signal.SIGINT - 1, "Ctrl-C is for the parent alone"
        if how == "killed":
            process.kill()
        elif how == "terminated":
            process.terminate()
        else:
            os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert wait_until(lambda: not workers(process.pid), 5), "a process is left behind"
    finally:
        for each in alive(process.pid):
            os.kill(each, signal.SIGKILL)
    assert out == ""
    if how != "killed":
        assert process.returncode == 130
        assert err.strip() == "nci compare: stopped; the same command goes on where this one was"
