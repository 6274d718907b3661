"""Hugging Face's T5 made to train faster: the same weights by the same names, and the same numbers but for rounding.

Its norms are six kernels each and its feed-forward layers take bf16 back to float32 before they need it as bf16 again: half
of the time of a training step at base width. Knows nothing of what the network is for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.t5.modeling_t5 import T5DenseActDense, T5DenseGatedActDense, T5LayerNorm

from nci.layers import Norm


def make_lean(encoder: nn.Module) -> None:
    """Replace norms and feed-forward layers of a T5, in place; anything else stays as it is."""
    for module in list(encoder.modules()):
        if type(module) in _LEAN:
            module.__class__ = _LEAN[type(module)]
        for name, child in module.named_children():
            if type(child) is T5LayerNorm:
                setattr(module, name, _norm(child))


def _norm(plain: Any) -> Norm:
    norm = Norm(len(plain.weight), eps=plain.variance_epsilon)
    norm.weight = plain.weight
    return norm


class _FeedForward(T5DenseActDense):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return _out(self.wo, self.dropout(self.act(self.wi(x))))


class _GatedFeedForward(T5DenseGatedActDense):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return _out(self.wo, self.dropout(self.act(self.wi_0(x)) * self.wi_1(x)))


def _out(layer: nn.Linear, x: Tensor) -> Tensor:
    # weights may be kept in float32 where the others are not
    mixed = torch.is_autocast_enabled(x.device.type)
    return layer(x if mixed else x.to(layer.weight.dtype))  # type: ignore[no-any-return]


_LEAN: dict[type[nn.Module], type[nn.Module]] = {
    T5DenseActDense: _FeedForward,
    T5DenseGatedActDense: _GatedFeedForward,
}
