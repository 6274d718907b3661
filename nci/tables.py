"""The trie and the document vectors as buffers beside the weights of a model. Knows no layers and no queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nci.anchors import TreeSum, node_means, node_sizes
from nci.trie import Trie

if TYPE_CHECKING:
    from nci.model_config import NCIConfig


class TreeTables(nn.Module):
    """The trie and the document vectors as buffers beside the weights; not part of the saved model."""

    def __init__(
        self,
        trie: Trie,
        config: NCIConfig,
        vectors: NDArray[np.floating] | None,
        seen: NDArray[np.bool_] | None = None,
        bias: NDArray[np.float32] | None = None,
        moves: NDArray[np.floating] | None = None,
    ) -> None:
        super().__init__()
        self.trie = trie
        self.bias: Tensor | None  # (documents,) added to the content scores
        self.put("bias", bias, torch.float32)
        self.seen: Tensor | None  # (documents,) has a real training query
        self.seen_nodes: Tensor | None  # (nodes,) has such a document below it
        self.put("seen", seen, torch.bool)
        counts = None if seen is None else np.concatenate([[0], np.cumsum(seen)])
        self.put(
            "seen_nodes",
            None if counts is None else counts[trie.last_document] > counts[trie.first_document],
            torch.bool,
        )
        self.token: Tensor  # (nodes,) token on the edge into each node
        self.child_start: Tensor
        self.path_nodes: Tensor
        self.log_sizes: Tensor
        token = (trie.depth - 1) * config.values + trie.value
        token[trie.value == config.values] = config.end_token
        token[0] = config.start_token
        self.put("token", token)
        self.put("child_start", trie.child_start)
        self.put("path_nodes", trie.path_nodes)
        self.vectors: Tensor | None
        self.moves: Tensor | None  # (documents, width) added to the vectors once candidates are chosen
        self.means: Tensor | None
        self.content: Tensor | None
        self.put("vectors", vectors if config.anchor == "exact" else None, torch.float32)
        self.put("moves", moves if config.anchor == "exact" else None, torch.float32)
        means = (
            node_means(trie, vectors) if vectors is not None and (config.content or config.anchor == "mean") else None
        )
        self.put("means", means if config.anchor == "mean" else None, torch.float32)
        self.put("log_sizes", np.log(node_sizes(trie)) if config.anchor == "mean" else None, torch.float32)
        if means is not None:
            means = means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)
        self.put("content", means if config.content else None, torch.float32)
        self.sum = TreeSum(trie) if config.anchor == "exact" else None

    def put(self, name: str, values: NDArray[Any] | None, dtype: torch.dtype = torch.long) -> None:
        tensor = None if values is None else torch.as_tensor(np.ascontiguousarray(values)).to(dtype)
        self.register_buffer(name, tensor, persistent=False)

    def children_of(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Children of each node (..., fanout), and which of them are real."""
        first, stop = self.child_start[nodes], self.child_start[nodes + 1]
        slots = torch.arange(self.trie.fanout, device=nodes.device)
        child = first.unsqueeze(-1) + slots
        real = child < stop.unsqueeze(-1)
        return torch.where(real, child, 0), real
