"""What every command refuses before any work, and how soon: devices, files, names, all in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import python, write_lines

from nci.cli import COMMANDS

Nci = Callable[..., tuple[int, str, str]]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a file and an empty one in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("mine")
    (tmp_path / "empty.jsonl").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "gpu"], "--device is cpu, cuda or cuda:N, not 'gpu'"),
        (["--json", "no/r.json"], "--json no/r.json: cannot be written: there is no folder no"),
        (["--json", "."], "--json .: is a folder"),
        (["--latex", "no/t.tex"], "--latex no/t.tex: cannot be written"),
        (["--plot", "no/p.png"], "--plot no/p.png: cannot be written"),
        (["--plot", "p.gif"], "--plot p.gif: expected a name that ends in .png, .svg, .pdf"),
        (["--plot", "p"], "--plot p: expected a name that ends in"),
        (["--tradeoff", "no/p.png"], "--tradeoff no/p.png: cannot be written"),
        (["-o", "taken"], "-o taken: is a file; expected a folder"),
        (["-o", "taken/deeper"], "-o taken/deeper: cannot be written"),
        (["--generated", "nowhere.jsonl"], "--generated nowhere.jsonl: there is no such file"),
        (["--generated", "."], "--generated queries.jsonl: there is no such file"),
    ],
)
def test_a_comparison_is_refused_before_any_work(
    run: Nci, beir: Path, place: Path, words: list[str], said: str
) -> None:
    code, out, err = run("compare", beir, "--systems", "bm25", *words)
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert said in err
    assert sorted(path.name for path in place.iterdir()) == ["empty.jsonl", "taken"]
    assert (place / "taken").read_text() == "mine"


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {"verify", "prepare", "cited"}))
def test_no_command_takes_an_unknown_device(run: Nci, command: str) -> None:
    words = ["a", "b"] if command in ("search", "evaluate") else [] if command == "demo" else ["a"]
    made = ["-o", "out"] if command in ("index", "querygen") else []
    code, out, err = run(command, *words, *made, "--device", "gpu")
    assert (code, out) == (1, "")
    assert err == f"nci {command}: --device is cpu, cuda or cuda:N, not 'gpu'\n"


def test_files_of_other_commands_are_checked_too(run: Nci, beir: Path, place: Path) -> None:
    for words in (["evaluate", "a", beir, "--run"], ["search", "a", "b", "--json"], ["cited", "nq320k", "--json"]):
        code, out, err = run(*words, "no/file")
        assert (code, out, len(err.splitlines())) == (1, "", 1)
        assert "no/file: cannot be written: there is no folder no" in err


def test_an_empty_file_of_queries_is_a_warning(run: Nci, beir: Path, place: Path) -> None:
    words = ["--systems", "bm25+qg", "--quiet", "--device", "cpu", "-o", "out"]
    code, _, err = run("compare", beir, *words, "--generated", "empty.jsonl")
    assert (code, err) == (0, "--generated empty.jsonl: holds no queries\n")
    write_lines(place / "queries.jsonl", [{"doc_id": "d0", "query": "apple"}])
    assert run("compare", beir, *words, "--generated", ".")[2] == ""


def test_queries_that_no_system_takes_are_a_warning(run: Nci, beir: Path, place: Path) -> None:
    write_lines(place / "queries.jsonl", [{"doc_id": "d0", "query": "apple"}])
    words = ["--systems", "bm25", "--quiet", "--device", "cpu", "-o", "out", "--generated", "."]
    code, _, err = run("compare", beir, *words)
    assert (code, err) == (0, "--generated .: no system of this call takes generated queries; nci-qg, bm25+qg do\n")


@pytest.mark.parametrize(
    "words",
    [
        ["compare", "DATA", "--systems", "bogus"],
        ["compare", "DATA", "--bogus"],
        ["compare", "DATA", "--systems", "bm25", "--set", "train.epochs=abc"],
        ["compare", "DATA", "--systems", "bm25", "--split", "bogus"],
        ["compare", "nowhere"],
        ["querygen", "DATA", "-o", "OUT", "--max-source", "0"],
        ["querygen", "nowhere", "-o", "OUT"],
    ],
)
def test_a_mistake_is_told_without_torch(beir: Path, tmp_path: Path, words: list[str]) -> None:
    """Which takes seconds to import."""
    places = {"DATA": str(beir), "OUT": str(tmp_path / "out")}
    code = "import sys; sys.modules['torch'] = None; from nci.cli import main; sys.exit(main(sys.argv[1:]))"
    result = python("-c", code, *(places.get(word, word) for word in words))
    assert result.returncode in (1, 2)
    assert len(result.stderr.splitlines()) == 1
    assert "torch" not in result.stderr


def test_a_data_set_is_no_index(run: Nci, beir: Path, tmp_path: Path) -> None:
    said = f"{beir} is a data set, not an index: nci index {beir} -o my.index makes one\n"
    for words in (["plot", beir], ["evaluate", beir, beir], ["search", beir, "apple"], ["verify", beir]):
        made = ["-o", tmp_path / "out"] if words[0] == "plot" else []
        assert run(*words, *made) == (1, "", f"nci {words[0]}: {said}")
