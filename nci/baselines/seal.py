"""SEAL: a sequence-to-sequence model writes n-grams of the corpus for a query; documents are found by the n-grams they hold.

Documents and training pairs in, search out. Decoding is held to what the corpus says by an index of its n-grams; any
model that gives log-probabilities step by step will do. After "Autoregressive Search Engines: Generating Substrings as
Document Identifiers" (Bevilacqua et al., 2022). Knows nothing of how a model is made inside.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer
from transformers.modeling_outputs import BaseModelOutput

from nci.baselines import Baseline, Shelf, folder
from nci.baselines.ngrams import Ngram, NgramIndex, score_documents
from nci.baselines.settings import SealSettings
from nci.encoders import fetch_encoder, read_settings
from nci.errors import DataError, MissingModelError
from nci.progress import hide_bars
from nci.records import Document, Hits
from nci.runtime import quiet

MARK = "|"
"""Stands before and after a title, so that a model can say that it means one; a character that all vocabularies have."""

MAX_SOURCE = 256
"""Tokens of a query, or of a part of a document, that a model reads."""

_BLOCK = 4096  # documents tokenised at once


class Decoder(Protocol):
    """A model that writes token by token. Its state has `select(rows)`, which gives the state of some rows, repeated or not."""

    @property
    def device(self) -> str: ...
    @property
    def start_piece(self) -> int: ...

    def start(self, texts: Sequence[str], /) -> Any:
        """Read some texts: a state with one row each. The first step takes `start_piece`."""

    def step(self, state: Any, tokens: Tensor, /) -> Tensor:
        """Add a token to each row; log-probabilities of the next, (rows, vocabulary)."""


class Seal(Baseline):
    """Search by the n-grams that a model writes for a query.

    Args:
        documents: What to search.
        decoder: Writes the n-grams.
        tokenizer: The decoder's.
        settings: Those of search, and how much of a document is indexed.
        index: The n-grams of the documents, where they have been indexed before.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        decoder: Decoder,
        tokenizer: Any,
        *,
        settings: SealSettings | None = None,
        index: NgramIndex | None = None,
    ) -> None:
        self.settings = settings or SealSettings()
        self.queries_at_once = self.settings.queries_at_once
        self._shelf = Shelf(documents, source="seal")
        self._decoder = decoder
        self.index = index or index_documents(self._shelf.documents, tokenizer, self.settings.max_tokens)
        if len(self.index) != len(self._shelf):
            raise DataError(f"the n-grams are those of {len(self.index)} documents, not of {len(self._shelf)}")
        # a title's mark alone says nothing, and would stand in the way of the titles
        self._mark = tuple(tokenizer(f" {MARK}", add_special_tokens=False)["input_ids"])

    @classmethod
    def train(
        cls,
        documents: Sequence[Document],
        pairs: Sequence[tuple[str, str]],
        *,
        out: Path,
        settings: SealSettings | None = None,
        device: str = "cpu",
    ) -> Seal:
        """Train a model on n-grams of the documents that answer each query; `out` is then what `load` reads.

        Args:
            pairs: Training queries, each with the doc_id it should find.
        """
        from nci.baselines.seal_training import train_model, training_pairs

        settings = settings or SealSettings()
        folder.begin(out)
        source = fetch_encoder(settings.model or settings.encoder)
        tokenizer = _load_tokenizer(source / read_settings(source).transformer)
        index = index_documents(documents, tokenizer, settings.max_tokens)
        index.save(out / "ngrams")
        examples = training_pairs(documents, pairs, tokenizer, index, settings) if settings.epochs else []
        train_model(examples, source, out=out / "model", settings=settings, device=device)
        (out / "documents.sha256").write_text(_fingerprint(documents) + "\n")
        folder.finish(out, "seal", settings)
        return cls.load(out, documents, device=device)

    @classmethod
    def load(cls, path: Path, documents: Sequence[Document], *, device: str = "cpu") -> Seal:
        """Read what `train` wrote, for the same documents."""
        settings = folder.read(path, "seal", SealSettings)
        if (path / "documents.sha256").read_text().strip() != _fingerprint(documents):
            raise DataError(f"the SEAL index in {path} was made of other documents; train it again")
        index = NgramIndex.load(path / "ngrams")
        if settings.model is not None:
            model = HuggingFaceDecoder.load(path / "model", device=device)
            return cls(documents, model, model.tokenizer, settings=settings, index=index)
        from nci.generator import Generator

        generator = Generator.load(path / "model", device=device)
        return cls(documents, generator, generator.encoder.tokenizer, settings=settings, index=index)

    def _answer(self, texts: list[str], k: int) -> list[Hits]:
        found = []
        for ngrams in self.ngrams(texts):
            rows, scores = score_documents(
                self.index,
                [ngram for ngram in ngrams if ngram.tokens != self._mark],
                power=self.settings.power,
                repetition=self.settings.repetition,
                max_occurrences=self.settings.max_occurrences,
            )
            found.append(self._shelf.hits(rows, scores.astype(np.float32), k))
        return found

    def ngrams(self, queries: list[str]) -> list[list[Ngram]]:
        """What the model writes for each query, all of it from the corpus."""
        settings = self.settings
        return write_ngrams(self._decoder, self.index, queries, beam=settings.beam, length=settings.length)


