"""Documents and (query, doc_id) pairs as a dual encoder trains on them: passages, queries and batches of word pieces.

A document that any pair gives to a query's text is relevant to it, and never its negative. Knows nothing of weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nci.encoders import TextEncoder
from nci.errors import ConfigError, DataError
from nci.records import Document

TokenRows = Sequence[Sequence[int]]
Rows = NDArray[np.int64]

_CHARS_PER_PIECE = 16  # English has 4 to 5: as much text as can matter is tokenised, not a whole book


@dataclass(frozen=True)
class DualSettings:
    """How a dual encoder is trained. With `refreshes=0` it is DPR, with more it is ANCE.

    Args:
        encoder: "minilm", a folder or a Hub name; the folder of a trained one goes on from there (with epochs 0).
        epochs: Passes over the pairs with the other documents of the batch as negatives.
        refreshes: How often hard negatives are mined afterwards, each time with the newest weights.
        refresh_epochs: Passes over the pairs after each mining.
        negatives: Hard negatives per query, drawn anew in each pass.
        depth: They are drawn from the best so many passages of documents that are not relevant.
        batch_size: Pairs per step.
        lr: Highest learning rate of each round.
        warmup: Share of a round's steps in which the learning rate rises; it falls to zero over the rest.
        temperature: Divides the cosines in the softmax.
        passage: firstp reads the start of "title [SEP] text", maxp the text in passages, of which the best one counts.
        max_length: Word pieces per passage.
        max_passages: Passages per document with maxp; what comes after them is not read.
        query_length: Word pieces per query.
        seed: Same seed, same weights on a CPU.
        precision: auto trains in bf16 where the device has it; weights and vectors are float32 in any case.
    """

    encoder: str = "minilm"
    epochs: int = 5
    refreshes: int = 0
    refresh_epochs: int = 1
    negatives: int = 4
    depth: int = 50
    batch_size: int = 128
    lr: float = 7e-5
    warmup: float = 0.1
    temperature: float = 0.03
    passage: Literal["firstp", "maxp"] = "firstp"
    max_length: int = 256
    max_passages: int = 4
    query_length: int = 64
    seed: int = 0
    precision: Literal["auto", "fp32", "bf16"] = "auto"

    def __post_init__(self) -> None:
        for name, choices in {"passage": ("firstp", "maxp"), "precision": ("auto", "fp32", "bf16")}.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} is one of {', '.join(choices)}; not {getattr(self, name)!r}")
        least = {"epochs": 0, "refreshes": 0, "seed": 0} | dict.fromkeys(
            ("refresh_epochs", "negatives", "depth", "batch_size", "max_length", "max_passages", "query_length"), 1
        )
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ConfigError(f"{name} is at least {smallest}, not {getattr(self, name)}")
        if self.depth < self.negatives:
            raise ConfigError(f"depth is at least the number of negatives ({self.negatives}), not {self.depth}")
        for name, inside in {
            "lr": 0 < self.lr < 1,
            "warmup": 0 <= self.warmup <= 1,
            "temperature": 0 < self.temperature < float("inf"),
        }.items():
            if not inside:
                raise ConfigError(f"{name} has an impossible value: {getattr(self, name)}")

    @property
    def name(self) -> str:
        """The method these settings amount to."""
        return "ance" if self.refreshes else "dpr"


@dataclass(frozen=True)
class Passages:
    """What is encoded of the documents: passages `starts[i]` to `starts[i + 1]` are those of document i."""

    tokens: TokenRows
    starts: Rows  # (documents + 1,)

    @cached_property
    def owners(self) -> Rows:
        """The document of each passage."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))

    def of(self, documents: Sequence[Collection[int]]) -> tuple[Rows, Rows]:
        """All passages of each group of documents: the numbers of the groups, repeated, and of the passages."""
        groups = np.repeat(np.arange(len(documents)), [len(group) for group in documents])
        members = np.array([document for group in documents for document in sorted(group)], np.int64)
        counts = self.starts[members + 1] - self.starts[members]
        ends = np.cumsum(counts)
        inside = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        return np.repeat(groups, counts), np.repeat(self.starts[members], counts) + inside

    @classmethod
    def cut(cls, documents: Sequence[Document], encoder: TextEncoder, settings: DualSettings) -> Passages:
        """At least one passage of every document."""
        prompt, between = encoder.prompt("document"), encoder.tokenizer.sep_token or "\n"
        if settings.passage == "firstp":
            texts = [f"{each.title} {between} {each.text}" if each.title else each.text for each in documents]
            tokens = encoder.tokenize([prompt + text for text in texts], settings.max_length)
            return cls(tokens, np.arange(len(documents) + 1))
        # An empty text keeps prompt and special tokens only: what they leave is the room for the passage.
        room = min(settings.max_length, encoder.max_length) - len(encoder.tokenize([prompt])[0])
        if room < 1:
            raise ConfigError(f"max_length {settings.max_length} leaves no room beside the encoder's own tokens")
        texts, counts = [], []
        for each in documents:
            spans = list(_spans(each.text or each.title, encoder, room, settings.max_passages))
            texts += [prompt + span for span in spans]
            counts.append(len(spans))
        return cls(encoder.tokenize(texts, settings.max_length), np.concatenate([[0], np.cumsum(counts)]))


def _spans(text: str, encoder: TextEncoder, room: int, most: int) -> Iterator[str]:
    text = text[: most * room * _CHARS_PER_PIECE]
    # not verbose: it would warn of a text that is longer than the model, which is why it is cut here
    found = encoder.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    pieces = found["offset_mapping"]
    for start in range(0, min(len(pieces), most * room), room):
        inside = pieces[start : start + room]
        yield text[inside[0][0] : inside[-1][1]]
    if not pieces:
        yield text


@dataclass(frozen=True)
class Pairs:
    """Queries as word pieces, the document each was given with, and all documents that any pair gives to its text."""

    tokens: TokenRows
    documents: Rows  # (pairs,)
    relevant: list[frozenset[int]]

    @classmethod
    def read(
        cls,
        pairs: Sequence[tuple[str, str]],
        documents: Sequence[Document],
        encoder: TextEncoder,
        settings: DualSettings,
    ) -> Pairs:
        rows = {document.doc_id: row for row, document in enumerate(documents)}
        if unknown := next((doc_id for _, doc_id in pairs if doc_id not in rows), None):
            raise DataError(f"a training pair names the document {unknown!r}, which is not in the corpus; leave it out")
        if not pairs:
            raise DataError("a dual encoder is trained on pairs of a query and a doc_id, and there are none")
        together: dict[str, set[int]] = {}
        for text, doc_id in pairs:
            together.setdefault(text, set()).add(rows[doc_id])
        shared = {text: frozenset(relevant) for text, relevant in together.items()}
        tokens = tokenize_queries([text for text, _ in pairs], encoder, settings)
        return cls(tokens, np.array([rows[doc_id] for _, doc_id in pairs]), [shared[text] for text, _ in pairs])


def tokenize_queries(texts: Sequence[str], encoder: TextEncoder, settings: DualSettings) -> TokenRows:
    """Word pieces of queries, after the encoder's own prompt for them."""
    prompt = encoder.prompt("query")
    return encoder.tokenize([prompt + text for text in texts], settings.query_length)


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
