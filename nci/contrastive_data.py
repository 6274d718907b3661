"""Texts and pairs as a contrastive training reads them: passages, queries and batches of word pieces.

A document that any pair gives to a query's text is relevant to it, and never its negative. Knows nothing of weights.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nci.contrast_settings import ContrastSettings
from nci.errors import DataError
from nci.records import Document

if TYPE_CHECKING:
    from nci.encoders import TextEncoder

Rows = NDArray[np.int64]

_WINDOW = 8  # batches within which pairs are put in order of length


@dataclass(frozen=True)
class Tokens:
    """Word pieces of many texts in one array: those of text i are `pieces[starts[i] : starts[i + 1]]`."""

    pieces: NDArray[np.int32]
    starts: Rows  # (texts + 1,)

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Tokens:
        starts = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)])
        return cls(np.fromiter(chain.from_iterable(rows), np.int32, count=int(starts[-1])), starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, text: int) -> NDArray[np.int32]:
        return self.pieces[self.starts[text] : self.starts[text + 1]]

    @cached_property
    def lengths(self) -> Rows:
        """Word pieces of each text."""
        return np.diff(self.starts)

    def padded(self, texts: Rows, pad: int) -> tuple[Rows, NDArray[np.bool_]]:
        """Some texts as a rectangle (texts, longest), filled up on the right, and the mask of what is theirs."""
        from nci.batches import ragged

        places, mask = ragged(self.starts, texts)
        return np.where(mask, self.pieces[places], pad).astype(np.int64), mask


@dataclass(frozen=True)
class Passages:
    """What is encoded of the documents: passages `starts[i]` to `starts[i + 1]` are those of document i."""

    tokens: Tokens
    starts: Rows  # (documents + 1,)

    @cached_property
    def owners(self) -> Rows:
        """The document of each passage."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))

    @property
    def several(self) -> bool:
        """Whether any document has more than one passage."""
        return len(self.tokens) >= len(self.starts)

    def of(self, documents: Sequence[Collection[int]]) -> tuple[Rows, Rows]:
        """All passages of each group of documents: the numbers of the groups, repeated, and of the passages."""
        groups = np.repeat(np.arange(len(documents)), [len(group) for group in documents])
        members = np.array([document for group in documents for document in sorted(group)], np.int64)
        counts = self.starts[members + 1] - self.starts[members]
        ends = np.cumsum(counts)
        inside = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        return np.repeat(groups, counts), np.repeat(self.starts[members], counts) + inside


@dataclass(frozen=True)
class Pairs:
    """Queries as word pieces, the document each was given with, and all documents that any pair gives to its text."""

    tokens: Tokens
    documents: Rows  # (pairs,)
    relevant: list[frozenset[int]]

    @classmethod
    def read(
        cls,
        pairs: Sequence[tuple[str, str]],
        documents: Sequence[Document],
        encoder: TextEncoder,
        settings: ContrastSettings,
    ) -> Pairs:
        rows = {document.doc_id: row for row, document in enumerate(documents)}
        if unknown := next((doc_id for _, doc_id in pairs if doc_id not in rows), None):
            raise DataError(f"a training pair names the document {unknown!r}, which is not in the corpus; leave it out")
        if not pairs:
            raise DataError("an encoder is trained on pairs of a query and a doc_id, and there are none")
        together: dict[str, set[int]] = {}
        for text, doc_id in pairs:
            together.setdefault(text, set()).add(rows[doc_id])
        shared = {text: frozenset(relevant) for text, relevant in together.items()}
        tokens = tokenize_queries([text for text, _ in pairs], encoder, settings.query_length)
        return cls(tokens, np.array([rows[doc_id] for _, doc_id in pairs]), [shared[text] for text, _ in pairs])


def tokenize_queries(texts: Sequence[str], encoder: TextEncoder, most: int) -> Tokens:
    """At most so many word pieces of queries, after the encoder's own prompt for them."""
    prompt = encoder.prompt("query")
    return Tokens.of(encoder.tokenize([prompt + text for text in texts], most))


def split_epoch(lengths: Rows, documents: int, batch_size: int, random: np.random.Generator) -> list[Rows]:
    """All pairs in random batches of documents of similar length, given the length of each pair's document.

    Pairs are put in order of length within windows that hold a document once or not at all, most of the time: pairs of
    the same document have the same length, come to lie in one batch, and are no negatives for each other there.
    """
    count = -(-len(lengths) // batch_size)
    window = min(_WINDOW * batch_size, max(1, documents // 2))
    order = random.permutation(len(lengths))
    order = order[np.lexsort((lengths[order], np.arange(len(order)) // window))]
    batches = np.array_split(order, count)
    return [batches[number] for number in random.permutation(count)]


def draw(candidates: Rows, count: int, random: np.random.Generator) -> list[Rows]:
    """Up to `count` different candidates of each row, all equally likely."""
    keys = np.where(candidates < 0, np.inf, random.random(candidates.shape))
    chosen = np.take_along_axis(candidates, np.argsort(keys, axis=1)[:, :count], axis=1)
    return [row[row >= 0] for row in chosen]


@dataclass(frozen=True)
class Batch:
    """Rows are queries, columns are passages, each of them once however many queries share it."""

    passages: Rows  # (columns,)
    targets: Rows  # (rows,)
    forbidden: NDArray[np.bool_]  # (rows, columns)

    @classmethod
    def make(
        cls, positives: Rows, negatives: Sequence[Rows], relevant: Sequence[frozenset[int]], owners: Rows
    ) -> Batch:
        columns = np.unique(np.concatenate([positives, *negatives]))
        targets = np.searchsorted(columns, positives)
        of_document: dict[int, list[int]] = {}
        for column, document in enumerate(owners[columns].tolist()):
            of_document.setdefault(document, []).append(column)
        forbidden = np.zeros((len(positives), len(columns)), bool)
        for row, documents in enumerate(relevant):
            for document in documents:
                forbidden[row, of_document.get(document, [])] = True
        forbidden[np.arange(len(targets)), targets] = False
        return cls(columns, targets, forbidden)

    def by_length(self, lengths: Rows) -> Batch:
        """The same batch with its columns from the longest passage to the shortest."""
        order = np.argsort(-lengths[self.passages], kind="stable")
        return Batch(self.passages[order], np.argsort(order)[self.targets], self.forbidden[:, order])
