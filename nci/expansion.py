"""Documents and their known queries -> BM25 of both together, and what of it each query would find without itself. No torch.

A query that is appended to its document matches it word for word, which a query of tomorrow does not: read like that in
training, the lexical score would seem better than it is. So a training query is scored against its own document as if it
were not appended there (`OwnScores`); the scores of all other documents, and all of search, read every query.

A word that many training queries have says little about which document is meant, however rare it is in documents ("which",
"total", "listed"): the more have it, the less it counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from nci.analyser import Analyser
from nci.config import LexicalConfig
from nci.lexical import BREAK, LexicalScores
from nci.pairs import SOURCES, Pair, first_of_each

VERSION = 3
"""Part of the key of all that is made with these scores: raise it when equal input begins to give others."""

_FEW = 1000  # queries: that a word is in most of fewer than these says little

Appended = list[tuple[str, int]]
"""Queries and the documents, by number, that they are appended to."""


def appended_queries(
    config: LexicalConfig, *, real: Iterable[tuple[str, int]], generated: Iterable[tuple[str, int]]
) -> Appended:
    """The queries that BM25 reads as part of their documents; one that comes twice is appended twice."""
    return [*(real if config.training else ()), *first_of_each(generated, config.generated)]


def expanded_scores(
    contents: Sequence[str], appended: Appended, config: LexicalConfig, asked: Iterable[str] = ()
) -> tuple[LexicalScores, NDArray[np.float32]]:
    """Scores of the documents, each followed by its queries on lines of their own, and `left_out` of every query.

    Args:
        asked: Training queries, for what a word counts; appended or not.
    """
    analyser = Analyser(runs=True)
    documents = analyser.words(contents)
    queries = analyser.words([text for text, _ in appended])
    for words, (_, document) in zip(queries, appended, strict=True):
        documents[document] += [BREAK, *words]
    lexical = LexicalScores.from_words(documents, analyser=analyser, k1=config.k1, b=config.b, phrases=config.phrases)
    factors = rarity(lexical, list(dict.fromkeys(asked))) ** config.rarity
    rows = [document for _, document in appended]
    return lexical.weighted(factors), left_out(lexical, documents, queries, rows, config, factors)


def rarity(lexical: LexicalScores, asked: Sequence[str]) -> NDArray[np.float64]:
    """(columns,) of each word and phrase, 1 if no query has it and near 0 if all have it, of a thousand or more."""
    counts = np.zeros(lexical.words + lexical.phrases)
    for columns in lexical.columns(asked):
        counts[np.unique(columns)] += 1
    factors: NDArray[np.float64] = 1 - np.log1p(counts) / np.log(2 + max(len(asked), _FEW))
    return factors


def left_out(
    lexical: LexicalScores,
    documents: Sequence[list[str]],
    queries: Sequence[list[str]],
    rows: Sequence[int],
    config: LexicalConfig,
    factors: NDArray[np.floating],
) -> NDArray[np.float32]:
    """(queries,) BM25 of each query for the document in its row, which has its words, had it not been appended there once.

    The document is shorter by the query's terms (words and phrases) and has each of them less often. Document frequencies
    and the mean length stay: they are those that the scores of all other documents were computed with.
    """
    scores = np.zeros(len(queries), np.float32)
    if not len(scores):
        return scores
    frequencies = lexical.document_frequencies()
    idf = np.log1p((len(documents) - frequencies + 0.5) / (frequencies + 0.5))
    idf[lexical.words :] *= config.phrases
    idf *= factors  # what each word and phrase counts
    weights = idf.tolist()
    held_columns, asked_columns = lexical.columns_of(documents), lexical.columns_of(queries)
    lengths = [len(columns) for columns in held_columns]
    mean = sum(lengths) / max(1, len(lengths)) or 1.0
    for row, numbers in groupby(sorted(range(len(rows)), key=rows.__getitem__), key=rows.__getitem__):
        held = Counter(held_columns[row].tolist())
        for number in numbers:
            query = asked_columns[number].tolist()
            damping = config.k1 * (1 - config.b + config.b * (lengths[row] - len(query)) / mean)
            scores[number] = sum(
                times * weights[term] * left / (left + damping)
                for term, times in Counter(query).items()
                if (left := held[term] - times) > 0
            )
    return scores


class OwnScores:
    """The lexical score of each pair's own document where the pair's query is appended to it, else NaN.

    Args:
        scores: What `expanded_scores` gave for these queries.
    """

    def __init__(self, appended: Appended, scores: NDArray[np.float32]) -> None:
        self.scores = dict(zip(appended, scores.tolist(), strict=True))

    def __call__(self, pairs: Sequence[Pair]) -> NDArray[np.float32]:
        piece = SOURCES.index("span")  # a piece of the document is no query, even if it reads like one
        found = (
            np.nan if pair.source == piece else self.scores.get((pair.text, pair.document), np.nan) for pair in pairs
        )
        return np.fromiter(found, np.float32, len(pairs))
