"""TriviaQA's folder: several pages per question, files too large to load at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepare_samples import all_bytes, corpus, judged, make_triviaqa, trivia

from nci.errors import DataError
from nci.prepare import prepare_triviaqa, triviaqa
from nci.prepare.triviaqa import read_array

PAGES = {
    "Judi_Dench.txt": "Dame Judi\r\n\nwas\tborn in York.",
    "England.txt": "A country.",
    "england.txt": "The same title.",
    "Angola.txt": "Long. " * 4000,
    "Unasked.txt": "Nobody asks for it.",
    "Only_test.txt": "Asked for by a test question.",
    "AC/DC.txt": "A band.",
}
ITEMS = {
    "train": [
        trivia(1, "Where was\nDench born?", "Judi_Dench.txt", "England.txt", "england.txt"),
        trivia(2, "Which “country”?", "england.txt", "England.txt"),
    ],
    "dev": [trivia(3, "Where is Luanda?", "Angola.txt", "AC/DC.txt")],
    "test-without-answers": [trivia(4, "Secret?", "Only_test.txt", "Angola.txt")],
}


def test_a_question_has_several_pages(tmp_path: Path) -> None:
    src = make_triviaqa(tmp_path / "src", ITEMS, PAGES)
    report = prepare_triviaqa(src, tmp_path / "out")
    assert (report.documents, report.queries) == (5, {"train": 2, "test": 1})
    assert judged(tmp_path / "out", "train") == {
        "tc_1": ("Where was Dench born?", ["Judi Dench", "England"]),
        "tc_2": ("Which “country”?", ["England"]),
    }
    qrels = (tmp_path / "out" / "qrels" / "train.tsv").read_text()
    assert qrels.splitlines()[1:] == ["tc_1\tJudi_Dench\t1", "tc_1\tEngland\t1", "tc_2\tEngland\t1"]
    assert judged(tmp_path / "out", "test") == {"tc_3": ("Where is Luanda?", ["Angola", "AC/DC"])}
    rows = corpus(tmp_path / "out")
    assert [row["_id"] for row in rows] == ["Judi_Dench", "England", "Angola", "AC/DC", "Only_test"]
    assert rows[0]["text"] == "Dame Judi was born in York."
    assert 10_000 < len(rows[2]["text"]) <= 10_240
    assert "train: 2 found, 61,888 expected" in str(report)


def test_pages_are_cut_where_one_asks(tmp_path: Path) -> None:
    src = make_triviaqa(tmp_path / "data" / "triviaqa-rc", ITEMS, PAGES)
    prepare_triviaqa(src.parent, tmp_path / "out", max_chars=9)
    assert corpus(tmp_path / "out")[1]["text"] == "A country"


def test_other_settings_start_from_the_beginning(tmp_path: Path) -> None:
    src = make_triviaqa(tmp_path / "src", ITEMS, PAGES)
    dev = src / "qa" / "wikipedia-dev.json"
    text = dev.read_text()
    dev.write_text(text[: len(text) // 2])
    with pytest.raises(DataError, match="cut off"):
        prepare_triviaqa(src, tmp_path / "out")
    dev.write_text(text)
    prepare_triviaqa(src, tmp_path / "out", max_chars=9)
    assert corpus(tmp_path / "out")[1]["text"] == "A country"
    with pytest.raises(DataError, match="was not made of these files"):
        prepare_triviaqa(src, tmp_path / "out")


def test_small_pieces_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = make_triviaqa(tmp_path / "src", ITEMS, PAGES)
    prepare_triviaqa(src, tmp_path / "whole")
    monkeypatch.setattr(triviaqa, "_CHUNK_BYTES", 3)
    prepare_triviaqa(src, tmp_path / "pieces")
    assert all_bytes(tmp_path / "pieces") == all_bytes(tmp_path / "whole")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(items=st.lists(VALUES, max_size=5), before=VALUES, indent=st.none() | st.just(2), piece=st.integers(1, 9))
def test_a_list_item_by_item(
    tmp_path_factory: pytest.TempPathFactory, items: list[Any], before: Any, indent: int | None, piece: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "array.json"
    whole = {"Other": before, "Data": items, "After": 1}
    path.write_text(json.dumps(whole, indent=indent, ensure_ascii=False), encoding="utf-8", errors="surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triviaqa, "_CHUNK_BYTES", piece)
        assert list(read_array(path, "Data")) == items


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"Question": None}, '"Question" is missing'),
        ({"QuestionId": None}, '"QuestionId" is missing'),
        ({"EntityPages": None}, '"EntityPages" is missing'),
        ({"EntityPages": {"a": 1}}, '"EntityPages" is not a list of objects'),
        ({"EntityPages": []}, "the question has no page"),
        ({"EntityPages": [{"Title": "England"}]}, '"Filename" is missing'),
        ({"EntityPages": [{"Filename": "Gone.txt"}]}, "Gone.txt cannot be read: No such file"),
        ({"EntityPages": [{"Filename": "../../qa/wikipedia-dev.txt"}]}, "a .txt file below"),
        ({"EntityPages": [{"Filename": "/etc/hosts.txt"}]}, "a .txt file below"),
        ({"EntityPages": [{"Filename": "Latin.txt"}]}, "not valid UTF-8"),
    ],
)
def test_a_changed_schema_names_file_question_and_field(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    bad = {name: value for name, value in (ITEMS["train"][1] | change).items() if value is not None}
    src = make_triviaqa(tmp_path / "src", {**ITEMS, "train": [ITEMS["train"][0], bad]}, PAGES)
    (src / "evidence" / "wikipedia" / "Latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError) as caught:
        prepare_triviaqa(src, tmp_path / "out")
    assert str(caught.value).startswith(f"{src / 'qa' / 'wikipedia-train.json'}, question 2: ")
    assert reason in str(caught.value)
    assert not (tmp_path / "out").exists()
    report = prepare_triviaqa(src, tmp_path / "out", on_error="skip")
    assert (report.skipped, report.queries["train"]) == (1, 1)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda text: text[: len(text) * 3 // 4], "cut off or damaged after item 1"),
        (lambda text: text.replace('"Data"', '"Rows"'), '"Data" is missing'),
        (lambda text: "[]", "not valid JSON"),
        (lambda text: "", "cut off or damaged after item 0"),
        (lambda text: text.replace('"Data": [', '"Data": 5, "x": ['), "not valid JSON"),
    ],
)
def test_damaged_files(tmp_path: Path, spoil: Any, reason: str) -> None:
    src = make_triviaqa(tmp_path / "src", ITEMS, PAGES)
    path = src / "qa" / "wikipedia-train.json"
    path.write_text(spoil(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(DataError) as caught:
        prepare_triviaqa(src, tmp_path / "out", on_error="skip")
    assert str(caught.value).startswith(f"{path}: ")
    assert reason in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("gone", ["qa/wikipedia-dev.json", "evidence", "qa", ""])
def test_missing_files(tmp_path: Path, gone: str) -> None:
    src = make_triviaqa(tmp_path / "src", ITEMS, PAGES)
    if gone:
        (src / gone).rename(tmp_path / "elsewhere")
        reason = "is missing; the unpacked folder of triviaqa-rc.tar.gz was expected"
    else:
        src, reason = tmp_path / "empty", "is empty"
        src.mkdir()
    with pytest.raises(DataError, match=reason):
        prepare_triviaqa(src, tmp_path / "out")
    assert not (tmp_path / "out").exists()
