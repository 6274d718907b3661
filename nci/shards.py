"""Map a stage over shards: shard inputs in, one file of arrays per shard out; a rerun does only what is missing.

The one place that knows how work is spread ("local" is a loop in this process). Knows nothing of documents or models:
a stage brings a function that makes a worker, and a worker turns the items of one shard into named arrays.
A shard is `shard-00017.safetensors` and, written last, the marker `shard-00017.ok`; without a marker that fits, in key,
size and hash, the shard is done again. A worker must be pure: equal items, equal arrays.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save
from tqdm import tqdm

from nci.errors import ConfigError
from nci.progress import hide_bars

ENGINES = ("local",)

Arrays = dict[str, np.ndarray[Any, Any]]
Worker = Callable[[Any], Arrays]

_advance: ContextVar[Callable[[int], object] | None] = ContextVar("advance", default=None)


class Shard(NamedTuple):
    """One piece of work. `key` is a hash of the items and of every setting that changes the result."""

    key: str
    items: Sequence[Any]


def report(items: int) -> None:
    """A worker may call this as it goes, so that the bar moves within a shard; without a bar it does nothing."""
    advance = _advance.get()
    if advance is not None:
        advance(items)


def map_shards(
    make_worker: Callable[[], Worker],
    shards: Iterable[Shard],
    out_dir: Path,
    *,
    engine: str = "local",
    describe: str | None = None,
    unit: str = "item",
    total: int | None = None,
) -> list[Path]:
    """Write one file per shard into `out_dir` and return the files in the order of `shards`.

    `make_worker` is called once, and not at all when every shard is already there; `shards` is read lazily, one at a
    time. The folder belongs to this function: files of an earlier run that had more shards are removed.

    Args:
        make_worker: Loads what is expensive (a model) and returns the worker.
        shards: The work, in order.
        out_dir: Where the files go; made when missing.
        engine: Where workers run.
        describe: Label of the progress bar, which counts items; None shows none.
        unit: What the bar counts.
        total: Items in all, where known, for the bar.
    """
    check_engine(engine)
    out_dir.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    worker: Worker | None = None
    with tqdm(desc=describe, total=total, unit=unit, disable=hide_bars(bool(describe))) as bar:
        for number, shard in enumerate(shards):
            file = out_dir / f"shard-{number:05d}.safetensors"
            files.append(file)
            end = bar.n + len(shard.items)
            if not is_finished(file, key=shard.key):
                worker = worker or make_worker()
                token = _advance.set(bar.update)
                try:
                    arrays = worker(shard.items)
                finally:
                    _advance.reset(token)
                _write_shard(file, arrays, key=shard.key)
            bar.update(end - bar.n)  # what the worker did not report itself
    _remove_others(out_dir, files)
    return files


def check_engine(engine: str) -> None:
    """Refuse an engine that does not exist, before any work is done."""
    if engine not in ENGINES:
        raise ConfigError(f"--engine {engine!r} does not exist; the engines are: {', '.join(ENGINES)}")


def read_shard(file: Path, *names: str) -> Arrays:
    """The arrays of one shard, or some of them."""
    if not names:
        return load_file(file)
    with safe_open(file, "np") as arrays:
        return {name: arrays.get_tensor(name) for name in names}


def shard_rows(file: Path, name: str) -> int:
    """How many rows one array of a shard has, which is not read."""
    with safe_open(file, "np") as arrays:
        return int(arrays.get_slice(name).get_shape()[0])


def write_rows(path: Path, parts: Iterable[np.ndarray[Any, Any]], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Arrays one below the other as one .npy file, never all of them in memory; a full disk is an error, as it would
    not be in a file that is mapped."""
    with path.open("wb") as file:
        head = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, head)
        for part in parts:
            file.write(np.ascontiguousarray(part).data)


def is_finished(file: Path, *, key: str) -> bool:
    """Whether the shard is whole and was made from the work that `key` stands for."""
    try:
        marker = json.loads(_marker(file).read_bytes())
        if marker["key"] != key or marker["size"] != file.stat().st_size:
            return False
        with file.open("rb") as stream:
            return bool(marker["sha256"] == hashlib.file_digest(stream, "sha256").hexdigest())
    except (OSError, ValueError, KeyError, TypeError):
        return False  # missing, cut off or foreign: the cure is the same, do it again


def rename_durably(source: Path, target: Path) -> None:
    """Put a finished file in its place; after a crash `target` is the old file or the new one, whole."""
    _sync(source)
    os.rename(source, target)
    _sync(target.parent)  # the rename itself is an entry of the folder


def _write_shard(file: Path, arrays: Mapping[str, np.ndarray[Any, Any]], *, key: str) -> None:
    # safetensors writes the buffer as it lies in memory, so a transposed view must be laid out in C order first
    data = save({name: np.asarray(array, order="C") for name, array in arrays.items()})
    _replace(file, data)
    marker = {"key": key, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    _replace(_marker(file), json.dumps(marker).encode())


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    rename_durably(temporary, path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _marker(file: Path) -> Path:
    return file.with_suffix(".ok")


def _remove_others(out_dir: Path, files: Sequence[Path]) -> None:
    keep = {*files, *map(_marker, files)}
    for path in out_dir.glob("shard-*"):
        if path not in keep:
            path.unlink()
