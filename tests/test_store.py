"""What the store promises: old or new after any crash, every damage found, one writer, clear errors."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nci import store
from nci.errors import IndexCorruptError, IndexLockedError, IndexNotFoundError, IndexVersionError, NciError
from nci.store import Storage, check, collect_garbage, publish, read_manifest, resolve, verify_checksums, writer_lock

NAMES = ("model.safetensors", "trie.safetensors", "documents.jsonl", "embedder/config.json")


def content(label: str, name: str) -> bytes:
    return f"{label} {name}\n".encode() * 40


def writer(label: str) -> Callable[[Path], dict[str, object]]:
    def write(staging: Path) -> dict[str, object]:
        (staging / "embedder").mkdir()
        for name in NAMES:
            (staging / name).write_bytes(content(label, name))
        return {"label": label}

    return write


def state(folder: Path) -> str | None:
    """The label of the live generation, all of whose files are whole; None when there is none."""
    try:
        generation = resolve(folder)
    except IndexNotFoundError:
        return None
    manifest = read_manifest(generation)
    check(generation, manifest, paranoid=True)
    assert verify_checksums(generation) == []
    assert all((generation / name).read_bytes() == content(manifest["label"], name) for name in NAMES)
    return str(manifest["label"])


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def run(script: str, *arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(store.__file__).parents[1])}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


# Publishing and finding


def test_round_trip(tmp_path: Path) -> None:
    index = tmp_path / "new" / "my.index"
    generation = publish(index, lambda staging: {**writer("a")(staging), "counts": {"documents": 3}, "seed": 7})
    assert generation == resolve(index) == index / "generation-000001"
    assert (index / "CURRENT").read_text() == "generation-000001\n"
    assert names(index) == {"CURRENT", "LOCK", "generation-000001"}
    manifest = read_manifest(generation)
    assert manifest["format_version"] == store.FORMAT_VERSION
    assert (manifest["counts"], manifest["seed"], manifest["generation"]) == ({"documents": 3}, 7, 1)
    assert {name: entry["role"] for name, entry in manifest["files"].items()} == {
        "model.safetensors": "model",
        "trie.safetensors": "trie",
        "documents.jsonl": "documents",
        "embedder/config.json": "embedder",
    }
    for name, entry in manifest["files"].items():
        data = content("a", name)
        assert (entry["size"], entry["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert state(index) == "a"


def test_next_generation_keeps_the_id_and_counts_up(tmp_path: Path) -> None:
    first = read_manifest(publish(tmp_path, writer("a")))
    second = read_manifest(publish(tmp_path, writer("b")))
    assert (first["index_id"], first["generation"] + 1) == (second["index_id"], second["generation"])
    assert state(tmp_path) == "b"
    (tmp_path / "generation-000002" / "manifest.json").write_text("rubbish")
    repaired = read_manifest(publish(tmp_path, writer("c")))
    assert (repaired["index_id"], repaired["generation"]) == (first["index_id"], 3)
    assert first["index_id"] != read_manifest(publish(tmp_path / "other", writer("a")))["index_id"]


def test_single_generation_and_read_only_folder(tmp_path: Path) -> None:
    generation = publish(tmp_path / "index", writer("a"))
    bare = shutil.copytree(generation, tmp_path / "snapshot")
    assert resolve(bare) == bare
    assert state(bare) == "a"
    assert collect_garbage(bare) == []
    with pytest.raises(NciError, match="another folder"):
        publish(bare, writer("b"))
    everything = sorted((tmp_path).rglob("*"), reverse=True)
    for path in everything:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path: path.stat() for path in everything}
    assert state(bare) == state(tmp_path / "index") == "a"
    after = {path: path.stat() for path in everything}
    assert {p: (s.st_mtime_ns, s.st_size) for p, s in before.items()} == {
        p: (s.st_mtime_ns, s.st_size) for p, s in after.items()
    }
    for path in everything:
        path.chmod(0o755)


def test_snapshot_of_the_hugging_face_cache(tmp_path: Path) -> None:
    generation = publish(tmp_path / "index", writer("a"))
    snapshot = tmp_path / "cache" / "snapshots" / "0123abc"
    (tmp_path / "cache" / "blobs").mkdir(parents=True)
    for number, path in enumerate(sorted(generation.rglob("*.*"))):
        blob = shutil.copy(path, tmp_path / "cache" / "blobs" / str(number))
        link = snapshot / path.relative_to(generation)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (snapshot / ".gitattributes").write_text("*.safetensors filter=lfs")
    assert state(snapshot) == "a"
    outside = shutil.copy(generation / NAMES[0], tmp_path / "outside")
    (snapshot / NAMES[0]).unlink()
    (snapshot / NAMES[0]).symlink_to(outside)
    assert len(verify_checksums(snapshot)) == 1


@pytest.mark.parametrize("name", [".hidden", "a\n", "a b", "manifest.json", "x" * 129, "a/" * 8 + "b", "ü"])
def test_odd_file_names_are_not_published(tmp_path: Path, name: str) -> None:
    def write(staging: Path) -> dict[str, object]:
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).write_text("x")
        return {}

    with pytest.raises(ValueError, match="plain files"):
        publish(tmp_path, write)
    assert names(tmp_path) == {"LOCK"}


def test_links_pipes_and_reserved_entries_are_not_published(tmp_path: Path) -> None:
    def link(staging: Path) -> dict[str, object]:
        (staging / "model.safetensors").symlink_to("/etc/hostname")
        return {}

    def folder_link(staging: Path) -> dict[str, object]:
        (staging / "embedder").symlink_to("/etc")
        return {}

    def pipe(staging: Path) -> dict[str, object]:
        os.mkfifo(staging / "model.safetensors")
        return {}

    def reserved(staging: Path) -> dict[str, object]:
        return {"files": {}}

    def unreadable_by_others(staging: Path) -> dict[str, object]:
        return {"loss": float("nan")}

    for write in (link, folder_link, reserved, unreadable_by_others):
        with pytest.raises(ValueError, match=r"files|JSON"):
            publish(tmp_path, write)
    with pytest.raises(OSError, match="Invalid argument"):
        publish(tmp_path, pipe)
    assert names(tmp_path) == {"LOCK"}


def test_messages_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        IndexNotFoundError, match=f"no CURRENT file in it; make one with: nci index CORPUS -o {tmp_path}"
    ):
        resolve(tmp_path)
    with pytest.raises(IndexNotFoundError, match="no such folder"):
        resolve(tmp_path / "missing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(IndexNotFoundError, match="not an index"):
        resolve(tmp_path / "file")
    with pytest.raises(NciError, match="cannot be written"):
        publish(tmp_path / "file", writer("a"))


def test_needs_no_torch() -> None:
    process = run("import sys, nci.store; print({'torch', 'numpy', 'transformers'} & set(sys.modules))")
    assert process.communicate()[0].strip() == "set()"


# Damage


@pytest.fixture(scope="module")
def two_generations(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Same names and sizes, different contents; one file is too large to be hashed at every open."""

    def write(label: str) -> Callable[[Path], dict[str, object]]:
        def fill(staging: Path) -> dict[str, object]:
            (staging / "vectors.npy").write_bytes(label.encode() * (store.ALWAYS_HASHED_BYTES + 1))
            return writer(label)(staging)

        return fill

    root = tmp_path_factory.mktemp("damage")
    return publish(root / "a", write("a")), publish(root / "b", write("b"))


