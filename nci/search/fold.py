"""Model -> edge table: the adapter, the head and the content vectors folded into one vector per edge.

Possible where the classifier of a node depends on its prefix alone (`adapter_start=learned`, `normalise=children`).
Fold in eval mode, after the last weight change; search then multiplies these rows with the decoder's state itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nci.errors import DataError
from nci.model import NCIModel


@dataclass(frozen=True)
class EdgeTable:
    """One row per node, for the edge into it; the root's row is zero."""

    vectors: Tensor  # (nodes, d)
    bias: Tensor  # (nodes,)

    def save(self, path: Path) -> None:
        save_file({"vectors": self.vectors.cpu().contiguous(), "bias": self.bias.cpu().contiguous()}, path)

    @classmethod
    def load(cls, path: Path, *, nodes: int, d_model: int) -> EdgeTable:
        """Read a table and refuse one that does not belong to the tree or the model."""
        tensors = load_file(path)
        table = cls(tensors.get("vectors", torch.empty(0)), tensors.get("bias", torch.empty(0)))
        if table.vectors.shape != (nodes, d_model) or table.bias.shape != (nodes,):
            raise DataError(
                f"{path.name} does not fit the tree: expected {nodes} x {d_model}, found {tuple(table.vectors.shape)}"
            )
        return table


@torch.no_grad()
def fold(model: NCIModel, *, chunk: int = 1024) -> EdgeTable:
    """The edge table of a bound model."""
    assert model.config.foldable and not model.training, "fold a foldable model, in eval mode"
    tables, trie = model.tables, model.tables.trie
    vectors = torch.zeros(trie.nodes, model.config.d_model, device=model.device)
    parent = torch.as_tensor(trie.parent, device=model.device).long()
    inner = tables.child_start[1:] > tables.child_start[:-1]
    for level in range(trie.positions):
        start, stop = trie.level_start[level : level + 2]
        nodes = torch.arange(start, stop, device=model.device)[inner[start:stop]]
        for part in torch.split(nodes, chunk):
            path = [part]
            for _ in range(level):
                path.append(parent[path[-1]])
            states = model.adapter_states(tables.token[torch.stack(path[::-1], dim=1)])
            adapter = states[:, -1] if states is not None else None
            edges, child, real = model.child_edges(part, adapter, level)
            vectors[child[real]] = model.head.fold(edges[real]).to(vectors.dtype)
    bias = model.head.bias
    return EdgeTable(vectors, torch.zeros(trie.nodes, device=model.device) if bias is None else bias.detach().clone())
