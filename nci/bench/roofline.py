"""What the hardware can do at best, measured, and which part of it a search reached.

In: a device and a precision, or counted operations, bytes and seconds. Knows no systems.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nci.errors import ConfigError
from nci.runtime import has_bf16
from nci.search.linear import PackedInt8, Precision

CUDA_SIZES = (8192,)
CPU_SIZES = (1024, 1536, 2048)
CUDA_COPY = 2**30  # bytes; far more than any cache holds
CPU_COPY = 2**28
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Peaks:
    """The best this device did: operations (two per multiply-add) and bytes moved, per second."""

    flops: float
    bytes_per_second: float


def measure_peaks(device: str, precision: Precision) -> Peaks:
    """The fastest large matrix product on random data, and a copy (bytes read and bytes written).

    On a CPU with the threads torch has now. Zeros would draw less power and run faster than any real data.
    """
    cuda = torch.device(device).type == "cuda"
    if precision == "int8" and cuda:
        raise ConfigError("the int8 peak is measured on the CPU only: use bf16 or fp32 with a GPU")
    with torch.inference_mode():
        flops = max(
            2 * size**3 / _seconds(_product(size, device, precision), device)
            for size in (CUDA_SIZES if cuda else CPU_SIZES)
        )
        source = torch.randn((CUDA_COPY if cuda else CPU_COPY) // 4, device=device)
        target = torch.empty_like(source)
        moved = 2 * source.numel() * source.element_size()
        return Peaks(flops, moved / _seconds(lambda: target.copy_(source), device))


def fraction(flops: float, bytes_moved: float, seconds: float, peaks: Peaks) -> float:
    """Part of the roofline reached: the time the binding resource needs at its peak, over the time taken."""
    return max(flops / peaks.flops, bytes_moved / peaks.bytes_per_second) / seconds


def _product(size: int, device: str, precision: Precision) -> Callable[[], Any]:
    """A product of two square matrices, ready to run."""
    left, right = torch.randn(2, size, size, device=device).unbind()
    if precision == "int8":
        layer = PackedInt8(right, None)
        return lambda: layer(left)
    # Where a CPU has no bf16, layers are computed in float32.
    dtype = torch.float32 if device == "cpu" and not has_bf16() else _DTYPES[precision]
    a, b, out = left.to(dtype), right.to(dtype), torch.empty(size, size, dtype=dtype, device=device)
    return lambda: torch.mm(a, b, out=out)


def _seconds(work: Callable[[], Any], device: str, warmup: int = 3, calls: int = 10) -> float:
    """Mean time of a call, once warm."""
    for _ in range(warmup):
        work()
    _wait(device)
    started = time.perf_counter()
    for _ in range(calls):
        work()
    _wait(device)
    return (time.perf_counter() - started) / calls


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
