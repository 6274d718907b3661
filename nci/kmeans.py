"""One k-means behind three back ends: vectors go in, a cluster number per vector and the clusters' means come out.

Knows nothing of trees, documents or configs. The same input and seed give the same clusters on the same machine.

- faiss: the fast one on a CPU. Started here by greedy k-means++: its own random start misses well separated groups.
- torch: the same start, then plain Lloyd on any torch device.
- sklearn: `KMeans` as the paper used it, on all points.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings

import numpy as np
from numpy.typing import NDArray

from nci.errors import ConfigError, DataError, MissingPackageError

Floats = NDArray[np.float32]
Labels = NDArray[np.int32]

PACKAGES = {"faiss": ("faiss", "faiss-cpu"), "sklearn": ("sklearn", "scikit-learn"), "torch": ("torch", "torch")}
CHUNK = 16_384  # rows per product: bounds the memory of a pass over all points
SUMMED = 512  # rows added in float32 before they go to a float64 sum: more of them lose digits
# Squared lengths are summed over all points in float32, whose largest number is 3e38.
MAX_SQUARED_LENGTH = 1e30


def resolve_backend(backend: str, device: str = "cpu") -> str:
    """Turn "auto" into the name of an installed back end, and refuse one that is unknown or not installed.

    Args:
        backend: auto, faiss, sklearn or torch.
        device: auto takes torch when this is a GPU.

    Returns:
        faiss, sklearn or torch.
    """
    if backend == "auto":
        if device.startswith("cuda"):
            return "torch"
        # On macOS the wheels of faiss and torch each bring an OpenMP runtime, and the second one aborts the process.
        candidates = ["sklearn"] if sys.platform == "darwin" else ["faiss", "sklearn"]
        return next((name for name in candidates if _installed(name)), "torch")
    if backend not in PACKAGES:
        raise ConfigError(f"--tree.backend is auto, faiss, sklearn or torch, not {backend!r}")
    if not _installed(backend):
        package = PACKAGES[backend][1]
        raise MissingPackageError(
            f"--tree.backend {backend} needs {package}: pip install {package}, or use another one"
        )
    return backend


def kmeans(
    vectors: Floats,
    k: int,
    *,
    backend: str = "faiss",
    iterations: int = 20,
    points_per_centroid: int = 256,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[Labels, Floats]:
    """Split vectors into at most k clusters.

    Args:
        vectors: One row per point.
        k: Clusters wanted; fewer come back when there are fewer different points or a cluster ends empty.
        backend: auto, faiss, sklearn or torch.
        iterations: Lloyd iterations at most.
        points_per_centroid: faiss and torch learn the centroids from at most k times this many points.
        seed: Decides the sample and the start.
        device: Where the torch back end computes.

    Returns:
        The cluster of every point, (n,), numbered without gaps, and the mean of every cluster, (clusters, width).
    """
    if k < 1:
        raise ConfigError(f"k-means needs at least one cluster, not k={k}")
    backend = resolve_backend(backend, device)
    vectors = _checked(vectors)
    if len(vectors) <= k:
        found = _distinct(vectors)
    elif _identical(vectors):
        found = np.zeros(len(vectors), np.int32)
    elif backend == "sklearn":
        found = _sklearn(vectors, k, iterations, seed)
    else:
        rng = np.random.default_rng(seed)
        sample = _sample(vectors, k * points_per_centroid, rng)
        # Float32 distances between points far from the origin cancel; around their mean they do not.
        origin = sample.mean(axis=0, dtype=np.float64).astype(np.float32)
        sample = sample - origin  # (sample, width)
        start = _plus_plus(sample, k, rng)
        if backend == "faiss":
            found = _faiss(vectors, sample, start, origin, iterations)
        else:
            found = _torch(vectors, sample, start, origin, iterations, device)
    kept, labels = np.unique(found, return_inverse=True)  # empty clusters leave no gap; the order stays
    numbered: Labels = np.asarray(labels.reshape(-1), dtype=np.int32)
    return numbered, cluster_means(vectors, numbered, len(kept))


def cluster_means(vectors: Floats, labels: Labels, clusters: int) -> Floats:
    """Return the mean of each cluster's rows, (clusters, width); every cluster has at least one row."""
    sums = np.zeros((clusters, vectors.shape[1]))
    for at in range(0, len(vectors), SUMMED):
        member = labels[at : at + SUMMED] == np.arange(clusters, dtype=np.int32)[:, None]  # (clusters, chunk)
        sums += member.astype(np.float32) @ vectors[at : at + SUMMED]
    counts = np.bincount(labels, minlength=clusters)
    return (sums / counts[:, None]).astype(np.float32)


def _installed(backend: str) -> bool:
    return importlib.util.find_spec(PACKAGES[backend][0]) is not None


def _checked(vectors: Floats) -> Floats:
    if vectors.ndim != 2 or 0 in vectors.shape:
        raise DataError(f"k-means needs rows of vectors, (n, width), not an array of shape {vectors.shape}")
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        squared = np.einsum("ij,ij->i", vectors, vectors)
    bad = np.flatnonzero(~(squared < MAX_SQUARED_LENGTH))
    if len(bad):
        raise DataError(
            f"vector {bad[0]} holds NaN, infinity or numbers too large to square ({len(bad)} such vectors of "
            f"{len(vectors)}); embed these documents again or leave them out"
        )
    return vectors


