"""Pre-processed forms of NQ320k and TriviaQA that people pass around -> a BEIR folder.

"ddro" are DDRO's files on the Hugging Face Hub: nq_train.gz and nq_val.gz (tab-separated, ten columns) and, where it is
there, nq_merged.json (one document per line). "nci-tsv" are the files of the paper's authors: questions with document
numbers, and the documents, of Natural Questions (also the nine-column tables they are made of) or of TriviaQA.
A row is one line. Cells may be quoted in the way of CSV, as pandas does, or bare.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from nci.bad_lines import BadLine, Line, Place, read_lines, string_value
from nci.errors import ConfigError, DataError
from nci.prepare.beir import MAX_LINE_BYTES, Entry, Input, Page, Record, list_files, write_beir
from nci.prepare.html import without_tags
from nci.prepare.nq import NQ320K, needed, parse_quickly
from nci.prepare.report import Report
from nci.prepare.titles import title_key

NINE = ["query", "id", "long_answer", "short_answer", "title", "abstract", "content", "doc_tac", "language"]
TEN = [*NINE[:7], "document_url", *NINE[7:]]
Parse = Callable[[Line], Entry]


class Form(NamedTuple):
    """One set of files that belong together: file name -> split and parser; `documents` are alternatives, best first.

    Names are compared without case, without .gz, and without .tsv.
    """

    train: tuple[str, Parse]
    test: tuple[str, Parse]
    documents: Mapping[str, Parse]
    documents_needed: bool
    expected: Mapping[str, int]


def prepare_public(
    kind: str, src: Path, out: Path, *, on_error: Literal["fail", "skip"] = "fail", progress: bool = True
) -> Report:
    """Make the BEIR folder of pre-processed files; a run that was stopped goes on where it was.

    Args:
        kind: "ddro" or "nci-tsv".
        src: The folder with the files.
        out: The folder to make.
        on_error: Stop at the first bad row, or skip it and list it in OUT/rejects.jsonl.
        progress: Show a bar on a terminal.

    Raises:
        ConfigError: No such kind.
        DataError: A file is missing, cut off or has other columns, or `out` holds something else.
    """
    if kind not in PUBLIC:
        raise ConfigError(f"unknown form {kind!r}; there are: {', '.join(PUBLIC)}")
    src, out = Path(src), Path(out)
    files = {_stem(path): path for path in reversed(list_files(src, out))}
    for form in PUBLIC[kind]:
        if form.train[0] in files and form.test[0] in files:
            break
    else:
        pairs = " or ".join(f"{form.train[0]} and {form.test[0]}" for form in PUBLIC[kind])
        raise DataError(f"{src} does not hold the files of {kind}: {pairs} (.tsv, .gz)")
    documents = next((name for name in form.documents if name in files), None)
    if documents is None and form.documents_needed:
        raise DataError(
            f"{src} holds questions but no documents; one of these was expected: {', '.join(form.documents)}"
        )
    inputs = [_input(files[documents], "", form.documents[documents])] if documents else []
    inputs += [_input(files[form.train[0]], "train", form.train[1]), _input(files[form.test[0]], "test", form.test[1])]
    return write_beir(
        inputs, out, settings={"kind": kind}, expected=form.expected, on_error=on_error, progress=progress
    )


def _stem(path: Path) -> str:
    return path.name.lower().removesuffix(".gz").removesuffix(".tsv")


def _input(path: Path, split: str, parse: Parse) -> Input:
    return Input(path, split, partial(_records, parse=parse))


def _records(path: Path, parse: Parse) -> Iterator[Record]:
    for line in read_lines(path, MAX_LINE_BYTES):
        if line.data.strip():
            yield Record(Place(str(path), line.number), line.data, partial(parse, line))


def split_row(line: Line, least: int, most: int) -> list[str]:
    """The cells of a row; `""` inside a quoted cell is one quote mark."""
    cells = line.text().split("\t")
    if not least <= len(cells) <= most:
        expected = f"{least}" if least == most else f"{least} to {most}"
        raise BadLine(f"{len(cells)} column{'s' * (len(cells) != 1)}; {expected} were expected")
    return [_unquoted(cell) for cell in cells]


def _unquoted(cell: str) -> str:
    inner = cell[1:-1]
    quoted = len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in inner.replace('""', "")
    return inner.replace('""', '"') if quoted else cell


def _table_row(line: Line, names: list[str]) -> Entry:
    row = dict(zip(names, split_row(line, len(names), len(names)), strict=True))
    return Entry([_titled(row)], row["id"], " ".join(row["query"].split()))


def _merged_row(line: Line) -> Entry:
    row = parse_quickly(line)
    return Entry(
        [_titled({name: string_value(row, needed(row, name)) for name in ("title", "abstract", "content")} | _url(row))]
    )


def _url(row: Mapping[str, object]) -> dict[str, str]:
    return {"document_url": str(row.get("document_url") or "")}


def _titled(row: Mapping[str, str]) -> Page:
    key = title_key(row["title"])
    if not key:
        raise BadLine("the title is empty")
    return Page(key, partial(_document, row))


def _document(row: Mapping[str, str]) -> dict[str, str]:
    abstract = without_tags(row["abstract"])
    text = " ".join(f"{abstract} {row['content']}".split())
    url = row.get("document_url", "").replace("&amp;", "&")
    return {"title": row["title"].strip(), "text": text, "abstract": abstract, "url": url}


def _numbered(line: Line) -> Entry:
    """A question of Natural Questions: query, example id, document number, semantic ids."""
    query, query_id, number, *_ = split_row(line, 4, 8)
    return Entry([_known(number)], query_id, " ".join(query.split()))


def _listed(line: Line, split: str) -> Entry:
    """A question of TriviaQA: query, old numbers, numbers, semantic ids, lists with commas; it may take several rows."""
    query, _, numbers, *_ = split_row(line, 4, 8)
    query = " ".join(query.split())
    query_id = f"{split}-{hashlib.blake2b(query.encode('utf-8', 'replace'), digest_size=8).hexdigest()}"
    return Entry([_known(number) for number in numbers.split(",")], query_id, query, again=True)


def _known(number: str) -> Page:
    return Page(number.strip())


def _document_row(line: Line, *, width: int, number: int, title: int | None, text: int) -> Entry:
    cells = split_row(line, width, width if width > 4 else 8)
    row = {"title": "" if title is None else cells[title].strip(), "text": without_tags(cells[text])}
    return Entry([Page(cells[number].strip(), lambda: row, cells[number].strip())])


_TEXT_FIRST = partial(_document_row, width=4, number=2, title=None, text=0)
PUBLIC: dict[str, tuple[Form, ...]] = {
    "ddro": (
        Form(
            train=("nq_train", partial(_table_row, names=TEN)),
            test=("nq_val", partial(_table_row, names=TEN)),
            documents={"nq_merged.json": _merged_row},
            documents_needed=False,
            expected=NQ320K,
        ),
    ),
    "nci-tsv": (
        Form(
            train=("nq_train_doc_newid", _numbered),
            test=("nq_dev_doc_newid", _numbered),
            documents={
                "nq_doc_content": partial(_document_row, width=7, number=0, title=None, text=3),
                "nq_title_abs": _TEXT_FIRST,
            },
            documents_needed=True,
            expected=NQ320K,
        ),
        Form(
            train=("nq_train", partial(_table_row, names=NINE)),
            test=("nq_dev", partial(_table_row, names=NINE)),
            documents={},
            documents_needed=False,
            expected=NQ320K,
        ),
        Form(
            train=("train", partial(_listed, split="train")),
            test=("dev", partial(_listed, split="test")),
            documents={
                "trivia_doc_content": partial(_document_row, width=5, number=1, title=2, text=3),
                "trivia_title_cont": _TEXT_FIRST,
            },
            documents_needed=True,
            expected={},
        ),
    ),
}
