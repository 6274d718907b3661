"""Published data sets -> BEIR folders: `prepare("nq320k", SRC, OUT)`, or one of the functions beneath.

In: the files as they are downloaded. Out: corpus.jsonl, queries.jsonl, qrels/train.tsv, qrels/test.tsv and report.json,
there only when all of them are whole. Downloads nothing and knows nothing of models.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from nci.errors import ConfigError
from nci.prepare.nq import prepare_nq320k
from nci.prepare.public import PUBLIC, prepare_public
from nci.prepare.report import Report
from nci.prepare.triviaqa import prepare_triviaqa

__all__ = ["KINDS", "Report", "prepare", "prepare_nq320k", "prepare_public", "prepare_triviaqa"]


class Preparation(Protocol):
    def __call__(self, src: Path, out: Path, *, on_error: Literal["fail", "skip"], progress: bool) -> Report: ...


_PREPARATIONS: dict[str, Preparation] = {
    "nq320k": prepare_nq320k,
    "triviaqa": prepare_triviaqa,
    **{kind: partial(prepare_public, kind) for kind in PUBLIC},
}
KINDS = tuple(_PREPARATIONS)


def prepare(
    kind: str,
    src: Path,
    out: Path,
    *,
    max_chars: int | None = None,
    on_error: Literal["fail", "skip"] = "fail",
    progress: bool = True,
) -> Report:
    """Make a BEIR folder of a published data set; a run that was stopped goes on where it was.

    Args:
        kind: One of KINDS.
        src: The folder with the downloaded files.
        out: The BEIR folder to make; what is there already must be empty or the result of the same files.
        max_chars: Where pages of triviaqa are cut; none means where the paper cuts them.
        on_error: Stop at the first bad record, or skip it and list it in OUT/rejects.jsonl.
        progress: Show a bar on a terminal.
    """
    if kind not in _PREPARATIONS:
        raise ConfigError(f"unknown data set {kind!r}; there are: {', '.join(KINDS)}")
    if max_chars is not None and kind != "triviaqa":
        raise ConfigError(f"--max-chars cuts the pages of triviaqa; those of {kind} are taken as they are")
    if max_chars is not None:
        return prepare_triviaqa(src, out, max_chars=max_chars, on_error=on_error, progress=progress)
    return _PREPARATIONS[kind](src, out, on_error=on_error, progress=progress)
