"""Weights -> a linear layer ready to run, in one of three precisions. Knows no network.

float32 is the reference. bf16 is for GPUs, and for CPUs that have it, where the weight is reordered once instead of at
every call. int8 is for CPUs: weights are quantised per row and packed once, inputs at every call. An index that was told to
use one of them is searched on any CPU, only slower where that has no instructions for it.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nci.runtime import has_bf16, uses_bf16

Precision = Literal["fp32", "bf16", "int8"]


class Linear(Protocol):
    """x (rows, in) -> (rows, out)."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + W x, without the bias: written into `residual` where that saves a pass."""

    def into(self, out: Tensor, x: Tensor) -> None:
        """W x, without the bias, written into `out`."""

    def gelu(self, x: Tensor) -> Tensor: ...

    def relu(self, x: Tensor) -> Tensor: ...


def make_linear(
    weight: Tensor, bias: Tensor | None, precision: Precision, device: str, *, outliers: bool = False
) -> Linear:
    """A layer from its float32 weight (out, in).

    `outliers`: among its inputs are some hundreds of times larger than most, beside which int8 would round the others to
    nothing; bf16, or float32 where a CPU has no bf16, takes its place.
    """
    if precision == "int8" and not outliers:
        return PackedInt8(weight, bias)
    if device == "cpu" and (precision == "bf16" or (precision == "int8" and uses_bf16("auto", device))):
        return PackedBf16(weight, bias) if has_bf16() else WideBf16(weight, bias)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return Plain(weight.to(device, dtype), None if bias is None else bias.to(device, dtype))


class Plain:
    """Whatever the device's own matrix product is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.transposed = weight.contiguous().T
        self.weight, self.bias = weight, bias
        # On a GPU the activation is part of the product in bf16; its tanh form differs by less than bf16 can hold.
        self.fused = weight.is_cuda and weight.dtype == torch.bfloat16
        self.zero = torch.zeros(len(weight), dtype=weight.dtype, device=weight.device) if bias is None else bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual.addmm_(x, self.transposed)

    def into(self, out: Tensor, x: Tensor) -> None:
        torch.mm(x, self.transposed, out=out)

    def gelu(self, x: Tensor) -> Tensor:
        if self.fused:
            return torch._addmm_activation(self.zero, x, self.transposed, use_gelu=True)
        return F.gelu(self(x))

    def relu(self, x: Tensor) -> Tensor:
        if self.fused:
            return torch._addmm_activation(self.zero, x, self.transposed)
        return self(x).relu_()


class PackedBf16:
    """bf16 on a CPU through oneDNN, the weight in the order its kernels want; the result in the format of the input."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16().contiguous(), None)
        self.bias = None if bias is None else bias.bfloat16()

    def __call__(self, x: Tensor, activation: str = "none", bias: bool = True) -> Tensor:
        shift, form = self.bias if bias else None, "none" if activation == "gelu" else ""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x.bfloat16(), self.packed, shift, activation, [], form)
        return out.to(x.dtype)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual.add_(self(x, bias=False))

    def into(self, out: Tensor, x: Tensor) -> None:
        out.copy_(self(x, bias=False))

    def gelu(self, x: Tensor) -> Tensor:
        return self(x, "gelu")

    def relu(self, x: Tensor) -> Tensor:
        return self(x, "relu")


class WideBf16(PackedBf16):
    """The same on a CPU without bf16: weights and inputs are rounded to it, products are float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight.bfloat16().float()
        self.bias = None if bias is None else bias.bfloat16().float()

    def __call__(self, x: Tensor, activation: str = "none", bias: bool = True) -> Tensor:
        out = F.linear(x.bfloat16().float(), self.weight, self.bias if bias else None)
        if activation != "none":
            out = F.gelu(out) if activation == "gelu" else out.relu_()
        return out.to(x.dtype)


@cache
def int8_overflows() -> bool:
    """Whether this CPU adds two products of bytes in 16 bits, which hold them only if inputs have 7 bits instead of 8."""
    product = torch.ops.quantized.linear_dynamic(torch.ones(1, 64), _packed(torch.ones(1, 64)), False)
    return float(product) < 60


def _packed(weight: Tensor) -> torch.ScriptObject:
    """A weight (out, in) with one scale per row, for `linear_dynamic`."""
    weight = weight.detach().float().cpu()
    scales = weight.abs().amax(1).clamp(min=1e-8) / 127
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantised tensors are called old, their kernels remain the fastest
        zeros = torch.zeros(len(weight), dtype=torch.long)
        quantised = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(quantised, None)
        return packed


class PackedInt8:
    """int8 on a CPU: one scale per output row, inputs quantised as they come; float32 in and out."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed, self.seven_bits = _packed(weight), int8_overflows()
        self.bias = None if bias is None else bias.detach().float().cpu()

    def __call__(self, x: Tensor) -> Tensor:
        out = self.product(x)
        return out if self.bias is None else out.add_(self.bias)

    def product(self, x: Tensor) -> Tensor:
        """W x."""
        out: Tensor = torch.ops.quantized.linear_dynamic(x, self.packed, self.seven_bits)
        return out

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual.add_(self.product(x))

    def into(self, out: Tensor, x: Tensor) -> None:
        out.copy_(self.product(x))

    def gelu(self, x: Tensor) -> Tensor:
        return F.gelu(self(x))

    def relu(self, x: Tensor) -> Tensor:
        return self(x).relu_()
