from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from nci.errors import ConfigError
from nci.shards import Arrays, Shard, map_shards, read_shard, report, shard_rows, write_rows

WORK = [Shard(key=f"key-{i}", items=list(range(i, i + 3))) for i in range(5)]


class Squares:
    """A worker that remembers what it was asked for; `loads` counts how often it was made."""

    def __init__(self) -> None:
        self.calls: list[Sequence[int]] = []
        self.loads = 0

    def make(self) -> Callable[[Sequence[int]], Arrays]:
        self.loads += 1
        return self

    def __call__(self, items: Sequence[int]) -> Arrays:
        self.calls.append(items)
        return {"squares": np.array([i * i for i in items], dtype=np.float32)}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    map_shards(Squares().make, WORK, tmp_path / "out")
    return tmp_path / "out"


def test_one_file_and_one_marker_per_shard_in_order(tmp_path: Path) -> None:
    squares = Squares()
    files = map_shards(squares.make, iter(WORK), tmp_path / "out")
    assert [file.name for file in files] == [f"shard-0000{i}.safetensors" for i in range(5)]
    assert squares.loads == 1
    for file, shard in zip(files, WORK, strict=True):
        np.testing.assert_array_equal(read_shard(file)["squares"], np.square(shard.items))
        marker = json.loads(file.with_suffix(".ok").read_text())
        assert marker["key"] == shard.key
        assert marker["size"] == file.stat().st_size
    assert len(list((tmp_path / "out").iterdir())) == 10


def test_a_second_run_does_nothing_and_loads_nothing(finished: Path) -> None:
    before, squares = contents(finished), Squares()
    map_shards(squares.make, WORK, finished)
    assert squares.loads == 0
    assert contents(finished) == before


@pytest.mark.parametrize("suffix", [".safetensors", ".ok"])
def test_only_a_missing_shard_is_redone(finished: Path, suffix: str) -> None:
    before, squares = contents(finished), Squares()
    (finished / f"shard-00002{suffix}").unlink()
    map_shards(squares.make, WORK, finished)
    assert squares.calls == [WORK[2].items]
    assert contents(finished) == before


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("name", ["shard-00003.safetensors", "shard-00003.ok"])
@pytest.mark.parametrize("damage", [flip, lambda data: data[:-1], lambda data: b"", lambda data: b"[]"])
def test_a_damaged_shard_is_redone(finished: Path, name: str, damage: Callable[[bytes], bytes]) -> None:
    before, squares = contents(finished), Squares()
    (finished / name).write_bytes(damage((finished / name).read_bytes()))
    map_shards(squares.make, WORK, finished)
    assert squares.calls == [WORK[3].items]
    assert contents(finished) == before


def test_a_changed_key_is_redone(finished: Path) -> None:
    squares = Squares()
    map_shards(squares.make, [*WORK[:4], WORK[4]._replace(key="other")], finished)
    assert squares.calls == [WORK[4].items]


def test_fewer_shards_leave_no_files_of_the_longer_run(finished: Path) -> None:
    (finished / "shard-00001.safetensors.tmp").write_bytes(b"half")
    map_shards(Squares().make, WORK[:2], finished)
    assert sorted(contents(finished)) == [f"shard-0000{i}.{kind}" for i in (0, 1) for kind in ("ok", "safetensors")]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(done=st.integers(0, 4))
def test_an_exception_keeps_what_was_finished(
    tmp_path_factory: pytest.TempPathFactory, finished: Path, done: int
) -> None:
    class Stops(Squares):
        def __call__(self, items: Sequence[int]) -> Arrays:
            if len(self.calls) == done:
                raise KeyboardInterrupt
            return super().__call__(items)

    out, squares = tmp_path_factory.mktemp("out"), Squares()
    with pytest.raises(KeyboardInterrupt):
        map_shards(Stops().make, WORK, out)
    map_shards(squares.make, WORK, out)
    assert squares.calls == [shard.items for shard in WORK[done:]]
    assert contents(out) == contents(finished)