def _distinct(vectors: Floats) -> Labels:
    """One cluster per different row, numbered by first appearance: the exact optimum when there are at most k rows."""
    _, first, inverse = np.unique(vectors, axis=0, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))
    return rank[inverse.reshape(-1)].astype(np.int32)


def _identical(vectors: Floats) -> bool:
    chunks = (vectors[at : at + CHUNK] for at in range(0, len(vectors), CHUNK))
    return all(bool((chunk == vectors[0]).all()) for chunk in chunks)


def _sample(vectors: Floats, size: int, rng: np.random.Generator) -> Floats:
    if len(vectors) <= size:
        return vectors
    return vectors[np.sort(rng.choice(len(vectors), size, replace=False, shuffle=False))]


def _plus_plus(points: Floats, k: int, rng: np.random.Generator) -> Floats:
    """Greedy k-means++: of a few points drawn by squared distance, keep the one that lowers the total most."""
    draws = 2 + int(np.log(k))
    lengths = np.einsum("ij,ij->i", points, points)
    chosen = [int(rng.integers(len(points)))]
    nearest = np.maximum(lengths + lengths[chosen[0]] - 2 * (points @ points[chosen[0]]), 0)  # (points,)
    for _ in range(1, k):
        mass = np.cumsum(nearest, dtype=np.float64)
        if mass[-1] == 0:  # every point is a centroid already
            break
        drawn = np.minimum(np.searchsorted(mass, rng.random(draws) * mass[-1], side="right"), len(points) - 1)
        distances = lengths + lengths[drawn, None] - 2 * (points[drawn] @ points.T)  # (draws, points)
        distances = np.clip(distances, 0, nearest)
        best = int(distances.sum(axis=1).argmin())
        chosen.append(int(drawn[best]))
        nearest = distances[best]
    return points[chosen]  # (at most k, width)


def _faiss(vectors: Floats, sample: Floats, start: Floats, origin: Floats, iterations: int) -> Labels:
    import faiss

    clusters, width = start.shape
    # Sampling is done already, and a node of few points is no reason for faiss to warn on the console.
    model = faiss.Kmeans(
        width, clusters, niter=iterations, min_points_per_centroid=1, max_points_per_centroid=len(sample), verbose=False
    )
    model.train(sample, init_centroids=start)
    centroids = np.asarray(model.centroids, dtype=np.float32).reshape(clusters, width)
    half = 0.5 * np.einsum("ij,ij->i", centroids, centroids)
    labels = np.empty(len(vectors), np.int32)
    for at in range(0, len(vectors), CHUNK):
        scores = (vectors[at : at + CHUNK] - origin) @ centroids.T - half  # (chunk, clusters)
        labels[at : at + CHUNK] = scores.argmax(axis=1)
    return labels


def _torch(vectors: Floats, sample: Floats, start: Floats, origin: Floats, iterations: int, device: str) -> Labels:
    # Imported here so that the other back ends run without torch and its OpenMP runtime.
    import torch

    points = torch.from_numpy(sample).to(device)  # (sample, width)
    centroids = torch.from_numpy(start).to(device)  # (clusters, width)
    shift = torch.from_numpy(origin).to(device)

    def nearest(rows: torch.Tensor) -> torch.Tensor:
        return (rows @ centroids.T - 0.5 * centroids.square().sum(dim=1)).argmax(dim=1)

    spans = [slice(at, at + CHUNK) for at in range(0, len(points), CHUNK)]
    previous = None
    for _ in range(iterations):
        labels = torch.cat([nearest(points[span]) for span in spans])
        if previous is not None and torch.equal(labels, previous):
            break
        previous = labels
        sums = torch.zeros_like(centroids)
        counts = torch.zeros(len(centroids), device=device)
        for span in spans:
            # A product, not index_add: that adds in no fixed order on a GPU, and the tree would change between runs.
            member = torch.nn.functional.one_hot(labels[span], len(centroids)).to(points.dtype)  # (chunk, clusters)
            sums += member.T @ points[span]
            counts += member.sum(dim=0)
        centroids = sums / counts.clamp(min=1)[:, None]  # an empty cluster starts again at the origin, the points' mean
    chunks = (torch.tensor(vectors[at : at + CHUNK], device=device) for at in range(0, len(vectors), CHUNK))
    found = torch.cat([nearest(chunk - shift).cpu() for chunk in chunks])
    return np.asarray(found.numpy(), dtype=np.int32)


def _sklearn(vectors: Floats, k: int, iterations: int, seed: int) -> Labels:
    from sklearn.cluster import KMeans  # type: ignore[import-untyped]
    from sklearn.exceptions import ConvergenceWarning  # type: ignore[import-untyped]

    with warnings.catch_warnings():
        # Fewer different points than k is an answer here, not an accident.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = KMeans(n_clusters=k, max_iter=iterations, random_state=seed).fit(vectors)
    return np.asarray(model.labels_, dtype=np.int32)
