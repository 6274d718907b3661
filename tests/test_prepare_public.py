"""Pre-processed files as others wrote them: quoted like CSV or bare, with titles or with document numbers."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepare_samples import corpus, judged

from nci.bad_lines import Line
from nci.errors import ConfigError, DataError
from nci.prepare import prepare_public
from nci.prepare.public import split_row

WIND = ["wind", ' The `` "wind" <I> ', "It blows , 5 < 6 ."]
SEA = ["sea", "", "It is wet ."]


def write_rows(path: Path, rows: list[list[str]], *, quoted: bool = True) -> Path:
    """As pandas writes them: quoted where needed; or bare cells with tabs between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    if quoted:
        csv.writer(text, delimiter="\t", lineterminator="\n").writerows(rows)
    else:
        text.write("".join("\t".join(row) + "\n" for row in rows))
    data = text.getvalue().encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def table_row(number: int, query: str, page: list[str], *, url: bool) -> list[str]:
    where = [f"https://en.wikipedia.org/?title={page[0]}&amp;oldid=1"] if url else []
    return [query, str(number), "long", "short", *page, *where, "".join(page), "en"]


@given(st.lists(st.text(st.characters(exclude_characters="\t\n\r", codec="utf-8"), max_size=6), min_size=4, max_size=4))
def test_cells_are_what_a_csv_writer_wrote(cells: list[str]) -> None:
    text = io.StringIO()
    csv.writer(text, delimiter="\t", lineterminator="\n").writerow(cells)
    assert split_row(Line(1, text.getvalue().removesuffix("\n").encode()), 4, 4) == cells


def test_bare_cells_keep_their_quote_marks() -> None:
    line = Line(1, b'"Yesterday" or "Help"\ta "b" c\t"\t"open')
    assert split_row(line, 4, 4) == ['"Yesterday" or "Help"', 'a "b" c', '"', '"open']


@pytest.mark.parametrize("merged", [True, False])
def test_ddro(tmp_path: Path, merged: bool) -> None:
    src = tmp_path / "src"
    write_rows(
        src / "nq_train.gz", [table_row(1, 'what "is" wind', WIND, url=True), table_row(2, "wind ?", WIND, url=True)]
    )
    write_rows(src / "nq_val.gz", [table_row(-3, "why is it wet", SEA, url=True)])
    if merged:
        names = ("title", "abstract", "content")
        rows = [{"id": "9", "language": "en", **dict(zip(names, page, strict=True))} for page in (SEA, WIND)]
        (src / "nq_merged.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = prepare_public("ddro", src, tmp_path / "out")
    assert (report.documents, report.queries) == (2, {"train": 2, "test": 1})
    assert [row["title"] for row in corpus(tmp_path / "out")] == (["sea", "wind"] if merged else ["wind", "sea"])
    row = next(row for row in corpus(tmp_path / "out") if row["title"] == "wind")
    assert row["text"] == 'The `` "wind" It blows , 5 < 6 .'
    assert row["abstract"] == 'The `` "wind"'
    assert row["url"] == ("" if merged else "https://en.wikipedia.org/?title=wind&oldid=1")
    assert judged(tmp_path / "out", "train") == {"1": ('what "is" wind', ["wind"]), "2": ("wind ?", ["wind"])}
    assert judged(tmp_path / "out", "test") == {"-3": ("why is it wet", ["sea"])}
    assert "documents: 2 found, 109,739 expected" in str(report)


def test_the_authors_tables(tmp_path: Path) -> None:
    src = tmp_path / "src"
    write_rows(src / "nq_train.tsv", [table_row(1, "what is wind", [" Wind ", *WIND[1:]], url=False)])
    write_rows(src / "nq_dev.tsv", [table_row(2, "wet", SEA, url=False), table_row(3, "blow", WIND, url=False)])
    report = prepare_public("nci-tsv", src, tmp_path / "out")
    assert (report.documents, report.duplicates) == (2, 1)
    assert judged(tmp_path / "out", "test") == {"2": ("wet", ["sea"]), "3": ("blow", ["Wind"])}


@pytest.mark.parametrize("documents", ["NQ_doc_content.tsv", "nq_title_abs.tsv"])
def test_the_authors_questions_with_document_numbers(tmp_path: Path, documents: str) -> None:
    src = tmp_path / "src"
    write_rows(src / "nq_train_doc_newid.tsv", [["what is wind", "11", "1", "3-1"], ["sea", "12", "0", "2-9"]])
    write_rows(src / "nq_dev_doc_newid.tsv", [["blow", "-13", "1", "3-1", "1-2", "4", "5", "6"]])
    if documents == "NQ_doc_content.tsv":
        rows = [["0", "", "", 'sea it is "wet"', "", "", "en"], ["1", "", "", "wind it blows", "", "", "en"]]
        write_rows(src / documents, rows, quoted=False)
    else:
        rows = [
            ["wind it blows", "11", "1", "3-1"],
            ['sea it is "wet"', "12", "0", "2-9"],
            ["wind again", "9", "1", "3-1"],
        ]
        write_rows(src / documents, rows)
    prepare_public("nci-tsv", src, tmp_path / "out")
    texts = {row["_id"]: row["text"] for row in corpus(tmp_path / "out")}
    assert texts == {"0": 'sea it is "wet"', "1": "wind it blows"}
    qrels = (tmp_path / "out" / "qrels" / "train.tsv").read_text().splitlines()
    assert qrels == ["query-id\tcorpus-id\tscore", "11\t1\t1", "12\t0\t1"]
    assert list(judged(tmp_path / "out", "test")) == ["-13"]


@pytest.mark.parametrize("documents", ["Trivia_doc_content.tsv", "trivia_title_cont.tsv"])
def test_the_authors_triviaqa(tmp_path: Path, documents: str) -> None:
    src = tmp_path / "src"
    train = [['"A" or b?', "7", "1", "3-1"], ["c?", "8", "0", "2"], ['"A" or b?', "8", "0", "2"]]
    write_rows(src / "train.tsv", train, quoted=False)
    write_rows(src / "dev.tsv", [["both?", "7,8", "1,0", "3-1,2"]], quoted=False)
    if documents == "Trivia_doc_content.tsv":
        write_rows(
            src / documents, [["8", "0", "sea", "wet", "seawet"], ["7", "1", "wind", "blows", "x"]], quoted=False
        )
    else:
        write_rows(src / documents, [["sea wet", "8", "0", "2"], ["wind blows", "7", "1", "3-1"]])
    report = prepare_public("nci-tsv", src, tmp_path / "out")
    assert (report.documents, report.queries, report.expected) == (2, {"train": 2, "test": 1}, {})
    first = corpus(tmp_path / "out")[0]
    assert (first["title"], first["text"]) == (("sea", "wet") if "content" in documents else ("", "sea wet"))
    qrels = (tmp_path / "out" / "qrels" / "train.tsv").read_text().splitlines()[1:]
    assert sorted(line.split("\t")[1] for line in qrels) == ["0", "0", "1"]
    assert {line.split("\t")[0] for line in qrels} == {row["_id"] for row in _queries(tmp_path / "out")[:2]}
    assert [row["text"] for row in _queries(tmp_path / "out")] == ['"A" or b?', "c?", "both?"]


def _queries(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "queries.jsonl").read_text().splitlines()]


