"""The two terms of the training loss, as formulas over tensors; knows no model and no tree."""

from __future__ import annotations

import torch
from torch import Tensor


def path_loss(log_probs: Tensor, real: Tensor, weights: Tensor | None = None) -> Tensor:
    """Mean over rows of -log p(d | q) = -sum over positions of log p(r_i | q, prefix); `real` marks positions in use."""
    per_row = -(log_probs.masked_fill(~real, 0.0)).sum(dim=1)  # (rows,)
    if weights is None:
        return per_row.mean()
    return (per_row * weights).sum() / weights.sum()


def consistency_loss(z: Tensor, documents: Tensor, real: Tensor, tau: float = 1.0) -> Tensor:
    """L_reg of two passes over the same queries, summed over real positions and averaged over rows.

    -log [ exp(z1.z2 / tau) / sum over k != 1 of exp(z1.zk / tau) ], for both passes in turn. Rows whose id has ended
    and rows of the same document (the partner apart) are left out of the sum.

    Args:
        z: (2 rows, positions, d), the second half is the second pass over the rows of the first.
        documents: (rows,) the target of each row.
        real: (rows, positions), true where the id has a digit.
    """
    rows = len(documents)
    twice, in_use = documents.repeat(2), real.repeat(2, 1)
    index = torch.arange(2 * rows, device=z.device)
    partner = (index + rows) % (2 * rows)
    excluded = twice[:, None] == twice[None, :]
    with torch.autocast(z.device.type, enabled=False):  # it would take the product back to bf16
        similarity = torch.einsum("apd,bpd->pab", z.float(), z.float()) / tau  # (positions, 2 rows, 2 rows)
    hidden = excluded[None] | ~in_use.T[:, None, :]
    positive = similarity[:, index, partner]  # (positions, 2 rows)
    # A row that has ended keeps its partner in the sum: its own loss is masked below, and no row is all -inf.
    hidden = hidden & (index[None, None, :] != partner[None, :, None])
    loss = torch.logsumexp(similarity.masked_fill(hidden, -torch.inf), dim=2) - positive
    return (loss * in_use.T).sum() / (2 * rows)
