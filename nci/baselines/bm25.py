"""BM25: documents in, lexical search out. No training, no torch.

The scores are those of bm25s, or those of rank_bm25, which the paper used; documents that share no word with the query
are no hits, as in Lucene.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from nci.baselines import Baseline, Shelf
from nci.baselines.okapi import okapi_scores
from nci.lexical import LexicalScores
from nci.records import Document, Hits

Extra = Mapping[str, Sequence[str]]
"""Queries known to ask for a document, by doc_id: training queries or generated ones."""


class BM25(Baseline):
    """Lexical search over title and text.

    Args:
        documents: What to search.
        k1: How soon repeated words stop counting.
        b: How much long documents are held back.
        stemmer: A Snowball algorithm by name, or None.
        stopwords: "en", or None to keep every word.
        runs: Every run of letters and digits is a word, see `nci.analyser.Analyser`.
        extra: Queries known to ask for a document, by doc_id: appended to its text.
        name: What hits say they come from.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        *,
        k1: float = 0.9,
        b: float = 0.4,
        stemmer: str | None = "english",
        stopwords: Literal["en"] | None = "en",
        runs: bool = False,
        extra: Extra | None = None,
        name: str = "bm25",
    ) -> None:
        self._shelf = Shelf(documents, source=name)
        texts = _texts(self._shelf, extra)
        self._lexical = LexicalScores.build(texts, k1=k1, b=b, stemmer=stemmer, stopwords=stopwords, runs=runs)

    @classmethod
    def rank_bm25(
        cls,
        documents: Sequence[Document],
        *,
        k1: float = 1.5,
        b: float = 0.75,
        epsilon: float = 0.25,
        extra: Extra | None = None,
        name: str = "bm25-okapi",
    ) -> Self:
        """The paper's BM25: scores of rank_bm25's BM25Okapi with its defaults, words in lower case by white space.

        `epsilon` is the share of the mean idf that words in more than half of the documents get.
        """
        made = cls.__new__(cls)
        made._shelf = Shelf(documents, source=name)
        made._lexical = okapi_scores(_texts(made._shelf, extra), k1=k1, b=b, epsilon=epsilon)
        return made

    @property
    def index_bytes(self) -> int:
        """Size of the postings in memory."""
        return sum(array.nbytes for array in self._lexical.postings)

    def _answer(self, texts: list[str], k: int) -> list[Hits]:
        return [self._search_one(text, k) for text in texts]

    def _finds(self, texts: list[str], doc_ids: list[str], k: int) -> npt.NDArray[np.bool_]:
        scores = self._lexical.scores(texts)  # (queries, documents)
        scores[scores == 0] = -np.inf
        return self._shelf.among_best(scores, doc_ids, k)

    def _search_one(self, query: str, k: int) -> Hits:
        scores = self._lexical.scores([query])[0]  # (documents,)
        rows = np.flatnonzero(scores)
        return self._shelf.hits(rows, scores[rows], k)


def _texts(shelf: Shelf, extra: Extra | None) -> list[str]:
    return ["\n".join([each.content, *(extra or {}).get(each.doc_id, [])]) for each in shelf.documents]
