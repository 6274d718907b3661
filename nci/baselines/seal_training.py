"""What SEAL's model is trained on, and its training: documents and pairs in, a folder with a model out.

Knows nothing of decoding or scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from nci.baselines.ngrams import NgramIndex
from nci.baselines.seal import MAX_SOURCE, content
from nci.baselines.settings import SealSettings
from nci.errors import DataError
from nci.progress import hide_bars
from nci.records import Document
from nci.runtime import quiet

_SPARE = 4  # tokens around a target: the start, the end, and what a cut word may need more


def training_pairs(
    documents: Sequence[Document],
    pairs: Sequence[tuple[str, str]],
    tokenizer: Any,
    index: NgramIndex,
    settings: SealSettings,
) -> list[tuple[str, str]]:
    """N-grams of the relevant document for each query, then parts of documents for other parts.

    A query's n-grams are drawn with probability exp(overlap / temperature): the share of the weight of the query's tokens
    (rare ones weigh more) that the n-gram has. A document's title is always among them.
    """
    rows = {document.doc_id: row for row, document in enumerate(documents)}
    queries: dict[int, list[tuple[int, str]]] = {}
    for number, (query, doc_id) in enumerate(pairs):
        if doc_id not in rows:
            raise DataError(f'a training query names the document "{doc_id}", which is not among the documents')
        queries.setdefault(rows[doc_id], []).append((number, query))
    everything = index.continuations(index.root())
    rarity = np.zeros(1 + max(int(everything.token.max(initial=0)), len(tokenizer)))  # (vocabulary,)
    rarity[everything.token] = np.log(index.total / everything.children.counts)
    examples: list[tuple[str, str]] = []
    for row, document in enumerate(tqdm(documents, desc="targets", unit="document", disable=hide_bars())):
        spans = _Spans.read(document, tokenizer, settings)
        for number, query in queries.get(row, []):
            random = np.random.default_rng([settings.seed, 0, number])
            asked = np.unique(tokenizer(" " + query, add_special_tokens=False)["input_ids"]).astype(np.int64)
            gain = np.zeros_like(rarity)
            gain[asked] = rarity[asked] / (settings.temperature * max(rarity[asked].sum(), 1e-9))
            examples += spans.title(query) + spans.draw(query, random, settings.spans, gain)
        random = np.random.default_rng([settings.seed, 1, row])
        words = document.text.split()
        for place in range(settings.unsupervised if words else 0):
            start = int(random.integers(max(1, len(words) - settings.source_words + 1)))
            part = " ".join(words[start : start + settings.source_words])
            examples += (spans.title(part) if place == 0 else []) or spans.draw(part, random, 1)
    return examples


@dataclass(frozen=True)
class _Spans:
    """The n-grams of one document that a model may be asked for: they begin and end with whole words."""

    text: str
    tokens: NDArray[np.int64]
    offsets: NDArray[np.int64]  # (tokens, 2) where in the text they begin and end
    first: NDArray[np.int64]  # (spans,)
    last: NDArray[np.int64]  # (spans,) one behind the end
    title_tokens: int

    @classmethod
    def read(cls, document: Document, tokenizer: Any, settings: SealSettings) -> _Spans:
        text = content(document)
        read = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        word = np.array(read.word_ids()[: settings.max_tokens], np.int64)
        tokens = np.array(read["input_ids"][: len(word)], np.int64)
        offsets = np.array(read["offset_mapping"][: len(word)], np.int64).reshape(-1, 2)
        edges = np.flatnonzero(np.diff(word, prepend=-1, append=-1))  # where words begin, and the end
        first = edges[:-1]
        last = edges[np.searchsorted(edges, first + settings.length, side="right") - 1]
        last = np.where(last > first, last, np.minimum(first + settings.length, len(word)))  # a very long word is cut
        title = len(content(replace(document, text="")).rstrip()) if document.title else 0
        return cls(text, tokens, offsets, first, last, min(int((offsets[:, 1] <= title).sum()), settings.length))

    def target(self, first: int, last: int) -> str:
        begin, end = self.offsets[first, 0], self.offsets[last - 1, 1]
        text = self.text[begin:end]
        blank = text[:1].isspace() or self.text[begin - 1].isspace()  # tokenizers differ in whose the blank is
        return f" {text.lstrip()}" if blank else text

    def title(self, source: str) -> list[tuple[str, str]]:
        """The title, with its marks as far as there is room, as the target of a source."""
        return [(source, self.target(0, self.title_tokens))] if self.title_tokens else []

    def draw(
        self, source: str, random: np.random.Generator, count: int, gain: NDArray[np.float64] | None = None
    ) -> list[tuple[str, str]]:
        """Some spans as targets of a source; `gain` is what each token of the vocabulary adds to the log of the chance."""
        if not len(self.first):
            return []
        shares = None
        if gain is not None:
            sums = np.concatenate([[0.0], np.cumsum(gain[self.tokens])])
            overlap = sums[self.last] - sums[self.first]  # (spans,)
            shares = np.exp(overlap - overlap.max())
            shares /= shares.sum()
        drawn = random.choice(len(self.first), size=count, p=shares)
        return [(source, self.target(self.first[i], self.last[i])) for i in drawn]


def train_model(
    pairs: Sequence[tuple[str, str]], source: Path, *, out: Path, settings: SealSettings, device: str
) -> None:
    """Train a model on pairs of texts: the one given, or a small one from an encoder; goes on where it was killed."""
    if settings.model is None:
        from nci.generator import Generator, GeneratorConfig

        small = GeneratorConfig(
            pieces="all",  # what is in no target may yet be in the corpus
            max_source=MAX_SOURCE,
            max_target=settings.length + _SPARE,
            epochs=settings.epochs,
            batch_size=settings.batch_size,
            seed=settings.seed,
        )
        Generator.train(pairs, out=out, encoder=source, settings=small, device=device)
        return
    from nci.seq2seq import FineTuneConfig, HuggingFaceGenerator

    if not settings.epochs:
        model = HuggingFaceGenerator.load(source)
        with quiet():
            model.model.save_pretrained(out)
            model.tokenizer.save_pretrained(out)
        return
    given = FineTuneConfig(
        max_source=MAX_SOURCE,
        max_target=settings.length + _SPARE,
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        seed=settings.seed,
    )
    HuggingFaceGenerator.fine_tune(source, pairs, out=out, settings=given, device=device)
