"""Makes a folder of files durable and proves later that it is undamaged: files in, generations and manifests out.

An index folder holds immutable `generation-NNNNNN/` folders and the file `CURRENT`, which names the live one. The
rename that replaces `CURRENT` is the only commit point: a crash or a power loss at any moment leaves the old generation
live or the new one, complete. Names that start with `staging-` belong to the process that holds `LOCK`; whoever takes
the lock next removes them. Readers take no lock and write nothing.

Knows nothing of models, tries or documents: other modules write the files, this one syncs, hashes and lists them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import stat
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nci
from nci.errors import IndexCorruptError, IndexLockedError, IndexNotFoundError, IndexVersionError, NciError

FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 16 * 2**20
ALWAYS_HASHED_BYTES = 2**20

_GENERATION = re.compile(r"generation-([0-9]{6,12})")
_STAGING = re.compile(r"staging-([0-9]+|current|generation-[0-9]+)")
_SAFE_NAME = re.compile(r"(?!manifest\.json$)((?!\.)[A-Za-z0-9._-]{1,128}(/(?!$)|$)){1,8}")
_ROLE = re.compile(
    r"(?P<embedder>embedder/)|(?P<lexical>lexical/)|(?P<pieces>pieces/)|(?P<trie>trie\.)|(?P<edges>edges\.)"
    r"|(?P<vectors>vectors\.|centroids\.)|(?P<documents>documents\.|offsets\.|doc_ids\.)"
    r"|(?P<tokenizer>tokenizer|special_tokens|vocab|spiece)|(?P<model>model|config\.json|generation_config)"
    r"|(?P<card>README\.md)"
)
_DISK_TROUBLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM}
_DISK_FULL = re.compile(r"\(os error (27|28|122)\)|\d requested and \d+ written")  # safetensors, numpy: no errno
_SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # no link leads an open elsewhere, no pipe blocks it


class Storage:
    """The operations whose order decides what survives a power loss; tests put a double in its place."""

    def write_file(self, path: Path, data: bytes) -> None:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY, 0o644), "wb") as file:
            file.write(data)

    def sync(self, path: Path) -> None:
        """Of a file its bytes, of a folder the names in it."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems cannot sync a folder at all; that is no failed write.
            if error.errno not in (errno.EINVAL, errno.EBADF) or not path.is_dir():
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


DISK = Storage()


def publish(folder: Path, write: Callable[[Path], Mapping[str, object]], *, storage: Storage = DISK) -> Path:
    """Let `write` fill a staging folder, make it durable and make it the live generation; returns its path.

    `write` returns further manifest entries (config, seeds, counts). If anything fails, what was live stays live.
    """
    if os.path.lexists(folder / "manifest.json"):
        raise NciError(f"{folder} is a single generation and never changes; write the index to another folder")
    unborn = [path for path in (folder.absolute(), *folder.absolute().parents) if not os.path.exists(path)]
    with writer_lock(folder):
        index_id, number = _lineage(folder)
        generation = folder / f"generation-{number:06d}"
        staging = folder / f"staging-{os.getpid()}"
        pointer = folder / "staging-current"
        try:
            _clear_staging(folder, storage)
            if not (folder / "CURRENT").exists():
                for parent in {folder.resolve().parent, *(path.parent for path in unborn)}:
                    storage.sync(parent)
            staging.mkdir()
            _seal(staging, write(staging), index_id=index_id, number=number, storage=storage)
            storage.rename(staging, generation)
            # CURRENT must never reach the disk before the folder it names.
            storage.sync(folder)
            storage.write_file(pointer, f"{generation.name}\n".encode())
            storage.sync(pointer)
            storage.rename(pointer, folder / "CURRENT")
            storage.sync(folder)
        except BaseException as error:
            with contextlib.suppress(OSError):
                # After the rename of CURRENT the generation is live, whatever failed next.
                if _current(folder) != f"{generation.name}\n":
                    for path in (pointer, staging, generation):
                        storage.remove(path)
            if getattr(error, "errno", None) in _DISK_TROUBLE or _DISK_FULL.search(str(error)):
                free = f"{shutil.disk_usage(folder).free} bytes are free, the last complete generation is live"
                raise NciError(f"{folder} could not be written: {error}; {free}; make room and try again") from error
            raise
    return generation


def collect_garbage(folder: Path, *, keep: int = 1, storage: Storage = DISK) -> list[str]:
    """Remove generations that are not live, except the `keep` newest before the live one; returns the removed names."""
    if resolve(folder) == folder:
        return []
    with writer_lock(folder):
        live = resolve(folder)
        # While the live generation is damaged, an older one may be all there is to restore from.
        check(live, read_manifest(live))
        # A writer may have died between replacing CURRENT and syncing it.
        storage.sync(folder)
        _clear_staging(folder, storage)
        generations = _generations(folder)
        spared = generations[generations.index(live) :][: 1 + max(keep, 0)]
        doomed = [path for path in generations if path not in spared]
        for path in doomed:
            storage.rename(path, folder / f"staging-{path.name}")
        # A half-removed folder must never carry the name of a generation.
        storage.sync(folder)
        _clear_staging(folder, storage)
    return [path.name for path in doomed]