@torch.inference_mode()
def write_ngrams(
    decoder: Decoder, index: NgramIndex, queries: list[str], *, beam: int, length: int
) -> list[list[Ngram]]:
    """Beam search among the n-grams of the corpus: per query all that were in the beam at any step, short ones included.

    Probabilities are the model's own, over its whole vocabulary: to be held to the corpus makes no n-gram likelier.
    """
    found: list[list[Ngram]] = [[] for _ in queries]
    state = decoder.start(queries)
    owner = np.arange(len(queries))  # (rows,) the query of each row
    log_p = np.zeros(len(queries))
    prefixes = np.empty((len(queries), 0), np.int64)  # (rows, tokens so far)
    intervals = index.root(len(queries))
    last = np.full(len(queries), decoder.start_piece)
    for step in range(length):
        scores = decoder.step(state, torch.from_numpy(last).to(decoder.device))  # (rows, vocabulary)
        following = index.continuations(intervals)
        where = (torch.from_numpy(each).to(scores.device) for each in (following.row, following.token))
        total = log_p[following.row] + scores[tuple(where)].double().cpu().numpy()
        kept = _best(owner[following.row], total, beam)
        if not len(kept):
            break
        rows, last = following.row[kept], following.token[kept]
        owner, log_p, intervals = owner[rows], total[kept], following.children.take(kept)
        prefixes = np.column_stack([prefixes[rows], last])
        bounds = zip(log_p.tolist(), intervals.low.tolist(), intervals.high.tolist(), strict=True)
        for query, tokens, (probability, low, high) in zip(owner, prefixes.tolist(), bounds, strict=True):
            found[query].append(Ngram(tuple(tokens), probability, low, high))
        if step + 1 < length:
            state = state.select(torch.from_numpy(rows).to(decoder.device))
    return found


def _best(groups: NDArray[np.int64], scores: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Places of the best `count` finite scores of each group, best first; groups are in order, ties too."""
    kept = []
    edges = np.flatnonzero(np.diff(groups, prepend=-1, append=-1))
    for begin, end in itertools.pairwise(edges):
        own = scores[begin:end]
        if count < len(own):
            threshold = np.partition(own, len(own) - count)[len(own) - count]
            places = np.flatnonzero(own >= threshold)
        else:
            places = np.arange(len(own))
        places = places[np.isfinite(own[places])]  # a model may rule a token out
        kept.append(begin + places[np.argsort(-own[places], kind="stable")][:count])
    return np.concatenate(kept) if kept else np.empty(0, np.int64)


def content(document: Document) -> str:
    """What is indexed of a document: its title between marks, and its text."""
    # Some tokenizers tell a word at the very start from one after a blank: here no word is at the very start.
    return f" {MARK} {document.title} {MARK} {document.text}" if document.title else f" {document.text}"


def index_documents(documents: Sequence[Document], tokenizer: Any, max_tokens: int | None) -> NgramIndex:
    """The n-grams of the documents' titles, between marks, and texts."""
    rows = []
    for start in tqdm(range(0, len(documents), _BLOCK), desc="n-grams", unit="block", disable=hide_bars()):
        texts = [content(document) for document in documents[start : start + _BLOCK]]
        rows += [row[:max_tokens] for row in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]]
    return NgramIndex.build(rows)


@dataclass
class Seq2SeqState:
    """What a Hugging Face model has read and written, per row."""

    states: Tensor  # (rows, source tokens, width)
    mask: Tensor  # (rows, source tokens)
    past: Any = None

    def select(self, rows: Tensor) -> Seq2SeqState:
        """The state of some rows, in this order; the old one is used up."""
        if self.past is not None:
            self.past.reorder_cache(rows)
        return Seq2SeqState(self.states[rows], self.mask[rows], self.past)


class HuggingFaceDecoder:
    """Any sequence-to-sequence model of transformers, token by token."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.start_piece: int = model.config.decoder_start_token_id
        self.device = str(model.device)

    @classmethod
    def load(cls, name: str | Path, *, device: str = "cpu") -> HuggingFaceDecoder:
        """Load a folder or a name on the Hugging Face Hub."""
        from nci.seq2seq import HuggingFaceGenerator

        loaded = HuggingFaceGenerator.load(name, device=device)
        return cls(loaded.model, loaded.tokenizer)

    @torch.inference_mode()
    def start(self, texts: Sequence[str]) -> Seq2SeqState:
        """Read some texts: one row each."""
        options = {"padding": True, "truncation": True, "max_length": MAX_SOURCE, "return_tensors": "pt"}
        read = self.tokenizer(list(texts), **options).to(self.device)
        ids, mask = read["input_ids"], read["attention_mask"]
        return Seq2SeqState(self.model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state, mask)

    @torch.inference_mode()
    def step(self, state: Seq2SeqState, tokens: Tensor) -> Tensor:
        """Add a token to each row; log-probabilities of the next, (rows, vocabulary)."""
        out = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=state.states),
            attention_mask=state.mask,
            decoder_input_ids=tokens[:, None],
            past_key_values=state.past,
            use_cache=True,
        )
        state.past = out.past_key_values
        return out.logits[:, -1].float().log_softmax(-1)  # type: ignore[no-any-return]


def _load_tokenizer(path: Path) -> Any:
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise MissingModelError(f"no tokenizer could be read from {path}: {reason}; expected tokenizer.json") from error
    if not tokenizer.is_fast:
        raise MissingModelError(f"the tokenizer in {path} does not say where its tokens are; it needs tokenizer.json")
    return tokenizer


def _fingerprint(documents: Sequence[Document]) -> str:
    whole = hashlib.sha256()
    for document in documents:
        whole.update(json.dumps([document.doc_id, document.title, document.text]).encode())
    return whole.hexdigest()
