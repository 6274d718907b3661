"""Corpus files of every format, and every way in which one line of them can be bad."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tracemalloc
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nci.config import CorpusConfig
from nci.corpus import (
    Dataset,
    fingerprint,
    load_documents,
    open_dataset,
    read_documents,
    read_qrels,
    read_queries,
    write_documents,
)
from nci.errors import DataError, MissingPackageError
from nci.records import Document, Query

FAIL = CorpusConfig()
SKIP = CorpusConfig(on_error="skip")
LIMIT = 40_000  # bytes per line in the tables of bad lines


def save(path: Path, data: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = data.encode("utf-8") if isinstance(data, str) else data
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def good(doc_id: str) -> bytes:
    return json.dumps({"id": doc_id, "title": "T", "text": f"text of {doc_id}"}).encode()


def rejected(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("ascii").splitlines()]


def ids(documents: Iterator[Document]) -> list[str]:
    return [document.doc_id for document in documents]


BAD_JSON = {
    "broken": (b'{"id": "x", "text": ', "not valid JSON"),
    "trailing comma": (b'{"id": "x", "text": "y",}', "not valid JSON"),
    "raw control character": (b'{"id": "x", "text": "a\tb"}', "not valid JSON"),
    "list": (b'["x", "y"]', "the line is a list"),
    "string": (b'"x"', "the line is a string"),
    "null": (b"null", "the line is null"),
    "nan": (b'{"id": "x", "text": "y", "score": NaN}', "NaN is not JSON"),
    "infinity": (b'{"id": "x", "text": "y", "score": -Infinity}', "-Infinity is not JSON"),
    "number too large": (b'{"id": "x", "text": "y", "score": 1e999}', "Infinity are not JSON"),
    "digits": (b'{"id": "x", "text": "y", "n": ' + b"9" * 5000 + b"}", "too many digits"),
    "deep": (b'{"id": "x", "text": "y", "f": ' + b"[" * 15000 + b"]" * 15000 + b"}", "nested too deeply"),
    "rather deep": (b'{"id": "x", "text": "y", "f": ' + b"[" * 70 + b"]" * 70 + b"}", "nested too deeply"),
    "no id": (b'{"title": "T", "text": "y"}', '"id" is missing (fields here: title, text); name the column with --id'),
    "no text": (b'{"id": "x", "body": "y"}', '"text" is missing (fields here: id, body); name the column with --text'),
    "no fields": (b"{}", "(fields here: none)"),
    "duplicate id": (b'{"id": "first", "text": "again"}', 'the id "first" appeared before'),
    "id null": (b'{"id": null, "text": "y"}', '"id" is null; a string or a whole number'),
    "id bool": (b'{"id": true, "text": "y"}', '"id" is true'),
    "id float": (b'{"id": 1.5, "text": "y"}', '"id" is a number; a string or a whole number'),
    "id list": (b'{"id": ["x"], "text": "y"}', '"id" is a list'),
    "text list": (b'{"id": "x", "text": ["y"]}', '"text" is a list; a string was expected'),
    "text object": (b'{"id": "x", "text": {"a": "y"}}', '"text" is an object'),
    "title number": (b'{"id": "x", "title": 3, "text": "y"}', '"title" is a number'),
    "id empty": (b'{"id": "", "text": "y"}', "the id is empty"),
    "id blank": (b'{"id": "  ", "text": "y"}', "the id is empty"),
    "id long": (b'{"id": "' + "é".encode() * 257 + b'", "text": "y"}', "longer than 512 bytes"),
    "id control": (b'{"id": "a\\nb", "text": "y"}', "control character"),
    "id C1 control": (b'{"id": "a\\u0085b", "text": "y"}', "control character"),
    "not utf-8": (b'{"id": "x", "text": "caf\xe9"}', "not valid UTF-8 (byte 25)"),
    "surrogate in text": (b'{"id": "x", "text": "\\ud800 y"}', "surrogate"),
    "surrogate in id": (b'{"id": "\\udc00", "text": "y"}', "surrogate"),
    "surrogate in a field": (b'{"id": "x", "text": "y", "f": [{"g": "\\ud83d"}]}', "surrogate"),
    "surrogate in a key": (b'{"id": "x", "text": "y", "f": {"\\ud83d": 1}}', "surrogate"),
    "empty": (b'{"id": "x", "title": "", "text": ""}', "title and text are empty"),
    "blank": (b'{"id": "x", "title": " ", "text": "\\n \\u2028"}', "title and text are empty"),
    "only NUL": (b'{"id": "x", "text": "\\u0000"}', "title and text are empty"),
    "huge": (b'{"id": "x", "text": "' + b"y" * LIMIT + b'"}', "too long"),
    "twice the same key": (b'{"id": "x", "text": "y", "text": "z"}', 'the key "text" appears twice'),
    "twice the same inner key": (b'{"id": "x", "text": "y", "f": {"a": 1, "a": 1}}', 'the key "a" appears twice'),
}
BAD_CSV = {
    "few columns": (b"x,T", "2 columns; 3 were expected (id, title, text)"),
    "many columns": (b"x,T,y,z", "4 columns; 3 were expected"),
    "quote not closed": (b'x,T,"y', "not valid CSV"),
    "text after quote": (b'x,"T"t,y', "not valid CSV"),
    "not utf-8": (b"x,T,caf\xe9", "not valid UTF-8"),
    "duplicate id": (b"first,T,y", "appeared before"),
    "no id": (b",T,y", "the id is empty"),
    "empty": (b"x,,", "title and text are empty"),
    "huge": (b"x,T," + b"y" * LIMIT, "too long"),
}
BAD_TSV = {name: (line.replace(b",", b"\t"), reason) for name, (line, reason) in BAD_CSV.items() if "quote" not in name}
CASES = [
    pytest.param(suffix, line, reason, id=f"{suffix}-{name}")
    for suffix, table in ((".jsonl", BAD_JSON), (".jsonl.gz", BAD_JSON), (".csv", BAD_CSV), (".tsv", BAD_TSV))
    for name, (line, reason) in table.items()
]


@pytest.mark.parametrize(("suffix", "line", "reason"), CASES)
def test_bad_line(tmp_path: Path, suffix: str, line: bytes, reason: str) -> None:
    comma = b"\t" if suffix == ".tsv" else b","
    if suffix.startswith(".jsonl"):
        lines = [good("first"), line, good("second")]
    else:
        lines = [comma.join(cells) for cells in ((b"id", b"title", b"text"), (b"first", b"T", b"y"))]
        lines += [line, comma.join((b"second", b"T", b"y"))]
    number = len(lines) - 1
    path = save(tmp_path / f"docs{suffix}", b"\r\n".join(lines))

    documents = read_documents(path, CorpusConfig(max_line_bytes=LIMIT))
    assert next(documents).doc_id == "first"
    with pytest.raises(DataError) as error:
        next(documents)
    assert f"docs{suffix}, line {number}: " in str(error.value)
    assert reason in str(error.value)

    rejects = tmp_path / "out" / "rejects.jsonl"
    config = CorpusConfig(on_error="skip", max_line_bytes=LIMIT)
    assert ids(read_documents(path, config, rejects=rejects)) == ["first", "second"]
    (row,) = rejected(rejects)
    assert row.keys() == {"file", "line", "reason", "start"}
    assert (row["file"], row["line"]) == (str(path), number)
    assert reason in row["reason"]
    assert row["start"] == line.decode("utf-8", "backslashreplace")[:200]


PLAIN = st.characters(exclude_categories=["Cs"], exclude_characters="\x00")
GOOD = st.builds(
    lambda title, text, extra, ascii_only: (title, "x" + text, extra, ascii_only),
    st.text(PLAIN, max_size=8),
    st.text(PLAIN, max_size=8),
    st.recursive(st.none() | st.integers() | st.text(PLAIN, max_size=3), lambda inner: st.lists(inner, max_size=2)),
    st.booleans(),
)
ORDER_MATTERS = ("duplicate id", "no text")  # as a first line, these two would be good
BAD = st.sampled_from([line for name, (line, _) in BAD_JSON.items() if name not in ORDER_MATTERS])


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mixture=st.lists(st.none() | GOOD | BAD, max_size=12), ends=st.sampled_from([b"\n", b"\r\n"]), bom=st.booleans())
def test_any_mixture(tmp_path: Path, mixture: list[Any], ends: bytes, bom: bool) -> None:
    """Good lines all come out, bad ones are all listed, whatever stands beside them; None is a blank line."""
    lines, expected, bad = [], [], []
    for number, item in enumerate(mixture, start=1):
        if isinstance(item, tuple):
            title, text, extra, ascii_only = item
            row = {"id": number, "title": title, "text": text, "extra": extra}
            lines.append(json.dumps(row, ensure_ascii=ascii_only).encode())
            expected.append(Document(str(number), text, title, {"extra": extra}))
        else:
            lines.append(item or b"")
            bad += [number] if item else []
    path = save(tmp_path / "docs.jsonl", b"\xef\xbb\xbf" * bom + ends.join(lines))
    rejects = tmp_path / "rejects.jsonl"
    config = CorpusConfig(on_error="skip", max_line_bytes=LIMIT)
    if expected:
        assert list(read_documents(path, config, rejects=rejects)) == expected
    else:
        with pytest.raises(DataError, match=f"all {len(bad)} lines" if bad else "is empty"):
            list(read_documents(path, config, rejects=rejects))
    assert [row["line"] for row in rejected(rejects)] == bad


def test_all_bad_and_none(tmp_path: Path) -> None:
    path = save(tmp_path / "docs.jsonl", '{"key": 1, "text": "a"}\n{"key": 2, "text": "b"}\n')
    with pytest.raises(
        DataError, match=r"all 2 lines .* line 1: \"_id\" is missing \(fields here: key, text\).*--id-f"
    ):
        list(read_documents(path, SKIP))
    assert ids(read_documents(path, CorpusConfig(id_field="key"))) == ["1", "2"]
    for name in ("a.jsonl", "a.txt", "a.csv", "a.jsonl.gz"):
        with pytest.raises(DataError, match="is empty"):
            list(read_documents(save(tmp_path / name, "\n\n"), SKIP))
    with pytest.raises(DataError, match="is empty"):
        list(read_documents([], SKIP))


def test_bad_first_line_does_not_settle_the_columns(tmp_path: Path) -> None:
    path = save(
        tmp_path / "docs.jsonl", b'{"docno": "", "body": "y"}\n' + good("a") + b'\n{"docno": "b", "body": "y"}\n'
    )
    rejects = tmp_path / "rejects.jsonl"
    assert ids(read_documents(path, SKIP, rejects=rejects)) == ["a"]
    assert [row["line"] for row in rejected(rejects)] == [1, 3]


@pytest.mark.parametrize("name", ["docs.jsonl", "docs.jsonl.gz"])
def test_huge_line_in_little_memory(tmp_path: Path, name: str) -> None:
    megabyte = b"y" * 2**20
    with gzip.open(tmp_path / name, "wb", 1) if name.endswith("gz") else open(tmp_path / name, "wb") as file:
        file.write(good("first") + b'\n{"id": "huge", "text": "')
        for _ in range(64):
            file.write(megabyte)
        file.write(b'"}\n' + good("second") + b"\n")
    config = CorpusConfig(on_error="skip", max_line_bytes=2**20)
    tracemalloc.start()
    try:
        found = ids(read_documents(tmp_path / name, config, rejects=tmp_path / "rejects.jsonl"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == ["first", "second"]
    assert [row["line"] for row in rejected(tmp_path / "rejects.jsonl")] == [2]
    assert peak < 8 * 2**20


@pytest.mark.parametrize("ends", ["", "\n", "\r\n", "\n5", "\r\n5"])
def test_line_limit_is_exact(tmp_path: Path, ends: str) -> None:
    path = save(tmp_path / "docs.txt", "1234" + ends)
    want = [Document("1", "1234"), Document("2", "5")][: 1 + ends.endswith("5")]
    assert list(read_documents(path, CorpusConfig(max_line_bytes=4))) == want
    with pytest.raises(DataError, match="line 1: too long"):
        list(read_documents(path, CorpusConfig(max_line_bytes=3)))


def test_damaged_gzip(tmp_path: Path) -> None:
    whole = gzip.compress(b"\n".join(good(str(number)) for number in range(1000)))
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "plain.jsonl.gz").write_bytes(good("a"))
    for config in (FAIL, SKIP):
        with pytest.raises(DataError, match=r"cut\.jsonl\.gz: the gzip file is cut off after line \d+"):
            list(read_documents(tmp_path / "cut.jsonl.gz", config))
        with pytest.raises(DataError, match=r"plain\.jsonl\.gz: damaged gzip file"):
            list(read_documents(tmp_path / "plain.jsonl.gz", config))


def test_text_is_cleaned_and_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"id": 1, "title": "a\0b", "text": "c\0d"},
        {"id": 2, "text": "12345678901"},
        {"id": 3, "text": "1234567890"},
    ]
    path = save(tmp_path / "docs.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    config = CorpusConfig(max_text_chars=10)
    one, two, three = read_documents(path, config)
    assert (one.title, one.text) == ("a b", "c d")
    assert two.text == three.text == "1234567890"
    (record,) = caplog.records
    assert "1 texts were cut at 10 characters" in record.getMessage()


UNUSUAL = "a\u2028b\u2029c\x85d\x0ce\x0bf\x1cg \U0001f600 \u00e9"


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_formats(tmp_path: Path, suffix: str, bom: bytes) -> None:
    want = [Document("7", UNUSUAL, "T"), Document("8", "second", "")]
    rows = [{"id": 7, "title": "T", "text": UNUSUAL}, {"id": "8", "title": None, "text": "second"}]
    json_lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    table = f"id,title,text\r\n7,T,{UNUSUAL}\r\n\r\n8,,second"
    files = {
        "docs.jsonl": json_lines,
        "docs.json": json_lines,
        "docs.ndjson": json_lines,
        "docs.csv": table,
        "docs.tsv": table.replace(",", "\t"),
    }
    for name, text in files.items():
        path = save(tmp_path / f"{name}{suffix}", bom + text.encode())
        assert list(read_documents(path, FAIL)) == want, name
        assert list(read_documents(str(path), FAIL)) == want, name
    path = save(tmp_path / f"docs.txt{suffix}", bom + f"{UNUSUAL}\r\n\nthird".encode())
    assert list(read_documents(path, FAIL)) == [Document("1", UNUSUAL), Document("3", "third")]
    path = save(tmp_path / f"collection.tsv{suffix}", bom + b'0\t"Hello" he said\r\n1\tsecond, "line\n')
    assert list(read_documents(path, FAIL)) == [Document("0", '"Hello" he said'), Document("1", 'second, "line')]


def test_csv_quotes(tmp_path: Path) -> None:
    path = save(tmp_path / "docs.csv", 'ID,Text,year\n1,"a, ""b""\n\nc",1999\n2,5" disk,2000\n3,x,2001,z\n')
    documents = read_documents(path, FAIL)
    assert next(documents) == Document("1", 'a, "b"\n\nc', "", {"year": "1999"})
    assert next(documents) == Document("2", '5" disk', "", {"year": "2000"})
    with pytest.raises(DataError, match=r"line 6: 4 columns; 3 were expected"):
        next(documents)


def test_csv_goes_on_after_an_open_quote(tmp_path: Path) -> None:
    lines = ["id,text", '1,"open', "2,b", '3,"c"', '4,"d', 'e"', '5,"open', "6,f", "7,g"]
    path = save(tmp_path / "docs.csv", "\n".join(lines))
    rejects = tmp_path / "rejects.jsonl"
    assert [(d.doc_id, d.text) for d in read_documents(path, SKIP, rejects=rejects)] == [
        *(("2", "b"), ("3", "c"), ("4", "d\ne")),
        *(("6", "f"), ("7", "g")),
    ]
    assert [row["line"] for row in rejected(rejects)] == [2, 7]


def test_csv_record_of_many_lines_has_a_limit(tmp_path: Path) -> None:
    path = save(tmp_path / "docs.csv", 'id,text\n1,"' + "line\n" * 10 + '"\n2,b\n')
    assert ids(read_documents(path, CorpusConfig(max_line_bytes=50))) == ["1", "2"]
    with pytest.raises(DataError, match=r"line 2: not valid CSV \(longer than --corpus\.max_line_bytes"):
        list(read_documents(path, CorpusConfig(max_line_bytes=40)))


def test_csv_field_beyond_the_default_limit_of_python(tmp_path: Path) -> None:
    path = save(tmp_path / "docs.csv", "id,text\n1," + "y" * 200_000)
    assert [len(document.text) for document in read_documents(path, FAIL)] == [200_000]


@pytest.mark.parametrize(
    ("name", "text", "config", "reason"),
    [
        ("a.csv", "key,text\n1,a\n", FAIL, r'line 1: "_id" is missing \(fields here: key, text\); .*--id-field'),
        ("a.csv", "key,text\n1,a\n", SKIP, r'line 1: "_id" is missing \(fields here: key, text\); .*--id-field'),
        ("a.csv", "id,passage\n1,a\n", FAIL, r'line 1: "text" is missing .*--text-fields'),
        ("a.csv", "id,text,text\n1,a,b\n", FAIL, "line 1: a column name appears twice"),
        ("a.csv", "id,text\n1,a\n", CorpusConfig(title_field="name"), r'line 1: "name" is missing .*--title-field'),
        ("a.csv", "id,text\n1,a\n", CorpusConfig(text_fields=("text", "more")), 'line 1: "more" is missing'),
        ("a.csv", 'id,"text\n1,a\n', SKIP, "line 1: the line of column names is not valid CSV"),
        ("a.tsv", "pid\ttext\n1\ta\n", CorpusConfig(id_field="key"), 'line 1: "key" is missing'),
        ("a.tsv", "1\tfirst\tTitle\n", FAIL, r"line 1: 3 columns; 2 were expected \(id, text\)"),
        ("a.pdf", "x", FAIL, r"unknown format; expected \.jsonl"),
    ],
)
def test_bad_header(tmp_path: Path, name: str, text: str, config: CorpusConfig, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        list(read_documents(save(tmp_path / name, text), config))


def test_missing_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.jsonl does not exist"):
        read_documents(tmp_path / "nothing.jsonl", FAIL)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="neither corpus"):
        read_documents(tmp_path / "empty", FAIL)


def test_fields_named_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    row = {"key": "k", "id": 3, "name": "N", "abstract": "A", "body": "B", "empty": None, "year": 1999, "tags": ["x"]}
    path = save(tmp_path / "docs.jsonl", json.dumps(row))
    config = CorpusConfig(id_field="key", title_field="name", text_fields=("body", "empty", "absent", "abstract"))
    assert list(read_documents(path, config)) == [Document("k", "B\nA", "N", {"id": 3, "year": 1999, "tags": ["x"]})]
    (found,) = read_documents(path, FAIL)
    assert (found.doc_id, found.text, found.title) == ("3", "B", "")
    assert found.fields.keys() == row.keys() - {"id", "body"}
    titled = CorpusConfig(text_fields=("title", "body"))
    assert list(read_documents([{"id": 1, "title": "T", "body": "B"}], titled)) == [Document("1", "T\nB")]
    assert not caplog.records
    assert ids(read_documents(path, CorpusConfig(title_field="heading"))) == ["3"]
    assert '"heading" (--title-field)' in caplog.text


def test_text_folder(tmp_path: Path) -> None:
    save(tmp_path / "b.md", "intro\r\n```\n# comment\n```\n## The *title* ##\nbody\n")
    save(tmp_path / "a" / "z.txt", b"\xef\xbb\xbf# no heading here\n")
    save(tmp_path / "a" / "plain.md", "text alone")
    for ignored in (".git/x.md", "a/.hidden.txt", "picture.png"):
        save(tmp_path / ignored, "ignored")
    assert list(read_documents(tmp_path, FAIL)) == [
        Document("a/plain.md", "text alone", "plain"),
        Document("a/z.txt", "# no heading here\n", "z"),
        Document("b.md", "intro\n```\n# comment\n```\n## The *title* ##\nbody\n", "The *title*"),
    ]
    save(tmp_path / "c.txt", b"caf\xe9")
    save(tmp_path / "d.txt", " \n")
    save(tmp_path / "e.txt", "x" * 101)
    rejects = tmp_path / "rejects.jsonl"
    config = CorpusConfig(on_error="skip", max_line_bytes=100)
    assert len(ids(read_documents(tmp_path, config, rejects=rejects))) == 3
    assert [Path(row["file"]).name for row in rejected(rejects)] == ["c.txt", "d.txt", "e.txt"]
    with pytest.raises(DataError, match=r"c\.txt: not valid UTF-8"):
        list(read_documents(tmp_path, FAIL))


def test_python_objects() -> None:
    items: list[Any] = [
        "a",
        {"id": 9, "text": "b", "n": 1},
        Document("x", "c\0", "T", MappingProxyType({"k": [1]})),
        "d",
    ]
    want = [
        Document("0", "a"),
        Document("9", "b", "", {"n": 1}),
        Document("x", "c ", "T", {"k": [1]}),
        Document("3", "d"),
    ]
    assert list(read_documents(items, FAIL)) == want
    assert list(read_documents(iter(items), FAIL)) == want


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (" ", "title and text are empty"),
        (b"bytes", "the item is of type bytes"),
        (3, "the item is a number"),
        ("\ud800", "surrogate"),
        ({"text": "no id"}, '"_id" is missing'),
        ({"id": 10**5000, "text": "y"}, "too many digits"),
        ({"id": "x", "text": "y", "when": Path()}, "JSON cannot hold"),
        ({"id": "x", "text": "y", 3: "z"}, "the field name 3 is not a string"),
        ({"id": "x", "text": "y", "f": float("nan")}, "NaN"),
        (Document("0", "again"), "appeared before"),
        (Document("a\tb", "y"), "control character"),
        (Document("x", None), "title and text are empty"),  # type: ignore[arg-type]
        (Document("x", "y", "", {"f": {1, 2}}), "JSON cannot hold"),
    ],
)
def test_bad_python_object(tmp_path: Path, item: Any, reason: str) -> None:
    with pytest.raises(DataError, match=f"the given list, item 1: .*{reason}"):
        list(read_documents(["good", item, "good too"], FAIL))
    rejects = tmp_path / "rejects.jsonl"
    assert ids(read_documents(["good", item, "good too"], SKIP, rejects=rejects)) == ["0", "2"]
    assert [row["line"] for row in rejected(rejects)] == [1]


def test_ir_datasets_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ir_datasets", None)
    with pytest.raises(MissingPackageError, match=r'pip install "nci\[irds\]"'):
        read_documents("irds:beir/scifact", FAIL)


def test_ir_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    Full = namedtuple("Full", "doc_id title body raw")
    Abstract = namedtuple("Abstract", "doc_id title abstract")
    Abstract.default_text = lambda self: f"{self.title} {self.abstract}"  # type: ignore[attr-defined]
    corpora: dict[str, Any] = {"full": [Full("a", "T", "B", b"x")], "abstract": [Abstract("a", "T", "A")], "none": None}

    def load(name: str) -> SimpleNamespace:
        docs = corpora[name]
        return SimpleNamespace(has_docs=lambda: docs is not None, docs_iter=lambda: iter(docs or ()))

    monkeypatch.setitem(sys.modules, "ir_datasets", SimpleNamespace(load=load))
    assert list(read_documents("irds:full", FAIL)) == [Document("a", "B", "T")]
    assert list(read_documents("irds:abstract", FAIL)) == [Document("a", "T A", "T", {"abstract": "A"})]
    named = CorpusConfig(text_fields=("abstract",))
    assert list(read_documents("irds:abstract", named)) == [Document("a", "A", "T")]
    for name in ("unknown", "none"):
        with pytest.raises(DataError, match=f"irds:{name} .*ir-datasets.com"):
            read_documents(f"irds:{name}", FAIL)


TEXT = st.text(PLAIN, max_size=20) | st.sampled_from([UNUSUAL, "a\r\nb\r", "\ufeff"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.builds(Document, TEXT, TEXT, TEXT, st.dictionaries(TEXT, TEXT | st.integers() | st.lists(TEXT), max_size=2))
    )
)
def test_write_and_load(tmp_path: Path, documents: list[Document]) -> None:
    path = tmp_path / "documents.jsonl"
    assert write_documents(path, iter(documents)) == len(documents)
    assert list(load_documents(path)) == documents
    assert path.read_bytes().count(b"\n") == len(documents)


def test_written_schema(tmp_path: Path) -> None:
    write_documents(tmp_path / "a.jsonl", [Document("é", "t", fields={"k": 1})])
    line = '{"doc_id": "é", "title": "", "text": "t", "fields": {"k": 1}}\n'
    assert (tmp_path / "a.jsonl").read_bytes() == line.encode()
    with pytest.raises(ValueError, match="JSON compliant"):
        write_documents(tmp_path / "a.jsonl", [Document("a", "t", fields={"k": float("nan")})])


def test_queries(tmp_path: Path) -> None:
    want = [Query("q1", "what\u2028is"), Query("2", "why")]
    lines = '{"_id": "q1", "text": "what\u2028is", "metadata": {}}\n\n{"_id": 2, "text": "why"}\n'
    assert read_queries(save(tmp_path / "q.jsonl", lines)) == want
    assert read_queries(save(tmp_path / "q.jsonl.gz", lines)) == want
    assert read_queries(save(tmp_path / "q.tsv", "q1\twhat\u2028is\r\n2\twhy\r\n")) == want
    assert read_queries(save(tmp_path / "h.tsv", "qid\tquery\nq1\twhat\u2028is\n2\twhy\n")) == want
    assert read_queries(save(tmp_path / "q.txt", "what\u2028is\nwhy\n")) == [
        Query("1", "what\u2028is"),
        Query("2", "why"),
    ]


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("q.jsonl", '{"_id": "1", "text": "a"}\n{"_id": "1", "text": "b"}', 'line 2: the id "1" appeared before'),
        ("q.jsonl", '{"_id": "1", "title": "a"}', r'line 1: "text" is missing .*; text or query was expected'),
        ("q.jsonl", '{"_id": "1", "text": " ", "title": "a"}', "line 1: the text is empty"),
        ("q.tsv", "1\ta\n2 b\n", "line 2: 1 column; 2 were expected"),
        ("q.txt", "\n", "is empty"),
    ],
)
def test_bad_queries(tmp_path: Path, name: str, text: str, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        read_queries(save(tmp_path / name, text))


def test_qrels(tmp_path: Path) -> None:
    want = {"q1": {"d 1": 1, "d2": 0}, "q2": {"d1": -2}}
    body = "q1\td 1\t1\r\nq1\td2\t0\r\nq2\td1\t-2\r\n"
    header = "query-id\tcorpus-id\tscore\r\n"
    assert read_qrels(save(tmp_path / "a.tsv", header + body)) == want
    assert read_qrels(save(tmp_path / "a.tsv.gz", header + body)) == want
    assert read_qrels(save(tmp_path / "b.tsv", body)) == want
    assert read_qrels(save(tmp_path / "c.qrels", "q1 0 d1 2\nq1 0  d1   2\n\nq2 Q0 d1 0\n")) == {
        "q1": {"d1": 2},
        "q2": {"d1": 0},
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("query-id\tcorpus-id\tscore\nq1\td1\t1.5\n", 'line 2: the grade "1.5" is not a whole number'),
        ("q1\td1\t1\nq1\td2\n", "line 2: 2 columns; 3 were expected"),
        ("q1 0 d1 1\nq1 0 1\n", "line 2: 3 columns; 4 were expected"),
        ("q1\n", r"line 1: 1 columns; 3 \(BEIR.* or 4 \(TREC"),
        ("q1\t\t1\n", "line 1: the query id or the doc_id is empty"),
        ("q1\td1\t1\nq1\td1\t2\n", "line 2: .* judged before"),
        (b"q1\td\xe9\t1\n", "line 1: not valid UTF-8"),
        ("query-id\tcorpus-id\tscore\n", "holds no judgements"),
    ],
)
def test_bad_qrels(tmp_path: Path, text: str | bytes, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        read_qrels(save(tmp_path / "qrels.tsv", text))


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_beir_folder(tmp_path: Path, suffix: str) -> None:
    corpus = '{"_id": "d1", "title": "T", "text": "x", "metadata": {"url": "u"}}\n'
    save(tmp_path / f"corpus.jsonl{suffix}", corpus)
    assert open_dataset(tmp_path) is None
    queries = [{"_id": name, "text": f"text {name}"} for name in ("q3", "q1", "q2")]
    save(tmp_path / f"queries.jsonl{suffix}", "\n".join(map(json.dumps, queries)))
    assert open_dataset(tmp_path) is None
    save(
        tmp_path / f"qrels/test.tsv{suffix}", "query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td9\t0\nq3\td1\t2\nq2\td1\t0\n"
    )
    save(tmp_path / f"qrels/dev.tsv{suffix}", "query-id\tcorpus-id\tscore\nq8\td1\t1\nq9\td1\t1\n")

    assert open_dataset(str(tmp_path)) == Dataset(tmp_path)
    assert open_dataset(tmp_path / f"corpus.jsonl{suffix}") is None
    assert open_dataset(["a"]) is None
    dataset = Dataset(tmp_path)
    document = Document("d1", "x", "T", {"metadata": {"url": "u"}})
    assert list(dataset.documents(FAIL)) == list(read_documents(tmp_path, FAIL)) == [document]
    assert list(dataset.queries.items()) == [("q3", "text q3"), ("q1", "text q1"), ("q2", "text q2")]
    assert dataset.splits() == ["dev", "test"]
    assert dataset.qrels("test") == {"q1": {"d1": 1, "d9": 0}, "q3": {"d1": 2}, "q2": {"d1": 0}}
    assert dataset.split("test") == (
        [Query("q3", "text q3"), Query("q1", "text q1")],
        {"q3": {"d1": 2}, "q1": {"d1": 1, "d9": 0}},
    )
    with pytest.raises(DataError, match=r'no split "train"; there are: dev, test'):
        dataset.qrels("train")
    with pytest.raises(DataError, match=r'dev\.tsv.*: 2 judged queries are not in queries\.jsonl, "q8"'):
        dataset.split("dev")


def test_plain_qrels_stand_before_packed_ones(tmp_path: Path) -> None:
    save(tmp_path / "qrels/test.tsv.gz", "q\td\t1\n")
    save(tmp_path / "qrels/test.tsv", "q\td\t2\n")
    assert Dataset(tmp_path).splits() == ["test"]
    assert Dataset(tmp_path).qrels("test") == {"q": {"d": 2}}


def test_fingerprint(tmp_path: Path) -> None:
    one, two = (save(tmp_path / place / "docs.jsonl", good("a")) for place in ("x", "y"))
    assert fingerprint(one, FAIL) == fingerprint(str(two), FAIL)
    different = {
        fingerprint(one, FAIL),
        fingerprint(one, CorpusConfig(max_text_chars=5)),
        fingerprint(save(tmp_path / "z" / "docs.jsonl", good("b")), FAIL),
        fingerprint(save(tmp_path / "z" / "other.jsonl", good("a")), FAIL),
        fingerprint("irds:a", FAIL),
        fingerprint("irds:b", FAIL),
        fingerprint(["a"], FAIL),
        fingerprint(["b"], FAIL),
        fingerprint(["b", "a"], FAIL),
    }
    for name, text in (("t/a.txt", "x"), ("t/b.txt", "y"), ("t/b.txt", "z")):
        save(tmp_path / name, text)
        different.add(fingerprint(tmp_path / "t", FAIL))
    (tmp_path / "t/b.txt").rename(tmp_path / "t/c.txt")
    different.add(fingerprint(tmp_path / "t", FAIL))
    assert len(different) == 13
    assert fingerprint(["a"], FAIL) == fingerprint([Document("0", "a")], FAIL)
    with pytest.raises(TypeError, match="make it a list"):
        fingerprint(iter(["a"]), FAIL)
    with pytest.raises(DataError, match="cannot be read"):
        fingerprint(tmp_path / "nothing.jsonl", FAIL)


def test_fingerprint_of_a_beir_folder_is_that_of_its_corpus(tmp_path: Path) -> None:
    save(tmp_path / "corpus.jsonl", good("a"))
    before = fingerprint(tmp_path, FAIL)
    save(tmp_path / "queries.jsonl", '{"_id": "q", "text": "x"}')
    assert fingerprint(tmp_path, FAIL) == before
    save(tmp_path / "corpus.jsonl", good("b"))
    assert fingerprint(tmp_path, FAIL) != before


def test_reading_needs_no_torch() -> None:
    code = "import sys, nci.corpus; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_index_inside_a_folder_of_texts_is_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# A\ntext")
    index = tmp_path / "my.index" / "generation-000001"
    index.mkdir(parents=True)
    (index / "README.md").write_text("a card")
    for name in ("CURRENT", "LOCK"):
        (tmp_path / "my.index" / name).write_text("")
    assert [document.doc_id for document in read_documents(tmp_path, CorpusConfig())] == ["a.md"]