def test_bad_rows(tmp_path: Path) -> None:
    src = tmp_path / "src"
    train = write_rows(src / "nq_train_doc_newid.tsv", [["a", "1", "0", "2"], ["b", "2", "5", "2"], ["c", "3"]])
    write_rows(src / "nq_dev_doc_newid.tsv", [["d", "4", "0", "2"]])
    write_rows(src / "NQ_doc_content.tsv", [["0", "", "", "text", "", "", "en"]])
    with pytest.raises(DataError) as caught:
        prepare_public("nci-tsv", src, tmp_path / "out")
    assert str(caught.value) == f'{train}, line 2: the document "5" is not among the documents'
    report = prepare_public("nci-tsv", src, tmp_path / "out", on_error="skip")
    assert (report.skipped, report.queries) == (2, {"train": 1, "test": 1})
    assert "2 columns; 4 to 8 were expected" in (tmp_path / "out" / "rejects.jsonl").read_text()
    assert f"2 bad records were skipped: {tmp_path / 'out' / 'rejects.jsonl'}" in str(report)


def test_ten_columns_are_not_nine(tmp_path: Path) -> None:
    src = tmp_path / "src"
    write_rows(src / "nq_train.gz", [table_row(1, "q", WIND, url=False)])
    write_rows(src / "nq_val.gz", [table_row(2, "q", WIND, url=True)])
    with pytest.raises(DataError, match=r"nq_train\.gz, line 1: 9 columns; 10 were expected"):
        prepare_public("ddro", src, tmp_path / "out")
    write_rows(src / "nq_train.gz", [table_row(1, "q", ["", "a", "b"], url=True)])
    with pytest.raises(DataError, match=r"nq_train\.gz, line 1: the title is empty"):
        prepare_public("ddro", src, tmp_path / "out")
    (src / "nq_merged.json").write_text('{"title": "x", "abstract": ""}\n')
    with pytest.raises(DataError, match=r'nq_merged\.json, line 1: "content" is missing'):
        prepare_public("ddro", src, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_files_and_unknown_forms(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown form 'x'; there are: ddro, nci-tsv"):
        prepare_public("x", tmp_path, tmp_path / "out")
    src = tmp_path / "src"
    src.mkdir()
    with pytest.raises(DataError, match="is empty"):
        prepare_public("ddro", src, tmp_path / "out")
    write_rows(src / "nq_train_doc_newid.tsv", [["a", "1", "0", "2"]])
    with pytest.raises(DataError, match="does not hold the files of ddro: nq_train and nq_val"):
        prepare_public("ddro", src, tmp_path / "out")
    write_rows(src / "nq_dev_doc_newid.tsv", [["a", "1", "0", "2"]])
    with pytest.raises(DataError, match="questions but no documents; one of these was expected: nq_doc_content"):
        prepare_public("nci-tsv", src, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