_held: dict[tuple[str, int, int], io.FileIO] = {}
# A forked worker shares the lock; if it outlived a killed writer, nobody could write any more.
os.register_at_fork(after_in_child=lambda: list(map(io.FileIO.close, _held.values())))


@contextlib.contextmanager
def writer_lock(folder: Path) -> Iterator[None]:
    """Be the only writer of `folder` (made if missing); another one gets IndexLockedError at once.

    The kernel drops the lock when its holder dies. The thread that holds it may take it again, so that a build can hold
    it for hours and call `publish` inside.
    """
    key = (os.path.realpath(folder), os.getpid(), threading.get_ident())
    if key in _held:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(folder / "LOCK", os.O_RDWR | os.O_CREAT | _SAFELY, 0o644)
            lock = stack.enter_context(open(file, "r+b", buffering=0))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = re.match(rb'{"pid": (\d+), "host": "([\w.-]+)"}$', lock.read(1024))
            who = "process {} on {}".format(*(word.decode() for word in owner.groups())) if owner else "another process"
            raise IndexLockedError(f"{folder} is being written by {who}; wait for it or stop it") from None
        except OSError as error:
            raise NciError(f"{folder} cannot be written: {error}; choose another folder") from error
        _held[key] = lock
        stack.callback(_held.pop, key, None)
        # The kernel holds the lock, the text is for people: a full disk must not keep anybody from freeing space.
        with contextlib.suppress(OSError):
            lock.truncate(0)
            lock.write(json.dumps({"pid": os.getpid(), "host": os.uname().nodename}).encode())
        yield


@contextlib.contextmanager
def waiting_lock(file: Path) -> Iterator[None]:
    """Be the only one who holds `file` (made if missing); another one waits. The kernel drops it when its holder dies."""
    with file.open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def resolve(folder: Path) -> Path:
    """The live generation of an index folder, or the folder itself when it is a single generation."""
    try:
        line = _current(folder)
    except OSError as error:
        line = str(error)
    if line is None and os.path.lexists(folder / "manifest.json"):
        return folder
    if line is None and (folder / "qrels").is_dir():
        raise IndexNotFoundError(f"{folder} is a data set, not an index: nci index {folder} -o my.index makes one")
    if line is None:
        reason = "no CURRENT file in it" if folder.is_dir() else "no such folder"
        raise IndexNotFoundError(f"{folder} is not an index: {reason}; make one with: nci index CORPUS -o {folder}")
    if not line.endswith("\n") or not _GENERATION.fullmatch(line[:-1]):
        raise _corrupt(folder / "CURRENT", "one line such as generation-000001", repr(line))
    generation = folder / line[:-1]
    if generation.is_symlink() or not generation.is_dir():
        raise _corrupt(generation, "the folder that CURRENT names", "no such folder")
    return generation


def _current(folder: Path) -> str | None:
    if not os.path.lexists(folder / "CURRENT"):
        return None
    with _open(folder / "CURRENT") as file:
        return file.read(64).decode("ascii", "replace")


