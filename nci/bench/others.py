"""The other systems to compare with: the encoder alone, dense search (flat and HNSW, encoder included) and BM25.

An encoder is any function from texts to one vector each, on whatever device it works. Out: arrays on the host.
Knows nothing of trees.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nci.errors import MissingPackageError

Encode = Callable[[list[str]], Tensor]  # texts -> (texts, width)
Found = tuple[NDArray[np.int64], NDArray[np.float32]]  # rows of documents and scores, each (texts, k), best first
Nearest = Callable[[Tensor, int], Found]

log = logging.getLogger(__name__)


class EncoderAlone:
    """The system "encoder": what every neural search pays before it begins."""

    name = "encoder"

    def __init__(self, encode: Encode) -> None:
        self._encode = encode

    @torch.inference_mode()
    def search(self, texts: list[str], k: int) -> NDArray[np.float32]:
        """Vectors of the texts, on the host; `k` changes nothing."""
        return _on_host(self._encode(texts))


class Dense:
    """A dense retriever: the encoder, then the nearest documents by inner product."""

    def __init__(self, name: str, encode: Encode, nearest: Nearest, documents: int) -> None:
        self.name = name
        self._encode, self._nearest, self._documents = encode, nearest, documents

    @classmethod
    def flat(cls, encode: Encode, vectors: NDArray[np.float32]) -> Dense:
        """The system "dense": all documents compared, on the encoder's device; `vectors` is (documents, width)."""
        with torch.inference_mode():
            example = encode(["an example"])
        if example.device.type != "cpu":
            nearest = torch_flat(torch.as_tensor(vectors).to(example))
        else:
            nearest = faiss_flat(vectors) if importlib.util.find_spec("faiss") else numpy_flat(vectors)
        return cls("dense", encode, nearest, len(vectors))

    @classmethod
    def hnsw(cls, encode: Encode, vectors: NDArray[np.float32], *, links: int = 32, width: int = 64) -> Dense | None:
        """The system "dense-hnsw": a graph with `links` per document, searched `width` wide on the CPU.

        None, with a line in the log, where faiss is not installed.
        """
        if not importlib.util.find_spec("faiss"):
            log.warning("dense-hnsw is left out: it needs faiss, pip install faiss-cpu")
            return None
        import faiss

        index = faiss.IndexHNSWFlat(vectors.shape[1], links, faiss.METRIC_INNER_PRODUCT)
        index.add(np.ascontiguousarray(vectors, np.float32))
        index.hnsw.efSearch = width
        return cls("dense-hnsw", encode, _faiss_search(index), len(vectors))

    @torch.inference_mode()
    def search(self, texts: list[str], k: int) -> Found:
        """Rows of the best k documents of each text, and their scores."""
        return self._nearest(self._encode(texts), min(k, self._documents))


def torch_flat(vectors: Tensor) -> Nearest:
    """Exact search by one product on the device of `vectors`, in their dtype."""

    def nearest(queries: Tensor, k: int) -> Found:
        scores, rows = (queries @ vectors.T).topk(k)
        return rows.cpu().numpy(), _on_host(scores)

    return nearest


def faiss_flat(vectors: NDArray[np.float32]) -> Nearest:
    """Exact search by faiss on the CPU."""
    import faiss

    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(np.ascontiguousarray(vectors, np.float32))
    return _faiss_search(index)


def numpy_flat(vectors: NDArray[np.float32]) -> Nearest:
    """Exact search by numpy, where there is no faiss."""

    def nearest(queries: Tensor, k: int) -> Found:
        scores = _on_host(queries) @ vectors.T  # (texts, documents)
        rows = np.argpartition(-scores, k - 1, axis=1)[:, :k]
        order = np.argsort(-np.take_along_axis(scores, rows, 1), axis=1)
        rows = np.take_along_axis(rows, order, 1)
        return rows, np.take_along_axis(scores, rows, 1)

    return nearest


def _faiss_search(index: Any) -> Nearest:
    def nearest(queries: Tensor, k: int) -> Found:
        scores, rows = index.search(np.ascontiguousarray(_on_host(queries)), k)
        return rows, scores

    return nearest


def _on_host(vectors: Tensor) -> NDArray[np.float32]:
    return vectors.float().cpu().numpy()


class Bm25:
    """The system "bm25": bm25s as its documentation uses it, with numba where that is installed."""

    name = "bm25"

    def __init__(self, retriever: Any, tokenize: Callable[[list[str]], Any], documents: int) -> None:
        self._retriever, self._tokenize, self._documents = retriever, tokenize, documents

    @classmethod
    def from_texts(cls, texts: Sequence[str]) -> Bm25:
        """Index the texts, with English stems and without stop words."""
        try:
            import bm25s
            import Stemmer  # type: ignore[import-not-found]
        except ImportError as error:
            raise MissingPackageError("bm25 needs bm25s and PyStemmer: pip install bm25s PyStemmer") from error
        stemmer = Stemmer.Stemmer("english")

        def tokenize(asked: list[str]) -> Any:
            return bm25s.tokenize(asked, stopwords="en", stemmer=stemmer, show_progress=False, return_ids=False)

        retriever = bm25s.BM25(backend="numba" if importlib.util.find_spec("numba") else "numpy")
        retriever.index(tokenize(list(texts)), show_progress=False)
        return cls(retriever, tokenize, len(texts))

    def search(self, texts: list[str], k: int) -> Found:
        """Rows of the best k documents of each text, and their scores."""
        found = self._retriever.retrieve(self._tokenize(texts), k=min(k, self._documents), show_progress=False)
        return found.documents, found.scores
