"""Every mistake a user can make has a class here; the command line prints its message as one line and no traceback.

An error says what was wrong, what was expected and what to do about it.
"""

from __future__ import annotations

from collections.abc import Mapping


class NciError(Exception):
    """Base of all errors that are the user's to fix."""


class ConfigError(NciError, ValueError):
    """A setting has an impossible value; the message names the flag."""


class DataError(NciError):
    """A corpus, query or qrels file is wrong; the message names file, line and reason."""


class MissingModelError(NciError):
    """An encoder is not on this machine; the message says what to install."""


class MissingPackageError(NciError, ImportError):
    """An optional package is not installed; the message says which extra brings it."""


class MemoryFullError(NciError):
    """What is asked for does not fit into the memory that is left."""


class IndexNotFoundError(NciError, FileNotFoundError):
    """The folder holds no index."""


class IndexCorruptError(NciError):
    """A file of the index is missing, damaged or foreign."""


class IndexVersionError(NciError):
    """The index was written by a newer format than this program reads."""


class IndexLockedError(NciError):
    """Another process is writing to the index."""


def check_least(settings: object, least: Mapping[str, float], flag: str = "") -> None:
    """Refuse settings below what makes sense; `flag` is what stands before their names on the command line."""
    for name, bound in least.items():
        if getattr(settings, name) < bound:
            raise ConfigError(f"{flag}{name} is at least {bound}, not {getattr(settings, name)}")
