"""What this machine can do, and how loud the libraries beneath may be. Knows nothing of the index."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from transformers.utils import logging as transformers_logging


def uses_bf16(precision: Literal["auto", "fp32", "bf16"], device: str) -> bool:
    """Whether to compute in bf16: on a GPU, and on a CPU that has instructions for it, unless told otherwise."""
    if precision == "auto":
        return device.startswith("cuda") or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return precision == "bf16"


@contextmanager
def quiet() -> Iterator[None]:
    """No bars and tables from transformers while it loads or saves."""
    # transformers draws a bar and prints a table of unused weights for every load; what matters of it is checked here
    logging: Any = transformers_logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