KILLED = """
import os, sys
from pathlib import Path
import numpy as np
from nci import shards
done = 0
def rename(source, target, real=os.rename):
    global done
    if done == int(sys.argv[2]):
        os._exit(9)
    done += 1
    real(source, target)
os.rename = rename
work = [shards.Shard(f"key-{i}", list(range(i, i + 3))) for i in range(5)]
def squares(items):
    return {"squares": np.array([i * i for i in items], dtype=np.float32)}
shards.map_shards(lambda: squares, work, Path(sys.argv[1]))
"""


@pytest.mark.parametrize("renames", [0, 3, 4])
def test_a_killed_process_is_taken_up_bit_for_bit(tmp_path: Path, finished: Path, renames: int) -> None:
    out = tmp_path / "killed"
    # each shard is two renames, so 3 stops between a file and its marker and 4 between two shards
    assert subprocess.run([sys.executable, "-c", KILLED, str(out), str(renames)], check=False).returncode == 9
    squares = Squares()
    map_shards(squares.make, WORK, out)
    assert squares.calls == [shard.items for shard in WORK[renames // 2 :]]
    assert contents(out) == contents(finished)


def test_shards_are_read_one_at_a_time(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def work() -> Any:
        for i, shard in enumerate(WORK):
            assert len(list(out.glob("*.ok"))) == i
            yield shard

    map_shards(Squares().make, work(), out)


def test_arrays_of_any_kind_come_back_as_they_were(tmp_path: Path) -> None:
    grid = np.arange(6, dtype=np.int64).reshape(2, 3)
    arrays: Arrays = {
        "view": grid.T,
        "every_other": grid[:, ::2],
        "half": grid.astype(np.float16),
        "none": np.empty((0, 4)),
    }
    [file] = map_shards(lambda: lambda items: arrays, [Shard("key", [1])], tmp_path)
    back = read_shard(file)
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype
        np.testing.assert_array_equal(back[name], array)


def test_an_unknown_engine_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--engine 'spark' does not exist; the engines are: local"):
        map_shards(Squares().make, WORK, tmp_path / "out", engine="spark")
    assert not (tmp_path / "out").exists()


def test_the_bar_counts_each_item_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    updates: list[int] = []

    class Bar:
        def __init__(self, **options: Any) -> None:
            self.n = 0

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def update(self, n: int) -> None:
            self.n += n
            updates.append(n)

    def work(items: Sequence[int]) -> Arrays:
        report(2)
        return Squares()(items)

    map_shards(Squares().make, WORK[:1], tmp_path)
    monkeypatch.setattr("nci.shards.tqdm", Bar)
    map_shards(lambda: work, WORK[:2], tmp_path, describe="square")
    report(1)  # outside a run there is no bar to move
    assert updates == [3, 2, 1]  # the finished shard, what the worker reported, the rest


@pytest.mark.parametrize("shape", [(), (3,), (2, 4)])
def test_rows_are_written_as_numpy_would(tmp_path: Path, shape: tuple[int, ...]) -> None:
    parts = [np.random.default_rng(n).integers(-100, 100, (n, *shape)).astype(np.int8) for n in (3, 0, 5)]
    parts.append(np.asfortranarray(parts[2]))
    whole = np.concatenate(parts)
    write_rows(tmp_path / "some.npy", iter(parts), whole.shape, whole.dtype)
    np.save(tmp_path / "other.npy", whole)
    assert (tmp_path / "some.npy").read_bytes() == (tmp_path / "other.npy").read_bytes()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no disk that is always full")
def test_a_full_disk_is_an_error() -> None:
    with pytest.raises(OSError, match="No space left"):
        write_rows(Path("/dev/full"), [np.zeros((1000, 1000))], (1000, 1000), np.dtype(np.float64))


def test_some_arrays_of_a_shard(tmp_path: Path) -> None:
    arrays = {"a": np.arange(6.0).reshape(2, 3), "b": np.zeros(0, np.int8)}
    save_file(arrays, tmp_path / "shard.safetensors")
    assert [shard_rows(tmp_path / "shard.safetensors", name) for name in arrays] == [2, 0]
    found = read_shard(tmp_path / "shard.safetensors", "a")
    assert list(found) == ["a"]
    np.testing.assert_array_equal(found["a"], arrays["a"])
