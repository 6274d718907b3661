"""Queries + documents -> training pairs and the batch plan, as npy files; no torch, no model.

Three sources: real queries, pieces of the documents themselves ("document as query" in the paper: the first 64 terms and
10 random groups of 64 consecutive terms), and generated queries. The plan is written once: one row is one batch of pairs
of similar length, read in order, so that resuming and several processes are index arithmetic.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from nci.analyser import UNSPACED
from nci.config import PairsConfig
from nci.errors import ConfigError
from nci.progress import hide_bars
from nci.records import Document

SOURCES = ("real", "span", "generated")
# A term is a run of non-blanks; where a script puts no blanks between words, every character is one.
_TERM = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")
_WINDOW = 64  # batches whose pairs are sorted by length together
_BLOCK = 4096  # texts tokenised together

Tokenize = Callable[[list[str]], list[list[int]]]
Ints = NDArray[np.int32]
Key = TypeVar("Key", int, str)


@dataclass(frozen=True)
class Pair:
    """A text and the number of the document it should find."""

    text: str
    document: int
    source: int  # place in SOURCES


def document_pieces(document: Document, config: PairsConfig, *, number: int) -> list[str]:
    """The first `terms` terms, then `spans` random groups of as many consecutive terms; seeded per document.

    >>> document_pieces(Document("d", "a b c d"), PairsConfig(terms=2, spans=1), number=0)
    ['a b', 'c d']
    """
    text = document.content
    terms = [match.span() for match in _TERM.finditer(text)]
    if not terms:
        return []
    size = min(config.terms, len(terms))
    rng = np.random.default_rng([config.seed, number])
    starts = [0, *rng.integers(0, len(terms) - size + 1, config.spans).tolist()]
    # A document of one group has no other: equal pieces would only count it several times.
    return [text[terms[start][0] : terms[start + size - 1][1]] for start in dict.fromkeys(starts)]


def make_pairs(
    documents: Iterable[Document],
    config: PairsConfig,
    *,
    real: Sequence[tuple[str, int]] = (),
    generated: Sequence[tuple[str, int]] = (),
) -> Iterator[Pair]:
    """All pairs in a fixed order: real queries, generated ones, then document pieces."""
    if config.real > 0:
        for text, document in real:
            yield Pair(text, document, SOURCES.index("real"))
    if config.generated > 0:
        for text, document in first_of_each(generated, config.generated_queries):
            yield Pair(text, document, SOURCES.index("generated"))
    if config.span_share > 0:
        for number, item in enumerate(documents):
            for piece in document_pieces(item, config, number=number):
                yield Pair(piece, number, SOURCES.index("span"))


def first_of_each(queries: Iterable[tuple[str, Key]], count: int) -> Iterator[tuple[str, Key]]:
    """At most `count` queries of every document, the first ones, in their order.

    >>> list(first_of_each([("a", 7), ("b", 7), ("c", 4)], 1))
    [('a', 7), ('c', 4)]
    """
    used: Counter[Key] = Counter()
    for query in queries:
        used[query[1]] += 1
        if used[query[1]] <= count:
            yield query


def plan_batches(
    documents: Ints, sources: NDArray[np.int8], lengths: Ints, config: PairsConfig, *, batch_size: int, epochs: float
) -> Ints:
    """(batches, batch size) numbers of pairs, -1 where a batch is not full; length buckets, shuffled, seeded."""
    shares = np.array([config.real, config.span_share, config.generated])[sources]  # (pairs,)
    batches: list[Ints] = []
    for epoch in range(int(np.ceil(epochs))):
        rng = np.random.default_rng([config.seed, epoch])
        chosen = _by_document(documents, shares, rng) if config.sampling == "document" else _by_pair(shares, rng)
        rng.shuffle(chosen)
        chosen = chosen[: int(np.ceil(len(chosen) * min(1.0, epochs - epoch)))]
        window = _WINDOW * batch_size
        for start in range(0, len(chosen), window):
            part = chosen[start : start + window]
            part = part[np.argsort(lengths[part], kind="stable")]
            padded = np.full(-(-len(part) // batch_size) * batch_size, -1, dtype=np.int32)
            padded[: len(part)] = part
            rows = padded.reshape(-1, batch_size)
            batches.append(rows[rng.permutation(len(rows))])
    return np.concatenate(batches) if batches else np.zeros((0, batch_size), dtype=np.int32)


def _by_pair(shares: NDArray[np.float64], rng: np.random.Generator) -> Ints:
    """Each pair as often as its share says; the fraction by lot."""
    times = np.floor(shares + rng.random(len(shares))).astype(int)
    return np.repeat(np.arange(len(shares), dtype=np.int32), times)


def _by_document(documents: Ints, shares: NDArray[np.float64], rng: np.random.Generator) -> Ints:
    """As many pairs as `_by_pair` takes on average, but the same number for every document that has any."""
    order = np.argsort(documents, kind="stable")
    order = order[shares[order] > 0]
    _, first, count = np.unique(documents[order], return_index=True, return_counts=True)
    draws = max(1, round(float(shares.sum()) / max(1, len(first))))
    mass = np.concatenate([[0.0], np.cumsum(shares[order])])
    low, high = mass[first], mass[first + count]
    points = low + rng.random((draws, len(first))) * (high - low)  # (draws, documents)
    place = np.clip(np.searchsorted(mass, points, side="right") - 1, first, first + count - 1)
    chosen: Ints = order[place.ravel()].astype(np.int32)
    return chosen


def write_plan(
    folder: Path,
    pairs: Iterable[Pair],
    tokenize: Tokenize,
    config: PairsConfig,
    *,
    batch_size: int,
    epochs: float,
    words: Callable[[list[str]], list[Ints]] | None = None,
    own_lexical: Callable[[list[Pair]], NDArray[np.float32]] | None = None,
    vectors: Callable[[list[str]], NDArray[np.float32]] | None = None,
    total: int | None = None,
) -> BatchPlan:
    """Tokenise all pairs and lay out the batches.

    Args:
        words: Gives the columns of the lexical scores of each text, where there are any.
        own_lexical: Gives the lexical score of each pair's own document where it is not the one that search reads, else NaN.
        vectors: Gives the query vector of each text, where it does not come from the encoder in training.
    """
    names = ("tokens", "lengths", "words", "word_counts", "own_lexical", "vectors")
    rows: dict[str, list[NDArray[np.generic]]] = {name: [] for name in names}
    documents: list[int] = []
    sources: list[int] = []
    stream = iter(pairs)
    with tqdm(desc="pairs", unit="pair", disable=hide_bars(), total=total) as bar:
        while block := list(islice(stream, _BLOCK)):
            texts = [pair.text for pair in block]
            _append(rows, "tokens", "lengths", tokenize(texts))
            if words is not None:
                _append(rows, "words", "word_counts", words(texts))
            if own_lexical is not None:
                rows["own_lexical"].append(own_lexical(block))
            if vectors is not None:
                rows["vectors"].append(vectors(texts))
            documents += [pair.document for pair in block]
            sources += [pair.source for pair in block]
            bar.update(len(block))
    if not documents:
        raise ConfigError("there is nothing to train on: no training queries, and --pairs.span_share is 0")
    arrays = {name: np.concatenate(parts) for name, parts in rows.items() if parts}
    arrays["documents"] = np.array(documents, dtype=np.int32)
    arrays["sources"] = np.array(sources, dtype=np.int8)
    arrays["batches"] = plan_batches(
        arrays["documents"],
        arrays["sources"],
        arrays["lengths"],  # type: ignore[arg-type]
        config,
        batch_size=batch_size,
        epochs=epochs,
    )
    staging = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    for name, array in arrays.items():
        np.save(staging / f"{name}.npy", array, allow_pickle=False)
    counts = {source: int((arrays["sources"] == number).sum()) for number, source in enumerate(SOURCES)}
    (staging / "plan.json").write_text(json.dumps({"pairs": counts, "batches": len(arrays["batches"])}))
    shutil.rmtree(folder, ignore_errors=True)
    staging.rename(folder)
    return BatchPlan(folder)


def _append(
    rows: dict[str, list[NDArray[np.generic]]], flat: str, sizes: str, ragged: Sequence[Sequence[int] | Ints]
) -> None:
    rows[flat].append(np.concatenate([np.asarray(row, dtype=np.int32) for row in ragged]))
    rows[sizes].append(np.array([len(row) for row in ragged], dtype=np.int32))


class BatchPlan:
    """Reader of a written plan; item i is batch i as ragged numpy arrays."""

    def __init__(self, folder: Path) -> None:
        def load(name: str) -> NDArray[np.generic]:
            return np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]

        self.folder = folder
        self.batches, self.documents, self.sources = load("batches"), load("documents"), load("sources")
        self.tokens, self.lengths = load("tokens"), load("lengths")
        self.starts = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        self.has_words = (folder / "words.npy").exists()
        if self.has_words:
            self.words = load("words")
            self.word_starts = np.concatenate([[0], np.cumsum(load("word_counts"), dtype=np.int64)])
        self.own_lexical = load("own_lexical") if (folder / "own_lexical.npy").exists() else None  # (pairs,) f32
        self.vectors = load("vectors") if (folder / "vectors.npy").exists() else None
        self.counts: dict[str, int] = json.loads((folder / "plan.json").read_text())["pairs"]

    def __len__(self) -> int:
        return len(self.batches)

    def rows(self, batch: int) -> NDArray[np.int64]:
        """Numbers of the pairs in a batch."""
        row = np.asarray(self.batches[batch], dtype=np.int64)
        return row[row >= 0]

    def pair_tokens(self, pair: int) -> Ints:
        return np.asarray(self.tokens[self.starts[pair] : self.starts[pair + 1]])

    def pair_words(self, pair: int) -> Ints:
        return np.asarray(self.words[self.word_starts[pair] : self.word_starts[pair + 1]])
