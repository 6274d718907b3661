"""`nci demo` on a part of the corpus: real encoder, real training, real comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nci.cli import main


@pytest.mark.slow
def test_demo_compares_and_searches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "demo.json"
    assert main(["demo", "-o", str(tmp_path / "demo"), "--limit", "800", "--json", str(target)]) == 0
    result = json.loads(target.read_text())
    assert set(result["systems"]) == {"nci", "nci untrained", "dense", "bm25"}
    for metric in ("R@1", "R@10"):
        assert result["systems"]["nci"][metric] >= result["systems"]["dense"][metric]
    assert result["systems"]["nci"]["R@10"] >= result["systems"]["bm25"]["R@10"]
    printed = capsys.readouterr().out
    assert printed.count("\n> ") == 3
    assert "Go on with:" in printed
