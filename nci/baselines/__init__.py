"""Other retrievers behind the same `search` as the index, so that every comparison runs on the same documents.

Each baseline is one file and a class made from documents. What they share is here: the contract, and how scores become
hits. Knows nothing of models or files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt

from nci.errors import ConfigError, DataError
from nci.records import Document, Hit, Hits


class Searcher(Protocol):
    """Whatever answers queries: the index itself, or a baseline.

    `withheld`: What it found first, before it was made of everything, of queries that were withheld; none where it fits nothing.
    """

    withheld: float | None

    @overload
    def search(self, queries: str, k: int = 10) -> Hits: ...
    @overload
    def search(self, queries: list[str], k: int = 10) -> list[Hits]: ...


class Baseline(ABC):
    """A searcher that answers texts in batches; one query alone is a batch of one."""

    queries_at_once = 256
    withheld: float | None = None

    @overload
    def search(self, queries: str, k: int = 10) -> Hits: ...
    @overload
    def search(self, queries: list[str], k: int = 10) -> list[Hits]: ...
    def search(self, queries: str | list[str], k: int = 10) -> Hits | list[Hits]:
        """The best k documents for one query, or for each of a list of queries; fewer where fewer are found."""
        check_k(k)
        asked = [queries] if isinstance(queries, str) else list(queries)
        found: list[Hits] = []
        for start in range(0, len(asked), self.queries_at_once):
            found += self._answer(asked[start : start + self.queries_at_once], k)
        return found[0] if isinstance(queries, str) else found

    @abstractmethod
    def _answer(self, texts: list[str], k: int) -> list[Hits]:
        """The best k documents of each text."""

    def finds(self, pairs: Sequence[tuple[str, str]], k: int) -> npt.NDArray[np.bool_]:
        """Whether each text finds its doc_id among its best k."""
        check_k(k)
        found = [np.zeros(0, bool)]
        for start in range(0, len(pairs), self.queries_at_once):
            block = pairs[start : start + self.queries_at_once]
            found.append(self._finds([text for text, _ in block], [doc_id for _, doc_id in block], k))
        return np.concatenate(found)

    def _finds(self, texts: list[str], doc_ids: list[str], k: int) -> npt.NDArray[np.bool_]:
        pairs = zip(self._answer(texts, k), doc_ids, strict=True)
        return np.array([any(hit.doc_id == doc_id for hit in hits) for hits, doc_id in pairs])


class Shelf:
    """The documents of a baseline, in the order of its score rows."""

    def __init__(self, documents: Sequence[Document], *, source: str) -> None:
        self.documents = list(documents)
        self.source = source
        doc_ids = [document.doc_id for document in self.documents]
        self._rows = {doc_id: row for row, doc_id in enumerate(doc_ids)}
        if len(self._rows) < len(doc_ids):
            twice = Counter(doc_ids).most_common(1)[0][0]
            raise DataError(f"doc_id {twice!r} occurs more than once; every document needs its own")
        # (documents,) position of each row in the order of doc_ids: the tie-break
        self._position = np.empty(len(doc_ids), np.int64)
        self._position[sorted(range(len(doc_ids)), key=doc_ids.__getitem__)] = np.arange(len(doc_ids))

    def __len__(self) -> int:
        return len(self.documents)

    def hits(
        self, rows: npt.NDArray[Any], scores: npt.NDArray[np.float32], k: int, *, scored: int | None = None
    ) -> Hits:
        """The best k of some rows with their scores, ties in the order of doc_ids.

        Args:
            rows: Numbers of documents, in any order.
            scores: Their scores.
            k: How many hits; fewer come back where there are fewer rows.
            scored: How many documents were scored, where these rows are not all of them.
        """
        scored = len(rows) if scored is None else scored
        if k < len(rows):
            threshold = np.partition(scores, len(scores) - k)[len(scores) - k]
            candidates = scores >= threshold  # everything tied with the last place is still in
            rows, scores = rows[candidates], scores[candidates]
        order = np.lexsort((self._position[rows], -scores))[:k]
        found = [(float(scores[i]), self.documents[rows[i]]) for i in order]
        hits = (
            Hit(rank, document.doc_id, score, document.title, document.text, source=self.source)
            for rank, (score, document) in enumerate(found, 1)
        )
        return Hits(hits, scored)

    def among_best(self, scores: npt.NDArray[np.float32], doc_ids: Sequence[str], k: int) -> npt.NDArray[np.bool_]:
        """Whether each doc_id is among the best k of its row of scores (queries, documents), -inf being no hit."""
        rows = np.array([self._rows.get(doc_id, -1) for doc_id in doc_ids])
        own = np.take_along_axis(scores, np.maximum(rows, 0)[:, None], axis=1)  # (queries, 1)
        earlier = self._position < self._position[np.maximum(rows, 0)][:, None]
        before = ((scores > own) | ((scores == own) & earlier)).sum(axis=1)
        found: npt.NDArray[np.bool_] = (rows >= 0) & (own[:, 0] > -np.inf) & (before < k)
        return found


def check_k(k: int) -> None:
    """Refuses a number of results nobody can mean."""
    if k < 1:
        raise ConfigError(f"-k is the number of results and at least 1, not {k}")
