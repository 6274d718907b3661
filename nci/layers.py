"""Transformer blocks of the decoder and of the adapter: pre-norm, no biases, no positional encoding.

Positions need no encoding of their own because a token is a pair (position, value). A stack runs in two ways that give
the same numbers: `forward` over whole teacher-forced ids, and `step` over the rows of one beam level, where each row
looks up the keys and values of its ancestors by index. Knows nothing of trees, losses or queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FEW = 64  # positions, for which a smaller tile is faster


def _by_mask(x: Tensor) -> bool:
    """Whether a mask makes PyTorch take the kernel with small tiles: the other one computes 128 positions for a handful."""
    return x.is_cuda and x.shape[1] <= _FEW


def is_mixed(x: Tensor) -> bool:
    """Whether layers convert what they read, where `x` is."""
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def as_read(x: Tensor) -> Tensor:
    """The same in the number format that layers read, where else each of them would convert it."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if is_mixed(x) else x


def norm_as_read(
    norm: Callable[..., Tensor], x: Tensor, shape: Sequence[int], *weights: Tensor | None, eps: float
) -> Tensor:
    """A norm of the states `x`, in the format that layers read; sums inside it are float32 all the same."""
    if not is_mixed(x):
        return norm(x, shape, *weights, eps=eps)
    with torch.autocast(x.device.type, enabled=False):
        normed = norm(x, shape, *(None if weight is None else weight.to(x.dtype) for weight in weights), eps=eps)
    return as_read(normed)


class Norm(nn.RMSNorm):
    """RMS norm whose result is what the layers behind it read."""

    def forward(self, x: Tensor) -> Tensor:
        normed = norm_as_read(F.rms_norm, x, self.normalized_shape, self.weight, eps=self.eps or 0.0)
        # beside weights of 16 bits some layers may have float32, and give it
        return normed if is_mixed(x) or self.weight.dtype == torch.float32 else normed.to(self.weight.dtype)


class Attention(nn.Module):
    """Multi-head attention whose keys and values are made apart from its queries, so that both can be kept."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.key = nn.Linear(d_model, d_model, bias=False)
        self.value = nn.Linear(d_model, d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """(batch, n, d) -> (batch, heads, n, d / heads)."""
        return x.view(*x.shape[:-1], self.heads, -1).transpose(1, 2)

    def project(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a memory: 2 x (batch, heads, n, d / heads)."""
        return self.split(self.key(memory)), self.split(self.value(memory))

    def forward(self, x: Tensor, memory: tuple[Tensor, Tensor], mask: Tensor | None, causal: bool = False) -> Tensor:
        """All rows of `x` (batch, n, d) look at one memory; `mask` is true where a key may be seen."""
        q = self.split(self.query(x))
        if causal and _by_mask(x):
            assert mask is None
            mask, causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril(), False
        mixed = F.scaled_dot_product_attention(q, *memory, attn_mask=mask, is_causal=causal)
        return self.out(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]

    def by_ancestors(self, x: Tensor, keys: Tensor, values: Tensor, ancestors: Tensor) -> Tensor:
        """Each row of `x` (batch, rows, d) looks at its own ancestors: indices (batch, rows, a) into the caches."""
        batch, rows, steps = ancestors.shape
        index = ancestors.reshape(batch, 1, rows * steps, 1).expand(-1, self.heads, -1, keys.shape[-1])
        own_keys = keys.gather(2, index).view(batch, self.heads, rows, steps, -1)  # (batch, heads, rows, a, d / heads)
        own_values = values.gather(2, index).view_as(own_keys)
        q = self.split(self.query(x)).unsqueeze(-2)  # (batch, heads, rows, 1, d / heads)
        mixed = F.scaled_dot_product_attention(q, own_keys, own_values).squeeze(-2)
        return self.out(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Self-attention, cross-attention where there is a memory, feed-forward; each with a residual around it."""

    def __init__(self, d_model: int, heads: int, d_ff: int, dropout: float, cross: bool) -> None:
        super().__init__()
        self.self_norm = Norm(d_model, eps=1e-6)
        self.self_attention = Attention(d_model, heads)
        self.cross_norm = Norm(d_model, eps=1e-6) if cross else None
        self.cross_attention = Attention(d_model, heads) if cross else None
        self.ff_norm = Norm(d_model, eps=1e-6)
        self.ff_in = nn.Linear(d_model, d_ff, bias=False)
        self.ff_out = nn.Linear(d_ff, d_model, bias=False)
        self.dropout = nn.Dropout(dropout)

    def rest(self, x: Tensor, memory: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        """What follows self-attention; the same for whole ids and for single steps."""
        if self.cross_attention is not None and self.cross_norm is not None:
            assert memory is not None
            x = x + self.dropout(self.cross_attention(self.cross_norm(x), memory, mask))
        hidden = F.gelu(self.ff_in(self.ff_norm(x)))
        return x + self.dropout(self.ff_out(self.dropout(hidden)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, memory: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        y = self.self_norm(x)
        x = x + self.dropout(self.self_attention(y, self.self_attention.project(y), None, causal=True))
        return self.rest(x, memory, mask)


@dataclass
class StackCache:
    """What a stack remembers between beam levels: keys and values of every row so far, per layer."""

    keys: list[Tensor] = field(default_factory=list)  # per layer (batch, heads, rows so far, d / heads)
    values: list[Tensor] = field(default_factory=list)


class Stack(nn.Module):
    """`layers` blocks and a final norm over a sequence of token embeddings."""

    def __init__(self, layers: int, d_model: int, heads: int, d_ff: int, dropout: float, cross: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(d_model, heads, d_ff, dropout, cross) for _ in range(layers))
        self.norm = Norm(d_model, eps=1e-6)
        self.dropout = nn.Dropout(dropout)

    def memories(self, states: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Cross-attention keys and values of every layer, once per query."""
        return [block.cross_attention.project(states) for block in self.blocks]  # type: ignore[union-attr, operator]

    def forward(
        self, x: Tensor, memories: list[tuple[Tensor, Tensor]] | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Outputs at every position of `x` (batch, positions, d), each seeing only what comes before it."""
        x = self.dropout(as_read(x))
        for number, block in enumerate(self.blocks):
            x = block(x, memories[number] if memories else None, mask)
        return self.dropout(self.norm(x))  # type: ignore[no-any-return]

    def step(
        self,
        x: Tensor,
        ancestors: Tensor,
        cache: StackCache,
        memories: list[tuple[Tensor, Tensor]] | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Outputs for the rows of one level (batch, rows, d); appends their keys and values to `cache`.

        `ancestors` (batch, rows, level + 1) are places in the cache, the row's own place last.
        """
        for number, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            y = block.self_norm(x)
            keys, values = block.self_attention.project(y)
            if number < len(cache.keys):
                cache.keys[number] = keys = torch.cat([cache.keys[number], keys], dim=2)
                cache.values[number] = values = torch.cat([cache.values[number], values], dim=2)
            else:
                cache.keys.append(keys)
                cache.values.append(values)
            x = x + block.self_attention.by_ancestors(y, keys, values, ancestors)
            x = block.rest(x, memories[number] if memories else None, mask)
        return self.norm(x)  # type: ignore[no-any-return]
