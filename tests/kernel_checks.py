"""Every Triton kernel against plain PyTorch, in Triton's interpreter; `test_kernels.py` runs this file in a process apart.

The interpreter must be chosen before Triton is first imported, which other tests may have done.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from reference import Folded, assert_same, batch_of, constrained
from torch import Tensor

import nci.search.plan
from nci.model import NCIModel
from nci.records import SemanticId
from nci.search import EdgeTable, EncodedQueries, make_plan
from nci.search import kernels as kernels_module
from nci.search.kernels import TritonOps
from nci.search.ops import SearchTree, TorchOps
from nci.trie import Trie

MakeModel = Callable[..., NCIModel]
MakeTrie = Callable[..., Trie]
Ask = Callable[..., EncodedQueries]

KERNELS, TORCH = TritonOps(), TorchOps()
# A root with three clusters and two leaves; nodes of one to five children, one below a single child.
IDS: list[SemanticId] = [
    (0, 0), (0, 1), (0, 2), (1, 0, 0), (1, 0, 1), (1, 1), (1, 2), (2,), (3, 0), (3, 1), (3, 2), (3, 3), (3, 4, 0), (4,),
]  # fmt: skip


def near(found: Tensor, wanted: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(found, wanted, atol=atol, rtol=1e-4)


@pytest.fixture
def tree(make_trie: MakeTrie) -> SearchTree:
    return make_tree(make_trie(IDS))


def make_tree(trie: Trie, width: int = 20) -> SearchTree:
    """Random edges below the nodes of a trie."""
    inner = trie.nodes - trie.documents
    table = EdgeTable(torch.randn(trie.nodes, width), torch.randn(trie.nodes), *torch.randn(2, inner, width).unbind())
    return SearchTree.on("cpu", trie, table)


def inner_nodes(tree: SearchTree) -> Tensor:
    return (tree.number >= 0).nonzero().squeeze(1)


def test_the_interpreter_is_on() -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert type(kernels_module._select).__name__ == "InterpretedFunction"


# ---- norms


@pytest.mark.parametrize("width", [1, 16, 24, 100])
@pytest.mark.parametrize("rows", [1, 5])
def test_norms(rows: int, width: int) -> None:
    x, shift, weight, bias = torch.randn(rows, width), torch.randn(width), torch.randn(width), torch.randn(width)
    before = x.clone()
    for eps in (1e-6, 0.5):
        near(KERNELS.rms_norm(x, eps), TORCH.rms_norm(x, eps))
        for given in (None, shift):
            wanted = TORCH.layer_norm(x, given, weight, bias, eps)
            near(KERNELS.layer_norm(x, given, weight, bias, eps), wanted, 1e-4)
    assert torch.equal(x, before)
    near(KERNELS.rms_norm(torch.zeros(rows, width), 1e-6), torch.zeros(rows, width))


# ---- attention


@pytest.mark.parametrize(
    ("heads", "head", "rows", "keys"), [(1, 16, 1, 1), (2, 16, 5, 7), (3, 32, 17, 20), (1, 16, 70, 33), (2, 24, 3, 5)]
)
@pytest.mark.parametrize("options", [{}, {"bias"}, {"bias", "scale"}], ids=["plain", "biased", "biased-unscaled"])
def test_attention(heads: int, head: int, rows: int, keys: int, options: set[str]) -> None:
    """Keys and values lie side by side in longer lines; a head of 24 is left to PyTorch."""
    d, batch = heads * head, 3
    q, lines = torch.randn(batch, rows, 2 * d)[..., :d], torch.randn(batch, keys, 5 * d)
    k, v = lines[..., d : 2 * d], lines[..., 3 * d : 4 * d]
    lengths = torch.tensor([keys, 1, max(1, keys // 2)])
    every: dict[str, Any] = {"bias": torch.randn(heads, rows, keys), "scale": 1.0}
    given = {name: value for name, value in every.items() if name in options}
    wanted = TORCH.attend(q, k, v, heads, lengths, **given)
    near(KERNELS.attend(q, k, v, heads, lengths, **given), wanted)
    lines[1, 1:] = 1e4  # what lies behind the length of a query is not seen
    near(KERNELS.attend(q, k, v, heads, lengths, **given), wanted)
    near(KERNELS.attend(q, k, v, heads, None, **given), TORCH.attend(q, k, v, heads, None, **given))


@pytest.mark.parametrize(("heads", "head"), [(1, 1), (2, 8), (3, 16), (5, 4), (2, 12)])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_ancestors(heads: int, head: int, steps: int) -> None:
    cache, first, rows = 2 * torch.randn(30, 3 * heads * head), 7, 6
    places = torch.randint(0, 30, (rows, steps))
    before = cache.clone()
    near(KERNELS.ancestors(cache, first, places, heads), TORCH.ancestors(cache, first, places, heads))
    assert torch.equal(cache, before)


# ---- children


@pytest.mark.parametrize("anchored", ["none", "rows", "columns"])
@pytest.mark.parametrize("dead", [False, True])
def test_child_scores(tree: SearchTree, anchored: str, dead: bool) -> None:
    """Content scores lie query by query or node by node."""
    nodes = inner_nodes(tree)[torch.randint(0, len(inner_nodes(tree)), (3, 4))]
    h, scores = torch.randn(12, 20), -torch.rand(3, 4)
    if dead:
        nodes[:, 1], scores[:, 1] = 0, -torch.inf
        nodes[2], scores[2] = 0, -torch.inf
    anchors = {"none": None, "rows": torch.randn(3, tree.trie.nodes), "columns": torch.randn(tree.trie.nodes, 3).T}
    arguments = (h, nodes, scores, tree, anchors[anchored], 5)
    (found, padded), (wanted, fanout) = KERNELS.child_scores(*arguments), TORCH.child_scores(*arguments)
    assert padded == 8
    found, wanted = found.view(3, 4, padded), wanted.view(3, 4, fanout)
    near(found[..., :fanout], wanted)
    assert (found[..., fanout:] == -torch.inf).all()
    assert not found.isnan().any()
    if not dead:
        near(found.exp().sum(-1), scores.exp(), 1e-4)


def test_child_scores_of_wide_states(make_trie: MakeTrie) -> None:
    """Wider than a block, and no multiple of it; a single child has all of the probability."""
    tree = make_tree(make_trie([*((0, n) for n in range(19)), (1, 0)]), width=300)
    nodes, h, scores = torch.tensor([[1, 2]]), torch.randn(2, 300), torch.tensor([[-1.0, -2.0]])
    found, padded = KERNELS.child_scores(h, nodes, scores, tree, None, 19)
    wanted, fanout = TORCH.child_scores(h, nodes, scores, tree, None, 19)
    near(found.view(2, padded)[:, :fanout], wanted.view(2, fanout), 1e-4)
    assert float(found.view(2, padded)[1, 0]) == pytest.approx(-2.0, abs=1e-5)


def test_too_many_children_are_left_to_pytorch(tree: SearchTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_module, "_MOST_CHILDREN", 4)
    monkeypatch.setattr(kernels_module, "_MOST_CANDIDATES", 4)
    nodes, h, scores = torch.zeros(2, 1, dtype=torch.long), torch.randn(2, 20), torch.zeros(2, 1)
    found, fanout = KERNELS.child_scores(h, nodes, scores, tree, None, 5)
    assert fanout == 5
    near(found, TORCH.child_scores(h, nodes, scores, tree, None, 5)[0])
    one, two = (ops.select(found, 3, nodes, fanout, tree, False) for ops in (KERNELS, TORCH))
    assert torch.equal(one.nodes.sort().values, two.nodes.sort().values)


def check_select(tree: SearchTree, total: Tensor, keep: int, nodes: Tensor, fanout: int, last: bool) -> None:
    """Equal children may be chosen in any order, and among those of the same score any."""
    found, wanted = (ops.select(total, keep, nodes, fanout, tree, last) for ops in (KERNELS, TORCH))
    one, two = (torch.maximum(kept.scores, kept.found_scores).sort(1).values for kept in (found, wanted))
    assert torch.equal(one, two)
    start, number = tree.child_start, tree.number
    for query in range(len(total)):
        seen = set()
        for n in range(keep):
            score, ended = float(found.scores[query, n]), float(found.found_scores[query, n])
            node, parent, leaf = (int(part[query, n]) for part in (found.nodes, found.parents, found.found))
            assert (leaf >= 0) == (ended > -np.inf)
            assert not (score > -np.inf and ended > -np.inf)
            if max(score, ended) == -np.inf:
                assert (node, leaf) == (0, -1)
                continue
            child = leaf if leaf >= 0 else node
            slot = child - int(start[nodes[query, parent]])
            assert 0 <= slot < fanout
            assert float(total[query, parent * fanout + slot]) == max(score, ended)
            assert (leaf >= 0) == (last or int(number[child]) < 0)
            assert node == (0 if leaf >= 0 else child)
            seen.add((parent, slot))
        assert len(seen) == min(keep, int((total[query] > -torch.inf).sum()))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("keep", [1, 4, 9])
@pytest.mark.parametrize("fanout", [5, 8])
@pytest.mark.parametrize("ties", [False, True])
def test_select(tree: SearchTree, fanout: int, keep: int, last: bool, ties: bool) -> None:
    inner = inner_nodes(tree)
    nodes = inner[torch.stack([torch.randperm(len(inner))[:3] for _ in range(4)])]
    total = torch.randn(4, 3, fanout).mul(3)
    if ties:
        total = total.round().add(0.0)
    count = tree.child_start[nodes + 1] - tree.child_start[nodes]
    total = total.masked_fill(torch.arange(fanout) >= count.unsqueeze(-1), -torch.inf)
    total[3, :2] = -torch.inf  # a query with less than it may keep
    check_select(tree, total.flatten(1), keep, nodes, fanout, last)


def test_select_of_scores_of_all_sizes(tree: SearchTree) -> None:
    nodes = torch.zeros(4, 1, dtype=torch.long)
    rows: Sequence[Sequence[float]] = [
        [0.0, -0.0, 1e-38, -1e-38, 5.0],
        [-1e9, -1e-9, -3.0, -3.0, -3.0],
        [-np.inf] * 5,
        [7.0, 7.0, 7.0, 7.0, 7.0],
    ]
    for keep in (1, 3, 5):
        check_select(tree, torch.tensor(rows), keep, nodes, 5, False)


@pytest.mark.parametrize("steps", [1, 3])
def test_descend(tree: SearchTree, steps: int) -> None:
    nodes = inner_nodes(tree)[torch.randint(0, len(inner_nodes(tree)), (3, 4))]
    nodes[1, 2] = 0  # a dead row stands at the root
    parents, places = torch.randint(0, 5, (3, 4)), torch.randint(0, 40, (3 * 5, steps))
    found = KERNELS.descend(nodes, parents, places, 40, tree, torch.float32)
    for one, two in zip(found, TORCH.descend(nodes, parents, places, 40, tree, torch.float32), strict=True):
        assert torch.equal(one, two)


# ---- a whole search


@pytest.mark.parametrize("merged", [0, 64])
@pytest.mark.parametrize(
    ("encoder", "ids", "beam"),
    [
        ("t5", IDS, [2, 3]),
        ("mpnet", IDS, [2, 3]),
        ("bert", [(n,) for n in range(5)], 3),
        ("bert", [(a, b, c) for a in range(3) for b in range(3) for c in range(2)], 2),
    ],
    ids=["uneven", "mpnet", "atomic", "even"],
)
def test_a_whole_search(
    make_model: MakeModel, ask: Ask, encoder: str, ids: list[SemanticId], beam: Any, merged: int
) -> None:
    model = make_model(
        ids, encoder=encoder, encoder_width=32, d_model=32, anchor="exact", edge_bias=True, moved=True, decoder_layers=2
    )
    batch = batch_of([5, 2, 3])
    queries, search = ask(model, **batch), Folded(model, ops=KERNELS)
    assert queries.anchors is not None
    anchors = queries.anchors.T.contiguous().T  # as `Content` gives them
    with patch.object(nci.search.plan, "MOST_FIRST_ROWS", merged):
        plan = make_plan(model.tables.trie, beam=beam, k=6, length_penalty=0.5, fixed=True)
    assert bool(plan.first_children) == (merged > 0 and len(ids[0]) > 1)
    found = search(batch, anchors, plan)
    for number in range(3):
        wanted, looked_at = constrained(model, queries, number, beam=beam, k=6, length_penalty=0.5)
        assert_same(search.ranked(found, number), wanted)
        assert int(found.scored[number]) == looked_at
