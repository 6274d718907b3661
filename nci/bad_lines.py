"""Lines of a file in bounded memory, and everything that can be wrong with one of them.

In: a path. Out: numbered lines, then JSON objects or table records, then checked Documents; each whole, or with the
reason why it is bad. Lines end at b"\\n" alone, so that U+2028, U+0085 and form feeds stay inside them.
Does not know which format a path has, nor where the records go.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import math
import re
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, ParamSpec, TextIO, TypeVar

from nci.config import CorpusConfig
from nci.errors import DataError
from nci.records import Document

MAX_NESTING = 64  # far below the interpreter's own limit, which depends on how deep the caller is
START_CHARS = 200
START_BYTES = 4 * START_CHARS  # a character of UTF-8 has at most four bytes
SKIP_BYTES = 1 << 16
TOO_LONG = "too long; --corpus.max_line_bytes is the limit"
MAX_ID_BYTES = 512
MAX_NUMBER_BITS = 8192  # Python refuses to write numbers of more than 4300 digits
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

P = ParamSpec("P")
T = TypeVar("T")


class BadLine(Exception):
    """Why one line cannot be used."""


class Place(NamedTuple):
    """Where a record comes from; an empty unit stands for the whole file."""

    file: str
    number: int
    unit: str = "line"

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.number}" if self.unit else self.file


class Line(NamedTuple):
    """One line without its end; of a line that is too long, the beginning only."""

    number: int
    data: bytes
    too_long: bool = False

    def text(self) -> str:
        if self.too_long:
            raise BadLine(TOO_LONG)
        return decode(self.data)


class BadLines:
    """What happens to bad lines: an error at the first one, or a list of them in the rejects file."""

    def __init__(self, on_error: Literal["fail", "skip"], rejects: Path | None) -> None:
        self.count = 0
        self.first = ""
        self._fail = on_error == "fail"
        self._path = rejects
        self._file: TextIO | None = None

    def __enter__(self) -> BadLines:
        if self._path is not None and not self._fail:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "w", encoding="ascii")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, place: Place, reason: str, start: object) -> None:
        message = f"{place}: {reason}"
        if self._fail:
            raise DataError(message)
        self.count += 1
        self.first = self.first or message
        if self._file is not None:
            row = {"file": place.file, "line": place.number, "reason": reason, "start": _beginning(start)}
            self._file.write(json.dumps(row) + "\n")


def _beginning(start: object) -> str:
    if isinstance(start, bytes):
        start = start[:START_BYTES].decode("utf-8", "backslashreplace")
    if not isinstance(start, str):
        try:
            start = repr(start)
        except Exception:  # a foreign object's own code, and the item is refused anyway
            start = kind(start)
    return start[:START_CHARS]


def attempt(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | BadLine:
    """The result, or the reason why there is none: a generator that raised could not go on to the next line."""
    try:
        return function(*args, **kwargs)
    except BadLine as fault:
        return fault


def decode(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadLine(f"not valid UTF-8 (byte {error.start + 1}); save the file as UTF-8") from None


def read_lines(path: Path, max_bytes: int) -> Iterator[Line]:
    """All lines of a plain or gzip file; at most about `max_bytes` of one line are ever in memory."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else open(path, "rb") as file:
            while piece := file.readline(max_bytes + 2):  # two more for the line end
                number += 1
                data = piece.removesuffix(b"\n").removesuffix(b"\r")
                too_long = len(data) > max_bytes
                while too_long and piece and not piece.endswith(b"\n"):
                    piece = file.readline(SKIP_BYTES)
                if number == 1:
                    data = data.removeprefix(b"\xef\xbb\xbf")
                yield Line(number, data[:START_BYTES], True) if too_long else Line(number, data)
    except EOFError:
        raise DataError(f"{path}: the gzip file is cut off after line {number}; copy or download it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip file after line {number} ({error}); copy or download it again") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def kind(value: object) -> str:
    """A value's type in the words of JSON."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names: dict[type, str] = {str: "a string", int: "a number", float: "a number", list: "a list"}
    return names.get(type(value)) or ("an object" if isinstance(value, Mapping) else f"of type {type(value).__name__}")


def check_value(value: object, levels: int = MAX_NESTING) -> None:
    """Refuse what could not be written again as JSON in UTF-8."""
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                raise BadLine("a string holds one half of a surrogate pair, which is no character") from None
    elif isinstance(value, dict | list | tuple):
        if levels == 0:
            raise BadLine(f"nested too deeply (more than {MAX_NESTING} levels)")
        for item in value:
            check_value(item, levels - 1)
            if isinstance(value, dict):
                if not isinstance(item, str):
                    raise BadLine(f"the field name {item!r} is not a string")
                check_value(value[item], levels - 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise BadLine("NaN and Infinity are not JSON")
    elif isinstance(value, int):
        if value.bit_length() > MAX_NUMBER_BITS:
            raise BadLine("a number has too many digits")
    elif value is not None:
        raise BadLine(f"a value is {kind(value)}, which JSON cannot hold")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for name, value in pairs:
        if name in record:
            raise BadLine(f'the key "{name}" appears twice')
        record[name] = value
    return record


def _refuse(literal: str) -> float:
    raise BadLine(f"{literal} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse)


def parse_object(line: Line) -> dict[str, Any]:
    """One strict JSON object."""
    try:
        value = _DECODER.decode(line.text())
    except RecursionError:
        raise BadLine(f"nested too deeply (more than {MAX_NESTING} levels)") from None
    except json.JSONDecodeError as error:
        raise BadLine(f"not valid JSON: {error.msg} at character {error.pos + 1}; one object per line") from None
    except ValueError:
        raise BadLine("a number has too many digits") from None
    if not isinstance(value, dict):
        raise BadLine(f"the line is {kind(value)}; one JSON object per line was expected")
    check_value(value)
    return value


def tab_records(path: Path, max_bytes: int) -> Iterator[tuple[Line, list[str] | BadLine]]:
    """Rows of a tsv file, where quote marks are ordinary characters; blank lines are passed over."""
    for line in read_lines(path, max_bytes):
        if line.data.strip():
            text = attempt(line.text)
            yield line, text if isinstance(text, BadLine) else text.split("\t")


class _Feed(Iterator[str]):
    """Hands lines to the csv reader and keeps those of the record it is in, to give them again after a fault."""

    def __init__(self, lines: Iterator[Line], max_bytes: int) -> None:
        self._lines = lines
        self._max_bytes = max_bytes
        self._again: deque[Line] = deque()
        self._bytes = 0
        self.taken: list[Line] = []

    def start_record(self) -> None:
        self.taken = []
        self._bytes = 0

    def give_back_all_but_first(self) -> None:
        self._again.extendleft(reversed(self.taken[1:]))

    def __next__(self) -> str:
        line = self._again.popleft() if self._again else next(self._lines)
        self.taken.append(line)
        self._bytes += len(line.data)
        if line.too_long or self._bytes > self._max_bytes:
            raise csv.Error("longer than --corpus.max_line_bytes")
        return line.data.decode("utf-8", "surrogateescape") + "\n"


def csv_records(path: Path, max_bytes: int) -> Iterator[tuple[Line, list[str] | BadLine]]:
    """Records of a csv file, each with its first line; one that cannot be finished costs that line only."""
    csv.field_size_limit(max(csv.field_size_limit(), max_bytes))
    feed = _Feed(read_lines(path, max_bytes), max_bytes)
    reader = csv.reader(feed, strict=True)
    while True:
        feed.start_record()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            feed.give_back_all_but_first()
            reason = TOO_LONG if feed.taken[0].too_long else f"not valid CSV ({error}; is a quote mark missing?)"
            yield feed.taken[0], BadLine(reason)
            continue
        if "".join(cells).strip() or len(cells) > 1:
            fault = attempt(decode, b"\n".join(line.data for line in feed.taken))
            yield feed.taken[0], fault if isinstance(fault, BadLine) else cells


class Schema(NamedTuple):
    """Known names of the columns, best first, and the end of the message when one is missing."""

    ids: tuple[str, ...]
    titles: tuple[str, ...]
    texts: tuple[str, ...]
    id_hint: str
    text_hint: str


DOCUMENTS = Schema(
    ids=("_id", "id", "doc_id", "docno"),
    titles=("title",),
    texts=("text", "contents", "content", "body"),
    id_hint="name the column with --id-field",
    text_hint="name the column with --text-fields",
)
QUERIES = Schema(
    ids=("_id", "id", "query_id", "qid"),
    titles=(),
    texts=("text", "query"),
    id_hint="_id, id, query_id or qid was expected",
    text_hint="text or query was expected",
)


class DocumentMaker:
    """Makes a document of every record, with all checks; keeps the ids seen and the columns found.

    Columns are settled by the first good record: a later line that spells them otherwise is bad, not a surprise.
    """

    def __init__(self, config: CorpusConfig, schema: Schema = DOCUMENTS) -> None:
        self.config = config
        self.schema = schema
        self.ids = (config.id_field,) if config.id_field else _spellings(schema.ids)
        self.titles = (config.title_field,) if config.title_field else _spellings(schema.titles)
        self.texts = config.text_fields or _spellings(schema.texts)
        self.titled = self.made = self.cut = 0
        self._seen: set[bytes] = set()  # hashes: ids may be long and there may be millions

    def make(self, record: Document | dict[str, Any] | BadLine) -> Document:
        if isinstance(record, BadLine):
            raise record
        if isinstance(record, Document):
            return self._checked(record)
        id_name, texts = self._columns(record)
        title_name = next((name for name in self.titles if name in record and name not in texts), None)
        fields = {name: value for name, value in record.items() if name not in (id_name, title_name, *texts)}
        parts = [string_value(record, name) for name in texts]
        title = string_value(record, title_name) if title_name else ""
        text = "\n".join(part for part in parts if part)
        document = self._checked(Document(id_value(record, id_name), text, title, fields))
        self.ids = (id_name,)
        self.texts = self.config.text_fields or texts
        self.titled += title_name is not None
        return document

    def _columns(self, record: Collection[str]) -> tuple[str, tuple[str, ...]]:
        id_name = next((name for name in self.ids if name in record), None)
        if id_name is None:
            raise BadLine(_missing(self.ids[0], record, self.schema.id_hint))
        texts = tuple(name for name in self.texts if name in record)
        if not texts:
            raise BadLine(_missing(self.texts[0], record, self.schema.text_hint))
        return id_name, texts if self.config.text_fields else texts[:1]

    def check_header(self, names: list[str]) -> None:
        """A table must have every column that was asked for by name."""
        if len(set(names)) < len(names):
            raise BadLine(f"a column name appears twice ({', '.join(names)})")
        self._columns(names)
        for name in (self.config.title_field, *(self.config.text_fields or ())):
            if name and name not in names:
                raise BadLine(_missing(name, names, "see --title-field and --text-fields"))

    def is_header(self, names: list[str]) -> bool:
        """A tsv file may go without one, but not when columns were named."""
        return bool(self.config.id_field or self.config.text_fields or set(self.ids) & set(names))

    def _checked(self, document: Document) -> Document:
        doc_id = document.doc_id
        check_value(doc_id)
        if not doc_id.strip():
            raise BadLine("the id is empty")
        if len(doc_id.encode("utf-8")) > MAX_ID_BYTES:
            raise BadLine(f"the id is longer than {MAX_ID_BYTES} bytes")
        if CONTROL.search(doc_id):
            raise BadLine(f"the id {doc_id!r} holds a control character")
        limit = self.config.max_text_chars
        title, text = document.title.replace("\0", " "), document.text.replace("\0", " ")
        if not text.strip() and not title.strip():
            raise BadLine("title and text are empty" if self.schema.titles else "the text is empty")
        digest = hashlib.blake2b(doc_id.encode("utf-8"), digest_size=16).digest()
        if digest in self._seen:
            raise BadLine(f'the id "{doc_id}" appeared before')
        self._seen.add(digest)
        self.made += 1
        self.cut += len(text) > limit or len(title) > limit
        return Document(doc_id, text[:limit], title[:limit], document.fields)


def _spellings(names: tuple[str, ...]) -> tuple[str, ...]:
    """Tables often write ID or Text."""
    return tuple(spelling for name in names for spelling in (name, name.capitalize(), name.upper()))


def _missing(name: str, record: Iterable[str], hint: str) -> str:
    return f'"{name}" is missing (fields here: {", ".join(list(record)[:20]) or "none"}); {hint}'


def string_value(record: dict[str, Any], name: str) -> str:
    value = record[name]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadLine(f'"{name}" is {kind(value)}; a string was expected')
    return value


def id_value(record: dict[str, Any], name: str) -> str:
    value = record[name]
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise BadLine(f'"{name}" is {kind(value)}; a string or a whole number was expected')
    return value
