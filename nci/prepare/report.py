"""What a preparation wrote, beside the counts that are known of the data set. Knows nothing of how it was written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nci.errors import DataError


@dataclass(frozen=True)
class Report:
    """What was written, and how it compares with the counts that are known.

    Args:
        folder: The BEIR folder.
        documents: How many it holds.
        queries: Questions of each split.
        duplicates: Pages left out, since one with the same title was there.
        skipped: Bad records, listed in rejects.jsonl.
        expected: The known counts, of "documents" and of splits.
    """

    folder: Path
    documents: int
    queries: Mapping[str, int]
    duplicates: int = 0
    skipped: int = 0
    expected: Mapping[str, int] = field(default_factory=dict)

    @property
    def differences(self) -> list[str]:
        """One line for each count that is not the known one."""
        found = {"documents": self.documents, **self.queries}
        pairs = ((name, found.get(name, 0), known) for name, known in self.expected.items())
        return [
            f"{name}: {count:,} found, {known:,} expected ({abs(count - known):,} {'more' if count > known else 'fewer'})"
            for name, count, known in pairs
            if count != known
        ]

    def __str__(self) -> str:
        splits = ", ".join(f"{count:,} {split}" for split, count in self.queries.items())
        lines = [
            f"{self.folder}: {self.documents:,} documents; questions: {splits}; {self.duplicates:,} repeated pages"
        ]
        if self.skipped:
            lines.append(f"{self.skipped:,} bad records were skipped: {self.folder / 'rejects.jsonl'}")
        if self.differences:
            lines += ["The counts differ from the published ones (is a file missing, or from another version?):"]
            lines += [f"  {line}" for line in self.differences]
        elif self.expected:
            lines.append("The counts are the published ones.")
        return "\n".join(lines)

    @classmethod
    def read(cls, out: Path, source: Mapping[str, object], expected: Mapping[str, int]) -> Report | None:
        """The report of a finished run over the same files; None where there is nothing yet.

        Raises:
            DataError: Something else is there.
        """
        if not out.exists() or (out.is_dir() and not any(out.iterdir())):
            return None
        try:
            saved: dict[str, Any] = json.loads((out / "report.json").read_bytes())
            if saved.pop("source") == source:
                return cls(folder=out, **saved, expected=expected)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        raise DataError(f"{out} exists and was not made of these files; remove it or choose another folder")
