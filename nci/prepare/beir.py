"""Records of any source -> a BEIR folder, streamed in bounded memory, restartable, and there only when it is whole.

In: input files in order, each with a function that yields its records. Out: a folder and a Report. All is written into
a hidden folder beside `out`, which one rename makes `out`. A checkpoint says how many bytes of each file belong to the
records done so far: a later run cuts the files there and goes on, so that it writes the same bytes as an undisturbed
one. Pages with the same key are one document, the first of them is kept. Does not know what a record looks like.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from tqdm import tqdm

from nci.bad_lines import BadLine, Place, check_value
from nci.errors import DataError, NciError
from nci.prepare.report import Report
from nci.progress import hide_bars
from nci.store import DISK, writer_lock

CHECKPOINT_RECORDS = 2000
MAX_LINE_BYTES = 256 * 2**20
START_CHARS = 200
QRELS_HEADER = b"query-id\tcorpus-id\tscore\n"


class Page(NamedTuple):
    """A document that a record refers to.

    Args:
        key: Pages with the same key are one document.
        make: Gives title, text and further fields; called for the first page of its key only. None: it must be known.
        doc_id: None stands for the running number.
    """

    key: str
    make: Callable[[], Mapping[str, str]] | None = None
    doc_id: str | None = None


class Entry(NamedTuple):
    """What one record says: a question (if any) and its pages. `again`: the question may have come before."""

    pages: Sequence[Page]
    query_id: str = ""
    query: str = ""
    again: bool = False


class Record(NamedTuple):
    """One record, not yet parsed, so that passing over those already done costs little."""

    place: Place
    start: bytes | str
    parse: Callable[[], Entry]


class Input(NamedTuple):
    """One input file; `split` is empty where it brings documents only."""

    path: Path
    split: str
    records: Callable[[Path], Iterator[Record]]


def list_files(src: Path, out: Path) -> list[Path]:
    """All files below `src` by name, without hidden ones and without those of `out`, which may lie inside."""
    check_folder(src)
    inside = out.resolve()
    files = (path for path in src.rglob("*") if path.is_file() and not path.resolve().is_relative_to(inside))
    named = sorted((path.relative_to(src), path) for path in files)
    return [path for name, path in named if not any(part.startswith(".") for part in name.parts)]


def check_folder(src: Path) -> None:
    if not src.is_dir():
        raise DataError(f"{src} is {'a file' if src.exists() else 'not there'}; the folder with the data was expected")
    if not any(src.iterdir()):
        raise DataError(f"{src} is empty; the folder with the data was expected")


def write_beir(
    inputs: Sequence[Input],
    out: Path,
    *,
    settings: Mapping[str, object],
    expected: Mapping[str, int] | None,
    on_error: Literal["fail", "skip"],
    progress: bool,
) -> Report:
    """Write all records of all inputs; `settings` is whatever else decides the result."""
    known = dict(expected or {})
    files = [[item.path.name, item.split, item.path.stat().st_size] for item in inputs]
    source = json.loads(json.dumps({"settings": settings, "files": files}))
    target = out.absolute()
    staging = target.parent / f".{target.name}.partial"
    try:
        report = Report.read(out, source, known)
        if report is None:
            with writer_lock(staging):
                work = _Work(staging, inputs, settings, on_error=on_error)
                with work:
                    work.run(sum(known.get(split, 0) for split in work.splits), hide_bars(progress))
                report = Report(folder=out, **work.finish(source), expected=known)
                os.rename(staging / "data", target)
                DISK.sync(target.parent)
        shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        reason = f"{error.strerror or error}; what is done so far is kept, run it again to go on"
        raise NciError(f"{out} could not be written: {reason}") from error
    return report


class _Work:
    """The hidden folder while it is written: data/ will be the result, checkpoint.json and seen.jsonl serve restarts."""

    def __init__(
        self,
        staging: Path,
        inputs: Sequence[Input],
        settings: Mapping[str, object],
        *,
        on_error: Literal["fail", "skip"],
    ) -> None:
        self.inputs = inputs
        self.splits = list(dict.fromkeys(item.split for item in inputs if item.split))
        self._staging = staging
        self._data = staging / "data"
        self._settings = json.loads(json.dumps({**settings, "splits": self.splits}))
        self._identities = [_identity(item) for item in inputs]
        self._fail = on_error == "fail"
        names = ["corpus.jsonl", "queries.jsonl", "rejects.jsonl", *(f"qrels/{split}.tsv" for split in self.splits)]
        self._paths = {**{name: self._data / name for name in names}, "seen.jsonl": staging / "seen.jsonl"}
        self._files: dict[str, BinaryIO] = {}
        self._doc_ids: dict[str, str] = {}
        self._used: set[str] = set()
        self._asked: set[str] = set()
        self._starts: list[dict[str, Any]] = []
        self._first_fault = ""

    def __enter__(self) -> _Work:
        mark = self._resume()
        self._counts: dict[str, int] = mark["counts"]
        (self._data / "qrels").mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            for name, path in self._paths.items():
                size = mark["sizes"].get(name, 0)
                if size:
                    os.truncate(path, size)
                else:
                    path.write_bytes(b"")
                self._files[name] = stack.enter_context(open(path, "ab"))
                if size == 0 and name.startswith("qrels/"):
                    self._files[name].write(QRELS_HEADER)
            self._close = stack.pop_all()
        with open(self._paths["seen.jsonl"], "rb") as file:
            for line in file:
                self._remember(json.loads(line))
        self._input, self._record = mark["input"], mark["record"]
        return self

    def __exit__(self, *_: object) -> None:
        self._close.close()

    def _resume(self) -> dict[str, Any]:
        """Where to go on: after the last record done, or at the first input that is not the same any more."""
        try:
            saved = json.loads((self._staging / "checkpoint.json").read_bytes())
        except (OSError, ValueError):
            saved = {}
        if saved.get("settings") == self._settings:
            begun = saved["now"]["input"] + 1
            pairs = zip_longest(saved["identities"][:begun], self._identities[:begun])
            same = next((number for number, (then, now) in enumerate(pairs) if then != now), begun)
            mark: dict[str, Any] = saved["now"] if same == begun else saved["starts"][same]
            if all(_has_bytes(self._paths[name], size) for name, size in mark["sizes"].items()):
                self._starts = saved["starts"][:same]
                return mark
        self._starts = []
        return {"input": 0, "record": 0, "sizes": {}, "counts": {}}

    def run(self, expected: int, disable: bool | None) -> None:
        done = sum(self._counts.get(split, 0) for split in self.splits)
        with tqdm(total=expected or None, initial=done, unit=" questions", disable=disable) as bar:
            try:
                for number in range(self._input, len(self.inputs)):
                    if number > self._input:
                        self._input, self._record = number, 0
                    if len(self._starts) <= number:
                        self._starts.append(self._mark())
                    self._read(self.inputs[number], bar)
                    self.checkpoint()
            except DataError:
                self.checkpoint()
                raise

    def _read(self, item: Input, bar: tqdm[Any]) -> None:
        bar.set_description(item.path.name)
        for number, record in enumerate(item.records(item.path)):
            if number < self._record:
                continue
            try:
                self._write(record.parse(), item.split)
                bar.update(bool(item.split))
            except BadLine as fault:
                self._reject(record, str(fault))
            self._record = number + 1
            if self._record % CHECKPOINT_RECORDS == 0:
                self.checkpoint()

    def _write(self, entry: Entry, split: str) -> None:
        if not entry.pages:
            raise BadLine("the question has no page")
        if split and (not entry.query_id.strip() or not entry.query.strip()):
            raise BadLine("the question or its id is empty")
        if entry.query_id in self._asked and split and not entry.again:
            raise BadLine(f'the question "{entry.query_id}" appeared before; is a file here twice, or in two forms?')
        check_value([entry.query_id, entry.query])
        new: dict[str, tuple[str, bytes]] = {}
        for page in entry.pages:
            if page.key not in self._doc_ids and page.key not in new:
                new[page.key] = self._make(page, number=len(self._doc_ids) + len(new))
        # Nothing above this line is kept when the record turns out to be bad.
        for key, (doc_id, line) in new.items():
            self._files["corpus.jsonl"].write(line)
            self._note(["page", key, doc_id])
        self._add("duplicates", len(entry.pages) - len(new))
        self._add("documents", len(new))
        if not split:
            return
        if entry.query_id not in self._asked:
            self._files["queries.jsonl"].write(_line({"_id": entry.query_id, "text": entry.query}))
            self._note(["question", entry.query_id])
            self._add(split, 1)
        for doc_id in dict.fromkeys(self._doc_ids[page.key] for page in entry.pages):
            self._files[f"qrels/{split}.tsv"].write(f"{entry.query_id}\t{doc_id}\t1\n".encode())

    def _make(self, page: Page, number: int) -> tuple[str, bytes]:
        if page.make is None:
            raise BadLine(f'the document "{page.key}" is not among the documents')
        doc_id = str(number) if page.doc_id is None else page.doc_id
        if doc_id in self._used:
            raise BadLine(f'two documents have the id "{doc_id}"')
        row = {"_id": doc_id, **page.make()}
        check_value(row)
        if not any(row.get(name, "").strip() for name in ("title", "text")):
            raise BadLine("title and text of the page are empty")
        return doc_id, _line(row)

    def _note(self, item: list[str]) -> None:
        self._files["seen.jsonl"].write(_line(item))
        self._remember(item)

    def _remember(self, item: list[str]) -> None:
        if item[0] == "page":
            self._doc_ids[item[1]] = item[2]
            self._used.add(item[2])
        else:
            self._asked.add(item[1])

    def _add(self, name: str, count: int) -> None:
        self._counts[name] = self._counts.get(name, 0) + count

    def _reject(self, record: Record, reason: str) -> None:
        message = f"{record.place}: {reason}"
        if self._fail:
            raise DataError(message)
        self._first_fault = self._first_fault or message
        start = record.start[: 4 * START_CHARS]
        text = start.decode("utf-8", "backslashreplace") if isinstance(start, bytes) else start
        row = {"file": record.place.file, "line": record.place.number, "reason": reason, "start": text[:START_CHARS]}
        self._files["rejects.jsonl"].write(json.dumps(row).encode("ascii") + b"\n")
        self._add("skipped", 1)

    def _mark(self) -> dict[str, Any]:
        sizes = {name: file.tell() for name, file in self._files.items()}
        return {"input": self._input, "record": self._record, "sizes": sizes, "counts": dict(self._counts)}

    def checkpoint(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        saved = {
            "settings": self._settings,
            "identities": self._identities,
            "starts": self._starts,
            "now": self._mark(),
        }
        path = self._staging / "checkpoint.json"
        fresh = path.with_suffix(".tmp")
        fresh.write_text(json.dumps(saved))
        DISK.sync(fresh)
        os.replace(fresh, path)

    def finish(self, source: Mapping[str, object]) -> dict[str, Any]:
        """Check that no split is empty and write report.json; the counts."""
        for split in self.splits:
            if not self._counts.get(split):
                files = ", ".join(item.path.name for item in self.inputs if item.split == split)
                bad = f"; the first bad record is {self._first_fault}" if self._first_fault else ""
                raise DataError(f"no question for the split {split} in {files}{bad}")
        counts = {
            "documents": self._counts["documents"],
            "queries": {split: self._counts[split] for split in self.splits},
            "duplicates": self._counts["duplicates"],
            "skipped": self._counts.get("skipped", 0),
        }
        if not counts["skipped"]:
            (self._data / "rejects.jsonl").unlink()
        (self._data / "report.json").write_text(json.dumps({"source": source, **counts}, indent=2) + "\n")
        for path in (*self._data.rglob("*"), self._data):
            DISK.sync(path)
        return counts


def _identity(item: Input) -> list[object]:
    status = item.path.stat()
    return [item.path.name, item.split, status.st_size, status.st_mtime_ns]


def _has_bytes(path: Path, size: int) -> bool:
    return size == 0 or (path.is_file() and path.stat().st_size >= size)


def _line(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8") + b"\n"
