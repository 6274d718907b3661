"""k-means: all back ends find separated groups, end in a fixed point of Lloyd's rule and survive degenerate input."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nci.kmeans
from nci.errors import ConfigError, DataError, MissingPackageError
from nci.kmeans import Floats, Labels, cluster_means, kmeans, resolve_backend

BACKENDS = ["faiss", "sklearn", "torch"]


def blobs(groups: int, size: int, width: int = 8, seed: int = 0) -> tuple[Floats, Labels]:
    """Groups on the corners of a large grid, their members in mixed order."""
    rng = np.random.default_rng(seed)
    corners = np.array(list(itertools.islice(itertools.product((0, 50), repeat=width), groups)), dtype=np.float32)
    truth = rng.permutation(np.repeat(np.arange(groups, dtype=np.int32), size))
    return corners[truth] + rng.standard_normal((groups * size, width), dtype=np.float32), truth


def partition(labels: Labels) -> set[frozenset[int]]:
    return {frozenset(np.flatnonzero(labels == label).tolist()) for label in np.unique(labels)}


def squared_distances(vectors: Floats, centroids: Floats) -> np.ndarray:
    differences = vectors[:, None].astype(np.float64) - centroids[None]
    squared: np.ndarray = np.einsum("pcw,pcw->pc", differences, differences)
    return squared


def naive_means(vectors: Floats, labels: Labels) -> np.ndarray:
    return np.array([vectors[labels == label].astype(np.float64).mean(axis=0) for label in range(labels.max() + 1)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_separated_groups_are_found(backend: str) -> None:
    vectors, truth = blobs(groups=12, size=25)
    labels, centroids = kmeans(vectors, 12, backend=backend, iterations=20, points_per_centroid=256, seed=3)
    assert partition(labels) == partition(truth)
    assert labels.dtype == np.int32
    assert centroids.dtype == np.float32
    np.testing.assert_allclose(centroids, naive_means(vectors, labels), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["faiss", "torch"])
def test_centroids_learned_from_a_sample_serve_all_points(backend: str) -> None:
    vectors, truth = blobs(groups=5, size=200)
    labels, centroids = kmeans(vectors, 5, backend=backend, points_per_centroid=20, seed=1)
    assert partition(labels) == partition(truth)
    np.testing.assert_allclose(centroids, naive_means(vectors, labels), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_converged_clusters_are_a_fixed_point(backend: str) -> None:
    vectors = np.random.default_rng(5).standard_normal((300, 4), dtype=np.float32)
    labels, centroids = kmeans(vectors, 7, backend=backend, iterations=300, seed=2)
    distances = squared_distances(vectors, centroids)
    own = distances[np.arange(300), labels]
    # scikit-learn stops when the centroids move less than a tolerance, the others when no label changes
    assert (own <= distances.min(axis=1) + 0.02).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_close_to_the_best_split_of_a_line(backend: str) -> None:
    line = np.sort(np.random.default_rng(8).uniform(size=40)).astype(np.float32)[:, None]

    def cost(parts: list[Floats]) -> float:
        return sum(float(((part - part.mean()) ** 2).sum()) for part in parts)

    best = min(cost(np.split(line, [i, j])) for i in range(1, 39) for j in range(i + 1, 40))
    runs = [kmeans(line, 3, backend=backend, iterations=50, seed=seed)[0] for seed in range(5)]
    found = min(cost([line[labels == label] for label in range(3)]) for labels in runs)
    assert best - 1e-6 <= found <= 1.05 * best


@pytest.mark.parametrize("backend", BACKENDS)
def test_far_from_the_origin(backend: str) -> None:
    vectors, truth = blobs(groups=4, size=20)
    labels, _ = kmeans(vectors + np.float32(2e5), 4, backend=backend, seed=0)
    assert partition(labels) == partition(truth)


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_seed_same_clusters_other_seed_other_clusters(backend: str) -> None:
    vectors = np.random.default_rng(1).standard_normal((400, 6), dtype=np.float32)
    first, again, other = (kmeans(vectors, 9, backend=backend, points_per_centroid=30, seed=s) for s in (4, 4, 5))
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(first[1], again[1])
    assert partition(first[0]) != partition(other[0])


@settings(deadline=None, max_examples=60)
@given(
    backend=st.sampled_from(BACKENDS),
    count=st.integers(1, 60),
    different=st.integers(1, 60),
    k=st.integers(1, 12),
    scale=st.sampled_from([0.0, 1e-20, 1.0, 1e12]),
    seed=st.integers(0, 2**31 - 1),
)
def test_any_input_gives_clusters_without_gaps(
    backend: str, count: int, different: int, k: int, scale: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((different, 3)) * scale).astype(np.float32)
    vectors = rows[rng.integers(different, size=count)]
    labels, centroids = kmeans(vectors, k, backend=backend, seed=seed)
    assert labels.shape == (count,)
    assert set(labels.tolist()) == set(range(len(centroids)))
    assert len(centroids) <= min(k, len(np.unique(vectors, axis=0)))
    np.testing.assert_allclose(centroids, naive_means(vectors, labels), rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("backend", BACKENDS)
def test_at_most_k_points_are_one_cluster_each_and_equal_ones_share(backend: str) -> None:
    vectors = np.array([[3, 0], [1, 0], [3, 0], [2, 0]], dtype=np.float32)
    labels, centroids = kmeans(vectors, 10, backend=backend)
    assert labels.tolist() == [0, 1, 0, 2]
    np.testing.assert_array_equal(centroids, vectors[[0, 1, 3]])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [0.0, 0.1, -7e3])
def test_equal_points_are_one_cluster(backend: str, scale: float) -> None:
    row = np.random.default_rng(4).uniform(size=(1, 67)).astype(np.float32) * np.float32(scale)
    labels, centroids = kmeans(np.repeat(row, 20_001, axis=0), 30, backend=backend)
    assert set(labels.tolist()) == {0}
    np.testing.assert_allclose(centroids, row, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_on_the_console(
    backend: str, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    rows = np.random.default_rng(0).standard_normal((4, 3), dtype=np.float32)
    kmeans(np.repeat(rows, 6, axis=0), 12, backend=backend)
    kmeans(np.random.default_rng(0).standard_normal((14, 3), dtype=np.float32), 12, backend=backend)
    assert capfd.readouterr() == ("", "")
    assert not list(recwarn)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_numbers_that_are_none_are_refused(bad: float) -> None:
    vectors = np.ones((10, 3), dtype=np.float32)
    vectors[6, 1] = bad
    with pytest.raises(DataError, match="vector 6 "):
        kmeans(vectors, 2)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (3,), (2, 2, 2)])
def test_wrong_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="shape"):
        kmeans(np.ones(shape, dtype=np.float32), 2)


def test_no_clusters_are_refused() -> None:
    with pytest.raises(ConfigError, match="k=0"):
        kmeans(np.ones((3, 2), dtype=np.float32), 0)


@pytest.mark.parametrize("backend", ["faiss", "torch"])
def test_chunks_do_not_change_the_answer(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, _ = blobs(groups=6, size=30, seed=2)
    whole = kmeans(vectors, 6, backend=backend, seed=9)
    monkeypatch.setattr(nci.kmeans, "CHUNK", 7)
    pieces = kmeans(vectors, 6, backend=backend, seed=9)
    np.testing.assert_array_equal(whole[0], pieces[0])
    np.testing.assert_allclose(whole[1], pieces[1], rtol=1e-5)


def test_cluster_means() -> None:
    vectors = np.array([[1, 2], [3, 4], [5, 9]], dtype=np.float32)
    means = cluster_means(vectors, np.array([1, 0, 1], dtype=np.int32), 2)
    assert means.tolist() == [[3, 4], [3, 5.5]]


@pytest.mark.parametrize(
    ("device", "platform", "installed", "expected"),
    [
        ("cuda", "linux", {"faiss", "sklearn", "torch"}, "torch"),
        ("cuda:1", "linux", {"faiss", "sklearn", "torch"}, "torch"),
        ("cpu", "linux", {"faiss", "sklearn", "torch"}, "faiss"),
        ("cpu", "linux", {"sklearn", "torch"}, "sklearn"),
        ("cpu", "linux", {"torch"}, "torch"),
        ("cpu", "darwin", {"faiss", "sklearn", "torch"}, "sklearn"),
        ("cpu", "darwin", {"faiss", "torch"}, "torch"),
    ],
)
def test_auto_backend(
    device: str, platform: str, installed: set[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(nci.kmeans, "_installed", installed.__contains__)
    assert resolve_backend("auto", device) == expected


def test_named_backend_must_be_known_and_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [resolve_backend(name, "cuda") for name in BACKENDS] == BACKENDS
    with pytest.raises(ConfigError, match="cuml"):
        resolve_backend("cuml")
    monkeypatch.setattr(nci.kmeans, "_installed", lambda name: name != "faiss")
    with pytest.raises(MissingPackageError, match="pip install faiss-cpu"):
        kmeans(np.ones((3, 2), dtype=np.float32), 2, backend="faiss")
