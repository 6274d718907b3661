"""Natural Questions as Google publishes it -> the NQ320k of the papers.

In: a folder with nq-train-*.jsonl.gz and nq-dev-*.jsonl.gz (original form: tokens and HTML) or the simplified train file
(document_text); a folder may hold one form for train and the other for dev, as the official simplified download does.
Out: a BEIR folder. The corpus are the pages of both splits, one per title, numbered as they come; a question's
relevant document is the page with its title. The published validation questions are the split "test".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from nci.bad_lines import BadLine, Line, Place, id_value, kind, read_lines, string_value
from nci.errors import DataError
from nci.prepare.beir import MAX_LINE_BYTES, Entry, Input, Page, Record, list_files, write_beir
from nci.prepare.html import read_page, read_title, tagged_text
from nci.prepare.report import Report
from nci.prepare.titles import title_key

NQ320K: Mapping[str, int] = MappingProxyType({"documents": 109_739, "train": 307_373, "test": 7_830})
TEXT_FIELDS = ("document_text", "document_tokens", "document_html")
_SPLITS = {"train": re.compile(r"(?<![a-z])train"), "test": re.compile(r"(?<![a-z])(dev|val)")}


def prepare_nq320k(
    src: Path,
    out: Path,
    *,
    expected: Mapping[str, int] | None = NQ320K,
    on_error: Literal["fail", "skip"] = "fail",
    progress: bool = True,
) -> Report:
    """Make the BEIR folder of NQ320k; a run that was stopped goes on where it was.

    Args:
        src: Folder with the official .jsonl or .jsonl.gz files, in sub-folders or not; names hold "train" or "dev".
        out: The folder to make.
        expected: Counts to compare with; None for a part of the data.
        on_error: Stop at the first bad line, or skip it and list it in OUT/rejects.jsonl.
        progress: Show a bar on a terminal.

    Raises:
        DataError: A file is cut off, a field is missing, a split has no files, or `out` holds something else.
    """
    inputs = _find_inputs(Path(src), Path(out))
    return write_beir(
        inputs, Path(out), settings={"kind": "nq320k"}, expected=expected, on_error=on_error, progress=progress
    )


def _find_inputs(src: Path, out: Path) -> list[Input]:
    found: dict[str, list[Path]] = {split: [] for split in _SPLITS}
    for path in list_files(src, out):
        if path.name.lower().endswith((".jsonl", ".jsonl.gz")):
            found[_split_of(path)].append(path)
    for split, official in (("train", "nq-train-00.jsonl.gz"), ("test", "nq-dev-00.jsonl.gz")):
        if not found[split]:
            raise DataError(f"{src} has no files of Natural Questions' split {official[3:-12]}, such as {official}")
    return [Input(path, split, read_questions) for split, paths in found.items() for path in paths]


def _split_of(path: Path) -> str:
    for name in (path.name.lower(), path.parent.name.lower()):
        splits = [split for split, pattern in _SPLITS.items() if pattern.search(name)]
        if len(splits) == 1:
            return splits[0]
    raise DataError(f'{path}: of which split is it? Its name or its folder must hold "train" or "dev"')


def read_questions(path: Path) -> Iterator[Record]:
    """One record per line, not yet parsed."""
    for line in read_lines(path, MAX_LINE_BYTES):
        if line.data.strip():
            yield Record(Place(str(path), line.number), line.data, partial(parse_question, line))


def parse_question(line: Line) -> Entry:
    """A question and its page, of either form."""
    row = parse_quickly(line)
    tagged, title = _tagged(row), ""
    if "document_title" in row:
        title = string_value(row, "document_title").strip()
    title = title or read_title(tagged())
    key = title_key(title)
    if not key:
        raise BadLine('the page has no title: neither "document_title" nor a heading <H1>')
    url = string_value(row, "document_url").replace("&amp;", "&") if "document_url" in row else ""
    query = " ".join(string_value(row, needed(row, "question_text")).split())
    return Entry([Page(key, lambda: _page(tagged(), title, url))], id_value(row, needed(row, "example_id")), query)


def parse_quickly(line: Line) -> dict[str, Any]:
    """One JSON object; the strict checks of a corpus would take twice as long on a page's thousands of tokens."""
    try:
        row = json.loads(line.text())
    except (ValueError, RecursionError) as error:
        raise BadLine(f"not valid JSON: {error}; one object per line was expected") from None
    if not isinstance(row, dict):
        raise BadLine(f"the line is {kind(row)}; one JSON object per line was expected")
    return row


def needed(row: Mapping[str, object], name: str) -> str:
    """The name itself, if the row has that field."""
    if name not in row:
        raise BadLine(f'"{name}" is missing (fields here: {", ".join(list(row)[:20]) or "none"})')
    return name


def _tagged(row: dict[str, Any]) -> Any:
    """A function that gives the page with its tags; it is called for new pages only."""
    name = next((name for name in TEXT_FIELDS if name in row), None)
    if name is None:
        needed(row, " or ".join(TEXT_FIELDS))
    if name == "document_tokens":
        return partial(_joined, row[name])
    text = string_value(row, str(name))
    return (lambda: text) if name == "document_text" else partial(tagged_text, text)


def _joined(tokens: object) -> str:
    """Tokens in the simplified form, where a tag with attributes is one word."""
    try:
        return " ".join([token["token"].replace(" ", "_") for token in tokens])  # type: ignore[attr-defined]
    except (KeyError, TypeError, AttributeError):
        raise BadLine('"document_tokens" is not a list of objects with the field "token"') from None


def _page(tagged: str, title: str, url: str) -> dict[str, str]:
    page = read_page(tagged)
    return {"title": title, "text": page.text, "abstract": page.abstract, "url": url}
