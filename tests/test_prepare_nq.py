"""Natural Questions in both forms, and all that can be wrong with its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prepare_samples import corpus, judged, make_nq, original, questions, simplified, write_lines

from nci.config import CorpusConfig
from nci.corpus import open_dataset
from nci.errors import ConfigError, DataError, NciError
from nci.prepare import KINDS, Report, prepare, prepare_nq320k

PAGES = [
    ("Wind", "It blows .", "Hard ."),
    ("The Mother (Song)", "A song ."),
    ("wind", "Another text ."),
    ("Élan", "E ."),
]


def test_both_forms_give_the_same_data(tmp_path: Path) -> None:
    folders = {}
    for name, make in {"simplified": simplified, "original": original}.items():
        rows: list[dict[str, Any]] = [make(-number, *page) for number, page in enumerate(PAGES, start=1)]
        write_lines(tmp_path / name / "nq-train-00.jsonl.gz", rows[:2])
        write_lines(tmp_path / name / "nq-train-01.jsonl", rows[2:3])
        write_lines(tmp_path / name / "nq-dev-00.jsonl", rows[3:])
        report = prepare_nq320k(tmp_path / name, tmp_path / f"out-{name}", expected=None)
        assert (report.documents, report.queries, report.duplicates) == (3, {"train": 3, "test": 1}, 1)
        folders[name] = report.folder
    assert corpus(folders["original"]) == corpus(folders["simplified"])
    assert corpus(folders["original"])[0] == {
        "_id": "0",
        "title": "Wind",
        "text": "It blows . Hard . box Español",
        "abstract": "It blows .",
        "url": "https://en.wikipedia.org//w/index.php?title=Wind&oldid=-1",
    }
    assert judged(folders["original"], "train") == {
        "-1": ("question -1 about wind", ["Wind"]),
        "-2": ("question -2 about the mother (song)", ["The Mother (Song)"]),
        "-3": ("question -3 about wind", ["Wind"]),
    }
    assert judged(folders["original"], "test") == {"-4": ("question -4 about élan", ["Élan"])}


def test_the_official_simplified_download_mixes_the_forms(tmp_path: Path) -> None:
    """Its train titles come from the heading, with spaces around punctuation, its dev titles from a field."""
    heading = simplified(1, "The Mother ( Song )", "A song .")
    write_lines(tmp_path / "src" / "v1.0-simplified_simplified-nq-train.jsonl.gz", [heading])
    write_lines(tmp_path / "src" / "v1.0-simplified_nq-dev-all.jsonl.gz", [original(2, "The Mother (Song)", "Later .")])
    report = prepare_nq320k(tmp_path / "src", tmp_path / "out", expected=None)
    assert report.documents == 1
    assert judged(tmp_path / "out", "test")["2"][1] == ["The Mother ( Song )"]


def test_html_alone_is_enough(tmp_path: Path) -> None:
    for name, tokens in {"with": True, "without": False}.items():
        write_lines(tmp_path / name / "train.jsonl", [original(1, "Wind", "It blows .", tokens=tokens)])
        write_lines(tmp_path / name / "dev.jsonl", [original(2, "Sea", "It is wet .", tokens=tokens)])
        prepare_nq320k(tmp_path / name, tmp_path / f"out-{name}", expected=None)
    assert corpus(tmp_path / "out-with") == corpus(tmp_path / "out-without")


def test_the_folder_is_read_by_the_other_commands(tmp_path: Path) -> None:
    prepare_nq320k(make_nq(tmp_path / "src"), tmp_path / "out", expected=None)
    dataset = open_dataset(tmp_path / "out")
    assert dataset is not None
    assert dataset.splits() == ["test", "train"]
    documents = list(dataset.documents(CorpusConfig()))
    assert [document.doc_id for document in documents] == [str(number) for number in range(7)]
    assert documents[0].fields["abstract"] == "About page 0 ."
    # The first question about page 0 brought its text, though later ones had another.
    assert documents[0].text.startswith("About page 0 . More of it , seen by question 0 .")


def test_counts_are_compared_with_the_published_ones(tmp_path: Path) -> None:
    src = make_nq(tmp_path / "src")
    report = prepare_nq320k(src, tmp_path / "out")
    assert report.differences[0] == "documents: 7 found, 109,739 expected (109,732 fewer)"
    assert "test: 4 found, 7,830 expected (7,826 fewer)" in str(report)
    right = prepare_nq320k(src, tmp_path / "right", expected={"documents": 7, "train": 15, "test": 4})
    assert right.differences == []
    assert "The counts are the published ones." in str(right)
    more = Report(tmp_path, 3, {"train": 2}, expected={"documents": 1, "train": 2, "test": 1})
    assert more.differences == ["documents: 3 found, 1 expected (2 more)", "test: 0 found, 1 expected (1 fewer)"]
    saved = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (saved["documents"], saved["queries"]) == (7, {"train": 15, "test": 4})


def without(name: str) -> dict[str, Any]:
    row = simplified(1, "Wind", "It blows .")
    del row[name]
    return row


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (without("question_text"), '"question_text" is missing'),
        (without("example_id"), '"example_id" is missing'),
        (without("document_text"), '"document_text or document_tokens or document_html" is missing'),
        (simplified(1, "Wind", "x") | {"question_text": ["a"]}, '"question_text" is a list; a string was expected'),
        (simplified(1, "Wind", "x") | {"question_text": " "}, "the question or its id is empty"),
        (simplified(1, "Wind", "x") | {"example_id": 1.5}, '"example_id" is a number; a string or a whole number'),
        (simplified(1, "Wind", "x") | {"document_text": "no heading"}, "the page has no title"),
        (simplified(1, "Wind", "x") | {"question_text": "\ud800"}, "surrogate"),
        (original(1, "Wind", "x") | {"document_tokens": ["a"]}, "list of objects with the field"),
        (original(1, "Wind", "x") | {"document_tokens": None}, "list of objects with the field"),
        ([], "the line is a list"),
    ],
)
def test_a_changed_schema_names_file_line_and_field(tmp_path: Path, row: Any, reason: str) -> None:
    path = tmp_path / "src" / "nq-train.jsonl"
    path.parent.mkdir()
    path.write_text("\n".join(json.dumps(each) for each in [next(questions(0, 1, 2)), row]))
    write_lines(tmp_path / "src" / "nq-dev.jsonl", questions(90, 1, 2))
    with pytest.raises(DataError) as caught:
        prepare_nq320k(tmp_path / "src", tmp_path / "out")
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def garble(path: Path) -> None:
    path.write_bytes(b"<html>not found</html>")


@pytest.mark.parametrize(("damage", "reason"), [(cut, "cut off after line"), (garble, "damaged gzip file")])
@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_a_damaged_file_is_never_skipped(
    tmp_path: Path, damage: Callable[[Path], None], reason: str, on_error: Any
) -> None:
    src = make_nq(tmp_path / "src")
    damage(src / "train" / "nq-train-02.jsonl.gz")
    with pytest.raises(DataError, match=rf"nq-train-02\.jsonl\.gz: .*{reason}.*download it again"):
        prepare_nq320k(src, tmp_path / "out", on_error=on_error)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ([], "is empty"),
        (["readme.txt"], "has no files of Natural Questions' split train, such as nq-train-00"),
        (["nq-train-00.jsonl"], "has no files of Natural Questions' split dev, such as nq-dev-00"),
        (["train.jsonl", "dev.jsonl", "sample.jsonl"], "sample.jsonl: of which split is it?"),
    ],
)
def test_missing_files(tmp_path: Path, names: list[str], reason: str) -> None:
    (tmp_path / "src").mkdir()
    for name in names:
        write_lines(tmp_path / "src" / name, questions(0, 1, 1))
    with pytest.raises(DataError) as caught:
        prepare_nq320k(tmp_path / "src", tmp_path / "out")
    assert reason in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_there_must_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not there"):
        prepare_nq320k(tmp_path / "none", tmp_path / "out")
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="is a file"):
        prepare_nq320k(tmp_path / "file", tmp_path / "out")
    with pytest.raises(DataError, match="exists and was not made of these files"):
        prepare_nq320k(make_nq(tmp_path / "src"), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "x"


def test_a_data_set_by_name(tmp_path: Path) -> None:
    report = prepare("nq320k", make_nq(tmp_path / "src"), tmp_path / "out", progress=False)
    assert report.documents == 7
    assert KINDS == ("nq320k", "triviaqa", "ddro", "nci-tsv")
    with pytest.raises(
        ConfigError, match="unknown data set 'squad'; there are: nq320k, triviaqa, ddro, nci-tsv"
    ) as caught:
        prepare("squad", tmp_path / "src", tmp_path / "other")
    assert isinstance(caught.value, NciError)
