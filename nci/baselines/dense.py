"""Dense retrieval: documents and an encoder in, exact search by inner product out. No torch of its own.

faiss does the product where it is installed, numpy otherwise. Knows nothing of how vectors are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt

from nci.baselines import Shelf, check_k
from nci.errors import DataError
from nci.records import Document, Hit

QUERIES_AT_ONCE = 256


class Encoder(Protocol):
    """What turns texts into vectors."""

    def encode(self, texts: list[str], /, *, batch_size: int) -> npt.NDArray[Any]: ...


class Dense:
    """Exact search over one vector per document.

    Args:
        documents: What to search.
        encoder: Makes the vectors of queries, and of the documents' title and text unless those are given.
        vectors: The documents' vectors in the same order, (documents, width).
        batch_size: Texts per forward pass of the encoder.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        encoder: Encoder,
        vectors: npt.NDArray[Any] | None = None,
        *,
        batch_size: int = 32,
    ) -> None:
        self._shelf = Shelf(documents, source="dense")
        self._encoder = encoder
        self._batch_size = batch_size
        if vectors is None:
            vectors = encoder.encode([document.content for document in self._shelf.documents], batch_size=batch_size)
        self._vectors = np.ascontiguousarray(vectors, np.float32)  # (documents, width)
        if self._vectors.ndim != 2 or len(self._vectors) != len(self._shelf):
            raise DataError(f"{len(self._shelf)} documents need one vector each, not an array of {vectors.shape}")
        self._faiss = _flat_index(self._vectors)

    @overload
    def search(self, queries: str, k: int = 10) -> list[Hit]: ...
    @overload
    def search(self, queries: list[str], k: int = 10) -> list[list[Hit]]: ...
    def search(self, queries: str | list[str], k: int = 10) -> list[Hit] | list[list[Hit]]:
        """The best k documents for one query, or for each of a list of queries."""
        check_k(k)
        asked = [queries] if isinstance(queries, str) else queries
        found: list[list[Hit]] = []
        for start in range(0, len(asked), QUERIES_AT_ONCE):
            texts = asked[start : start + QUERIES_AT_ONCE]
            vectors = np.ascontiguousarray(self._encoder.encode(texts, batch_size=self._batch_size), np.float32)
            found += [self._shelf.hits(rows, scores, k) for rows, scores in self._nearest(vectors, k)]
        return found[0] if isinstance(queries, str) else found

    def _nearest(
        self, queries: npt.NDArray[np.float32], k: int
    ) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.float32]]]:
        """Per query the rows and scores of at least the best k, with all that tie with the last of them."""
        total = len(self._shelf)
        if self._faiss is None or k >= total:
            rows = np.arange(total)
            for scores in queries @ self._vectors.T:  # (queries, documents)
                yield rows, scores
            return
        width = k
        while True:
            width = min(2 * width, total)
            scores, found = self._faiss.search(queries, width)  # (queries, width), best first
            # faiss drops ties at the last place by its own order: widen until the last place is no tie.
            if width == total or (scores[:, -1] < scores[:, k - 1]).all():
                yield from zip(found, scores, strict=True)
                return


def _flat_index(vectors: npt.NDArray[np.float32]) -> Any | None:
    try:
        import faiss
    except ImportError:
        return None
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    return index
