"""Texts in, BM25 scores of every document for a query out; no torch, and at search time numpy and PyStemmer only.

bm25s computes the weights once, when the scores are built. They are kept as one sparse column of documents per word, in
plain arrays, so that a reader needs neither bm25s (which imports numba and jax where it finds them) nor pickle. Where
asked for, phrases of two neighbouring words have columns of their own, behind those of the words.
Knows nothing of doc_ids: documents are row numbers here, in the order of the texts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from nci.analyser import Analyser
from nci.errors import ConfigError, IndexCorruptError, MissingPackageError

FORMAT = 2
BREAK = ""  # stands between words that are no neighbours


def check_parameters(k1: float, b: float) -> None:
    """Refuses parameters that BM25 cannot have."""
    if k1 < 0 or not 0 <= b <= 1:
        raise ConfigError(f"BM25 needs k1 >= 0 and b between 0 and 1, not k1={k1}, b={b}")


class LexicalScores:
    """BM25 weights as a sparse (documents, words and phrases) matrix, stored by column.

    Make one with `build`, `from_words` or `load`; the constructor takes the parts as they are, `pairs` as `_pairs` gives them.
    """

    def __init__(
        self,
        *,
        analyser: Analyser,
        vocabulary: Sequence[str],
        data: npt.NDArray[np.float32],
        indices: npt.NDArray[np.int32],
        indptr: npt.NDArray[np.int64],
        documents: int,
        pairs: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.analyser = analyser
        self.documents = documents
        self._columns = {word: column for column, word in enumerate(vocabulary)}
        self._pairs = np.zeros(0, np.int64) if pairs is None else pairs  # (phrases,) ascending
        self._data = data  # (postings,)
        self._indices = indices  # (postings,) rows, ascending and distinct within a column
        self._indptr = indptr  # (words + phrases + 1,)

    @classmethod
    def build(
        cls,
        texts: Sequence[str],
        *,
        k1: float = 0.9,
        b: float = 0.4,
        stemmer: str | None = "english",
        stopwords: Literal["en"] | None = "en",
        runs: bool = False,
    ) -> LexicalScores:
        """Computes the weights (Lucene's variant of BM25); the same texts give the same arrays, byte for byte."""
        analyser = Analyser(stemmer, stopwords, runs)
        return cls.from_words(analyser.words(texts), analyser=analyser, k1=k1, b=b)

    @classmethod
    def from_words(
        cls, texts: Sequence[list[str]], *, analyser: Analyser, k1: float, b: float, phrases: float = 0.0
    ) -> LexicalScores:
        """The same from texts that the analyser has read; no phrase goes across a BREAK.

        Args:
            phrases: What a phrase counts, where a word counts 1; 0 leaves them out.
        """
        check_parameters(k1, b)
        columns: dict[str, int] = {}
        words = (columns.setdefault(word, len(columns)) if word else -1 for word in chain.from_iterable(texts))
        row, owners = _flat(words, texts)
        keys, first = _pairs(row, len(columns), owners) if phrases else (np.zeros(0, np.int64), np.zeros(0, np.int64))
        pairs, places = np.unique(keys, return_inverse=True)
        if not columns:  # bm25s divides by the mean length
            data, indices = np.zeros(0, np.float32), np.zeros(0, np.int32)
            indptr = np.zeros(1, np.int64)
        else:
            # Where jax is installed bm25s starts it, and jax would take most of a GPU's memory for itself.
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
            try:
                import bm25s  # type: ignore[import-untyped]
            except ImportError as error:
                raise MissingPackageError("lexical scores need bm25s: pip install bm25s PyStemmer") from error
            ids = _by_text(row, owners, len(columns) + places, owners[first], len(texts))
            model = bm25s.BM25(k1=k1, b=b, method="lucene")
            names = dict(enumerate(range(len(columns) + len(pairs))))  # bm25s counts them, and reads them nowhere
            model.index(([each.tolist() for each in ids], names), create_empty_token=False, show_progress=False)
            data = model.scores["data"].astype(np.float32, copy=False)
            indices = model.scores["indices"].astype(np.int32, copy=False)
            indptr = model.scores["indptr"].astype(np.int64, copy=False)
            data[indptr[len(columns)] :] *= phrases
        return cls(
            analyser=analyser,
            vocabulary=list(columns),
            data=data,
            indices=indices,
            indptr=indptr,
            documents=len(texts),
            pairs=pairs,
        )

    def save(self, folder: Path | str) -> None:
        """Writes the parts into the folder; making them durable is the business of whoever publishes it."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        parts: dict[str, npt.NDArray[Any]] = {
            "data": self._data,
            "indices": self._indices,
            "indptr": self._indptr,
            "pairs": self._pairs,
        }
        for name, array in parts.items():
            np.save(folder / f"{name}.npy", array, allow_pickle=False)
        vocabulary = json.dumps(list(self._columns), ensure_ascii=False)
        (folder / "vocabulary.json").write_text(vocabulary, encoding="utf-8")
        settings = {"format": FORMAT, "documents": self.documents, "analyser": asdict(self.analyser)}
        (folder / "lexical.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path | str, *, mmap: bool = True) -> LexicalScores:
        """Opens what `save` wrote, by default without reading the weights into memory."""
        folder = Path(folder)
        try:
            settings = json.loads((folder / "lexical.json").read_text(encoding="utf-8"))
            vocabulary = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
            if settings["format"] != FORMAT:
                raise ValueError(f"format {settings['format']} where {FORMAT} is read")
            # A plain view of the mapping: slicing np.memmap itself costs microseconds per word.
            data, indices, indptr, pairs = (
                np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r" if mmap else None, allow_pickle=False))
                for name in ("data", "indices", "indptr", "pairs")
            )
            documents = int(settings["documents"])
            whole = len(indptr) == len(vocabulary) + len(pairs) + 1 and len(data) == len(indices) == indptr[-1]
            inside = not len(indices) or 0 <= indices.min() <= indices.max() < documents
            if not (
                whole and inside and indptr[0] == 0 and (np.diff(indptr) >= 0).all() and (np.diff(pairs) > 0).all()
            ):
                raise ValueError("its arrays do not fit together")
            analyser = Analyser(**settings["analyser"])
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            if isinstance(error, ConfigError | MissingPackageError):
                raise
            raise IndexCorruptError(
                f"{folder} holds no usable lexical scores ({error}); expected what LexicalScores.save wrote: rebuild"
            ) from error
        return cls(
            analyser=analyser,
            vocabulary=vocabulary,
            data=data,
            indices=indices,
            indptr=indptr,
            documents=documents,
            pairs=pairs,
        )

    @property
    def postings(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Weights, documents, and where the postings of each word begin."""
        return self._data, self._indices, self._indptr

    @property
    def words(self) -> int:
        """How many columns belong to words; those of phrases come behind."""
        return len(self._columns)

    @property
    def phrases(self) -> int:
        """How many columns belong to phrases."""
        return len(self._pairs)

    def document_frequencies(self) -> npt.NDArray[np.int64]:
        """(columns,) how many documents hold each word and phrase."""
        return np.diff(self._indptr)

    def columns(self, queries: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """The known words of each query as numbers of columns, then its known phrases; what is asked twice comes twice."""
        return self.columns_of(self.analyser.words(queries))

    def columns_of(self, texts: Sequence[Sequence[str]]) -> list[npt.NDArray[np.int32]]:
        """The same of texts that the analyser has read; a word that is not known parts its neighbours."""
        known = self._columns
        row, owners = _flat((known.get(word, -1) for word in chain.from_iterable(texts)), texts)
        if not len(self._pairs):
            return _by_text(row, owners, row[:0], owners[:0], len(texts))
        keys, first = _pairs(row, len(known), owners)
        order, places = keys.argsort(), np.empty_like(keys)
        places[order] = self._pairs.searchsorted(keys[order])  # in order the search stays in one place of a long list
        places[places == len(self._pairs)] = 0
        there = self._pairs[places] == keys
        return _by_text(row, owners, len(known) + places[there], owners[first[there]], len(texts))

    def count_postings(self, words: npt.NDArray[np.integer]) -> int:
        """How many documents hold each of some words, added up."""
        return int((self._indptr[words + 1] - self._indptr[words]).sum())

    def score_columns(self, queries: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.float32]:
        """BM25 of every document for queries that are given as columns."""
        scores = np.zeros((len(queries), self.documents), np.float32)  # (queries, documents)
        for row, columns in zip(scores, queries, strict=True):
            for column in columns:
                start, end = self._indptr[column], self._indptr[column + 1]
                row[self._indices[start:end]] += self._data[start:end]
        return scores

    def normalised_columns(
        self,
        queries: Sequence[npt.NDArray[np.int32]],
        *,
        own: npt.NDArray[np.float32] | None = None,
        documents: npt.NDArray[np.integer] | None = None,
    ) -> npt.NDArray[np.float32]:
        """The same divided by each query's highest: 1 for its best document, 0 where no word matches.

        Args:
            own: (queries,) the score that one document of each query has instead, NaN to leave it.
            documents: (queries,) which document that is.
        """
        scores = self.score_columns(queries)
        if own is not None and documents is not None:
            (rows,) = np.nonzero(~np.isnan(own))
            scores[rows, documents[rows]] = own[rows]
        highest = scores.max(axis=1, initial=0.0, keepdims=True)  # (queries, 1)
        np.divide(scores, highest, out=scores, where=highest > 0)
        return scores

    def scores(self, queries: Sequence[str]) -> npt.NDArray[np.float32]:
        """BM25 of every document for every query."""
        return self.score_columns(self.columns(queries))

    def normalised(self, queries: Sequence[str]) -> npt.NDArray[np.float32]:
        """BM25 of every document, as a share of each query's highest."""
        return self.normalised_columns(self.columns(queries))

    def weighted(self, factors: npt.NDArray[np.floating]) -> LexicalScores:
        """The same scores with each word and phrase counting so many times what it does: (columns,) factors."""
        data = self._data * np.repeat(factors, np.diff(self._indptr))
        return self._with(data=data.astype(np.float32))

    def renumbered(self, row_of: npt.NDArray[np.integer]) -> LexicalScores:
        """The same scores with document i in row row_of[i]."""
        word = np.repeat(np.arange(len(self._indptr) - 1), np.diff(self._indptr))
        rows = np.asarray(row_of)[self._indices]
        order = np.lexsort((rows, word))
        return self._with(data=np.asarray(self._data)[order], indices=rows[order].astype(np.int32))

    def _with(self, **changed: npt.NDArray[Any]) -> LexicalScores:
        parts: dict[str, Any] = {"data": self._data, "indices": self._indices, "indptr": np.asarray(self._indptr)}
        return LexicalScores(
            analyser=self.analyser,
            vocabulary=list(self._columns),
            documents=self.documents,
            pairs=self._pairs,
            **(parts | changed),
        )


def _flat(
    columns: Iterable[int], texts: Sequence[Sequence[str]]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(words,) the columns of all words of some texts, and the text that each is of."""
    sizes = [len(words) for words in texts]
    return np.fromiter(columns, np.int64, sum(sizes)), np.repeat(np.arange(len(texts)), sizes)


def _by_text(
    words: npt.NDArray[np.int64],
    owners: npt.NDArray[np.int64],
    phrases: npt.NDArray[np.int64],
    phrase_owners: npt.NDArray[np.int64],
    texts: int,
) -> list[npt.NDArray[np.int32]]:
    """Of each text the columns of its words, without those that have none, then those of its phrases."""
    there = words >= 0
    both, whose = np.concatenate([words[there], phrases]), np.concatenate([owners[there], phrase_owners])
    columns = both[whose.argsort(kind="stable")].astype(np.int32)
    ends = np.bincount(whose, minlength=texts).cumsum().tolist()
    return [columns[start:end] for start, end in pairwise([0, *ends])]


def _pairs(
    row: npt.NDArray[np.int64], words: int, owners: npt.NDArray[np.integer]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Neighbours as one number each, in order, and where the first of each stands.

    Args:
        row: Columns of the words of some texts, -1 where there is none.
        words: How many columns there are.
        owners: The text that each word is of.

    >>> keys, first = _pairs(np.array([2, 0, -1, 1, 1, 3]), 10, np.array([0, 0, 0, 0, 0, 1]))
    >>> keys.tolist(), first.tolist()
    ([20, 11], [0, 3])
    """
    near = (row[:-1] >= 0) & (row[1:] >= 0) & (owners[:-1] == owners[1:])
    (first,) = np.nonzero(near)
    return row[first] * words + row[first + 1], first
