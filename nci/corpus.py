"""Files -> Document, Query, Qrels: BEIR folders, jsonl, csv, tsv, txt, folders of texts, irds:ID, and Python lists.

In: what the user has. Out: checked records in the order of the file, one at a time, in bounded memory; a bad line is an
error with file, line and reason, or goes to a rejects file. Knows nothing of vectors, trees or models.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from nci.bad_lines import (
    QUERIES,
    BadLine,
    BadLines,
    DocumentMaker,
    Line,
    Place,
    attempt,
    check_value,
    csv_records,
    id_value,
    kind,
    parse_object,
    read_lines,
    string_value,
    tab_records,
)
from nci.config import CorpusConfig
from nci.errors import DataError, MissingPackageError
from nci.records import Document, Qrels, Query

Source = str | Path | Iterable[str | Mapping[str, object] | Document]

TEXT_SUFFIXES = (".txt", ".md")
FORMATS = ".jsonl, .ndjson, .json, .csv, .tsv or .txt, each also with .gz"
HEADING = re.compile(r"#{1,6}[ \t]+(.*?)[ \t]*#*[ \t]*$")
GRADE = re.compile(r"[+-]?[0-9]+")
JUDGEMENT_HEADERS = ("query-id", "query_id", "queryid", "qid")

log = logging.getLogger(__name__)


class _Row(NamedTuple):
    """One record on its way in; `start` is what the rejects file shows of it."""

    place: Place
    start: object
    record: Document | dict[str, Any] | BadLine


def read_documents(source: Source, config: CorpusConfig, *, rejects: Path | None = None) -> Iterator[Document]:
    """Documents of a corpus, one at a time, each checked.

    Args:
        source: A BEIR folder, a folder of .txt and .md files, a .jsonl, .csv, .tsv or .txt file (also .gz), irds:ID,
            or an iterable of strings, dicts or Documents.
        config: Names of the columns, limits, and what to do with bad lines.
        rejects: Where on_error="skip" lists the bad lines, each as an object {"file", "line", "reason", "start"}.

    Raises:
        DataError: A bad line (unless they are skipped), an unreadable file, or no document at all.
    """
    maker = DocumentMaker(config)
    name = str(source) if isinstance(source, str | Path) else "the given list"
    return _documents(_rows(source, maker), maker, BadLines(config.on_error, rejects), name)


def _documents(rows: Iterator[_Row], maker: DocumentMaker, bad: BadLines, name: str) -> Iterator[Document]:
    with bad:
        for row in rows:
            try:
                document = maker.make(row.record)
            except BadLine as fault:
                bad.add(row.place, str(fault), row.start)
                continue
            yield document
    if not maker.made and bad.count:
        raise DataError(f"all {bad.count} lines of {name} are bad; the first one is {bad.first}")
    if not maker.made:
        raise DataError(f"{name} is empty: nothing to read in it")
    if bad.count:
        log.warning("%s: %d bad lines were skipped; the first one is %s", name, bad.count, bad.first)
    if maker.cut:
        limit = maker.config.max_text_chars
        log.warning("%s: %d texts were cut at %d characters (--corpus.max_text_chars)", name, maker.cut, limit)
    if maker.config.title_field and not maker.titled:
        log.warning('%s: no document has the field "%s" (--title-field)', name, maker.config.title_field)


def _rows(source: Source, maker: DocumentMaker) -> Iterator[_Row]:
    if not isinstance(source, str | Path):
        return _item_rows(source)
    if str(source).startswith("irds:"):
        return _irds_rows(str(source).removeprefix("irds:"), maker)
    path = Path(source)
    if not path.is_dir():
        return _file_rows(path, maker)
    corpus = _in_folder(path, "corpus.jsonl")
    return _file_rows(corpus, maker) if corpus else _folder_rows(path, maker)


def _in_folder(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _file_rows(path: Path, maker: DocumentMaker) -> Iterator[_Row]:
    if not path.exists():
        raise DataError(f"{path} does not exist; a file ({FORMATS}), a folder or irds:ID was expected")
    name = path.name.lower().removesuffix(".gz")
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return _line_rows(path, maker, parse_object)
    if name.endswith(".txt"):
        return _line_rows(path, maker, lambda line: Document(str(line.number), line.text()))
    if name.endswith((".csv", ".tsv")):
        return _table_rows(path, maker, tabs=name.endswith(".tsv"))
    raise DataError(f"{path} has an unknown format; expected {FORMATS}")


def _line_rows(path: Path, maker: DocumentMaker, parse: Callable[[Line], Document | dict[str, Any]]) -> Iterator[_Row]:
    for line in read_lines(path, maker.config.max_line_bytes):
        if line.data.strip():  # blank lines hold nothing that could be lost
            yield _Row(Place(str(path), line.number), line.data, attempt(parse, line))


def _table_rows(path: Path, maker: DocumentMaker, *, tabs: bool) -> Iterator[_Row]:
    header: list[str] | None = None
    for line, cells in (tab_records if tabs else csv_records)(path, maker.config.max_line_bytes):
        place = Place(str(path), line.number)
        if header is None and not isinstance(cells, BadLine):
            names = [cell.strip() for cell in cells]
            if not tabs or maker.is_header(names):
                fault = attempt(maker.check_header, names)
                if isinstance(fault, BadLine):
                    raise DataError(f"{place}: {fault}")
                header = names
                continue
            header = ["id", "text"]
        elif header is None and not tabs:
            raise DataError(f"{place}: the line of column names is {cells}")
        if not isinstance(cells, BadLine) and header is not None and len(cells) != len(header):
            expected = f"{len(header)} were expected ({', '.join(header[:20])})"
            cells = BadLine(f"{len(cells)} column{'s' * (len(cells) != 1)}; {expected}")
        record = cells if isinstance(cells, BadLine) else dict(zip(header or (), cells, strict=True))
        yield _Row(place, line.data, record)


def _text_files(folder: Path) -> list[str]:
    """Names below the folder; hidden files and folders are left out, and so is an index that lies in it."""
    indexes = {path.parent for path in folder.rglob("CURRENT") if (path.parent / "LOCK").exists()}
    paths = (
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.suffix.lower() in TEXT_SUFFIXES and indexes.isdisjoint(path.parents)
    )
    visible = (path for path in paths if not any(part.startswith(".") for part in path.parts))
    names = sorted(path.as_posix() for path in visible if (folder / path).is_file())
    if not names:
        raise DataError(f"{folder} holds neither corpus.jsonl (a BEIR folder) nor .txt or .md files")
    return names


def _folder_rows(folder: Path, maker: DocumentMaker) -> Iterator[_Row]:
    return (_whole_file(folder, name, maker.config.max_line_bytes) for name in _text_files(folder))


def _whole_file(folder: Path, name: str, max_bytes: int) -> _Row:
    path = folder / name
    place = Place(str(path), 1, unit="")
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        return _Row(place, "", BadLine(f"cannot be read: {error.strerror or error}"))
    line = Line(1, data.removeprefix(b"\xef\xbb\xbf"), too_long=len(data) > max_bytes)
    return _Row(place, data, attempt(_text_document, name, path, line))


def _text_document(name: str, path: Path, line: Line) -> Document:
    text = line.text().replace("\r\n", "\n")
    if not text.strip():
        raise BadLine("the file is empty")
    heading = _first_heading(text) if path.suffix.lower() == ".md" else ""
    return Document(name, text, heading or path.stem)


def _first_heading(text: str) -> str:
    fenced = False
    for line in text.split("\n"):
        if line.startswith(("```", "~~~")):
            fenced = not fenced  # a # in a code block is a comment
        elif not fenced and (match := HEADING.match(line)):
            return match[1]
    return ""


def _irds_rows(dataset_id: str, maker: DocumentMaker) -> Iterator[_Row]:
    try:
        ir_datasets = importlib.import_module("ir_datasets")
    except ImportError:
        raise MissingPackageError('irds:ID needs ir_datasets; pip install "nci[irds]"') from None
    try:
        dataset = ir_datasets.load(dataset_id)
    except KeyError:
        raise DataError(f"irds:{dataset_id} is not known to ir_datasets; see https://ir-datasets.com") from None
    if not dataset.has_docs():
        raise DataError(f"irds:{dataset_id} has no documents; see https://ir-datasets.com for one that has")
    return (_irds_row(dataset_id, number, item, maker) for number, item in enumerate(dataset.docs_iter(), start=1))


def _irds_row(dataset_id: str, number: int, item: Any, maker: DocumentMaker) -> _Row:
    values = {name: value for name, value in item._asdict().items() if isinstance(value, str | int | float)}
    if not maker.config.text_fields and not set(maker.texts) & set(values):
        values["text"] = item.default_text()
    return _Row(Place(f"irds:{dataset_id}", number, "document"), values, attempt(_item, values, number))


def _item_rows(items: Iterable[str | Mapping[str, object] | Document]) -> Iterator[_Row]:
    for number, item in enumerate(items):
        yield _Row(Place("the given list", number, "item"), item, attempt(_item, item, number))


def _item(item: object, number: int) -> Document | dict[str, Any]:
    if isinstance(item, str):
        item = Document(str(number), item)
    if isinstance(item, Document):
        values = {"doc_id": item.doc_id, "title": item.title, "text": item.text}
        fields = dict(item.fields)
        check_value([values, fields])
        return Document(id_value(values, "doc_id"), string_value(values, "text"), string_value(values, "title"), fields)
    if not isinstance(item, Mapping):
        raise BadLine(f"the item is {kind(item)}; a string, a dict or a Document was expected")
    record = dict(item)
    check_value(record)
    return record


def read_queries(path: str | Path) -> list[Query]:
    """Queries of a .jsonl file {_id, text}, a .tsv file (id, text) or a .txt file (one per line, id = line number)."""
    maker = DocumentMaker(CorpusConfig(), QUERIES)
    rows = _file_rows(Path(path), maker)
    found = _documents(rows, maker, BadLines("fail", None), str(path))
    return [Query(document.doc_id, document.text) for document in found]


def read_qrels(path: str | Path) -> Qrels:
    """Judgements of a BEIR tsv file (query-id, corpus-id, score) or a TREC file (query, 0, doc_id, grade)."""
    qrels: Qrels = {}
    width: int | None = None
    for line in read_lines(Path(path), CorpusConfig().max_line_bytes):
        if not line.data.strip():
            continue
        cells = attempt(_cells, line, width)
        if width is None and not isinstance(cells, BadLine):
            width = len(cells)
            if cells[0].lower() in JUDGEMENT_HEADERS and not GRADE.fullmatch(cells[-1]):
                continue
        judgement = cells if isinstance(cells, BadLine) else attempt(_judge, qrels, cells)
        if isinstance(judgement, BadLine):
            raise DataError(f"{Place(str(path), line.number)}: {judgement}")
    if not qrels:
        raise DataError(f"{path} holds no judgements")
    return qrels


def _cells(line: Line, width: int | None) -> list[str]:
    text = line.text()
    cells = text.split("\t") if "\t" in text else text.split()
    if len(cells) not in (3, 4) if width is None else len(cells) != width:
        expected = f"{width}" if width else "3 (BEIR: query-id, corpus-id, score) or 4 (TREC: query, 0, doc_id, grade)"
        raise BadLine(f"{len(cells)} columns; {expected} were expected")
    return cells


def _judge(qrels: Qrels, cells: list[str]) -> None:
    query_id, doc_id, grade = cells[0], cells[-2], cells[-1].strip()
    if not GRADE.fullmatch(grade):
        raise BadLine(f'the grade "{grade}" is not a whole number')
    if not query_id.strip() or not doc_id.strip():
        raise BadLine("the query id or the doc_id is empty")
    if qrels.setdefault(query_id, {}).setdefault(doc_id, int(grade)) != int(grade):
        raise BadLine(f'query "{query_id}" and document "{doc_id}" were judged before, with another grade')


@dataclass(frozen=True)
class Dataset:
    """A BEIR folder: corpus.jsonl, queries.jsonl (each also .gz) and qrels/SPLIT.tsv."""

    folder: Path

    def documents(self, config: CorpusConfig, *, rejects: Path | None = None) -> Iterator[Document]:
        return read_documents(self.folder, config, rejects=rejects)

    @cached_property
    def queries(self) -> dict[str, str]:
        """Query id -> text, in the order of the file, which is read once."""
        return dict(read_queries(_in_folder(self.folder, "queries.jsonl") or self.folder / "queries.jsonl"))

    def splits(self) -> list[str]:
        return sorted(self._qrels_files())

    def qrels(self, split: str) -> Qrels:
        files = self._qrels_files()
        if split not in files:
            raise DataError(f'{self.folder} has no split "{split}"; there are: {", ".join(sorted(files)) or "none"}')
        return read_qrels(files[split])

    def split(self, name: str) -> tuple[list[Query], Qrels]:
        """Queries with at least one relevant document in this split, in the order of the file, and their judgements."""
        qrels, texts = self.qrels(name), self.queries
        if unknown := [query_id for query_id in qrels if query_id not in texts]:
            raise DataError(
                f"{self._qrels_files()[name]}: {len(unknown)} judged queries are not in queries.jsonl, "
                f'"{unknown[0]}" is the first; add them there or take their judgements out'
            )
        queries = [
            Query(*item) for item in texts.items() if any(grade > 0 for grade in qrels.get(item[0], {}).values())
        ]
        return queries, {query.query_id: qrels[query.query_id] for query in queries}

    def _qrels_files(self) -> dict[str, Path]:
        files = sorted(path for pattern in ("*.tsv.gz", "*.tsv") for path in (self.folder / "qrels").glob(pattern))
        return {path.name.removesuffix(".gz").removesuffix(".tsv"): path for path in reversed(files)}


def open_dataset(source: object) -> Dataset | None:
    """The data set when `source` is a BEIR folder with corpus, queries and qrels, else None."""
    if not isinstance(source, str | Path):
        return None
    dataset = Dataset(Path(source))
    whole = _in_folder(dataset.folder, "corpus.jsonl") and _in_folder(dataset.folder, "queries.jsonl")
    return dataset if whole and dataset.splits() else None


def fingerprint(source: Source, config: CorpusConfig) -> str:
    """A hash of all that decides what `read_documents` gives: settings, names and bytes of the files it opens.

    Queries and judgements of a BEIR folder are not part of it; their files have fingerprints of their own.
    A list is read through; an iterator would be used up, so that it must become a list or a file first.
    """
    digests: list[tuple[str, str]]
    if not isinstance(source, str | Path):
        if isinstance(source, Iterator):
            raise TypeError("an iterator can be read only once; make it a list first")
        whole = hashlib.sha256()
        for document in read_documents(source, config):
            whole.update(_canonical_line(document))
        digests = [("", whole.hexdigest())]
    elif str(source).startswith("irds:"):
        digests = [(str(source), "")]
    else:
        digests = [(name, _file_digest(path)) for name, path in _files(Path(source))]
    key = json.dumps({"config": asdict(config), "files": digests}, sort_keys=True)
    return hashlib.sha256(key.encode("ascii")).hexdigest()


def _files(path: Path) -> list[tuple[str, Path]]:
    if not path.is_dir():
        return [(path.name, path)]
    corpus = _in_folder(path, "corpus.jsonl")
    return [(corpus.name, corpus)] if corpus else [(name, path / name) for name in _text_files(path)]


def _file_digest(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def _canonical_line(document: Document) -> bytes:
    row = {"doc_id": document.doc_id, "title": document.title, "text": document.text, "fields": dict(document.fields)}
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n"


def write_documents(path: str | Path, documents: Iterable[Document]) -> int:
    """Write documents one by one as {"doc_id", "title", "text", "fields"} lines; return how many."""
    count = 0
    with open(path, "wb") as file:
        for document in documents:
            file.write(_canonical_line(document))
            count += 1
    return count


def load_documents(path: str | Path) -> Iterator[Document]:
    """Read what `write_documents` wrote; fast, since nothing is checked again."""
    with open(path, "rb") as file:
        for line in file:
            row = json.loads(line)
            yield Document(row["doc_id"], row["text"], row["title"], row["fields"])
