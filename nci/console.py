"""What the commands share: checks and words of flags, files that are written, log lines, lines that are safe to print."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nci.errors import ConfigError

if TYPE_CHECKING:
    from jsonargparse import Namespace

log = logging.getLogger("nci")
PICTURES = (".png", ".svg", ".pdf")


class Typed(Exception):
    """The command was typed wrong."""


def whole_numbers(flag: str, text: object) -> list[int]:
    """Numbers of a flag like 10,100."""
    try:
        return [int(part) for part in str(text).split(",")]
    except ValueError:
        raise Typed(f"{flag} is a whole number, or several separated by commas; not {str(text)!r}") from None


def check_arguments(args: Namespace) -> None:
    """Refuse what no command can work with, before any work: devices, and files that are not there or cannot be written."""
    device, out, generated = (getattr(args, name, None) for name in ("device", "out", "generated"))
    if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"--device is cpu, cuda or cuda:N, not {device!r}")
    for flag in ("json", "latex", "plot", "tradeoff", "append", "run"):
        target = getattr(args, flag, None)
        if target is not None and (flag, target) != ("json", "-"):
            _check_file(f"--{flag} {target}", Path(target), PICTURES if flag in ("plot", "tradeoff") else ())
    if out is not None:
        _check_folder(f"-o {out}", Path(out))
    if generated not in (None, "auto", "none"):
        file = Path(generated) / "queries.jsonl" if os.path.isdir(generated) else Path(generated)
        if not file.is_file():
            raise ConfigError(f"--generated {file}: there is no such file; nci querygen writes one")
        if not file.stat().st_size:
            log.warning("--generated %s: holds no queries", file)


def _check_file(label: str, path: Path, suffixes: tuple[str, ...]) -> None:
    if path.is_dir():
        raise ConfigError(f"{label}: is a folder; expected the name of a file")
    if suffixes and path.suffix not in suffixes:
        raise ConfigError(f"{label}: expected a name that ends in {', '.join(suffixes)}")
    if not path.parent.is_dir():
        raise ConfigError(f"{label}: cannot be written: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{label}: cannot be written: no permission")


def _check_folder(label: str, path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{label}: is a file; expected a folder")
    above = next((folder for folder in (path, *path.absolute().parents) if folder.exists()), path)
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ConfigError(f"{label}: cannot be written: {above} is {'read-only' if above.is_dir() else 'a file'}")


def words(text: str) -> list[str]:
    """Words of a flag like bm25,dense."""
    return [word.strip() for word in text.split(",") if word.strip()]


def write_json(target: str | None, value: dict[str, Any]) -> None:
    if target is None:
        return
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2) + "\n"
    if target == "-":
        print(text, end="")
        return
    with writing("--json", target):
        Path(target).write_text(text, encoding="utf-8")


@contextmanager
def writing(flag: str, target: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{flag} {target}: cannot be written: {reason}") from error


def set_up_logging(level: int) -> None:
    """Log lines of the library for people, on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers = [handler]
    log.setLevel(level)
    log.propagate = False


def plain(text: str) -> str:
    """One line that cannot steer a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
