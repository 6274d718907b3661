"""How long hierarchical k-means takes, and how good its clusters are, on vectors that lie in groups of groups.

python benchmarks/tree.py --documents 100000 --width 768 --backend faiss
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from nci.config import TreeConfig
from nci.kmeans import Floats, resolve_backend
from nci.tree import Tree, build_tree


def grouped_vectors(documents: int, width: int, seed: int) -> Floats:
    """Unit vectors around 1,000 topics that lie around 50 themes; each step adds noise of the same length."""
    rng = np.random.default_rng(seed)
    themes = rng.standard_normal((50, width), dtype=np.float32)
    topics = themes[rng.integers(50, size=1000)] + rng.standard_normal((1000, width), dtype=np.float32)
    vectors = rng.standard_normal((documents, width), dtype=np.float32)
    vectors += topics[rng.integers(1000, size=documents)]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def inertia(vectors: Floats, tree: Tree, digits: int | None) -> float:
    """Mean squared distance of a document to its cluster after so many digits; None: to its leaf cluster."""
    rows = {tuple(prefix[prefix >= 0].tolist()): row for row, prefix in enumerate(tree.centroid_prefixes)}
    of = np.array([rows[tree.semantic_id(i)[: digits or -1]] for i in range(len(vectors))])
    chunks = range(0, len(vectors), 8192)
    return sum(float(((vectors[i : i + 8192] - tree.centroids[of[i : i + 8192]]) ** 2).sum()) for i in chunks) / len(of)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--k", type=int, default=30)
    parser.add_argument("--c", type=int, default=30)
    parser.add_argument("--backend", default="auto", choices=["auto", "faiss", "sklearn", "torch"])
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    vectors = grouped_vectors(args.documents, args.width, args.seed)
    config = TreeConfig(k=args.k, c=args.c, backend=args.backend, iterations=args.iterations, seed=args.seed)
    started = time.perf_counter()
    tree = build_tree(vectors, config, device=args.device)
    seconds = time.perf_counter() - started
    lengths = np.bincount((tree.paths >= 0).sum(axis=1))
    print(f"backend   {resolve_backend(args.backend, args.device)} on {args.device}")
    print(f"seconds   {seconds:.2f}")
    print(f"clusters  {len(tree.centroids)}")
    print(f"depth     {', '.join(f'{depth}: {count}' for depth, count in enumerate(lengths) if count)}")
    top, bottom = inertia(vectors, tree, 1), inertia(vectors, tree, None)
    print(f"inertia   {top:.4f} after one digit, {bottom:.4f} in leaf clusters")


if __name__ == "__main__":
    main()