def read_manifest(generation: Path) -> dict[str, Any]:
    """The manifest, proven whole by its own hash and well formed."""
    path = generation / "manifest.json"
    named = _GENERATION.fullmatch(generation.name)
    try:
        with _open(path, generation) as file:
            raw = file.read(MAX_MANIFEST_BYTES + 1)
        # The signature is the same in every format, so that damage is never taken for a newer version.
        body = raw[: -len(_signature(b""))]
        if body + _signature(body) != raw or len(raw) > MAX_MANIFEST_BYTES:
            raise ValueError("not signed by its own SHA-256")
        manifest: dict[str, Any] = json.loads(raw)
        if (version := manifest["format_version"]) > FORMAT_VERSION:
            reads = f"this nci reads up to {FORMAT_VERSION}"
            raise IndexVersionError(f"{generation}: written by format {version}, {reads}; upgrade nci")
        if not isinstance(manifest["index_id"], str) or (named and int(named[1]) != manifest["generation"]):
            raise ValueError("made for another folder")
        for name, entry in manifest["files"].items():
            if not (_SAFE_NAME.fullmatch(name) and type(entry["size"]) is int and entry["sha256"].isalnum()):
                raise ValueError(f"bad entry for {name!r}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _corrupt(path, f"a manifest of format {FORMAT_VERSION}", f"{type(error).__name__}: {error}") from error
    return manifest


def check(generation: Path, manifest: Mapping[str, Any], *, paranoid: bool = False) -> None:
    """Raise at the first file that differs from the manifest: in name or size, in content if small or `paranoid`."""
    for name, expected, got in _damage(generation, manifest, None if paranoid else ALWAYS_HASHED_BYTES):
        raise _corrupt(generation / name, expected, got)


def verify_checksums(generation: Path) -> list[str]:
    """Every difference between the files and the manifest, one line each; none means undamaged."""
    try:
        manifest = read_manifest(generation)
    except IndexCorruptError as error:
        return [str(error)]
    return [f"{name}: expected {expected}, got {got}" for name, expected, got in _damage(generation, manifest, None)]


def _damage(generation: Path, manifest: Mapping[str, Any], hash_up_to: int | None) -> Iterator[tuple[str, str, str]]:
    """Differences as (file name, expected, got)."""
    listed = manifest["files"]
    try:
        found = {name for name, entry in _entries(generation) if not entry.is_dir(follow_symlinks=False)}
    except OSError as error:
        yield ".", "readable folders", str(error.strerror)
        return
    for name, entry in listed.items():
        try:
            with _open(generation / name, generation) as file:
                size = os.fstat(file.fileno()).st_size
                if size != entry["size"]:
                    yield name, f"{entry['size']} bytes", f"{size} bytes"
                elif hash_up_to is None or size <= hash_up_to:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                    if digest != entry["sha256"]:
                        yield name, f"SHA-256 {entry['sha256']}", f"SHA-256 {digest}"
        except OSError as error:
            yield name, f"a plain file of {entry['size']} bytes", str(error.strerror)
    for name in sorted(found - listed.keys() - {"manifest.json"}):
        # Dot files come from file managers and download tools, and no published file is one.
        if not any(part.startswith(".") for part in name.split("/")):
            yield name if _SAFE_NAME.fullmatch(name) else ascii(name), "no such file", "one the manifest does not list"


def _corrupt(path: Path, expected: str, got: str) -> IndexCorruptError:
    hint = "restore it from a copy or rebuild the index with: nci index CORPUS -o INDEX"
    return IndexCorruptError(f"{path}: expected {expected}, got {got}; {hint}")


def _lineage(folder: Path) -> tuple[str, int]:
    """The id that this index has had so far, and a number above that of every generation in the folder."""
    generations = _generations(folder)
    number = 1 + (int(generations[0].name.removeprefix("generation-")) if generations else 0)
    for generation in generations:
        with contextlib.suppress(IndexCorruptError):
            return read_manifest(generation)["index_id"], number
    return str(uuid.uuid4()), number


def _seal(staging: Path, entries: Mapping[str, object], *, index_id: str, number: int, storage: Storage) -> None:
    own = {"format_version": FORMAT_VERSION, "index_id": index_id, "generation": number}
    own |= {"created": datetime.now(UTC).isoformat(timespec="seconds"), "nci": nci.__version__}
    if reserved := {*own, "files", "manifest_sha256"} & entries.keys():
        raise ValueError(f"manifest entries that the store writes itself: {', '.join(sorted(reserved))}")
    files: dict[str, dict[str, object]] = {}
    for name, entry in sorted(_entries(staging)):
        if entry.is_symlink() or not _SAFE_NAME.fullmatch(name):
            raise ValueError(f"an index holds plain files named with letters, digits, '.', '_' and '-', not {name!r}")
        storage.sync(staging / name)
        if not entry.is_dir():
            with _open(staging / name) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                role = _ROLE.match(name)
                files[name] = {"size": file.tell(), "sha256": digest, "role": role.lastgroup if role else "other"}
    # Strict JSON without NaN: any program can read it.
    body = json.dumps({**own, **entries, "files": files}, indent=2, allow_nan=False).removesuffix("\n}").encode()
    storage.write_file(staging / "manifest.json", body + _signature(body))
    storage.sync(staging / "manifest.json")
    storage.sync(staging)


def _signature(body: bytes) -> bytes:
    """The end of a manifest: the hash of every byte before it."""
    return b',\n  "manifest_sha256": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode()


def _clear_staging(folder: Path, storage: Storage) -> None:
    for path in sorted(folder.iterdir()):
        if _STAGING.fullmatch(path.name):
            storage.remove(path)


def _generations(folder: Path) -> list[Path]:
    """Newest first."""
    paths = (path for path in folder.iterdir() if _GENERATION.fullmatch(path.name) and path.is_dir())
    return sorted(paths, key=lambda path: (len(path.name), path.name), reverse=True)


def _entries(folder: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Everything below `folder` by its relative name; links are listed, never followed."""
    pending = [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(folder / prefix) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(f"{prefix}{entry.name}/")
                yield f"{prefix}{entry.name}", entry


def _open(path: Path, generation: Path | None = None) -> io.BufferedReader:
    """A plain file; only those of a snapshot in the Hugging Face cache may link, to the `blobs` of their repository."""
    target = Path(os.path.realpath(path))
    if generation and path.is_symlink() and target.parent == generation.resolve().parent.parent / "blobs":
        path = target
    descriptor = os.open(path, os.O_RDONLY | _SAFELY)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file")
    return open(descriptor, "rb")
