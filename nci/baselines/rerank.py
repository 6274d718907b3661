"""A cross-encoder over the best hits of any searcher: query and document are read together and scored anew.

Any Hugging Face model for sequence classification by name or folder; `train` makes one from a plain encoder. Knows
nothing of how the hits were found. What the searcher misses in its best `depth` stays missed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from nci.baselines import Baseline, Searcher, Shelf, folder
from nci.baselines.settings import RerankSettings
from nci.encoders import CHARS_PER_PIECE, fetch_encoder, read_settings
from nci.errors import ConfigError, DataError, MissingModelError
from nci.progress import hide_bars
from nci.records import Document, Hit, Hits
from nci.runtime import quiet, uses_bf16

_TOGETHER = 64  # queries whose pairs share batches
# What a family of models calls the layers between its encoder and a class.
_NEW_PARTS = {"classifier", "pooler", "pre_classifier", "score", "head", "classification_head"}


class CrossEncoder:
    """A model for sequence classification and its tokenizer: pairs of texts in, one score each out.

    With one label its logit is the score; with two, how far the second is above the first.
    """

    def __init__(self, model: Any, tokenizer: Any, *, max_length: int, precision: str, device: str) -> None:
        if model.config.num_labels not in (1, 2):
            raise ConfigError(f"a cross-encoder has one label or two (wrong, right), not {model.config.num_labels}")
        self.model = model.to(device).eval()
        self.tokenizer = tokenizer
        self._bf16 = uses_bf16(precision, device)  # type: ignore[arg-type]
        positions = getattr(model.config, "max_position_embeddings", None) or max_length
        offset = int(model.config.model_type in ("roberta", "xlm-roberta", "camembert")) * 2  # counts from padding + 1
        self._max_length = min(max_length, int(positions) - offset)

    @classmethod
    def load(
        cls,
        name: str | Path,
        *,
        max_length: int = 192,
        precision: str = "auto",
        device: str = "cpu",
        fresh: bool = False,
    ) -> Self:
        """A model by name or folder; `fresh` allows an encoder without a classifier and puts a new one on it."""
        place = fetch_encoder(name)
        place = place / read_settings(place).transformer
        local: dict[str, Any] = {"local_files_only": True}
        try:
            with quiet():
                tokenizer = AutoTokenizer.from_pretrained(place, **local)
                if fresh:
                    local |= {"config": AutoConfig.from_pretrained(place, num_labels=1, **local)}
                model, loading = AutoModelForSequenceClassification.from_pretrained(
                    place, output_loading_info=True, use_safetensors=True, dtype=torch.float32, **local
                )
            lost = [key for key in loading["missing_keys"] if not (fresh and _NEW_PARTS.intersection(key.split(".")))]
            if lost:
                raise ValueError(f"the weights are incomplete, {min(lost)} is missing")
        except (OSError, ValueError, SafetensorError) as error:
            reason = str(error).strip().partition("\n")[0]
            expected = "an encoder" if fresh else "a model for sequence classification"
            raise MissingModelError(f"no cross-encoder from {name}: {reason}; expected {expected}") from error
        return cls(model, tokenizer, max_length=max_length, precision=precision, device=device)

    def logits(self, pairs: Sequence[tuple[str, str]]) -> Tensor:
        """Scores with gradients, (pairs,)."""
        longest = self._max_length * CHARS_PER_PIECE
        texts = [[query[:longest], document[:longest]] for query, document in pairs]
        # A long query must not push the document out, nor the other way round.
        tokens = self.tokenizer(
            texts, truncation="longest_first", max_length=self._max_length, padding=True, return_tensors="pt"
        ).to(self.model.device)
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self._bf16):
            logits: Tensor = self.model(**tokens).logits.float()  # (pairs, labels)
        return logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]

    @torch.inference_mode()
    def score(self, pairs: Sequence[tuple[str, str]], *, batch_size: int) -> npt.NDArray[np.float32]:
        """Scores of pairs of query and document, in their order."""
        scores = np.empty(len(pairs), np.float32)
        # Similar lengths share a batch.
        order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))
        for start in range(0, len(order), batch_size):
            places = order[start : start + batch_size]
            scores[places] = self.logits([pairs[i] for i in places]).cpu().numpy()
        return scores


class Rerank(Baseline):
    """The best hits of another searcher in the order of a cross-encoder.

    Hits beyond the depth that is read keep their places below.

    Args:
        documents: The texts that are read.
        base: Finds the hits.
        model: Scores them.
        settings: How many are read, and how many at once.
        name: What hits say they come from.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        base: Searcher,
        model: CrossEncoder,
        *,
        settings: RerankSettings | None = None,
        name: str = "rerank",
    ) -> None:
        self._settings = settings or RerankSettings()
        self._shelf = Shelf(documents, source=name)
        self._rows = {document.doc_id: row for row, document in enumerate(self._shelf.documents)}
        self._base = base
        self.model = model

    @classmethod
    def train(
        cls,
        documents: Sequence[Document],
        pairs: Sequence[tuple[str, str]],
        *,
        base: Searcher,
        out: Path,
        settings: RerankSettings | None = None,
        device: str = "cpu",
    ) -> Self:
        """Trains a cross-encoder to tell each query's document from wrong ones among the hits of `base`.

        The loss is the cross-entropy of a softmax over the document and the wrong ones.

        Args:
            documents: The texts that are read.
            pairs: Queries with the doc_ids they ask for.
            base: Where wrong documents come from; later it finds what is re-ranked.
            out: Where the model is kept; a rerun trains anew.
            settings: What to start from, and how long to train.
            device: Where to train and search.
        """
        settings = settings or RerankSettings()
        torch.manual_seed(settings.seed)  # the new classifier, and dropout
        model = CrossEncoder.load(
            settings.encoder,
            max_length=settings.max_length,
            precision=settings.precision,
            device=device,
            fresh=True,
        )
        made = cls(documents, base, model, settings=settings)
        _fit(model, made._groups(pairs), settings)
        folder.begin(out)
        with quiet():
            model.model.save_pretrained(out)
            model.tokenizer.save_pretrained(out)
        folder.finish(out, "rerank", settings)
        return made

    @classmethod
    def load(cls, out: Path, documents: Sequence[Document], *, base: Searcher, device: str = "cpu") -> Self:
        """Opens what `train` wrote; for a model that was trained elsewhere see `CrossEncoder.load`."""
        settings = folder.read(out, "rerank", RerankSettings)
        length, precision = settings.max_length, settings.precision
        model = CrossEncoder.load(out, max_length=length, precision=precision, device=device)
        return cls(documents, base, model, settings=settings)

    @property
    def index_bytes(self) -> int:
        """Size of the model; what the searcher beneath keeps is not in it."""
        return sum(weight.nbytes for weight in self.model.model.parameters())

    def _answer(self, texts: list[str], k: int) -> list[Hits]:
        depth = self._settings.depth
        hits = self._base.search(texts, k=max(k, depth))
        found: list[Hits] = []
        for start in range(0, len(texts), _TOGETHER):
            queries = texts[start : start + _TOGETHER]
            rows = [
                np.array([self._row(hit.doc_id) for hit in own], np.int64) for own in hits[start : start + _TOGETHER]
            ]
            contents = [[self._shelf.documents[row].content for row in own[:depth]] for own in rows]
            pairs = [(query, text) for query, own in zip(queries, contents, strict=True) for text in own]
            scores = self.model.score(pairs, batch_size=self._settings.score_batch)
            ends = np.cumsum([len(own) for own in contents])
            merged = (self._merged(*each, k) for each in zip(rows, np.split(scores, ends[:-1]), strict=True))
            before = (own.documents_scored for own in hits[start : start + _TOGETHER])
            read = map(len, contents)
            found += [Hits(new, old + more) for new, old, more in zip(merged, before, read, strict=True)]
        return found

    def _merged(self, rows: npt.NDArray[np.int64], scores: npt.NDArray[np.float32], k: int) -> list[Hit]:
        """Hits of one query: those with scores by these, and the others in their order below."""
        read = self._shelf.hits(rows[: len(scores)], scores, k)
        # One apart, so that a run file keeps their order.
        below = float(scores.min(initial=0.0)) - 1 - np.arange(len(rows) - len(scores))
        rest = self._shelf.hits(rows[len(scores) :], below.astype(np.float32), k)
        return read + [hit._replace(rank=hit.rank + len(read)) for hit in rest]

    def _row(self, doc_id: str) -> int:
        if doc_id not in self._rows:
            raise DataError(f"the searcher found {doc_id!r}, which is not among the documents to re-rank")
        return self._rows[doc_id]

    def _groups(self, pairs: Sequence[tuple[str, str]]) -> list[_Group]:
        """Per pair the query, its document and the wrong documents to draw from."""
        if not pairs:
            raise DataError("a cross-encoder is trained on pairs of query and doc_id, and there are none")
        relevant: dict[str, set[int]] = {}
        for query, doc_id in pairs:
            relevant.setdefault(query, set()).add(self._row(doc_id))
        if len(self._shelf) <= max(len(rows) for rows in relevant.values()):
            raise DataError("a cross-encoder needs wrong documents to learn from: give more documents")
        found = self._base.search(list(relevant), k=self._settings.depth)
        wrong = {
            query: [row for row in (self._row(hit.doc_id) for hit in hits) if row not in relevant[query]]
            for query, hits in zip(relevant, found, strict=True)
        }
        texts = self._shelf.documents
        return [_Group(query, self._row(doc_id), wrong[query], relevant[query], texts) for query, doc_id in pairs]


