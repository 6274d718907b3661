"""An index of every n-gram of a corpus: rows of token ids in; continuations of n-grams, and documents by n-grams, out.

A suffix array over all tokens. An n-gram is an interval of it: the suffixes that begin with the n-gram. One more token
narrows the interval, so that a decoder can be held to what the corpus says, token by token. No n-gram crosses the end of
a document. Knows nothing of text, tokenizers or models; no torch.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nci.errors import DataError, IndexCorruptError

Ints = NDArray[np.integer[Any]]

_END = 0  # closes every document; tokens are stored one higher
_LARGE = 1024  # occurrences from which the continuations of an n-gram are worth keeping
_KEPT = 1 << 23  # continuations kept in all: 24 bytes each


class Intervals(NamedTuple):
    """N-grams of one length, a row each: those of row i are the suffixes low[i] to high[i] of the suffix array."""

    low: NDArray[np.int64]
    high: NDArray[np.int64]
    depth: int

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often each n-gram occurs in the corpus."""
        return self.high - self.low

    def take(self, rows: Ints) -> Intervals:
        """Some of the rows, in the order given."""
        return Intervals(self.low[rows], self.high[rows], self.depth)


class Continuations(NamedTuple):
    """Every token that follows some n-grams somewhere: all of row 0 first, tokens of a row in order.

    `children` are the n-grams with that token added, so that `children.counts` says how often it follows.
    """

    row: NDArray[np.int64]
    token: NDArray[np.int64]
    children: Intervals


