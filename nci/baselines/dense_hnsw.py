"""Approximate dense retrieval: the same as `dense`, with faiss' graph of neighbours (HNSW) in place of all products.

What the graph does not reach is not found: recall against exact search is the price of a search time that hardly grows
with the corpus. Not a row of the paper, whose "ANN (Faiss)" is exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from nci.baselines.dense import Dense, Encoder, encode_corpus
from nci.baselines.settings import DenseSettings
from nci.config import content_key
from nci.errors import ConfigError, MissingPackageError
from nci.records import Document
from nci.shards import rename_durably


@dataclass(frozen=True)
class HnswSettings:
    """Size of the graph, and how much of it a search looks at.

    Args:
        neighbours: Links per document (M).
        build_width: Candidates looked at when a document is put in (efConstruction).
        search_width: Candidates looked at per query (efSearch), never fewer than hits are asked for.
        threads: One makes the same graph every time; more are faster and each graph is a little different.
    """

    neighbours: int = 32
    build_width: int = 200
    search_width: int = 64
    threads: int = 1

    def __post_init__(self) -> None:
        if self.neighbours < 2 or min(self.build_width, self.search_width, self.threads) < 1:
            raise ConfigError("an HNSW graph needs 2 neighbours or more, and widths and threads of 1 or more")


class DenseHnsw(Dense):
    """Approximate search over one vector per document.

    Args:
        documents: What to search.
        encoder: Makes the vectors of queries, and of the documents' title and text unless those are given.
        vectors: The documents' vectors in the same order, (documents, width).
        hnsw: Size of the graph.
        folder: Where the graph is kept; built anew each time if None.
        batch_size: Texts per forward pass of the encoder.
        similarity: cosine or dot; the graph is at its best with cosine.
        name: What hits say they come from.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        encoder: Encoder,
        vectors: npt.NDArray[Any] | None = None,
        *,
        hnsw: HnswSettings | None = None,
        folder: Path | None = None,
        batch_size: int = 32,
        similarity: Literal["cosine", "dot"] = "cosine",
        name: str = "dense-hnsw",
    ) -> None:
        self._hnsw = hnsw or HnswSettings()
        self._folder = folder
        super().__init__(documents, encoder, vectors, batch_size=batch_size, similarity=similarity, name=name)

    @classmethod
    def build(
        cls,
        documents: Sequence[Document],
        *,
        out: Path,
        settings: DenseSettings | None = None,
        device: str = "cpu",
        name: str = "dense-hnsw",
        hnsw: HnswSettings | None = None,
    ) -> Self:
        """Encodes the documents and links them, in the folder `out`; a rerun takes up what is there."""
        settings = settings or DenseSettings()
        encoder, vectors = encode_corpus(documents, out=out, settings=settings, device=device)
        return cls(
            documents,
            encoder,
            vectors,
            hnsw=hnsw,
            folder=out,
            batch_size=settings.batch_size,
            similarity=settings.similarity,
            name=name,
        )

    @property
    def index_bytes(self) -> int:
        """Size of the graph with its vectors, as a file has it."""
        import faiss

        return int(faiss.serialize_index(self._faiss).nbytes)

    def _make_index(self, vectors: npt.NDArray[np.float32]) -> Any:
        try:
            import faiss
        except ImportError as error:
            raise MissingPackageError("dense-hnsw needs faiss: pip install faiss-cpu") from error
        size = self._hnsw
        key = content_key(size.neighbours, size.build_width, hashlib.sha256(vectors.tobytes()).hexdigest())
        file = self._folder / f"hnsw-{key}.faiss" if self._folder else None
        if file is not None and file.is_file():
            try:
                return faiss.read_index(str(file))
            except RuntimeError:
                file.unlink()  # damaged: the vectors are still there, so the graph is made again
        index = faiss.IndexHNSWFlat(vectors.shape[1], size.neighbours, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = size.build_width
        threads = faiss.omp_get_max_threads()
        faiss.omp_set_num_threads(size.threads)
        try:
            index.add(vectors)
        finally:
            faiss.omp_set_num_threads(threads)
        if file is not None:
            staged = file.with_suffix(".tmp")
            faiss.write_index(index, str(staged))
            rename_durably(staged, file)
        return index

    def _nearest(
        self, queries: npt.NDArray[np.float32], k: int
    ) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.float32]]]:
        import faiss

        faiss.cvar.hnsw_stats.reset()  # type: ignore[attr-defined]
        width = min(k, len(self._shelf))
        reach = faiss.SearchParametersHNSW(efSearch=max(self._hnsw.search_width, width))  # type: ignore[attr-defined]
        scores, found = self._faiss.search(queries, width, params=reach)  # (queries, width), -1 where nothing was found
        for rows, row_scores in zip(found, scores, strict=True):
            yield rows[rows >= 0], row_scores[rows >= 0]

    def _compared(self, queries: int) -> int:
        import faiss

        # on average: faiss counts those of a search together
        return round(int(faiss.cvar.hnsw_stats.ndis) / queries)  # type: ignore[attr-defined]
