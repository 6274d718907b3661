"""BM25: documents in, lexical search out. No training, no torch.

The scores are those of bm25s; documents that share no word with the query are no hits, as in Lucene.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, overload

import numpy as np

from nci.baselines import Shelf, check_k
from nci.lexical import LexicalScores
from nci.records import Document, Hit


class BM25:
    """Lexical search over title and text.

    Args:
        documents: What to search.
        k1: How soon repeated words stop counting.
        b: How much long documents are held back.
        stemmer: A Snowball algorithm by name, or None.
        stopwords: "en", or None to keep every word.
        extra: Queries known to ask for a document, by doc_id: appended to its text.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        *,
        k1: float = 0.9,
        b: float = 0.4,
        stemmer: str | None = "english",
        stopwords: Literal["en"] | None = "en",
        extra: Mapping[str, list[str]] | None = None,
    ) -> None:
        self._shelf = Shelf(documents, source="bm25")
        texts = ["\n".join([each.content, *(extra or {}).get(each.doc_id, [])]) for each in self._shelf.documents]
        self._lexical = LexicalScores.build(texts, k1=k1, b=b, stemmer=stemmer, stopwords=stopwords)

    @overload
    def search(self, queries: str, k: int = 10) -> list[Hit]: ...
    @overload
    def search(self, queries: list[str], k: int = 10) -> list[list[Hit]]: ...
    def search(self, queries: str | list[str], k: int = 10) -> list[Hit] | list[list[Hit]]:
        """The best k documents for one query, or for each of a list of queries."""
        check_k(k)
        if isinstance(queries, str):
            return self._search_one(queries, k)
        return [self._search_one(query, k) for query in queries]

    def _search_one(self, query: str, k: int) -> list[Hit]:
        scores = self._lexical.scores([query])[0]  # (documents,)
        rows = np.flatnonzero(scores)
        return self._shelf.hits(rows, scores[rows], k)
