"""Model -> edge table: everything in the search that depends on the tree alone, computed once, after training.

Per edge: the adapter, the head, the content vectors and the weight of the decoder's last norm folded into one vector,
which search multiplies with the decoder's normed state; and a bias. Per inner node: its state behind the first
self-attention, which no query has touched yet, and what that state asks of the query. Possible where the classifier of a
node depends on its prefix alone (`adapter_start=learned`, `normalise=children`). Fold in eval mode, after the last
weight change.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nci.errors import DataError
from nci.layers import Block
from nci.model import NCIModel


@dataclass(frozen=True)
class EdgeTable:
    """One row per node for the edge into it (the root's is zero), and one row per inner node, in the order of nodes."""

    vectors: Tensor  # (nodes, d)
    bias: Tensor  # (nodes,)
    states: Tensor  # (inner nodes, d) x behind the decoder's first self-attention
    asks: Tensor  # (inner nodes, d) queries of the first cross-attention

    def to(self, device: str | torch.device, dtype: torch.dtype | None = None) -> EdgeTable:
        """The table elsewhere; the bias keeps its precision."""
        moved = {f.name: getattr(self, f.name).to(device=device, dtype=dtype) for f in fields(self) if f.name != "bias"}
        return EdgeTable(bias=self.bias.to(device), **moved)

    def without_edges(self) -> EdgeTable:
        """A table whose classifier says nothing: content scores alone."""
        return EdgeTable(torch.zeros_like(self.vectors), torch.zeros_like(self.bias), self.states, self.asks)

    def save(self, path: Path) -> None:
        """Write it as bf16, half the bytes for no measured loss; the bias as float32."""
        table = self.to("cpu", torch.bfloat16)
        save_file({f.name: getattr(table, f.name).contiguous() for f in fields(table)}, path)

    @classmethod
    def load(cls, path: Path, *, nodes: int, inner: int, d_model: int) -> EdgeTable:
        """Map a table into memory, unread, and refuse one that does not belong to the tree or the model."""
        tensors = load_file(path)
        table = cls(**{f.name: tensors.get(f.name, torch.empty(0)) for f in fields(cls)})
        wanted = {"vectors": (nodes, d_model), "bias": (nodes,), "states": (inner, d_model), "asks": (inner, d_model)}
        for name, shape in wanted.items():
            found = tuple(getattr(table, name).shape)
            if found != shape:
                raise DataError(
                    f"{path.name} does not fit the tree: {name} is {found}, expected {shape}; build it again"
                )
        return table


@torch.no_grad()
def fold(model: NCIModel, *, chunk: int = 1024) -> EdgeTable:
    """The edge table of a bound model, in float32 on the model's device."""
    assert model.config.foldable and not model.training, "fold a foldable model, in eval mode"
    tables, trie, device = model.tables, model.tables.trie, model.device
    d = model.config.d_model
    inner = torch.as_tensor(np.diff(trie.child_start) > 0, device=device)
    number = inner.cumsum(0) - 1  # (nodes,) place among the inner nodes
    vectors = torch.zeros(trie.nodes, d, device=device)
    states, asks = (torch.zeros(int(inner.sum()), d, device=device) for _ in range(2))
    parent = torch.as_tensor(trie.parent, device=device).long()
    for level in range(trie.positions):
        start, stop = trie.level_start[level : level + 2]
        nodes = torch.arange(start, stop, device=device)[inner[start:stop]]
        for part in torch.split(nodes, chunk):
            path = [part]
            for _ in range(level):
                path.append(parent[path[-1]])
            tokens = tables.token[torch.stack(path[::-1], dim=1)]
            adapted = model.adapter_states(tokens)
            edges, child, real = model.child_edges(part, adapted[:, -1] if adapted is not None else None, level)
            vectors[child[real]] = model.head.fold(edges[real]) * model.decoder.norm.weight
            states[number[part]], asks[number[part]] = _before_the_query(model, tokens)
    bias = torch.zeros(trie.nodes, device=device) if model.head.bias is None else model.head.bias.detach().clone()
    return EdgeTable(vectors, bias, states, asks)


def _before_the_query(model: NCIModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The part of the first decoder layer that reads the prefix alone: (prefixes, d) twice."""
    block = model.decoder.blocks[0]
    assert isinstance(block, Block) and block.cross_norm is not None and block.cross_attention is not None
    x = model.embedding(tokens)
    y = block.self_norm(x)
    x = x + block.self_attention(y, block.self_attention.project(y), None, causal=True)
    last = x[:, -1]
    return last, block.cross_attention.query(block.cross_norm(last))
