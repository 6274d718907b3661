"""The folder of a trained baseline: settings in, and a marker that says whether everything is there. No torch.

A baseline writes its own files between `begin` and `finish`; a folder without COMPLETE is never read. Knows nothing of
what the files mean.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, TypeVar

from nci.errors import IndexCorruptError, IndexNotFoundError
from nci.shards import rename_durably

Settings = TypeVar("Settings")

SETTINGS = "settings.json"
COMPLETE = "COMPLETE"


def begin(folder: Path) -> None:
    """Makes the folder; what it held before no longer counts."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / COMPLETE).unlink(missing_ok=True)


def finish(folder: Path, kind: str, settings: Any) -> None:
    """Writes the settings (a dataclass), then the marker, which names the kind of baseline."""
    write_json(folder / SETTINGS, dataclasses.asdict(settings))
    _write(folder / COMPLETE, kind)


def read(folder: Path, kind: str, settings: type[Settings]) -> Settings:
    """The settings of a finished folder of this kind."""
    marker = folder / COMPLETE
    if not marker.is_file():
        raise IndexNotFoundError(f"{folder} holds no finished {kind}: its file {COMPLETE} is missing; train it again")
    found = marker.read_text(encoding="utf-8").strip()
    if found != kind:
        raise IndexCorruptError(f"{folder} holds the baseline {found!r} where {kind!r} was expected; give its folder")
    try:
        return settings(**read_json(folder / SETTINGS))
    except (OSError, ValueError, TypeError) as error:
        raise IndexCorruptError(f"{folder / SETTINGS} cannot be read ({error}); train the {kind} again") from error


def write_json(path: Path, value: object) -> None:
    """Writes a JSON file that is there whole or not at all."""
    _write(path, json.dumps(value, indent=1, ensure_ascii=False))


def read_json(path: Path) -> Any:
    """Reads a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def _write(path: Path, text: str) -> None:
    staged = path.with_name(f".{path.name}.tmp")
    staged.write_text(text + "\n", encoding="utf-8")
    rename_durably(staged, path)
