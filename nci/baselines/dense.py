"""Dense retrieval: documents and an encoder in, exact search by inner product or cosine out. No torch of its own.

faiss does the product where it is installed, numpy otherwise, unless one of them is asked for. The paper's "BERT +
BruteForce" is similarity "cosine", its "BERT + ANN (Faiss)", a flat index too, is similarity "dot"; with vectors of
length 1 both are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

from nci.baselines import Baseline, Shelf
from nci.baselines.settings import DenseSettings, check_similarity
from nci.errors import DataError, MissingPackageError
from nci.records import Document, Hits

if TYPE_CHECKING:
    from nci.encoders import TextEncoder


class Encoder(Protocol):
    """What turns texts into vectors."""

    def encode(self, texts: list[str], /, *, batch_size: int) -> npt.NDArray[Any]: ...


class QueryEncoder:
    """The query side of a text encoder: its own prompt for queries stands before every text."""

    def __init__(self, encoder: TextEncoder) -> None:
        self._encoder = encoder

    @classmethod
    def load(cls, settings: DenseSettings, *, device: str) -> Self:
        """The encoder by name or folder."""
        from nci.encoders import TextEncoder
        from nci.runtime import uses_bf16

        return cls(
            TextEncoder.load(
                settings.encoder,
                pooling=settings.pooling,
                max_length=settings.max_length,
                device=device,
                dtype="bfloat16" if uses_bf16(settings.precision, device) else "float32",
            )
        )

    def encode(self, texts: list[str], /, *, batch_size: int) -> npt.NDArray[np.float32]:
        """Vectors of queries, (texts, width)."""
        return self._encoder.encode(texts, role="query", batch_size=batch_size)


class Dense(Baseline):
    """Exact search over one vector per document.

    Args:
        documents: What to search.
        encoder: Makes the vectors of queries, and of the documents' title and text unless those are given.
        vectors: The documents' vectors in the same order, (documents, width).
        batch_size: Texts per forward pass of the encoder.
        similarity: dot, or cosine, which scales all vectors to length 1 first.
        name: What hits say they come from.
        backend: What does the product; auto takes faiss where it is installed.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        encoder: Encoder,
        vectors: npt.NDArray[Any] | None = None,
        *,
        batch_size: int = 32,
        similarity: Literal["cosine", "dot"] = "dot",
        name: str = "dense",
        backend: Literal["auto", "faiss", "numpy"] = "auto",
    ) -> None:
        check_similarity(similarity)
        self._backend = backend
        self._shelf = Shelf(documents, source=name)
        self._encoder = encoder
        self._batch_size = batch_size
        self._similarity = similarity
        if vectors is None:
            vectors = encoder.encode([document.content for document in self._shelf.documents], batch_size=batch_size)
        if vectors.ndim != 2 or len(vectors) != len(self._shelf):
            raise DataError(f"{len(self._shelf)} documents need one vector each, not an array of {vectors.shape}")
        self._vectors = self._ready(vectors)  # (documents, width)
        self._faiss: Any = self._make_index(self._vectors)

    @classmethod
    def build(
        cls,
        documents: Sequence[Document],
        *,
        out: Path,
        settings: DenseSettings | None = None,
        device: str = "cpu",
        name: str = "dense",
    ) -> Self:
        """Encodes the documents into the folder `out`; a rerun takes up what is there.

        Args:
            documents: What to search.
            out: Where the vectors are kept.
            settings: Encoder, similarity and backend.
            device: Where texts are encoded, also at search time.
            name: What hits say they come from.
        """
        settings = settings or DenseSettings()
        encoder, vectors = encode_corpus(documents, out=out, settings=settings, device=device)
        return cls(
            documents,
            encoder,
            vectors,
            batch_size=settings.batch_size,
            similarity=settings.similarity,
            name=name,
            backend=settings.backend,
        )

    @property
    def index_bytes(self) -> int:
        """Size of the vectors in memory."""
        return self._vectors.nbytes

    def _answer(self, texts: list[str], k: int) -> list[Hits]:
        vectors = self._ready(self._encoder.encode(texts, batch_size=self._batch_size))
        found = list(self._nearest(vectors, k))
        scored = self._compared(len(texts))
        return [self._shelf.hits(rows, scores, k, scored=scored) for rows, scores in found]

    def _compared(self, queries: int) -> int:
        """With how many documents each of the last so many queries was compared."""
        return len(self._shelf)

    def _finds(self, texts: list[str], doc_ids: list[str], k: int) -> npt.NDArray[np.bool_]:
        queries = self._ready(self._encoder.encode(texts, batch_size=self._batch_size))
        return self._shelf.among_best(queries @ self._vectors.T, doc_ids, k)

    def _ready(self, vectors: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        ready = np.ascontiguousarray(vectors, np.float32)
        return unit(ready) if self._similarity == "cosine" else ready

    def _make_index(self, vectors: npt.NDArray[np.float32]) -> Any | None:
        if self._backend == "numpy":
            return None
        try:
            import faiss
        except ImportError as error:
            if self._backend == "faiss":
                raise MissingPackageError("dense search by faiss needs it: pip install faiss-cpu") from error
            return None
        index = faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors)
        return index

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


def encode_corpus(
    documents: Sequence[Document], *, out: Path, settings: DenseSettings, device: str
) -> tuple[QueryEncoder, npt.NDArray[Any]]:
    """The query side of an encoder, and its vectors of title and text, kept in `out` in resumable shards."""
    from nci.config import EmbedConfig
    from nci.embed import embed_documents
    from nci.encoders import fetch_encoder, read_settings

    config = EmbedConfig(
        encoder=settings.encoder,
        pooling=settings.pooling,
        # Whether "dot" means vectors of length 1 is the encoder's own business.
        normalise=settings.similarity == "cosine" or read_settings(fetch_encoder(settings.encoder)).normalise,
        max_length=settings.max_length,
        batch_size=settings.batch_size,
        precision=settings.precision,
    )
    vectors = embed_documents(documents, out, config, device=device)
    return QueryEncoder.load(settings, device=device), vectors


def unit(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Vectors scaled to length 1; a zero vector stays as it is, similar to nothing."""
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: npt.NDArray[np.float32] = np.divide(vectors, length, out=np.zeros_like(vectors), where=length > 0)
    return scaled
