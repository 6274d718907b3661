"""The streaming writer: stopped at any moment it goes on to the same bytes, and nothing is there before it is whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prepare_samples import all_bytes, make_nq, questions, simplified, write_lines

from nci.errors import DataError, NciError
from nci.prepare import beir, prepare_nq320k
from nci.prepare import nq as nq_module
from nci.store import writer_lock

nq: Any = nq_module  # its functions are replaced here


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beir, "CHECKPOINT_RECORDS", 2)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Titles of the pages parsed so far."""
    made: list[str] = []
    real: Callable[[str], str] = nq.title_key

    def counted(title: str) -> str:
        made.append(title)
        return real(title)

    monkeypatch.setattr(nq, "title_key", counted)
    return made


@pytest.mark.usefixtures("often")
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stops=st.lists(st.integers(0, 19), min_size=1, max_size=3))
def test_a_run_that_is_stopped_goes_on_to_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, stops: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("stops")
    src = make_nq(folder / "src")
    prepare_nq320k(src, folder / "whole", expected=None)
    real: Callable[[str], str] = nq.title_key
    for stop in stops:
        left = [stop]

        def falls(title: str, left: list[int] = left) -> str:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return real(title)

        nq.title_key = falls
        try:
            prepare_nq320k(src, folder / "out", expected=None)
        except KeyboardInterrupt:
            assert not (folder / "out").exists()
        finally:
            nq.title_key = real
    prepare_nq320k(src, folder / "out", expected=None)
    assert all_bytes(folder / "out") == all_bytes(folder / "whole")
    assert sorted(path.name for path in folder.iterdir()) == ["out", "src", "whole"]


def test_a_killed_process_leaves_what_the_next_one_needs(tmp_path: Path) -> None:
    src = make_nq(tmp_path / "src")
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom nci.prepare import beir, nq, prepare_nq320k\n"
        "beir.CHECKPOINT_RECORDS = 3\nreal, seen = nq.title_key, []\n"
        "def falls(title):\n    seen.append(title)\n"
        "    return os.kill(os.getpid(), signal.SIGKILL) if len(seen) == 9 else real(title)\n"
        "nq.title_key = falls\nprepare_nq320k(Path(sys.argv[1]), Path(sys.argv[2]), expected=None)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(src), str(tmp_path / "out")], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    prepare_nq320k(src, tmp_path / "out", expected=None)
    prepare_nq320k(src, tmp_path / "whole", expected=None)
    assert all_bytes(tmp_path / "out") == all_bytes(tmp_path / "whole")


@pytest.mark.usefixtures("often")
def test_what_is_done_is_not_done_again(tmp_path: Path, calls: list[str]) -> None:
    src = make_nq(tmp_path / "src")
    broken = src / "train" / "nq-train-01.jsonl.gz"
    whole = broken.read_bytes()
    broken.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"nq-train-01\.jsonl\.gz: the gzip file is cut off"):
        prepare_nq320k(src, tmp_path / "out", expected=None)
    assert not (tmp_path / "out").exists()
    broken.write_bytes(whole)
    calls.clear()
    prepare_nq320k(src, tmp_path / "out", expected=None)
    assert len(calls) == 5 + 5 + 4  # all but the first shard; of the second, lines seen before may have changed
    prepare_nq320k(src, tmp_path / "whole", expected=None)
    assert all_bytes(tmp_path / "out") == all_bytes(tmp_path / "whole")


