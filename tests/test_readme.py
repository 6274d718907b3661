"""What the README shows is run, with the real encoder: its Python lines and its command lines."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from nci.cli import COMMANDS, main
from nci.stdlib import make_dataset

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    fenced = [part.partition("\n") for part in README.split("```")[1::2]]
    return [text for first, _, text in fenced if first == kind]


@pytest.mark.slow
def test_the_python_lines_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python")
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2
    assert printed[0].startswith("1 copy ")


@pytest.mark.slow
def test_the_command_lines_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = make_dataset(tmp_path / "DATA", limit=300)
    (tmp_path / "docs.jsonl").write_bytes((data / "corpus.jsonl").read_bytes())
    assert main(["index", "DATA", "-o", "other.index", "--preset", "fast", "--train.epochs", "0.5"]) == 0
    (text,) = [block for block in blocks("") if "nci index docs.jsonl" in block]
    lines = [shlex.split(line, comments=True) for line in text.splitlines() if line.startswith("nci ")]
    (more,) = [block for block in blocks("") if "nci compare" in block]
    others = {line.split()[1] for line in more.splitlines()}
    assert {line[1] for line in lines} | others == set(COMMANDS) - {"demo"}
    for line in lines:
        assert main(line[1:]) == 0, line
    assert "is whole" in capsys.readouterr().out


def test_every_flag_in_the_readme_exists(capsys: pytest.CaptureFixture[str]) -> None:
    known = ""
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        known += capsys.readouterr().out
    for flag in set(re.findall(r"(?<![\w-])--[a-z][\w.-]+", README)):
        assert re.search(rf"{re.escape(flag)}\b", known), flag
