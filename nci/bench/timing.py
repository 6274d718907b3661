"""A search function and texts in, latency and throughput out. Knows neither systems nor trees."""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

Search = Callable[[list[str]], Any]


@dataclass(frozen=True)
class Timing:
    """Times of the measured calls; warm-up calls are in none of these."""

    p50_ms: float
    p99_ms: float
    qps: float
    calls: int


def measure(
    search: Search, texts: Sequence[str], *, batch: int, seconds: float = 2.0, warmup: int = 3, at_least: int = 5
) -> Timing:
    """Time calls on successive batches of texts, each from its start until the results are back.

    Args:
        search: Must be finished when it returns.
        texts: Cut into batches in their order; after the last comes the first again.
        batch: Texts per call.
        seconds: No new call after so long, and none once every text was asked.
        warmup: Calls before the clock starts; fewer, but one, where they alone take longer than `seconds`.
        at_least: Calls to measure in any case.
    """
    place = 0

    def call() -> float:
        nonlocal place
        asked = [texts[(place + i) % len(texts)] for i in range(batch)]
        place += batch
        started = time.perf_counter()
        search(asked)
        return time.perf_counter() - started

    spent = 0.0
    for _ in range(warmup):
        spent += call()
        if spent > seconds:
            break
    place = 0
    times: list[float] = []
    total = 0.0
    while len(times) < at_least or (total < seconds and place < len(texts)):
        times.append(call())
        total += times[-1]
    p50, p99 = np.percentile(times, [50, 99]) * 1e3
    return Timing(float(p50), float(p99), len(times) * batch / total, len(times))


def best_batch(
    search: Search,
    texts: Sequence[str],
    batches: Sequence[int],
    *,
    seconds: float = 2.0,
    warmup: int = 3,
    at_least: int = 5,
) -> dict[int, Timing]:
    """Timings by batch size, until throughput has fallen twice in a row or the GPU's memory is full."""
    timings: dict[int, Timing] = {}
    last, falls = 0.0, 0
    for batch in batches:
        try:
            timing = measure(search, texts, batch=batch, seconds=seconds, warmup=warmup, at_least=at_least)
        except torch.OutOfMemoryError:
            full = True
        else:
            full = False
        if full:
            # Outside the handler: the error holds the frames, and with them the tensors that filled the memory.
            gc.collect()
            torch.cuda.empty_cache()
            break
        timings[batch] = timing
        falls = falls + 1 if timing.qps < last else 0
        last = timing.qps
        if falls == 2:
            break
    return timings


def device_name(device: str | None = None) -> str:
    """The GPU's name, or the CPU's with the cores in use; without an argument the GPU where there is one."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if torch.device(device).type == "cuda":
        return str(torch.cuda.get_device_name(device))
    cores = torch.get_num_threads()
    return f"{_cpu_model()}, {cores} {'core' if cores == 1 else 'cores'}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