class NgramIndex:
    """The n-grams of a corpus.

    Args:
        tokens: All documents one after the other, each token one higher than given, each document closed by 0.
        suffixes: The suffix array of `tokens`.
        ends: Where the closing 0 of each document is.
    """

    def __init__(self, tokens: Ints, suffixes: Ints, ends: Ints) -> None:
        if not len(tokens) == len(suffixes) or not len(ends) or ends[-1] != len(tokens) - 1:
            raise IndexCorruptError("the arrays of the n-gram index do not belong together; build it again")
        self.tokens = tokens  # (tokens + documents,)
        self.suffixes = suffixes  # (tokens + documents,)
        self.ends = np.asarray(ends)  # (documents,)
        self._large: OrderedDict[tuple[int, int, int], tuple[NDArray[np.int64], ...]] = OrderedDict()
        self._kept = 0
        self._lock = threading.Lock()

    @classmethod
    def build(cls, documents: Iterable[Sequence[int]]) -> NgramIndex:
        """The index of some documents, each a row of token ids."""
        rows = [np.asarray(row, np.int32) for row in documents]
        if not rows:
            raise DataError("an n-gram index needs at least one document")
        ends = np.cumsum([len(row) + 1 for row in rows]) - 1
        tokens = np.full(ends[-1] + 1, _END, np.int32)
        tokens[np.delete(np.arange(len(tokens)), ends)] = np.concatenate(rows) + 1
        if tokens.min() < 0 or (tokens == _END).sum() != len(rows):
            raise DataError("token ids are 0 or more")
        return cls(tokens, suffix_array(tokens), ends)

    def save(self, folder: Path) -> None:
        """Three .npy files."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("tokens", "suffixes", "ends"):
            np.save(folder / f"{name}.npy", getattr(self, name))

    @classmethod
    def load(cls, folder: Path) -> NgramIndex:
        """What `save` wrote; pages are read from the disk when they are needed."""
        try:
            return cls(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("tokens", "suffixes", "ends")))
        except (OSError, ValueError) as error:
            raise IndexCorruptError(f"{folder} holds no n-gram index ({error}); build it again") from error

    def __len__(self) -> int:
        """Documents."""
        return len(self.ends)

    @property
    def total(self) -> int:
        """Tokens of all documents."""
        return len(self.tokens) - len(self.ends)

    def root(self, rows: int = 1) -> Intervals:
        """The empty n-gram, once per row; it occurs before every token."""
        # the closing zeros sort first
        return Intervals(np.full(rows, len(self.ends)), np.full(rows, len(self.tokens)), 0)

    def refine(self, intervals: Intervals, token: int | Ints) -> Intervals:
        """The n-grams with a token added, one for all rows or one per row; an interval is empty where there is none."""
        wanted = np.broadcast_to(np.asarray(token, np.int64) + 1, intervals.low.shape)
        low, high = (self._first(intervals, wanted + more) for more in (0, 1))
        possible = wanted != _END  # -1 would ask for the end of a document
        return Intervals(low, np.where(possible, high, low), intervals.depth + 1)

    def find(self, ngram: Sequence[int]) -> Intervals:
        """One n-gram, in a single row."""
        found = self.root()
        for token in ngram:
            found = self.refine(found, token)
        return found

    def count(self, ngram: Sequence[int]) -> int:
        """How often an n-gram occurs."""
        return int(self.find(ngram).counts[0])

    def continuations(self, intervals: Intervals) -> Continuations:
        """All that follows each of some n-grams. What follows frequent ones is kept for the next time."""
        sizes, depth = intervals.counts, intervals.depth
        parts = [
            (np.full(len(token), row), token, low, high)
            for row in np.flatnonzero(sizes >= _LARGE)
            for token, low, high in [self._frequent(int(intervals.low[row]), int(intervals.high[row]), depth)]
        ]
        small = np.flatnonzero((sizes > 0) & (sizes < _LARGE))
        # all suffixes of all small intervals in one row, so that numpy is called once and not once per n-gram
        places = _ranges(intervals.low[small], sizes[small])
        parts.append(self._runs(places, np.repeat(small, sizes[small]), depth))
        row, token, low, high = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        order = np.argsort(row, kind="stable")
        return Continuations(row[order], token[order], Intervals(low[order], high[order], depth + 1))

    def positions(self, low: int, high: int) -> NDArray[np.int64]:
        """Where in `tokens` an n-gram begins, in no order."""
        return self.suffixes[low:high].astype(np.int64)

    def documents_at(self, positions: Ints) -> NDArray[np.int64]:
        """The numbers of the documents that positions in `tokens` belong to."""
        return np.searchsorted(self.ends, positions)

    def documents(self, low: int, high: int) -> NDArray[np.int64]:
        """The numbers of the documents that hold an n-gram, each once, in order."""
        return np.unique(self.documents_at(self.positions(low, high)))

    def _first(self, intervals: Intervals, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        """Per row the first suffix of the interval whose next token is not below the wanted one, by bisection."""
        low, high = intervals.low.copy(), intervals.high.copy()
        while (open_ := np.flatnonzero(low < high)).size:
            middle = (low[open_] + high[open_]) // 2
            below = self.tokens[self.suffixes[middle] + intervals.depth] < wanted[open_]
            low[open_[below]] = middle[below] + 1
            high[open_[~below]] = middle[~below]
        return low

    def _frequent(self, low: int, high: int, depth: int) -> tuple[NDArray[np.int64], ...]:
        key = (low, high, depth)
        with self._lock:
            if key in self._large:
                self._large.move_to_end(key)
                return self._large[key]
        found = self._runs(np.arange(low, high), np.zeros(high - low, np.int64), depth)[1:]
        with self._lock:
            if key not in self._large:
                self._large[key] = found
                self._kept += len(found[0])
            while self._kept > _KEPT and len(self._large) > 1:
                self._kept -= len(self._large.popitem(last=False)[1][0])
        return found

    def _runs(
        self, places: NDArray[np.int64], rows: NDArray[np.int64], depth: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Row, token, low and high of each run of equal next tokens among places of the suffix array, ends left out."""
        following = self.tokens[self.suffixes[places] + depth].astype(np.int64)
        new = np.ones(len(places), bool)
        new[1:] = (following[1:] != following[:-1]) | (rows[1:] != rows[:-1])
        first = np.flatnonzero(new)
        lengths = np.diff(first, append=len(places))
        real = following[first] != _END
        first, lengths = first[real], lengths[real]
        return rows[first], following[first] - 1, places[first], places[first] + lengths


class Ngram(NamedTuple):
    """An n-gram of the corpus that a model gave, with its interval; `log_p` is the model's log P(n-gram | query)."""

    tokens: tuple[int, ...]
    log_p: float
    low: int
    high: int


