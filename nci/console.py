"""What the commands share: numbers and words of flags, files that are written, log lines, lines that are safe to print."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nci.errors import ConfigError


class Typed(Exception):
    """The command was typed wrong."""


def whole_numbers(flag: str, text: object) -> list[int]:
    """Numbers of a flag like 10,100."""
    try:
        return [int(part) for part in str(text).split(",")]
    except ValueError:
        raise Typed(f"{flag} is a whole number, or several separated by commas; not {str(text)!r}") from None


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
    log = logging.getLogger("nci")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers = [handler]
    log.setLevel(level)
    log.propagate = False


def plain(text: str) -> str:
    """One line that cannot steer a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
