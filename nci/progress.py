"""Whether progress bars show: on a terminal, unless TQDM_DISABLE (or --quiet, which sets it) says no. No torch."""

from __future__ import annotations

import os


def hide_bars(wanted: bool = True) -> bool | None:
    """The `disable` of a tqdm bar; None lets tqdm look whether this is a terminal."""
    return None if wanted and os.environ.get("TQDM_DISABLE", "0") in ("", "0") else True