def ngram_weights(log_p: NDArray[np.float64], counts: Ints, total: int) -> NDArray[np.float64]:
    """How much more likely n-grams are for the query than in the corpus: max(0, log of the ratio of the odds).

    Args:
        log_p: log P(n | q).
        counts: How often each n-gram occurs; P(n) is its share of `total`.
        total: Tokens of the corpus.
    """
    given = np.clip(np.exp(log_p), np.finfo(float).tiny, 1 - 1e-9)  # neither odds may be infinite
    alone = np.clip(counts / total, np.finfo(float).tiny, 1 - 1e-9)
    ratio: NDArray[np.float64] = np.log(given) - np.log1p(-given) - np.log(alone) + np.log1p(-alone)
    return np.maximum(ratio, 0)


def score_documents(
    index: NgramIndex, ngrams: Sequence[Ngram], *, power: float, repetition: float, max_occurrences: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The documents that hold some of the n-grams, and the sum of w(n, q)^power cover(n) over those that count in each.

    An n-gram counts in a document where it occurs at least once clear of every n-gram of more weight that counts there.
    cover(n) = 1 - repetition + repetition x (share of its distinct tokens that no n-gram of more weight has brought).

    Args:
        ngrams: All different.
        power: Above 1, few strong n-grams are worth more than many weak ones.
        repetition: 0 counts every token again, 1 only what is new.
        max_occurrences: N-grams that occur more often than this say nothing and cost much; left out.
    """
    if not ngrams:
        return np.empty(0, np.int64), np.empty(0)
    counts = np.array([ngram.high - ngram.low for ngram in ngrams], np.int64)
    weights = ngram_weights(np.array([ngram.log_p for ngram in ngrams]), counts, index.total)
    columns = {token: column for column, token in enumerate({token for ngram in ngrams for token in ngram.tokens})}
    # Zeroed memory that nobody writes to costs nothing, so that these may be as large as the corpus.
    taken = np.zeros(len(index.tokens), bool)
    brought = np.zeros((len(index), len(columns)), bool)  # (documents, tokens of n-grams)
    scores = np.zeros(len(index))
    for number in np.argsort(-weights, kind="stable"):
        if weights[number] <= 0 or counts[number] > max_occurrences:
            continue
        ngram = ngrams[number]
        places = index.positions(ngram.low, ngram.high)[:, None] + np.arange(len(ngram.tokens))  # (occurrences, n)
        holders = index.documents_at(places[:, 0])
        clear = ~taken[places].any(axis=1)
        documents = np.unique(holders[clear])
        cells = np.ix_(documents, np.array(sorted({columns[token] for token in ngram.tokens})))
        cover = 1 - repetition * brought[cells].mean(axis=1)
        scores[documents] += weights[number] ** power * cover
        taken[places[np.isin(holders, documents)]] = True
        brought[cells] = True
    found = np.flatnonzero(scores)
    return found, scores[found]


def suffix_array(tokens: NDArray[np.int32]) -> Ints:
    """Where the suffixes of `tokens` begin, in the order of the suffixes; by pydivsufsort where it is installed."""
    try:
        from pydivsufsort import divsufsort  # type: ignore[import-untyped]
    except ImportError:
        found = sort_by_doubling(tokens)
    else:
        found = divsufsort(tokens)
    narrow = len(tokens) <= np.iinfo(np.int32).max
    return found.astype(np.int32 if narrow else np.int64, copy=False)


def sort_by_doubling(tokens: NDArray[np.int32]) -> NDArray[np.int64]:
    """The suffix array with numpy alone: sorted by 1 token, then by 2, 4, 8, ... until no two suffixes are equal."""
    rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64)
    width = 1
    while True:
        # a suffix that has ended sorts before all others
        second = np.concatenate([rank[width:] + 1, np.zeros(min(width, len(rank)), np.int64)])
        key = rank * (len(rank) + 1) + second
        order = np.argsort(key, kind="stable")
        new = np.diff(key[order], prepend=-1) != 0
        rank[order] = np.cumsum(new) - 1
        if new.all():
            return order
        width *= 2


def _ranges(low: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """low[0], low[0] + 1, ... (sizes[0] of them), low[1], ..."""
    before = np.cumsum(sizes) - sizes
    return np.repeat(low - before, sizes) + np.arange(int(sizes.sum()))
