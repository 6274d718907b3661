"""Nearest training queries: pairs of query and document in, search by similar questions out. No torch of its own.

A document's score is that of the training queries that asked for it; its text is never read. A document without
training queries is therefore NEVER found: on unseen documents this baseline is 0 by construction, and on seen ones it
says how much of a benchmark is answered by remembering questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from nci.baselines import Baseline, Shelf, folder
from nci.baselines.dense import Encoder, QueryEncoder, unit
from nci.baselines.settings import DenseSettings, KnnSettings
from nci.errors import DataError, IndexCorruptError
from nci.records import Document, Hits


class Knn(Baseline):
    """Search among the documents that training queries asked for, by cosine of the queries.

    Args:
        documents: What to search; those without pairs are never found.
        pairs: Training queries with the doc_ids they ask for.
        encoder: Makes the vectors of queries.
        vectors: The vectors of the training queries in the order of the pairs, if there are any already.
        settings: How the training queries of a document count together.
        name: What hits say they come from.
    """

    queries_at_once = 64  # each is compared with every training query

    def __init__(
        self,
        documents: Sequence[Document],
        pairs: Sequence[tuple[str, str]],
        encoder: Encoder,
        vectors: npt.NDArray[Any] | None = None,
        *,
        settings: KnnSettings | None = None,
        name: str = "knn",
    ) -> None:
        self._settings = settings or KnnSettings()
        self._shelf = Shelf(documents, source=name)
        self._encoder = encoder
        rows = {document.doc_id: row for row, document in enumerate(self._shelf.documents)}
        unknown = next((doc_id for _, doc_id in pairs if doc_id not in rows), None)
        if unknown is not None:
            raise DataError(f"a training query asks for {unknown!r}, which is not among the documents; leave it out")
        if not pairs:
            raise DataError("knn searches training queries and there are none: give pairs of query and doc_id")
        if vectors is None:
            vectors = encoder.encode([query for query, _ in pairs], batch_size=self._settings.batch_size)
        if len(vectors) != len(pairs):
            raise DataError(f"{len(pairs)} training queries need one vector each, not an array of {vectors.shape}")
        owner = np.array([rows[doc_id] for _, doc_id in pairs])  # (pairs,)
        order = np.argsort(owner, kind="stable")
        # Each query once: a matrix product may round equal columns differently, and two documents of one query would not tie.
        texts = np.array([query for query, _ in pairs], object)[order]
        _, first, query = np.unique(texts, return_index=True, return_inverse=True)
        self._query = query  # (pairs,) document by document
        self._vectors = unit(np.ascontiguousarray(vectors[order[first]], np.float32))  # (queries, width)
        self._rows, self._starts = np.unique(owner[order], return_index=True)  # (seen documents,)

    @classmethod
    def train(
        cls,
        documents: Sequence[Document],
        pairs: Sequence[tuple[str, str]],
        *,
        out: Path,
        settings: KnnSettings | None = None,
        device: str = "cpu",
    ) -> Self:
        """Encodes the training queries into the folder `out`; nothing is learned."""
        settings = settings or KnnSettings()
        encoder = _query_encoder(settings, device)
        vectors = encoder.encode([query for query, _ in pairs], batch_size=settings.batch_size)
        made = cls(documents, pairs, encoder, vectors, settings=settings)
        folder.begin(out)
        np.save(out / "vectors.npy", vectors, allow_pickle=False)
        folder.write_json(out / "pairs.json", [list(pair) for pair in pairs])
        folder.finish(out, "knn", settings)
        return made

    @classmethod
    def load(cls, out: Path, documents: Sequence[Document], *, device: str = "cpu") -> Self:
        """Opens what `train` wrote."""
        settings = folder.read(out, "knn", KnnSettings)
        try:
            pairs = [(query, doc_id) for query, doc_id in folder.read_json(out / "pairs.json")]
            vectors = np.load(out / "vectors.npy", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise IndexCorruptError(f"{out} is damaged ({error}); train the knn again") from error
        return cls(documents, pairs, _query_encoder(settings, device), vectors, settings=settings)

    @property
    def index_bytes(self) -> int:
        """Size of the training queries' vectors in memory."""
        return self._vectors.nbytes

    def _answer(self, texts: list[str], k: int) -> list[Hits]:
        vectors = self._encoder.encode(texts, batch_size=self._settings.batch_size)
        scores = self._scores(unit(np.ascontiguousarray(vectors, np.float32)))
        return [self._shelf.hits(self._rows, row, k) for row in scores]

    def _scores(self, queries: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        similarity = (queries @ self._vectors.T)[:, self._query]  # (queries, pairs)
        best = np.maximum.reduceat(similarity, self._starts, axis=1)  # (queries, seen documents)
        if self._settings.weighting == "best":
            return best
        # t log sum exp(s / t): the logarithm of the share, up to what is the same for all documents. Relative to each
        # document's best, so that nothing overflows and nothing far away becomes a tie at 0.
        sizes = np.diff([*self._starts, len(self._query)])
        similarity -= np.repeat(best, sizes, axis=1)
        np.exp(similarity / self._settings.temperature, out=similarity)
        total = np.log(np.add.reduceat(similarity, self._starts, axis=1))
        scores: npt.NDArray[np.float32] = best + np.float32(self._settings.temperature) * total
        return scores


def _query_encoder(settings: KnnSettings, device: str) -> QueryEncoder:
    dense = DenseSettings(settings.encoder, max_length=settings.max_length, batch_size=settings.batch_size)
    return QueryEncoder.load(dense, device=device)