def found(generation: Path, *, paranoid: bool) -> bool:
    try:
        check(generation, read_manifest(generation), paranoid=paranoid)
    except IndexCorruptError as error:
        return "expected" in str(error) and "restore it from a copy" in str(error)
    return False


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def damages(data: bytes, foreign: bytes) -> Iterator[tuple[str, bytes]]:
    rng = random.Random(len(data))
    for _ in range(20):
        bit = rng.randrange(8 * len(data))
        yield f"bit {bit} flipped", flipped(data, bit)
    for length in (0, 1, len(data) // 2, len(data) - 1):
        yield f"cut to {length}", data[:length]
    yield "one byte more", data + b"\n"
    yield "zeroed page", bytes(min(4096, len(data))) + data[4096:]
    yield "swapped", foreign


REPLACEMENTS: tuple[tuple[Callable[[Path], object], Callable[[Path], object]], ...] = (
    (lambda path: None, lambda path: None),
    (Path.mkdir, Path.rmdir),
    (os.mkfifo, Path.unlink),
    (lambda path: path.symlink_to("/etc/hostname"), Path.unlink),
)


@pytest.mark.parametrize("name", [*NAMES, "vectors.npy", "manifest.json"])
def test_every_damage_to_every_file_is_found(two_generations: tuple[Path, Path], name: str) -> None:
    generation, other = two_generations
    path = generation / name
    data = path.read_bytes()
    try:
        for kind, damaged in damages(data, (other / name).read_bytes()):
            path.write_bytes(damaged)
            assert verify_checksums(generation), kind
            assert found(generation, paranoid=True), kind
            # What opening an index skips by design: the content of a large file of the right size.
            assert found(generation, paranoid=False) or (name == "vectors.npy" and len(damaged) == len(data)), kind
        path.unlink()
        for make, unmake in REPLACEMENTS:
            make(path)
            assert verify_checksums(generation)
            assert found(generation, paranoid=False)
            unmake(path)
    finally:
        path.write_bytes(data)
    assert verify_checksums(generation) == []
    assert not found(generation, paranoid=True)


def test_every_bit_of_the_manifest_counts(two_generations: tuple[Path, Path], tmp_path: Path) -> None:
    data = (two_generations[0] / "manifest.json").read_bytes()
    for bit in range(0, 8 * len(data), 17):
        (tmp_path / "manifest.json").write_bytes(flipped(data, bit))
        with pytest.raises(IndexCorruptError):
            read_manifest(tmp_path)


def test_all_problems_are_listed(tmp_path: Path) -> None:
    generation = publish(tmp_path, writer("a"))
    (generation / "pytorch_model.bin").write_text("not ours")
    (generation / "embedder" / "more").symlink_to("/etc")
    (generation / ".DS_Store").write_text("a file manager was here")
    (generation / NAMES[0]).unlink()
    (generation / NAMES[1]).write_bytes(b"short")
    problems = verify_checksums(generation)
    assert [line.split(":")[0] for line in problems] == [
        "model.safetensors",
        "trie.safetensors",
        "embedder/more",
        "pytorch_model.bin",
    ]


def test_damaged_current_never_leads_to_a_damaged_index(tmp_path: Path) -> None:
    for label in "abc":
        publish(tmp_path, writer(label))
    line = (tmp_path / "CURRENT").read_bytes()
    outcomes = Counter[str | None]()
    for damaged in [
        *(flipped(line, bit) for bit in range(8 * len(line))),
        b"",
        line[:-1],
        line + b"\n",
        b"../../etc\n",
    ]:
        (tmp_path / "CURRENT").write_bytes(damaged)
        try:
            outcomes[state(tmp_path)] += 1
        except IndexCorruptError:
            outcomes["refused"] += 1
    assert outcomes.keys() <= {"refused", "a", "b"}
    assert outcomes["refused"] > 140
    (tmp_path / "CURRENT").unlink()
    (tmp_path / "CURRENT").mkdir()
    with pytest.raises(IndexCorruptError):
        resolve(tmp_path)


def sealed(body: bytes) -> bytes:
    return body + store._signature(body)


def test_foreign_files_that_pass_for_ours(tmp_path: Path) -> None:
    def write(staging: Path) -> dict[str, object]:
        (staging / "empty.txt").touch()
        return {}

    first, second = publish(tmp_path, write), publish(tmp_path, write)
    manifest = (second / "manifest.json").read_bytes()
    shutil.copy(first / "manifest.json", second)
    assert verify_checksums(second)
    (second / "manifest.json").write_bytes(manifest)
    assert verify_checksums(second) == []
    (second / "empty.txt").unlink()
    os.mkfifo(second / "empty.txt")
    assert verify_checksums(second)
    shutil.rmtree(second)
    second.symlink_to(first)
    with pytest.raises(IndexCorruptError):
        resolve(tmp_path)


@pytest.mark.parametrize(
    ("name", "digest"),
    [("../x", "0" * 64), ("/etc/hostname", "0" * 64), ("a/../../x", "0" * 64), ("a//b", "0" * 64), ("a", "\x1b[31m")],
)
def test_manifest_cannot_lead_out_of_the_folder(tmp_path: Path, name: str, digest: str) -> None:
    entries = {"format_version": 1, "index_id": "", "generation": 1, "files": {name: {"size": 1, "sha256": digest}}}
    (tmp_path / "manifest.json").write_bytes(sealed(json.dumps(entries).encode()[:-1]))
    with pytest.raises(IndexCorruptError, match="bad entry"):
        read_manifest(tmp_path)
    entries["files"] = {"a": {"size": 1, "sha256": "0" * 64}}
    (tmp_path / "manifest.json").write_bytes(sealed(json.dumps(entries).encode()[:-1]))
    assert read_manifest(tmp_path)["files"] == entries["files"]


def test_newer_format_is_refused(tmp_path: Path) -> None:
    path = publish(tmp_path, writer("a")) / "manifest.json"
    body = path.read_bytes()[: -len(store._signature(b""))]
    path.write_bytes(sealed(body.replace(b'"format_version": 1', b'"format_version": 2')))
    with pytest.raises(IndexVersionError, match="written by format 2, this nci reads up to 1; upgrade nci"):
        read_manifest(path.parent)
    with pytest.raises(IndexVersionError):
        publish(tmp_path, writer("b"))
    assert names(tmp_path) == {"CURRENT", "LOCK", "generation-000001"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
entry_values = st.fixed_dictionaries(
    {"size": st.integers() | json_values, "sha256": st.text("0a", max_size=64) | json_values}
)
manifests = st.fixed_dictionaries(
    {},
    optional={
        "format_version": st.integers(-1, 2) | json_values,
        "index_id": st.text() | json_values,
        "generation": st.integers() | json_values,
        "files": st.dictionaries(st.text("./a\x00\n", max_size=5), entry_values | json_values, max_size=3)
        | json_values,
    },
)


@settings(deadline=None, max_examples=150)
@given(st.binary(max_size=200) | manifests.map(lambda m: json.dumps(m).encode()[:-1]))
def test_hostile_manifests_raise_only_our_errors(tmp_path_factory: pytest.TempPathFactory, body: bytes) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "manifest.json").write_bytes(sealed(body))
    try:
        check(folder, read_manifest(folder), paranoid=True)
        verify_checksums(folder)
    except (IndexCorruptError, IndexVersionError):
        pass
    (folder / "manifest.json").unlink()


def test_huge_and_deep_manifests_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = publish(tmp_path, writer("a")) / "manifest.json"
    whole = path.read_bytes()
    path.write_bytes(sealed(b'{"format_version": 1, "deep": ' + b"[" * 100_000 + b"]" * 100_000))
    with pytest.raises(IndexCorruptError):
        read_manifest(path.parent)
    path.write_bytes(whole)
    monkeypatch.setattr(store, "MAX_MANIFEST_BYTES", len(whole))
    read_manifest(path.parent)
    monkeypatch.setattr(store, "MAX_MANIFEST_BYTES", len(whole) - 1)
    with pytest.raises(IndexCorruptError):
        read_manifest(path.parent)


# One writer

HOLD = """
import os, sys, time
from pathlib import Path
from nci.store import writer_lock
with writer_lock(Path(sys.argv[1])):
    if "fork" not in sys.argv:
        print(0, flush=True)
    elif os.fork() == 0:
        print(os.getpid(), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("fork", ["", "fork"])
def test_second_writer_is_refused_and_a_dead_one_replaced(tmp_path: Path, fork: str) -> None:
    publish(tmp_path, writer("a"))
    holder = run(HOLD, tmp_path, fork)
    assert holder.stdout
    worker = int(holder.stdout.readline())
    try:
        for action in (lambda: publish(tmp_path, writer("b")), lambda: collect_garbage(tmp_path)):
            with pytest.raises(IndexLockedError, match=f"process {holder.pid} on {socket.gethostname()}"):
                action()
        assert state(tmp_path) == "a"
        holder.kill()
        holder.wait()
        assert json.loads((tmp_path / "LOCK").read_text()) == {"pid": holder.pid, "host": socket.gethostname()}
        publish(tmp_path, writer("b"))
        assert state(tmp_path) == "b"
    finally:
        if worker:
            os.kill(worker, signal.SIGKILL)
        holder.kill()
        holder.communicate()


def test_lock_nests_in_one_thread_only(tmp_path: Path) -> None:
    refused: list[Exception] = []

    def intrude() -> None:
        try:
            publish(tmp_path, writer("b"))
        except IndexLockedError as error:
            refused.append(error)

    (tmp_path / "LOCK").write_text("longer than any name of a process and its host " * 10)
    with writer_lock(tmp_path / "." / ""):
        assert json.loads((tmp_path / "LOCK").read_text())["pid"] == os.getpid()
        publish(tmp_path, writer("a"))
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
    assert len(refused) == 1
    assert state(tmp_path) == "a"
    intrude()
    assert state(tmp_path) == "b"


# Garbage


@pytest.mark.parametrize(("keep", "left"), [(-1, {3}), (0, {3}), (1, {2, 3}), (2, {1, 2, 3}), (9, {1, 2, 3})])
def test_garbage(tmp_path: Path, keep: int, left: set[int]) -> None:
    for label in "abc":
        publish(tmp_path, writer(label))
    # A generation that was never committed is no state to go back to.
    shutil.copytree(tmp_path / "generation-000003", tmp_path / "generation-000004")
    (tmp_path / "staging-notes.txt").write_text("the user's own")
    shutil.copytree(tmp_path / "generation-000001", tmp_path / "staging-generation-000001")
    removed = collect_garbage(tmp_path, keep=keep)
    assert set(removed) == {f"generation-{n:06d}" for n in {1, 2, 4} - left}
    assert names(tmp_path) == {"CURRENT", "LOCK", "staging-notes.txt"} | {f"generation-{n:06d}" for n in left}
    assert state(tmp_path) == "c"


def test_nothing_is_collected_while_the_live_generation_is_damaged(tmp_path: Path) -> None:
    publish(tmp_path, writer("a"))
    (publish(tmp_path, writer("b")) / NAMES[0]).write_bytes(b"")
    with pytest.raises(IndexCorruptError):
        collect_garbage(tmp_path, keep=0)
    assert "generation-000001" in names(tmp_path)
    with pytest.raises(IndexNotFoundError):
        collect_garbage(tmp_path / "missing")
    assert "missing" not in names(tmp_path)


# Crashes

OPERATIONS = ("write_file", "sync", "rename", "remove")


class Unsynced(Storage):
    """Only a power loss can tell the difference, and the tests need not wait for the disk."""

    def sync(self, path: Path) -> None:
        pass


def hooked(before: Callable[..., None], after: Callable[..., None]) -> Storage:
    """A storage that calls `before(operation, *arguments)` and `after(...)` around every operation."""

    def hook(name: str) -> Callable[..., None]:
        def call(self: Storage, *arguments: Any) -> None:
            before(name, *arguments)
            getattr(Unsynced, name)(self, *arguments)
            after(name, *arguments)

        return call

    storage = type("Hooked", (Unsynced,), {name: hook(name) for name in OPERATIONS})()
    assert isinstance(storage, Storage)
    return storage


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), OSError(errno.EIO, os.strerror(errno.EIO)), KeyboardInterrupt()],
    ids=["full", "io-error", "interrupt"],
)
def test_failure_at_every_operation(tmp_path: Path, error: BaseException, when: str) -> None:
    publish(tmp_path, writer("0"))
    seen = Counter[str]()
    for stop in range(1, 100):
        countdown = iter(range(1, 1000))
        committed = False

        def fail(name: str, *arguments: object, countdown: Any = countdown, stop: int = stop) -> None:
            nonlocal committed
            if next(countdown) == stop:
                if name == "write_file":
                    path, data = arguments
                    assert isinstance(path, Path)
                    assert isinstance(data, bytes)
                    path.write_bytes(data[: len(data) // 2])
                seen[name] += 1
                raise error

        def note(name: str, *arguments: object) -> None:
            nonlocal committed
            committed = committed or (name == "rename" and arguments[1] == tmp_path / "CURRENT")

        old = state(tmp_path)
        message = f"{error}; ... bytes are free in {tmp_path}"
        try:
            storage = hooked(fail, note) if when == "before" else hooked(note, fail)
            publish(tmp_path, writer(str(stop)), storage=storage)
            break
        except NciError as clear:
            message = str(clear)
        except KeyboardInterrupt:
            pass
        assert all(part in message for part in (str(error), "bytes are free", str(tmp_path)))
        assert state(tmp_path) == (str(stop) if committed else old)
        assert not any(name.startswith("staging") for name in names(tmp_path))
        assert len(list(tmp_path.glob("generation-*"))) == 1 + int(committed)
        collect_garbage(tmp_path, keep=0, storage=Unsynced())
    assert seen.keys() == set(OPERATIONS) - {"remove"}
    assert sum(seen.values()) == stop - 1 == 14
    assert state(tmp_path) == str(stop)


@pytest.mark.parametrize(
    ("error", "clear"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (OSError("100000 requested and 109 written"), True),
        (RuntimeError("a bug"), False),
        (ConnectionError("no route to the model hub"), False),
        (SystemExit(1), False),
    ],
)
def test_failing_writer_leaves_the_old_state(tmp_path: Path, error: BaseException, clear: bool) -> None:
    def write(staging: Path) -> dict[str, object]:
        writer("b")(staging)
        raise error

    publish(tmp_path, writer("a"))
    with pytest.raises(NciError if clear else type(error), match="could not be written" if clear else str(error)):
        publish(tmp_path, write)
    assert state(tmp_path) == "a"
    assert names(tmp_path) == {"CURRENT", "LOCK", "generation-000001"}


def test_full_disk_told_by_the_kernel(tmp_path: Path) -> None:
    script = """
import resource, signal, sys
from pathlib import Path
from nci.errors import NciError
from nci.store import publish
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    publish(Path(sys.argv[1]), lambda staging: {"n": (staging / "vectors.npy").write_bytes(bytes(10_000))})
except NciError as error:
    print(error)
"""
    publish(tmp_path, writer("a"))
    assert "File too large" in run(script, tmp_path).communicate()[0]
    assert state(tmp_path) == "a"
    assert names(tmp_path) == {"CURRENT", "LOCK", "generation-000001"}


def test_folder_that_cannot_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    publish(tmp_path, writer("a"))
    assert state(tmp_path) == "a"


DEADLY = """
import os, signal, sys
from pathlib import Path
from nci.store import Storage, publish

folder, label, stop, names = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4].split()
steps = 0