@pytest.mark.usefixtures("often")
def test_within_a_file_no_more_is_lost_than_since_the_last_checkpoint(
    tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    src = make_nq(tmp_path / "src", shards=1, per_shard=10)
    counted: Callable[[str], str] = nq.title_key

    def falls(title: str) -> str:
        if len(calls) == 7:
            raise KeyboardInterrupt
        return counted(title)

    monkeypatch.setattr(nq, "title_key", falls)
    with pytest.raises(KeyboardInterrupt):
        prepare_nq320k(src, tmp_path / "out", expected=None)
    calls.clear()
    monkeypatch.setattr(nq, "title_key", counted)
    prepare_nq320k(src, tmp_path / "out", expected=None)
    assert len(calls) == (10 - 6) + 4


def test_two_changes_one_after_the_other(tmp_path: Path) -> None:
    src = make_nq(tmp_path / "src")
    dev = src / "dev" / "nq-dev-00.jsonl.gz"
    good = dev.read_bytes()
    for cut in (9, 10):
        dev.write_bytes(good[:-cut])
        with pytest.raises(DataError, match="cut off"):
            prepare_nq320k(src, tmp_path / "out", expected=None)
        if cut == 9:
            write_lines(src / "train" / "nq-train-01.jsonl.gz", questions(600, 9, 11))
    dev.write_bytes(good)
    prepare_nq320k(src, tmp_path / "out", expected=None)
    prepare_nq320k(src, tmp_path / "whole", expected=None)
    assert all_bytes(tmp_path / "out") == all_bytes(tmp_path / "whole")


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("change", ["shard added before", "shard changed", "files lost", "checkpoint damaged"])
def test_nothing_stale_is_kept(tmp_path: Path, change: str) -> None:
    src = make_nq(tmp_path / "src")
    dev = src / "dev" / "nq-dev-00.jsonl.gz"
    good = dev.read_bytes()
    dev.write_bytes(good[:-9])
    with pytest.raises(DataError, match="cut off"):
        prepare_nq320k(src, tmp_path / "out", expected=None)
    dev.write_bytes(good)
    staging = tmp_path / ".out.partial"
    if change == "shard added before":
        write_lines(src / "train" / "nq-train-000.jsonl.gz", questions(500, 4, 11))
    elif change == "shard changed":
        write_lines(src / "train" / "nq-train-01.jsonl.gz", questions(600, 4, 11))
    elif change == "files lost":
        (staging / "data" / "corpus.jsonl").write_bytes(b"")
    else:
        (staging / "checkpoint.json").write_text("{")
    prepare_nq320k(src, tmp_path / "out", expected=None)
    prepare_nq320k(src, tmp_path / "whole", expected=None)
    assert all_bytes(tmp_path / "out") == all_bytes(tmp_path / "whole")


def test_a_finished_folder_is_left_alone(tmp_path: Path, calls: list[str]) -> None:
    src = make_nq(tmp_path / "src")
    first = prepare_nq320k(src, tmp_path / "out")
    before = all_bytes(tmp_path / "out")
    calls.clear()
    assert prepare_nq320k(src, tmp_path / "out") == first
    assert calls == []
    write_lines(src / "train" / "nq-train-03.jsonl.gz", questions(500, 1, 3))
    with pytest.raises(DataError, match="was not made of these files"):
        prepare_nq320k(src, tmp_path / "out")
    assert all_bytes(tmp_path / "out") == before


def test_the_result_may_lie_inside_the_source(tmp_path: Path) -> None:
    src = make_nq(tmp_path / "src")
    (src / "beir").mkdir()
    first = prepare_nq320k(src, src / "beir", expected=None)
    assert prepare_nq320k(src, src / "beir", expected=None) == first


def test_bad_records_are_listed_and_leave_no_trace(tmp_path: Path) -> None:
    good = list(questions(0, 4, 3))
    bad = simplified(7, "Only here", "a page .")
    del bad["question_text"]
    write_lines(tmp_path / "src" / "nq-train.jsonl", [good[0], bad, *good[1:], good[0]])
    write_lines(tmp_path / "src" / "nq-dev.jsonl", questions(90, 2, 3))
    report = prepare_nq320k(tmp_path / "src", tmp_path / "out", expected=None, on_error="skip")
    assert (report.skipped, report.queries) == (2, {"train": 4, "test": 2})
    files = all_bytes(tmp_path / "out")
    lines = files.pop("rejects.jsonl").decode().splitlines()
    assert '"line": 2' in lines[0]
    assert "question_text" in lines[0]
    assert "appeared before" in lines[1]
    write_lines(tmp_path / "clean" / "nq-train.jsonl", good)
    write_lines(tmp_path / "clean" / "nq-dev.jsonl", questions(90, 2, 3))
    prepare_nq320k(tmp_path / "clean", tmp_path / "same", expected=None)
    same = all_bytes(tmp_path / "same")
    assert all(files[name] == same[name] for name in same if name != "report.json")
    assert files.keys() == same.keys()


def test_after_a_bad_line_a_run_that_skips_goes_on(tmp_path: Path, calls: list[str]) -> None:
    write_lines(tmp_path / "src" / "nq-train.jsonl", [*questions(0, 4, 9), {"x": 1}, *questions(10, 2, 9)])
    write_lines(tmp_path / "src" / "nq-dev.jsonl", questions(90, 2, 9))
    with pytest.raises(DataError, match="line 5"):
        prepare_nq320k(tmp_path / "src", tmp_path / "out", expected=None)
    assert len(calls) == 4
    report = prepare_nq320k(tmp_path / "src", tmp_path / "out", expected=None, on_error="skip")
    assert len(calls) == 4 + 2 + 2
    assert report.queries == {"train": 6, "test": 2}


def test_a_split_without_questions_is_an_error(tmp_path: Path) -> None:
    write_lines(tmp_path / "src" / "nq-train.jsonl", questions(0, 4, 9))
    write_lines(tmp_path / "src" / "nq-dev.jsonl", [{"x": 1}])
    with pytest.raises(
        DataError, match=r"no question for the split test in nq-dev\.jsonl; the first bad record is .*line 1"
    ):
        prepare_nq320k(tmp_path / "src", tmp_path / "out", on_error="skip")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_files(tmp_path: Path) -> None:
    words = " ".join(f"word{number}" for number in range(40_000))  # a page of 370 kB
    rows = (simplified(number, f"Page {number}", words) for number in range(40))
    write_lines(tmp_path / "src" / "nq-train.jsonl.gz", rows)
    write_lines(tmp_path / "src" / "nq-dev.jsonl.gz", questions(90, 2, 3))
    prepare_nq320k(make_nq(tmp_path / "warm"), tmp_path / "w", expected=None)
    tracemalloc.start()
    prepare_nq320k(tmp_path / "src", tmp_path / "out", expected=None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "out" / "corpus.jsonl").stat().st_size > 13e6
    assert peak < 8e6


def test_one_process_at_a_time(tmp_path: Path) -> None:
    src = make_nq(tmp_path / "src")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with writer_lock(tmp_path / ".out.partial"):
            os.write(writer, b"x")
            signal.pause()
    try:
        os.read(reader, 1)
        with pytest.raises(NciError, match="is being written by process"):
            prepare_nq320k(src, tmp_path / "out", expected=None)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert prepare_nq320k(src, tmp_path / "out", expected=None).queries["train"] == 15


def test_a_disk_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = make_nq(tmp_path / "src")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(NciError, match="could not be written: No space left on device"):
            prepare_nq320k(src, tmp_path / "out", expected=None)
    assert not (tmp_path / "out").exists()
    assert prepare_nq320k(src, tmp_path / "out", expected=None).documents == 7


def test_a_checkpoint_counts_only_bytes_that_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power loss a file may end at its last sync; no checkpoint and no rename may come before that."""
    src = make_nq(tmp_path / "src")
    synced: dict[str, int] = {}
    steps: list[str] = []

    def sync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced[path.name] = path.stat().st_size if path.is_file() else 0

    def replace(source: Path, target: Path) -> None:
        saved = json.loads(Path(source).read_text())
        sizes = {Path(name).name: size for name, size in saved["now"]["sizes"].items()}
        assert all(synced[name] >= size for name, size in sizes.items())
        assert synced[Path(source).name] == Path(source).stat().st_size
        steps.append("checkpoint")
        os.rename(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    prepare_nq320k(src, tmp_path / "out", expected=None)
    assert len(steps) == 4
    assert synced["report.json"] == (tmp_path / "out" / "report.json").stat().st_size
    assert {"data", "qrels", tmp_path.name} <= synced.keys()
