"""Hierarchical k-means (Algorithm 1 of the paper): vectors go in, semantic ids and the clusters' means come out.

Documents are rows here; what they say, what they are called and how their vectors were made is not known.
Every path is unique and none is the start of another, whatever the vectors hold: where k-means cannot split a cluster
(equal documents) or would make a path too long, the documents are cut by their order instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from nci.config import TreeConfig
from nci.errors import ConfigError, DataError, IndexCorruptError
from nci.kmeans import Floats, Labels, cluster_means, kmeans, resolve_backend
from nci.progress import hide_bars
from nci.records import SemanticId

ARRAYS = {"paths": np.int32, "centroid_prefixes": np.int32, "centroids": np.float32}


@dataclass(frozen=True, eq=False)
class Tree:
    """The identifiers of a corpus. Rows shorter than the longest path are padded with -1.

    Attributes:
        paths: Semantic id of every document, (documents, positions).
        centroid_prefixes: Path of every cluster below the root, level by level, (clusters, positions).
        centroids: Mean vector of every such cluster, (clusters, width).
        values: Every digit is below this.
    """

    paths: NDArray[np.int32]
    centroid_prefixes: NDArray[np.int32]
    centroids: Floats
    values: int

    def semantic_id(self, document: int) -> SemanticId:
        """Return the path of one document, without padding."""
        return tuple(int(digit) for digit in self.paths[document] if digit >= 0)

    def save(self, path: str | Path) -> None:
        """Write the tree into one safetensors file."""
        # safetensors writes the memory as it lies, so that a slice or a transposed array would come back scrambled.
        arrays = {name: np.ascontiguousarray(getattr(self, name), dtype) for name, dtype in ARRAYS.items()}
        safetensors.numpy.save_file(arrays, path, metadata={"values": str(self.values)})

    @classmethod
    def load(cls, path: str | Path) -> Tree:
        """Read what `save` wrote."""
        try:
            with safe_open(path, framework="numpy") as file:
                arrays = {name: file.get_tensor(name) for name in ARRAYS}
                values = int(file.metadata()["values"])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise IndexCorruptError(f"{path} is not a tree that nci wrote ({error}); build the index again") from error
        wrong = [name for name, dtype in ARRAYS.items() if arrays[name].ndim != 2 or arrays[name].dtype != dtype]
        if wrong:
            raise IndexCorruptError(f"{path} holds arrays of the wrong kind: {', '.join(wrong)}; build the index again")
        return cls(**arrays, values=values)


def build_tree(vectors: Floats, config: TreeConfig, *, device: str = "cpu", progress: bool = True) -> Tree:
    """Give every document its semantic id.

    Args:
        vectors: One row per document, any float type, a memory map too; see `query_vectors` for `source="queries"`.
        config: Shape of the tree, kind of ids, k-means.
        device: Where the torch back end computes.
        progress: Show a bar when standard error is a terminal.

    Returns:
        The tree; with random or atomic ids it has no centroids, since no cluster then means anything.
    """
    vectors = np.asarray(vectors)  # (documents, width)
    if vectors.ndim != 2 or 0 in vectors.shape:
        raise DataError(f"a tree needs one vector per document, (documents, width), not shape {vectors.shape}")
    if config.ids == "atomic":
        numbers = np.arange(len(vectors), dtype=np.int32)[:, None]
        return _without_centroids(numbers, width=vectors.shape[1], values=len(vectors))
    tree = _semantic(vectors, config, device=device, progress=progress)
    if config.ids == "random":
        shuffled = tree.paths[np.random.default_rng(config.seed % 2**32).permutation(len(vectors))]
        return _without_centroids(shuffled, width=vectors.shape[1], values=tree.values)
    return tree


def query_vectors(document_vectors: Floats, query_vectors: Floats, document_of_query: NDArray[np.integer]) -> Floats:
    """Describe each document by what is asked about it: the mean direction of its queries, at their mean length.

    Args:
        document_vectors: One row per document.
        query_vectors: One row per training query, of the same width.
        document_of_query: Row of the document that each query asks for.

    Returns:
        One row per document: its own vector where it has no query or its queries cancel out.
    """
    documents, queries = np.asarray(document_vectors), np.asarray(query_vectors)
    of = np.asarray(document_of_query)
    if queries.ndim != 2 or documents.shape[1:] != queries.shape[1:] or of.shape != queries.shape[:1]:
        raise DataError(
            f"queries {queries.shape} need the width of the documents {documents.shape} and one document each, "
            f"not {of.shape}; embed both with the same encoder"
        )
    result = np.array(documents, dtype=np.float32)  # (documents, width)
    if not len(of):
        return result
    if of.min() < 0 or of.max() >= len(documents):
        raise DataError(f"queries ask for documents {of.min()} to {of.max()}, but there are only {len(documents)}")
    order = np.argsort(of, kind="stable")
    asked, first, counts = np.unique(of[order], return_index=True, return_counts=True)
    ordered = queries[order].astype(np.float32)
    sums = np.add.reduceat(ordered, first, axis=0)  # (asked, width)
    lengths = np.add.reduceat(np.linalg.norm(ordered, axis=1), first) / counts
    norms = np.linalg.norm(sums, axis=1)
    usable = norms > 1e-6 * lengths * counts
    result[asked[usable]] = sums[usable] * (lengths[usable] / norms[usable])[:, None]
    return result


def node_seed(seed: int, prefix: SemanticId) -> int:
    """Return the seed of one node: it depends on its path alone, never on which nodes were split before it."""
    # As a spawn key and not as entropy, where trailing zeros do not count and (1,) would equal (1, 0).
    state = np.random.SeedSequence(seed % 2**32, spawn_key=prefix).generate_state(1)
    return int(state[0]) % 2**31


def _semantic(vectors: Floats, config: TreeConfig, *, device: str, progress: bool) -> Tree:
    documents = len(vectors)
    needed = max(2, _digits_needed(documents, config))
    if needed > config.max_depth:
        raise ConfigError(
            f"--tree.max_depth {config.max_depth} is too short for {documents} documents with k={config.k} and "
            f"c={config.c}: set it to at least {needed}, or raise k or c"
        )
    backend = resolve_backend(config.backend, device)
    columns = [np.full(documents, -1, np.int32)]  # one per position
    prefixes: list[SemanticId] = []
    centroids: list[Floats] = []
    level: list[tuple[SemanticId, NDArray[np.int64]]] = [((), np.arange(documents))]
    with tqdm(total=documents, desc="tree", unit="doc", disable=hide_bars(progress)) as bar:
        while level:
            columns.append(np.full(documents, -1, np.int32))
            deeper = []
            for prefix, members in level:
                chosen = vectors if len(members) == documents else vectors[members]
                labels, means = _split(chosen, prefix, config, backend=backend, device=device)
                columns[-2][members] = labels
                centroids.append(means)
                for digit in range(len(means)):
                    prefixes.append((*prefix, digit))
                    inside = members[labels == digit]
                    if len(inside) > config.c:
                        deeper.append((prefixes[-1], inside))
                    else:
                        columns[-1][inside] = np.arange(len(inside))
                        bar.update(len(inside))
            level = deeper
    padded = np.full((len(prefixes), len(columns)), -1, np.int32)
    for row, prefix in zip(padded, prefixes, strict=True):
        row[: len(prefix)] = prefix
    return Tree(
        paths=np.stack(columns, axis=1),
        centroid_prefixes=padded,
        centroids=np.concatenate(centroids),
        values=max(config.k, config.c),
    )


def _split(
    vectors: Floats, prefix: SemanticId, config: TreeConfig, *, backend: str, device: str
) -> tuple[Labels, Floats]:
    """Split one node's documents, by distance where that gets them apart soon enough, else by order."""
    vectors = np.asarray(vectors, dtype=np.float32)
    labels, means = kmeans(
        vectors,
        config.k,
        backend=backend,
        iterations=config.iterations,
        points_per_centroid=config.points_per_centroid,
        seed=node_seed(config.seed, prefix),
        device=device,
    )
    count, largest = len(vectors), int(np.bincount(labels).max())
    left = config.max_depth - len(prefix) - 1  # digits below this split
    if largest < count and _digits_needed(largest, config) <= left:
        return labels, means
    parts = min(config.k, -(-count // config.c))
    labels = (np.arange(count) * parts // count).astype(np.int32)
    return labels, cluster_means(vectors, labels, parts)


def _digits_needed(documents: int, config: TreeConfig) -> int:
    """Length of the shortest path that tells so many documents apart: even splits by k, then one digit below c."""
    digits, room = 1, config.c
    while room < documents:
        digits, room = digits + 1, room * config.k
    return digits


def _without_centroids(paths: NDArray[np.int32], *, width: int, values: int) -> Tree:
    nothing = np.empty((0, paths.shape[1]), np.int32)
    return Tree(paths=paths, centroid_prefixes=nothing, centroids=np.empty((0, width), np.float32), values=values)