def step():
    global steps
    steps += 1
    if steps == stop:
        os.kill(os.getpid(), signal.SIGKILL)

def deadly(name):
    plain = getattr(Storage, name)
    def call(self, path, *rest):
        if name == "write_file":
            path.write_bytes(rest[0][: len(rest[0]) // 2])
            step()
            path.unlink()
        if name == "remove" and path.is_dir():
            next(file for file in path.rglob("*") if file.is_file()).unlink()
            step()
        plain(self, path, *rest)
        step()
    return call

Deadly = type("Deadly", (Storage,), {name: deadly(name) for name in sys.argv[5].split()})

def write(staging):
    (staging / "embedder").mkdir()
    for name in names:
        data = f"{label} {name}\\n".encode() * 40
        with open(staging / name, "wb", buffering=0) as file:
            file.write(data[:100])
            step()
            file.write(data[100:])
    return {"label": label}

publish(folder, write, storage=Deadly())
"""


@pytest.mark.slow
def test_kill_at_every_step(tmp_path: Path) -> None:
    publish(tmp_path, writer("0"))
    outcomes = Counter[str]()
    for stop in range(1, 100):
        old = state(tmp_path)
        stale = tmp_path / "staging-1" / "model.safetensors"
        stale.parent.mkdir()
        stale.write_text("of a writer that died")
        process = run(DEADLY, tmp_path, f"killed at {stop}", stop, " ".join(NAMES), " ".join(OPERATIONS))
        process.communicate()
        after = state(tmp_path)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        assert after in (old, f"killed at {stop}")
        outcomes["old" if after == old else "new"] += 1
        publish(tmp_path, writer(f"after {stop}"), storage=Unsynced())
        assert state(tmp_path) == f"after {stop}"
        assert not any(name.startswith("staging") for name in names(tmp_path))
        collect_garbage(tmp_path, keep=0, storage=Unsynced())
    assert outcomes == {"old": stop - 3, "new": 2}
    assert stop > 20


def test_readers_never_see_a_half_written_generation(tmp_path: Path) -> None:
    publish(tmp_path, writer("0"))
    script = """
import sys
from pathlib import Path
from nci.store import publish
for label in range(1, 31):
    def write(staging):
        (staging / "embedder").mkdir()
        for name in sys.argv[2].split():
            (staging / name).write_bytes(f"{label} {name}\\n".encode() * 40)
        return {"label": str(label)}
    publish(Path(sys.argv[1]), write)
"""
    process = run(script, tmp_path, " ".join(NAMES))
    seen = [0]
    while process.poll() is None:
        seen.append(int(state(tmp_path) or -1))
    assert process.returncode == 0
    assert seen == sorted(seen)
    assert state(tmp_path) == "30"


# Power loss


class Moment(NamedTuple):
    """What is on the disk for certain and what the kernel still holds in memory; names lead to inodes."""

    synced_files: dict[int, bytes]
    synced_folders: dict[int, dict[str, int]]
    files: dict[int, bytes]
    folders: dict[int, dict[str, int]]


class Recorder:
    """Records after every operation of a real storage what a power loss could leave; can forget one sync."""

    def __init__(self, root: Path, *, skip: int | None = None) -> None:
        self.root, self.skip = root, skip
        self.syncs: list[str] = []
        self.moments: list[Moment] = []
        self.pins: dict[int, int] = {}
        self.synced_files, self.synced_folders = self.look()

        def after(name: str, path: Path, *rest: object) -> None:
            if name == "sync":
                self.syncs.append(path.name)
                if len(self.syncs) - 1 != self.skip:
                    self.sync(path)
            self.remember()

        self.storage = hooked(lambda *_: None, after)

    def sync(self, path: Path) -> None:
        inode = path.stat().st_ino
        if path.is_dir():
            self.synced_folders[inode] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self.synced_files[inode] = path.read_bytes()

    def look(self) -> tuple[dict[int, bytes], dict[int, dict[str, int]]]:
        files, folders = {}, {}
        for path in [self.root, *self.root.rglob("*")]:
            inode = path.stat().st_ino
            if inode not in self.pins:
                # An open descriptor keeps the number of a removed file from being given to a new one.
                self.pins[inode] = os.open(path, os.O_RDONLY)
            if path.is_dir():
                folders[inode] = {entry.name: entry.inode() for entry in os.scandir(path)}
            else:
                files[inode] = path.read_bytes()
        return files, folders

    def remember(self) -> None:
        self.moments.append(Moment(dict(self.synced_files), dict(self.synced_folders), *self.look()))

    def close(self) -> None:
        for descriptor in self.pins.values():
            os.close(descriptor)

    def recover(self, moment: Moment, target: Path, rng: random.Random) -> None:
        """Lay out one state that the disk could be in: each unsynced change kept, dropped or, in a file, garbled."""

        def lay(inode: int, path: Path) -> None:
            if inode not in moment.folders and inode not in moment.synced_folders:
                old, new = moment.synced_files.get(inode, b""), moment.files.get(inode)
                path.write_bytes(old if new in (None, old) else rng.choice([old, new, garbled(new, rng)]))
                return
            path.mkdir()
            before, now = moment.synced_folders.get(inode, {}), moment.folders.get(inode, {})
            for name in sorted(before.keys() | now.keys()):
                child = rng.choice([before.get(name), now.get(name)])
                if child is not None:
                    lay(child, path / name)

        lay(self.root.stat().st_ino, target)


def garbled(data: bytes | None, rng: random.Random) -> bytes:
    data = data or b"\0"
    start = rng.randrange(len(data))
    return rng.choice([data[:start], data[:start] + bytes(len(data) - start), data[:start] + rng.randbytes(8)])


def lose_power(scenario: str, root: Path, *, skip: int | None = None) -> Recorder:
    work = root / "work"
    shutil.rmtree(work, ignore_errors=True)
    index = work / "deep" / "index"
    work.mkdir()
    if scenario in ("next publish", "garbage"):
        publish(index, writer("old"), storage=Unsynced())
        (index / "staging-7").mkdir()
        (index / "staging-7" / "model.safetensors").write_text("of a writer that died")
    if scenario == "second try":
        index.parent.mkdir()
    recorder = Recorder(work, skip=skip)
    if scenario == "second try":
        # The first writer was killed before it had synced the new folder into its parent.
        index.mkdir()
    if scenario == "garbage":
        folder = index.stat().st_ino
        old = recorder.synced_folders[folder]["CURRENT"]
        publish(index, writer("new"), storage=Unsynced())
        recorder.synced_files, recorder.synced_folders = recorder.look()
        # That writer was killed before its last sync, the one of the folder with the new CURRENT.
        recorder.synced_folders[folder]["CURRENT"] = old
        recorder.synced_files[old] = b"generation-000001\n"
    recorder.remember()
    if scenario == "garbage":
        collect_garbage(index, keep=0, storage=recorder.storage)
    else:
        publish(index, writer("new"), storage=recorder.storage)
    return recorder


def outcomes(recorder: Recorder, root: Path, seeds: int) -> Iterator[str | None]:
    index = root / "recovered" / "deep" / "index"
    last = len(recorder.moments) - 1
    for seed, (number, moment) in itertools.product(range(seeds), reversed([*enumerate(recorder.moments)])):
        shutil.rmtree(root / "recovered", ignore_errors=True)
        recorder.recover(moment, root / "recovered", random.Random(1000 * seed + number))
        try:
            outcome = state(index)
        except (IndexCorruptError, AssertionError):
            outcome = "corrupt"
        if any(verify_checksums(path) for path in index.glob("generation-*")):
            outcome = "corrupt"
        # Once the call has returned, going back to the old state is a broken promise too.
        yield "lost" if number == last and outcome in (None, "old") else outcome


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["first publish", "second try", "next publish", "garbage"])
def test_power_loss_leaves_old_or_new(tmp_path: Path, scenario: str) -> None:
    recorder = lose_power(scenario, tmp_path)
    tally = Counter[str | None]()
    for outcome in outcomes(recorder, tmp_path, 40):
        tally[outcome] += 1
        if tally.total() <= len(recorder.moments):
            index = tmp_path / "recovered" / "deep" / "index"
            publish(index, writer("next"), storage=Unsynced())
            assert state(index) == "next"
    recorder.close()
    assert tally.keys() == {"old" if scenario in ("next publish", "garbage") else None, "new"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "syncs"), [("first publish", 12), ("second try", 11), ("next publish", 10), ("garbage", 2)]
)
def test_no_sync_can_be_left_out(tmp_path: Path, scenario: str, syncs: int) -> None:
    whole = lose_power(scenario, tmp_path)
    whole.close()
    assert len(whole.syncs) == syncs
    for skip, name in enumerate(whole.syncs):
        recorder = lose_power(scenario, tmp_path, skip=skip)
        assert any(outcome in ("corrupt", "lost") for outcome in outcomes(recorder, tmp_path, 40)), name
        recorder.close()
