"""The classifier's columns, by loops over the formulas of the design."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from nci.head import Head
from nci.model_config import NCIConfig

D, VALUES, POSITIONS, NODES, CONTENT = 6, 3, 2, 9, 6
HEADS = [("tied", 0), ("additive", 2), ("additive", 0), ("product", 2), ("product", 0)]


def make(kind: str, rank: int = 2, *, random: bool = True, **settings: Any) -> Head:
    given = {"d_content": CONTENT} | settings
    config = NCIConfig(
        d_model=D, head=kind, head_rank=rank, values=VALUES, positions=POSITIONS, nodes=NODES, heads=1, **given
    )
    head = Head(config)
    head.reset()
    if random:
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.add_(0.5 * torch.randn_like(parameter))
    return head


def numbers(tensor: torch.Tensor) -> NDArray[np.float64]:
    return tensor.detach().double().numpy()


def naive_column(head: Head, kind: str, rank: int, e: Any, token: int, a: Any) -> NDArray[np.float64]:
    """w(prefix, v), one number at a time."""
    w = np.array(e, dtype=np.float64)
    if kind == "additive":
        mix = numbers(head.mix)[token]  # (d, rank) or (d, d)
        narrow = numbers(next(head.narrow.parameters())) if rank else mix
        for i in range(D):
            for j in range(D):
                m = sum(mix[i, r] * narrow[r, j] for r in range(rank)) if rank else mix[i, j]
                w[i] += m * a[j]
    elif kind == "product":
        s = numbers(head.gate.weight)
        for i in range(D):
            for j in range(D):
                if rank:
                    assert head.left is not None
                    assert head.right is not None
                    left, right = numbers(head.left), numbers(head.right)
                    entry = sum(left[i, r] * (s[r] @ a) * right[j, r] for r in range(rank))
                else:
                    entry = s[i * D + j] @ a
                w[i] += entry * e[j]
    return w


@pytest.mark.parametrize(("kind", "rank"), HEADS)
@pytest.mark.parametrize("tokens", [[0, 1, 2], [3, 4, 5], [3, 4, 5, 6], [6]], ids=str)
def test_columns_equal_the_formula(kind: str, rank: int, tokens: list[int]) -> None:
    head = make(kind, rank)
    rows, adapter = torch.randn(len(tokens), D), torch.randn(4, D)
    columns = head.columns(rows, torch.tensor(tokens), adapter)
    assert columns.shape == (1 if kind == "tied" else 4, len(tokens), D)
    for prefix, a in enumerate(numbers(adapter)):
        for number, token in enumerate(tokens):
            wanted = naive_column(head, kind, rank, numbers(rows)[number], token, a)
            np.testing.assert_allclose(numbers(columns.expand(4, -1, -1))[prefix, number], wanted, atol=1e-5)


@pytest.mark.parametrize(("kind", "rank"), HEADS)
def test_without_adapter_every_head_is_the_tied_one(kind: str, rank: int) -> None:
    rows = torch.randn(3, D)
    assert torch.equal(make(kind, rank).columns(rows, torch.arange(3), None), rows[None])


@pytest.mark.parametrize(("kind", "rank"), HEADS[1:])
def test_adapter_changes_the_columns(kind: str, rank: int) -> None:
    columns = make(kind, rank).columns(torch.randn(3, D), torch.arange(3), torch.randn(2, D))
    assert ((columns[0] - columns[1]).abs().amax(-1) > 1e-3).all()


@pytest.mark.parametrize("content", [True, False])
@pytest.mark.parametrize(("kind", "rank"), HEADS)
def test_folded_edges_times_h_equal_projected_h_times_edges(kind: str, rank: int, content: bool) -> None:
    head = make(kind, rank, content=content, anchor="exact")
    w = head.columns(torch.randn(3, D), torch.arange(3), torch.randn(2, D)).expand(2, 3, D)
    edges = head.edges(w, torch.randn(2, 3, CONTENT))
    h = torch.randn(5, D)
    unfolded = torch.einsum("hd,ncd->hnc", head.project(h), edges)
    folded = torch.einsum("hd,ncd->hnc", h, head.fold(edges))
    torch.testing.assert_close(folded, unfolded, atol=1e-5, rtol=1e-5)
    wanted = np.zeros((5, 2, 3))
    out = numbers(head.out.weight)
    for row in range(5):
        projected = [sum(out[i, j] * numbers(h)[row, j] for j in range(D)) for i in range(D)]
        for n in range(2):
            for c in range(3):
                wanted[row, n, c] = D**-0.5 * sum(projected[i] * numbers(edges)[n, c, i] for i in range(D))
    np.testing.assert_allclose(numbers(folded), wanted, atol=1e-5)


@pytest.mark.parametrize("width", [D, 4, 9])
def test_content_vectors_are_projected_and_scaled(width: int) -> None:
    head = make("tied", content=True, d_content=width)
    assert head.content is not None
    w, means = torch.randn(2, 3, D), torch.nn.functional.normalize(torch.randn(2, 3, width), dim=-1)
    wanted = numbers(w) + np.einsum("ij,ncj->nci", numbers(head.content.weight), numbers(means)) * D**0.5
    np.testing.assert_allclose(numbers(head.edges(w, means)), wanted, atol=1e-5)


def test_without_content_edges_are_the_columns() -> None:
    w = torch.randn(2, 3, D)
    assert make("tied", content=False).edges(w, torch.randn(2, 3, CONTENT)) is w
    assert make("tied", content=True).edges(w, None) is w


@pytest.mark.parametrize(("kind", "rank"), HEADS)
@pytest.mark.parametrize("anchor", ["none", "mean", "exact"])
def test_start_values(kind: str, rank: int, anchor: str) -> None:
    head = make(kind, rank, random=False, anchor=anchor, content=True, edge_bias=True)
    assert torch.equal(head.out.weight, torch.eye(D) if anchor == "none" else torch.zeros(D, D))
    assert head.bias is not None
    assert head.bias.shape == (NODES,)
    assert not head.bias.any()
    assert head.content is not None
    assert torch.equal(head.content.weight, torch.eye(D))
    rows = torch.randn(3, D)
    columns = head.columns(rows, torch.arange(3), torch.randn(2, D))
    assert (columns - rows).abs().max() < 0.5, "w starts near e"
    assert all(torch.isfinite(p).all() for p in head.parameters())


def test_a_full_head_has_full_matrices() -> None:
    vocabulary = POSITIONS * VALUES + 2
    assert make("additive", 0).mix.shape == (vocabulary, D, D)
    assert make("additive", 2).mix.shape == (vocabulary, D, 2)
    assert make("product", 0).gate.weight.shape == (D * D, D)
    assert make("product", 2).gate.weight.shape == (2, D)
