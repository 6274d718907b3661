"""The Triton kernels, checked by `kernel_checks.py` in Triton's interpreter, which needs a process of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny import python


@pytest.mark.slow
def test_kernels_equal_plain_pytorch() -> None:
    """One process for all checks: starting it takes longer than most of them. Without Triton this fails."""
    checks = Path(__file__).with_name("kernel_checks.py")
    child = python("-m", "pytest", str(checks), "-v", "-p", "no:cacheprovider", TRITON_INTERPRET="1")
    assert child.returncode == 0, child.stdout + child.stderr
    summary = child.stdout.splitlines()[-1]
    assert re.fullmatch(r"=* ?\d+ passed in .*", summary), summary
