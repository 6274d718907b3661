"""TriviaQA's reading-comprehension download, Wikipedia domain -> a BEIR folder where a question has several pages.

In: the folder with qa/wikipedia-train.json, qa/wikipedia-dev.json and evidence/wikipedia/. Out: the pages that any
question names, in the order in which they are named, one per title; wikipedia-dev is the split "test". The official test
questions come without answers but with pages: those join the corpus, as in the paper. The QA files are read piece by
piece, pages one at a time.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

from nci.bad_lines import BadLine, Place, decode, id_value, kind, string_value
from nci.errors import ConfigError, DataError
from nci.prepare.beir import Entry, Input, Page, Record, check_folder, write_beir
from nci.prepare.nq import needed
from nci.prepare.report import Report
from nci.prepare.titles import title_key

TRIVIAQA = {"train": 61_888, "test": 7_993}
MAX_CHARS = 10_240
_FILES = {"wikipedia-train.json": "train", "wikipedia-dev.json": "test", "wikipedia-test-without-answers.json": ""}
_CHUNK_BYTES = 2**20
_MAX_ITEM_CHARS = 64 * 2**20
_SPACE = re.compile(r"\s+")
_DECODER = json.JSONDecoder()


def prepare_triviaqa(
    src: Path,
    out: Path,
    *,
    max_chars: int = MAX_CHARS,
    on_error: Literal["fail", "skip"] = "fail",
    progress: bool = True,
) -> Report:
    """Make the BEIR folder of TriviaQA; a run that was stopped goes on where it was.

    Args:
        src: The unpacked triviaqa-rc folder.
        out: The folder to make.
        max_chars: Pages are cut after so many characters; 10,240 in the paper's data.
        on_error: Stop at the first bad question, or skip it and list it in OUT/rejects.jsonl.
        progress: Show a bar on a terminal.

    Raises:
        DataError: A file or a page is missing, cut off or of another schema, or `out` holds something else.
    """
    if max_chars < 1:
        raise ConfigError(f"--max-chars is at least 1, not {max_chars}")
    inputs = _find_inputs(Path(src), max_chars)
    settings = {"kind": "triviaqa", "max_chars": max_chars}
    return write_beir(inputs, Path(out), settings=settings, expected=TRIVIAQA, on_error=on_error, progress=progress)


def _find_inputs(src: Path, max_chars: int) -> list[Input]:
    check_folder(src)
    # The pages are hundreds of thousands of files, so only where the archive unpacks is looked.
    root = next((folder for folder in (src, *sorted(src.iterdir())) if (folder / "qa").is_dir()), src)
    evidence = root / "evidence" / "wikipedia"
    for path in (root / "qa" / "wikipedia-train.json", root / "qa" / "wikipedia-dev.json", evidence):
        if not path.exists():
            raise DataError(f"{path} is missing; the unpacked folder of triviaqa-rc.tar.gz was expected")
    read = partial(read_questions, evidence=evidence, max_chars=max_chars)
    files = ((root / "qa" / name, split) for name, split in _FILES.items())
    return [Input(path, split, read) for path, split in files if path.is_file()]


def read_questions(path: Path, *, evidence: Path, max_chars: int) -> Iterator[Record]:
    for number, item in enumerate(read_array(path, "Data"), start=1):
        start = json.dumps(item)[:1000]
        yield Record(Place(str(path), number, "question"), start, partial(_entry, item, evidence, max_chars))


def _entry(item: Any, evidence: Path, max_chars: int) -> Entry:
    if not isinstance(item, dict):
        raise BadLine(f"the question is {kind(item)}; an object was expected")
    query = " ".join(string_value(item, needed(item, "Question")).split())
    pages = item[needed(item, "EntityPages")]
    if not isinstance(pages, list) or not all(isinstance(page, dict) for page in pages):
        raise BadLine('"EntityPages" is not a list of objects')
    names = [string_value(page, needed(page, "Filename")) for page in pages]
    return Entry(
        [_page(name, evidence, max_chars) for name in names], id_value(item, needed(item, "QuestionId")), query
    )


def _page(name: str, evidence: Path, max_chars: int) -> Page:
    path = evidence / name
    if not name.endswith(".txt") or ".." in path.parts or not path.is_relative_to(evidence):
        raise BadLine(f'"Filename" is {name!r}; a .txt file below {evidence} was expected')
    title = name.removesuffix(".txt").replace("_", " ")
    return Page(title_key(title), lambda: {"title": title, "text": _read(path, max_chars)}, name.removesuffix(".txt"))


def _read(path: Path, max_chars: int) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadLine(f"the page {path} cannot be read: {error.strerror or error}") from None
    return " ".join(decode(data)[:max_chars].split())


def read_array(path: Path, name: str) -> Iterator[Any]:
    """The items of the list `name` of a JSON object, one at a time: the files are too large to load at once."""
    count = 0
    try:
        with open(path, "rb") as file:
            for item in _items(_Text(file), name):
                yield item
                count += 1
    except KeyError:
        raise DataError(f'{path}: "{name}" is missing; a JSON object with that list was expected') from None
    except EOFError:
        raise DataError(
            f'{path}: cut off or damaged after item {count} of "{name}"; unpack or download it again'
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f'{path}: not valid JSON after item {count} of "{name}" ({error})') from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def _items(text: _Text, name: str) -> Iterator[Any]:
    text.take("{")
    while (key := text.value()) != name:
        text.take(":")
        text.value()
        if text.take(",}") == "}":
            raise KeyError(key)
    text.take(":")
    text.take("[")
    if text.peek() == "]":
        return
    while True:
        yield text.value()
        if text.take(",]") == "]":
            return


class _Text:
    """A file of JSON of which only the part ahead is held."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decode = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at = "", 0

    def peek(self) -> str:
        """The next character that is no space."""
        while True:
            space = _SPACE.match(self._text, self._at)
            self._at = space.end() if space else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                raise EOFError

    def take(self, expected: str) -> str:
        found = self.peek()
        if found not in expected:
            raise ValueError(f"{found!r} where one of {expected} was expected")
        self._at += 1
        return found

    def value(self) -> Any:
        self.peek()
        while True:
            with suppress(json.JSONDecodeError):
                value, end = _DECODER.raw_decode(self._text, self._at)
                # The piece at hand may end inside a number.
                if isinstance(value, str | list | dict) or self._text[end : end + 1] in set(" \t\r\n,]}"):
                    self._at = end
                    return value
            if len(self._text) - self._at > _MAX_ITEM_CHARS:
                raise ValueError(f"no value ends within {_MAX_ITEM_CHARS} characters")
            if not self._more():
                raise EOFError

    def _more(self) -> bool:
        # As much again as is there, so that a long item is not decoded once per piece.
        data = self._file.read(max(_CHUNK_BYTES, len(self._text) - self._at))
        self._text = self._text[self._at :] + self._decode.decode(data, final=not data)
        self._at = 0
        return bool(data)
