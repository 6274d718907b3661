"""BM25 as the Python package rank_bm25 computes it (its class BM25Okapi): texts in, scores out. numpy only, no torch.

This is the BM25 of the NCI paper, and a weak one: words are what white space separates, in lower case, so "what?" and
"what" differ, nothing is stemmed, and no word is too common to count. Kept to compare with the paper's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nci.analyser import Analyser
from nci.lexical import LexicalScores, check_parameters


@dataclass(frozen=True)
class Whitespace(Analyser):
    """Words are what white space separates, in lower case."""

    stemmer: None = None
    stopwords: None = None

    def words(self, texts: Sequence[str]) -> list[list[str]]:
        """The words of each text, in order, repeated as often as they occur."""
        return [text.lower().split() for text in texts]


def okapi_scores(texts: Sequence[str], *, k1: float = 1.5, b: float = 0.75, epsilon: float = 0.25) -> LexicalScores:
    """Weights of every word in every text: idf(word) * f (k1 + 1) / (f + k1 (1 - b + b length / mean length)).

    Args:
        texts: What to search.
        k1: How soon repeated words stop counting.
        b: How much long texts are held back.
        epsilon: idf is log((N - n + 1/2) / (n + 1/2)); where that is negative, because a word is in more than half of
            the texts, this share of the mean idf of all words stands in its place.
    """
    check_parameters(k1, b)
    analyser = Whitespace()
    columns: dict[str, int] = {}
    ids = [[columns.setdefault(word, len(columns)) for word in words] for words in analyser.words(texts)]
    lengths = np.array([len(row) for row in ids], np.float64)  # (texts,)
    word = np.concatenate([np.array(row, np.int64) for row in ids]) if ids else np.zeros(0, np.int64)
    text = np.repeat(np.arange(len(ids)), lengths.astype(np.int64))
    # One number per (word, text), so that unique() sorts by word, then text: the order of the columns.
    places, counts = np.unique(word * max(len(ids), 1) + text, return_counts=True)  # (postings,)
    word, text = np.divmod(places, max(len(ids), 1))
    held = np.bincount(word, minlength=len(columns))  # (words,) texts that hold each word
    idf = np.log(len(ids) - held + 0.5) - np.log(held + 0.5)
    if len(idf):
        idf = np.where(idf < 0, epsilon * idf.mean(), idf)
    relative = lengths / max(float(lengths.mean()), 1e-9) if len(lengths) else lengths
    data = idf[word] * counts * (k1 + 1) / (counts + k1 * (1 - b + b * relative[text]))
    return LexicalScores(
        analyser=analyser,
        vocabulary=list(columns),
        data=data.astype(np.float32),
        indices=text.astype(np.int32),
        indptr=np.concatenate([[0], np.cumsum(held)]).astype(np.int64),
        documents=len(ids),
    )
