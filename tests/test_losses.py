"""The two terms of the loss, by loops over the formulas of the design."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from nci.losses import consistency_loss, path_loss


def ended(lengths: list[int], positions: int) -> Tensor:
    return torch.arange(positions) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("weights", [None, [1.0, 0.5, 3.0]])
def test_path_loss_equals_the_formula(weights: list[float] | None) -> None:
    lengths = [3, 1, 2]
    log_probs = -torch.rand(3, 3)
    total, weight = 0.0, 0.0
    for row, length in enumerate(lengths):
        w = 1.0 if weights is None else weights[row]
        total -= w * sum(float(log_probs[row, position]) for position in range(length))
        weight += w
    loss = path_loss(log_probs, ended(lengths, 3), None if weights is None else torch.tensor(weights))
    assert float(loss) == pytest.approx(total / weight, abs=1e-5)


def test_path_loss_does_not_read_ended_positions() -> None:
    log_probs = torch.tensor([[-1.0, -torch.inf], [-2.0, -3.0]], requires_grad=True)
    loss = path_loss(log_probs, ended([1, 2], 2))
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == pytest.approx(3.0)
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[-0.5, 0.0], [-0.5, -0.5]]


def naive_consistency(z: NDArray[np.float64], documents: list[int], lengths: list[int], tau: float) -> float:
    """-log [exp(z1.z2 / tau) / sum over k != 1 of exp(z1.zk / tau)] of both passes of each row at each real position."""
    rows = len(documents)
    total = 0.0
    for one in range(2 * rows):
        partner = (one + rows) % (2 * rows)
        for position in range(lengths[one % rows]):
            share = 0.0
            for k in range(2 * rows):
                same = documents[k % rows] == documents[one % rows]
                over = position >= lengths[k % rows]
                if k == partner or not (same or over):
                    share += math.exp(float(z[one, position] @ z[k, position]) / tau)
            total -= math.log(math.exp(float(z[one, position] @ z[partner, position]) / tau) / share)
    return total / (2 * rows)


@given(
    st.integers(1, 5).flatmap(
        lambda rows: st.tuples(
            st.lists(st.integers(0, 2), min_size=rows, max_size=rows),
            st.lists(st.integers(1, 3), min_size=rows, max_size=rows),
        )
    ),
    st.sampled_from([0.5, 1.0, 3.0]),
    st.integers(0, 10**6),
)
@settings(max_examples=80, deadline=None)
def test_consistency_equals_the_formula(rows: tuple[list[int], list[int]], tau: float, seed: int) -> None:
    documents, of_row = rows
    length_of = dict(zip(documents, of_row, strict=True))  # one document has one id
    lengths = [length_of[d] for d in documents]
    z = torch.randn(2 * len(documents), 3, 4, generator=torch.Generator().manual_seed(seed))
    loss = consistency_loss(z, torch.tensor(documents), ended(lengths, 3), tau)
    assert float(loss) == pytest.approx(naive_consistency(z.double().numpy(), documents, lengths, tau), abs=1e-4)


def test_ended_rows_and_rows_of_the_same_document_have_no_part() -> None:
    documents, real = torch.tensor([7, 7, 3, 4]), ended([2, 2, 1, 2], 2)
    z = torch.randn(8, 2, 4)
    loss = consistency_loss(z, documents, real)
    beyond = z.clone()
    beyond[[2, 6], 1] += 100  # position 1 of the row that has ended
    torch.testing.assert_close(consistency_loss(beyond, documents, real), loss)
    other = consistency_loss(z, torch.tensor([7, 8, 3, 4]), real)
    assert float(other) > float(loss), "rows 0 and 1 are each other's negatives once their documents differ"


def test_one_document_alone_has_nothing_to_be_told_from() -> None:
    assert float(consistency_loss(torch.randn(4, 2, 3), torch.tensor([5, 5]), ended([2, 2], 2))) == pytest.approx(0.0)


def test_a_short_id_in_every_row_gives_finite_gradients() -> None:
    z = torch.randn(4, 3, 4, requires_grad=True)
    consistency_loss(z, torch.tensor([0, 1]), ended([1, 1], 3)).backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert torch.isfinite(z.grad).all()
    assert not z.grad[:, 1:].any()


@pytest.mark.parametrize("tau", [0.5, 2.0])
def test_a_step_down_the_gradient_pulls_the_passes_together(tau: float) -> None:
    rows = 4
    z = torch.nn.functional.normalize(torch.randn(2 * rows, 1, 6), dim=-1).requires_grad_()
    documents, real = torch.arange(rows), ended([1] * rows, 1)

    def closeness(x: Tensor) -> tuple[float, float]:
        similarity = x[:, 0] @ x[:, 0].T
        partners = torch.diagonal(similarity, rows)
        others = similarity.masked_fill(torch.eye(2 * rows).bool(), 0).sum() / 2 - partners.sum()
        return float(partners.mean()), float(others)

    loss = consistency_loss(z, documents, real, tau)
    loss.backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    moved = (z - 0.1 * z.grad).detach()
    assert float(consistency_loss(moved, documents, real, tau)) < float(loss.detach())
    (near, far), (near_after, far_after) = closeness(z.detach()), closeness(moved)
    assert near_after > near
    assert far_after < far


def test_positive_and_in_full_precision() -> None:
    z = torch.randn(6, 2, 4).bfloat16()
    loss = consistency_loss(z, torch.arange(3), ended([2, 1, 2], 2))
    assert loss.dtype == torch.float32
    assert float(loss) > 0
