"""Content scores on the tree: log-sum-exp and means over each node's own documents, by plain loops."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import logsumexp, softmax

from nci.anchors import TreeSum, node_means, node_sizes
from nci.trie import Trie

Vectors = Callable[..., NDArray[np.float32]]


@st.composite
def tries(draw: st.DrawFn) -> Trie:
    """Trees of one to four levels whose leaves stand at different depths."""
    ids = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), min_size=1, max_size=20))
    kept = [p for p in set(ids) if not any(p[: len(q)] == q for q in ids if q != p)]
    paths = np.full((len(kept), max(map(len, kept))), -1, dtype=np.int32)
    for row, path in zip(paths, kept, strict=True):
        row[: len(path)] = path
    return Trie.from_paths(paths)[0]


def documents_below(trie: Trie) -> list[list[int]]:
    """Documents of each node, from the ids alone."""
    ids = [trie.semantic_id(document) for document in range(trie.documents)]
    prefixes = sorted({path[:n] for path in ids for n in range(len(path) + 1)}, key=lambda p: (len(p), p))
    return [[d for d, path in enumerate(ids) if path[: len(prefix)] == prefix] for prefix in prefixes]


@given(tries(), st.sampled_from([0.5, 5.0, 80.0]), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_tree_sum_is_log_sum_exp_over_the_documents_of_each_node(trie: Trie, size: float, seed: int) -> None:
    scores = np.random.default_rng(seed).uniform(-size, size, (3, trie.documents)).astype(np.float32)
    scores[0, 0], scores[1, -1] = size, -size
    sums = TreeSum(trie)(torch.tensor(scores)).numpy()
    below = documents_below(trie)
    assert sums.shape == (3, len(below))
    for node, documents in enumerate(below):
        wanted = logsumexp(scores[:, documents].astype(np.float64), axis=1)
        np.testing.assert_allclose(sums[:, node], wanted, atol=1e-4 * max(1.0, size / 10))


@given(tries(), st.sampled_from([1.0, 80.0]), st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_gradient_of_tree_sum_is_the_softmax(trie: Trie, size: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    scores = generator.uniform(-size, size, (2, trie.documents)).astype(np.float32)
    weights = generator.standard_normal((2, trie.nodes)).astype(np.float32)
    leaf = torch.tensor(scores, requires_grad=True)
    (TreeSum(trie)(leaf) * torch.tensor(weights)).sum().backward()
    wanted = np.zeros((2, trie.documents))
    for node, documents in enumerate(documents_below(trie)):
        wanted[:, documents] += weights[:, [node]] * softmax(scores[:, documents].astype(np.float64), axis=1)
    assert leaf.grad is not None
    np.testing.assert_allclose(leaf.grad.numpy(), wanted, atol=1e-4)


def test_extreme_scores_stay_finite(trie: Trie) -> None:
    scores = torch.tensor([[80.0] * trie.documents, [-80.0] * trie.documents], requires_grad=True)
    sums = TreeSum(trie)(scores)
    wanted = np.log([len(documents) for documents in documents_below(trie)])
    np.testing.assert_allclose(sums.detach().numpy(), np.stack([80 + wanted, -80 + wanted]), atol=1e-4)
    sums.sum().backward()
    assert scores.grad is not None
    assert torch.isfinite(scores.grad).all()


def test_tree_sum_telescopes_to_a_softmax_over_all_documents(trie: Trie) -> None:
    scores = 5 * torch.randn(2, trie.documents)
    sums = TreeSum(trie)(scores).numpy().astype(np.float64)
    for document in range(trie.documents):
        total = np.zeros(2)
        for node in (n for n in trie.path_nodes[document, 1:] if n >= 0):
            brothers = list(trie.children(int(trie.parent[node])))
            total += sums[:, node] - logsumexp(sums[:, brothers], axis=1)
        np.testing.assert_allclose(total, torch.log_softmax(scores, 1)[:, document].numpy(), atol=1e-4)


@given(tries())
@settings(max_examples=40, deadline=None)
def test_means_and_sizes(trie: Trie) -> None:
    vectors = np.random.default_rng(trie.nodes).standard_normal((trie.documents, 3)).astype(np.float32)
    below = documents_below(trie)
    assert node_sizes(trie).tolist() == [len(documents) for documents in below]
    means = node_means(trie, vectors)
    assert means.dtype == np.float32
    np.testing.assert_allclose(means, [vectors[documents].mean(axis=0) for documents in below], atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_means_of_any_precision(trie: Trie, unit_vectors: Vectors, dtype: type[np.floating]) -> None:
    vectors = unit_vectors(trie.documents).astype(dtype)
    np.testing.assert_allclose(node_means(trie, vectors)[0], vectors.astype(np.float64).mean(axis=0), atol=1e-4)
