"""The classifier over the children of a node: prefix-aware weights, content vectors, biases.

    logit_c = d^-1/2 (O h_i) . (w(prefix, v) + P n_c) + b_c + A_c(q)

In: the decoder's state h_i and the adapter's state a_i of a prefix. Out: the vectors and biases of the columns. The rows
e(i, v) come from the embedding table that is also the decoder's input. Knows columns and edges, not how they form a tree.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


class Head(nn.Module):
    """Everything in the logit but the anchor; `config` is the model's NCIConfig."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        d, rank, vocabulary = config.d_model, config.head_rank, config.vocabulary
        self.kind: str = config.head
        self.scale = d**-0.5
        self.zero_start = config.anchor != "none"
        self.out = nn.Linear(d, d, bias=False)  # O
        if self.kind == "additive":
            self.mix = nn.Parameter(torch.empty(vocabulary, d, rank or d))  # U_v, or M_v itself
            self.narrow = nn.Linear(d, rank, bias=False) if rank else nn.Identity()  # V^T
        elif self.kind == "product":
            self.gate = nn.Linear(d, rank or d * d, bias=False)  # S, or the whole matrix
            self.left = nn.Parameter(torch.empty(d, rank)) if rank else None  # U
            self.right = nn.Parameter(torch.empty(d, rank)) if rank else None  # V
        self.content = nn.Linear(config.d_content, d, bias=False) if config.content else None  # P
        self.bias = nn.Parameter(torch.empty(config.nodes)) if config.edge_bias else None  # b

    @torch.no_grad()
    def reset(self) -> None:
        """Start values: O is zero where an anchor speaks first, the identity otherwise; w starts near e."""
        d = self.out.in_features
        nn.init.zeros_(self.out.weight) if self.zero_start else nn.init.eye_(self.out.weight)
        if self.kind == "additive":
            nn.init.normal_(self.mix, std=0.02)
            if isinstance(self.narrow, nn.Linear):
                nn.init.normal_(self.narrow.weight, std=d**-0.5)
        elif self.kind == "product":
            nn.init.normal_(self.gate.weight, std=d**-0.5 if self.left is not None else 0.02 / d)
            if self.left is not None and self.right is not None:
                nn.init.normal_(self.left, std=0.02)
                nn.init.normal_(self.right, std=d**-0.5)
        if self.content is not None:
            wide = self.content.in_features != self.content.out_features
            nn.init.orthogonal_(self.content.weight) if wide else nn.init.eye_(self.content.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def columns(self, rows: Tensor, tokens: Tensor, adapter: Tensor | None) -> Tensor:
        """w(prefix, v) for some tokens: rows e (columns, d), adapter states (prefixes, d) -> (prefixes or 1, columns, d)."""
        if adapter is None or self.kind == "tied":
            return rows.unsqueeze(0)
        if self.kind == "additive":
            added: Tensor = torch.einsum("ur,cdr->ucd", self.narrow(adapter), self.mix[tokens])
            return rows + added
        if self.left is None or self.right is None:
            matrices = self.gate(adapter).unflatten(-1, (rows.shape[-1], -1))  # (prefixes, d, d)
            return rows + torch.einsum("uij,cj->uci", matrices, rows)
        gated: Tensor = self.gate(adapter).unsqueeze(1) * (rows @ self.right)  # (prefixes, columns, rank)
        return rows + gated @ self.left.T

    def edges(self, w: Tensor, means: Tensor | None) -> Tensor:
        """w + P n_c of child edges; `means` are unit vectors n_c, scaled so that both parts have the same size."""
        if self.content is None or means is None:
            return w
        return w + self.content(means) * math.sqrt(w.shape[-1])  # type: ignore[no-any-return]

    def project(self, h: Tensor) -> Tensor:
        """d^-1/2 O h: what the columns are multiplied with."""
        return self.out(h) * self.scale  # type: ignore[no-any-return]

    def fold(self, edges: Tensor) -> Tensor:
        """d^-1/2 O^T (w + P n_c): one vector per edge, to be multiplied with h itself."""
        return edges @ self.out.weight * self.scale  # type: ignore[no-any-return]