@dataclass(frozen=True)
class _Group:
    query: str
    right: int
    wrong: list[int]
    relevant: set[int]
    documents: Sequence[Document]

    def draw(self, negatives: int, rng: np.random.Generator) -> Iterator[tuple[str, str]]:
        """The right pair, then wrong ones: hits of the searcher, random documents where those are too few."""
        rows = rng.permutation(self.wrong)[:negatives].tolist() if self.wrong else []
        while len(rows) < negatives:
            row = int(rng.integers(len(self.documents)))
            if row not in self.relevant:
                rows.append(row)
        return ((self.query, self.documents[row].content) for row in (self.right, *rows))


def _fit(model: CrossEncoder, groups: Sequence[_Group], settings: RerankSettings) -> None:
    rng = np.random.default_rng(settings.seed)
    per_epoch = math.ceil(len(groups) / settings.batch_size)
    steps = settings.epochs * per_epoch
    optimiser = torch.optim.AdamW(model.model.parameters(), lr=settings.lr, weight_decay=0.01)
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
    )
    width = 1 + settings.negatives
    model.model.train()
    with tqdm(desc="rerank", total=steps, unit="step", disable=hide_bars()) as bar:
        for _ in range(settings.epochs):
            for places in np.array_split(rng.permutation(len(groups)), per_epoch):
                pairs = [pair for i in places for pair in groups[i].draw(settings.negatives, rng)]
                logits = model.logits(pairs).view(len(places), width)  # (queries, 1 + negatives), the right one first
                loss = torch.nn.functional.cross_entropy(logits, logits.new_zeros(len(places), dtype=torch.long))
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(model.model.parameters(), 1.0)
                optimiser.step()
                schedule.step()
                bar.update()
    model.model.eval()
