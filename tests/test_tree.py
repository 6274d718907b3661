"""The tree: equals a literal Algorithm 1, is valid whatever the vectors hold, and comes back from disk as it was."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from nci.config import TreeConfig
from nci.errors import ConfigError, DataError, IndexCorruptError
from nci.kmeans import Floats, kmeans
from nci.records import SemanticId
from nci.tree import Tree, build_tree, node_seed, query_vectors

QUICK: dict[str, Any] = {"backend": "faiss"}


def normal(documents: int, width: int = 6, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((documents, width), dtype=np.float32)


def ids(tree: Tree) -> list[SemanticId]:
    return [tree.semantic_id(i) for i in range(len(tree.paths))]


def check(tree: Tree, config: TreeConfig) -> None:
    """Everything the rest of the library relies on, by plain sets and dicts."""
    paths = ids(tree)
    assert len(set(paths)) == len(paths)
    prefixes = {path[:i] for path in paths for i in range(len(path))}
    assert prefixes.isdisjoint(paths)
    assert all(0 <= digit < tree.values for path in paths for digit in path)
    assert tree.values == max(config.k, config.c)
    assert min(map(len, paths)) >= 2
    assert max(map(len, paths)) == tree.paths.shape[1] <= config.max_depth
    children: dict[SemanticId, set[SemanticId]] = {}
    for path in [*paths, *prefixes - {()}]:
        children.setdefault(path[:-1], set()).add(path)
    for prefix, below in children.items():
        leaves = below & set(paths)
        assert leaves in (set(), below), "a node has leaves or clusters below it, never both"
        assert len(below) <= (config.c if leaves else config.k)
        assert sorted(child[-1] for child in below) == list(range(len(below))), prefix
        if leaves:  # within a leaf cluster, documents are numbered in their own order
            assert [path for path in paths if path in leaves] == sorted(leaves)
    named = [tuple(row[row >= 0].tolist()) for row in tree.centroid_prefixes]
    assert len(named) == len(set(named)) == len(tree.centroids)
    assert set(named) == prefixes - {()}


def literal(vectors: Floats, config: TreeConfig, members: np.ndarray, prefix: SemanticId = ()) -> dict[int, SemanticId]:
    """Algorithm 1 as the paper prints it: recursive, one cluster after the other."""
    labels, _ = kmeans(
        vectors[members],
        config.k,
        backend=config.backend,
        iterations=config.iterations,
        points_per_centroid=config.points_per_centroid,
        seed=node_seed(config.seed, prefix),
    )
    result: dict[int, SemanticId] = {}
    for i in range(config.k):
        cluster = members[labels == i]
        if len(cluster) > config.c:
            result |= literal(vectors, config, cluster, (*prefix, i))
        else:
            result |= {int(document): (*prefix, i, rank) for rank, document in enumerate(cluster)}
    return result


@pytest.mark.parametrize("backend", ["faiss", "sklearn", "torch"])
@pytest.mark.parametrize(("documents", "k", "c"), [(400, 5, 4), (300, 3, 10), (9, 30, 30), (250, 30, 30)])
def test_equals_the_literal_algorithm(backend: Any, documents: int, k: int, c: int) -> None:
    vectors = normal(documents, seed=documents)
    config = TreeConfig(k=k, c=c, backend=backend, seed=11)
    tree = build_tree(vectors, config)
    expected = literal(vectors, config, np.arange(documents))
    assert ids(tree) == [expected[i] for i in range(documents)]
    check(tree, config)


@pytest.mark.slow
@settings(deadline=None, max_examples=80)
@given(
    documents=st.integers(1, 200),
    different=st.integers(1, 200),
    k=st.integers(2, 8),
    c=st.integers(1, 8),
    zeros=st.booleans(),
    backend=st.sampled_from(["faiss", "torch"]),
    seed=st.integers(0, 1000),
)
def test_any_vectors_give_a_valid_tree(
    documents: int, different: int, k: int, c: int, zeros: bool, backend: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    vectors = normal(different, 3, seed)[rng.integers(different, size=documents)]
    if zeros:
        vectors[rng.random(documents) < 0.7] = 0
    config = TreeConfig(k=k, c=c, backend=backend, seed=seed)
    tree = build_tree(vectors, config)
    check(tree, config)
    for prefix, centroid in zip(tree.centroid_prefixes, tree.centroids, strict=True):
        depth = int((prefix >= 0).sum())
        inside = (tree.paths[:, :depth] == prefix[:depth]).all(axis=1)
        np.testing.assert_allclose(centroid, vectors[inside].mean(axis=0), rtol=1e-4, atol=1e-5)


def test_one_document() -> None:
    tree = build_tree(normal(1), TreeConfig(**QUICK))
    assert ids(tree) == [(0, 0)]
    np.testing.assert_array_equal(tree.centroids, normal(1))


def test_a_singleton_cluster_gets_digit_zero() -> None:
    vectors = np.array([[0, 0], [0, 0.1], [90, 90]], dtype=np.float32)
    paths = ids(build_tree(vectors, TreeConfig(k=2, c=2, **QUICK)))
    assert paths[2][1:] == (0,)
    assert [path[1:] for path in paths[:2]] == [(0,), (1,)]
    assert paths[0][0] == paths[1][0] != paths[2][0]


@pytest.mark.parametrize("ids_kind", ["semantic", "random", "atomic"])
def test_no_documents_are_refused(ids_kind: Any) -> None:
    with pytest.raises(DataError, match="one vector per document"):
        build_tree(np.empty((0, 4), dtype=np.float32), TreeConfig(ids=ids_kind))


def test_a_bad_vector_is_named() -> None:
    vectors = normal(50)
    vectors[17, 2] = np.nan
    with pytest.raises(DataError, match="vector 17 "):
        build_tree(vectors, TreeConfig(k=3, c=3))


@pytest.mark.parametrize("backend", ["faiss", "sklearn", "torch"])
def test_same_seed_same_tree_other_seed_other_tree(backend: Any) -> None:
    config = TreeConfig(k=4, c=5, backend=backend, seed=1)
    first, again = (build_tree(normal(200), config) for _ in range(2))
    other = build_tree(normal(200), dataclasses.replace(config, seed=2))
    for name in ("paths", "centroid_prefixes", "centroids"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
    assert ids(first) != ids(other)


def test_node_seeds_differ_and_fit_every_library() -> None:
    prefixes = [(), (0,), (0, 0), (0, 0, 0), (1,), (1, 0), (0, 1)]
    seeds = [node_seed(seed, prefix) for seed in (-3, 0, 1, 2**40 + 5) for prefix in prefixes]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert node_seed(7, (3, 1)) == node_seed(7, (3, 1))


def test_thousands_of_equal_documents_end_shallow_and_soon() -> None:
    started = time.perf_counter()
    for vectors in (np.ones((5000, 64), dtype=np.float32), np.zeros((5000, 64), dtype=np.float32)):
        config = TreeConfig(**QUICK)
        tree = build_tree(vectors, config)
        check(tree, config)
        assert tree.paths.shape[1] == 3
        np.testing.assert_allclose(tree.centroids, vectors[: len(tree.centroids)])
    assert time.perf_counter() - started < 10


def test_equal_documents_beside_others_are_cut_by_order() -> None:
    vectors = np.concatenate([normal(100, 4), np.full((1000, 4), 30, np.float32)])
    config = TreeConfig(k=10, c=10, **QUICK)
    tree = build_tree(vectors, config)
    check(tree, config)
    equal = ids(tree)[100:]
    assert len({path[0] for path in equal}) == 1
    assert equal == sorted(equal)
    assert max(map(len, equal)) <= 5


@pytest.mark.parametrize("max_depth", [6, 7, 9, 12])
def test_no_path_is_longer_than_max_depth(max_depth: int) -> None:
    # Two means of powers of two cut off the largest each time: 32 documents would make a path of 32 digits.
    vectors = 2.0 ** np.arange(32, dtype=np.float32)[:, None]
    config = TreeConfig(k=2, c=1, max_depth=max_depth, **QUICK)
    tree = build_tree(vectors, config)
    check(tree, config)
    assert tree.paths.shape[1] == max_depth
    deep = build_tree(vectors, dataclasses.replace(config, max_depth=40))
    assert deep.paths.shape[1] > 12


def test_a_max_depth_that_cannot_hold_the_corpus_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_depth 5 .* 33 documents .* at least 7"):
        build_tree(normal(33), TreeConfig(k=2, c=1, max_depth=5, **QUICK))


def test_random_ids_permute_the_same_paths() -> None:
    config = TreeConfig(k=4, c=5, **QUICK)
    vectors = normal(150)
    semantic, random = build_tree(vectors, config), build_tree(vectors, dataclasses.replace(config, ids="random"))
    other = build_tree(vectors, dataclasses.replace(config, ids="random", seed=9))
    assert sorted(ids(random)) == sorted(ids(semantic))
    assert ids(random) != ids(semantic)
    assert ids(random) == ids(build_tree(vectors, dataclasses.replace(config, ids="random")))
    assert ids(random) != ids(other)
    assert random.values == semantic.values
    assert random.centroids.shape == (0, vectors.shape[1])
    assert random.centroid_prefixes.shape == (0, random.paths.shape[1])


def test_atomic_ids_are_the_documents_numbers() -> None:
    tree = build_tree(np.full((40, 3), np.nan, dtype=np.float32), TreeConfig(ids="atomic"))
    assert ids(tree) == [(i,) for i in range(40)]
    assert tree.values == 40
    assert tree.centroids.shape == (0, 3)
    assert tree.centroid_prefixes.shape == (0, 1)


def test_half_precision_memory_map_gives_the_tree_of_its_numbers(tmp_path: Path) -> None:
    config = TreeConfig(k=4, c=5, **QUICK)
    half = normal(120).astype(np.float16)
    np.save(tmp_path / "vectors.npy", half)
    mapped = np.load(tmp_path / "vectors.npy", mmap_mode="r")
    assert ids(build_tree(mapped, config)) == ids(build_tree(half.astype(np.float32), config))


@pytest.mark.parametrize("ids_kind", ["semantic", "random", "atomic"])
def test_save_and_load(ids_kind: Any, tmp_path: Path) -> None:
    tree = build_tree(normal(100), TreeConfig(k=4, c=5, ids=ids_kind, **QUICK))
    tree.save(tmp_path / "tree.safetensors")
    loaded = Tree.load(tmp_path / "tree.safetensors")
    assert loaded.values == tree.values
    for name in ("paths", "centroid_prefixes", "centroids"):
        before, after = getattr(tree, name), getattr(loaded, name)
        assert before.dtype == after.dtype
        np.testing.assert_array_equal(before, after)


def test_arrays_that_are_not_contiguous_survive_saving(tmp_path: Path) -> None:
    tree = build_tree(normal(60), TreeConfig(k=4, c=5, **QUICK))
    strided = dataclasses.replace(tree, paths=np.asfortranarray(tree.paths), centroids=tree.centroids[:, ::2])
    strided.save(tmp_path / "tree.safetensors")
    loaded = Tree.load(tmp_path / "tree.safetensors")
    np.testing.assert_array_equal(loaded.paths, tree.paths)
    np.testing.assert_array_equal(loaded.centroids, tree.centroids[:, ::2])


def test_a_file_that_is_no_tree_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tree.safetensors"
    with pytest.raises(IndexCorruptError, match="not a tree"):
        Tree.load(path)
    path.write_bytes(b"not safetensors at all")
    with pytest.raises(IndexCorruptError, match="not a tree"):
        Tree.load(path)
    tree = build_tree(normal(60), TreeConfig(k=4, c=5, **QUICK))
    tree.save(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(IndexCorruptError, match="not a tree"):
        Tree.load(path)
    safetensors.numpy.save_file({"paths": tree.paths}, path)
    with pytest.raises(IndexCorruptError, match="not a tree"):
        Tree.load(path)
    arrays = {
        "paths": tree.paths[:, 0].copy(),
        "centroid_prefixes": tree.centroid_prefixes,
        "centroids": tree.centroids,
    }
    safetensors.numpy.save_file(arrays, path, metadata={"values": "5"})
    with pytest.raises(IndexCorruptError, match="wrong kind: paths"):
        Tree.load(path)


def test_query_vectors_are_means_of_the_queries() -> None:
    rng = np.random.default_rng(0)
    documents = rng.standard_normal((6, 4)).astype(np.float32)
    queries = rng.standard_normal((9, 4)).astype(np.float32)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    of = np.array([4, 0, 4, 2, 2, 4, 0, 2, 5])
    result = query_vectors(documents, queries, of)
    for document in range(6):
        mine = queries[of == document]
        expected = documents[document]
        if len(mine):
            expected = mine.mean(axis=0) / np.linalg.norm(mine.mean(axis=0))
        np.testing.assert_allclose(result[document], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(query_vectors(documents, 3 * queries, of)[4], 3 * result[4], rtol=1e-5)


def test_query_vectors_without_usable_queries_are_the_documents() -> None:
    documents = normal(3, 2)
    none = query_vectors(documents, np.empty((0, 2), np.float32), np.empty(0, np.int64))
    np.testing.assert_array_equal(none, documents)
    assert none is not documents
    opposite = np.array([[1, 2], [-1, -2], [0, 0]], dtype=np.float32)
    np.testing.assert_array_equal(query_vectors(documents, opposite, np.array([1, 1, 2])), documents)


@pytest.mark.parametrize(
    ("queries", "of", "message"),
    [
        (np.ones((2, 5)), [0, 1], "same encoder"),
        (np.ones((2, 4)), [0], "same encoder"),
        (np.ones((2, 4)), [0, 3], "only 3"),
        (np.ones((2, 4)), [-1, 0], "only 3"),
    ],
)
def test_query_vectors_of_the_wrong_shape_are_refused(queries: Any, of: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        query_vectors(normal(3, 4), queries, np.array(of))


def test_trees_of_queries_differ_from_trees_of_documents() -> None:
    config = TreeConfig(k=3, c=3, source="queries", **QUICK)
    documents, queries = normal(60), normal(60, seed=1)
    asked = build_tree(query_vectors(documents, queries, np.arange(60)), config)
    assert ids(asked) != ids(build_tree(documents, config))
    expected = literal(query_vectors(documents, queries, np.arange(60)), config, np.arange(60))
    assert ids(asked) == [expected[i] for i in range(60)]
