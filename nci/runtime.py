"""What this machine can do, and how loud the libraries beneath may be. Knows nothing of the index."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock, local
from typing import Any, Literal, TypeVar

import torch
from transformers.utils import logging as transformers_logging

from nci.errors import ConfigError

Job = TypeVar("Job")
Result = TypeVar("Result")


def check_device(device: str | None) -> str:
    """The device to work on, a GPU where there is one and nothing was said; refuses one that is not there.

    cuDNN's attention is turned off with a GPU: it plans anew for every shape of a batch, 20 ms each time where the other
    kernels take 0.1 ms, and batches of texts have hundreds of shapes.
    """
    if device in (None, "cuda") and torch.cuda.is_available():
        device = f"cuda:{os.environ['LOCAL_RANK']}" if "LOCAL_RANK" in os.environ else "cuda"
    device = device or "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ConfigError(f"--device is cpu, cuda or cuda:N, not {device!r}") from error
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"--device is cpu, cuda or cuda:N, not {device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {device}: this machine or this build of PyTorch has no GPU; use --device cpu")
    if kind == "cuda" and torch.device(device).index is not None:
        torch.cuda.set_device(device)  # the Trainer works on the current one
    if kind == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def has_bf16() -> bool:
    """Whether this CPU has instructions for bf16."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def uses_bf16(precision: Literal["auto", "fp32", "bf16"], device: str) -> bool:
    """Whether to compute in bf16: on a GPU, and on a CPU that has instructions for it, unless told otherwise."""
    if precision == "auto":
        return device.startswith("cuda") or has_bf16()
    return precision == "bf16"


def one_thread_each(work: Callable[[Job], Result], jobs: Sequence[Job]) -> list[Result]:
    """Results of some jobs on the CPU, by as many workers as torch has threads, each with one thread of its own.

    Small products gain nothing from a second thread, and threads that wait for each other collapse on busy cores.
    """
    if getattr(_LOCAL, "alone", False):  # a worker already
        return [work(job) for job in jobs]
    threads = _crowd.enter()

    def alone(job: Job) -> Result:
        torch.set_num_threads(1)  # holds for the thread that calls it, and for those made later
        _LOCAL.alone = True
        try:
            return work(job)
        finally:
            _LOCAL.alone = False

    try:
        if len(jobs) < 2 or threads < 2:
            return [alone(job) for job in jobs]
        with ThreadPoolExecutor(min(threads, len(jobs))) as pool:
            return list(pool.map(alone, jobs))
    finally:
        torch.set_num_threads(threads)
        _crowd.leave()


class _Crowd:
    """How many threads torch had before the first of several callers went in."""

    def __init__(self) -> None:
        self.lock, self.inside, self.threads = Lock(), 0, 1

    def enter(self) -> int:
        with self.lock:
            if not self.inside:
                self.threads = torch.get_num_threads()
            self.inside += 1
            return self.threads

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1


_crowd, _LOCAL = _Crowd(), local()


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
