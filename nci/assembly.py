"""Tree, encoders and lexical scores -> a fresh model and the engine that searches with it.

What training, packing and the untrained row of an evaluation share. Knows no folders and no stages.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nci.config import Config
from nci.encoders import TextEncoder
from nci.errors import ConfigError
from nci.evaluate import evaluate
from nci.lexical import LexicalScores
from nci.model import NCIModel
from nci.model_config import NCIConfig
from nci.pieces import PieceVectors
from nci.records import Query
from nci.search import Engine
from nci.search.content import DocumentVectors
from nci.trie import Trie

DevQueries = Sequence[tuple[Query, list[int]]]
"""Held-out queries with the corpus rows of their relevant documents."""


@dataclass(frozen=True)
class Assembly:
    """The parts around the model.

    Args:
        values: Digits per position.
        order: The corpus row behind each leaf.
        vectors: Document vectors (documents, width) in leaf order.
        embedder: The encoder of the documents.
        query_encoder: The encoder of the queries before training; often the same.
        lexical: Lexical scores in leaf order, where the content score has them.
        bias: (documents,) in leaf order, added to the content scores, where calibration found one.
        pieces: Word pieces in leaf order, where the content score has late interaction.
        moves: (documents, width) in leaf order, added to the vectors that queries are compared with, where calibration did so.
    """

    config: Config
    trie: Trie
    values: int
    order: NDArray[np.int64]
    vectors: NDArray[np.floating]
    embedder: TextEncoder
    query_encoder: TextEncoder
    lexical: LexicalScores | None
    bias: NDArray[np.float32] | None = None
    pieces: PieceVectors | None = None
    moves: NDArray[np.floating] | None = None

    @cached_property
    def leaf_of_row(self) -> NDArray[np.int64]:
        leaves = np.empty(len(self.order), dtype=np.int64)
        leaves[self.order] = np.arange(len(self.order))
        return leaves

    @property
    def learned_length(self) -> int:
        """Word pieces of a query that training reads."""
        return min(self.config.pairs.max_length, self.query_encoder.max_length)

    @property
    def query_length(self) -> int:
        """Word pieces of a query that search reads.

        As many as of a document, since only long queries take longer; without an anchor, which compares texts, no more
        than the network has learned from.
        """
        if self.config.model.anchor == "none":
            return self.learned_length
        return min(max(self.config.pairs.max_length, self.config.embed.max_length), self.query_encoder.max_length)

    def model(self, *, seen_rows: Sequence[int] | None = None, device: str = "cpu") -> NCIModel:
        """A fresh model bound to the tree; `seen_rows` are documents with real queries, where unseen ones are spared."""
        torch.manual_seed(self.config.train.seed)
        model = fresh_model(self.config, self.trie, self.values, self.query_encoder, self.vectors.shape[1])
        model.config.late = self.config.model.late if self.pieces is not None else 0.0
        long = self.pieces is not None and self.pieces.further is not None
        model.config.further = self.config.model.further if long else 0.0
        seen = None if seen_rows is None else self.seen(seen_rows)
        model.bind(self.trie, np.asarray(self.vectors, dtype=np.float32), seen, self.bias, self.moves)
        return model.to(device).eval()  # type: ignore[arg-type, no-any-return]

    def seen(self, rows: Sequence[int]) -> NDArray[np.bool_]:
        """(documents,) in leaf order: which are among these rows of the corpus."""
        return np.isin(self.order, np.asarray(rows, dtype=np.int64))

    def counts(self, rows: Sequence[int]) -> NDArray[np.int64]:
        """(documents,) in leaf order: how often each is among these rows of the corpus."""
        return np.bincount(np.asarray(rows, dtype=np.int64), minlength=len(self.order))[self.order]

    @property
    def document_vectors(self) -> DocumentVectors:
        """All that the dense part of the content score reads of documents."""
        moves = None if self.moves is None else DocumentVectors(self.moves)
        return DocumentVectors(self.vectors, bias=self.bias, moves=moves)

    def engine(self, model: NCIModel) -> Engine:
        """Search with the weights as they are now."""
        return Engine.for_model(
            model,
            self.query_encoder.tokenizer,
            self.trie,
            vectors=self.document_vectors,
            precision=self.config.search.precision,
            lexical=self.lexical,
            pieces=self.pieces,
            candidates=self.config.search.candidates,
            embedder=self.embedder if model.config.query_vector == "stored" else None,
            prompt=self.query_encoder.prompt("query"),
            max_length=self.query_length,
        )

    def search_dev(self, model: NCIModel, dev: DevQueries) -> dict[str, float]:
        """Metrics of held-out queries, searched as a finished index would."""
        search = self.config.search
        metrics = list(dict.fromkeys([self.config.train.metric, "R@1", "R@10", "RR@10"]))
        rankings = self.engine(model).search(
            [query.text for query, _ in dev],
            k=max(int(name.rpartition("@")[2]) if "@" in name else 100 for name in metrics),
            beam=search.beam,
            length_penalty=search.length_penalty,
            batch_size=search.batch_size,
        )
        run = {
            query.query_id: {str(d): float(s) for d, s in zip(ranking.documents, ranking.scores, strict=True)}
            for (query, _), ranking in zip(dev, rankings, strict=True)
        }
        qrels = {query.query_id: {str(self.leaf_of_row[row]): 1 for row in relevant} for query, relevant in dev}
        return evaluate(run, qrels, metrics)

    def better_query_vector(self, model: NCIModel, dev: DevQueries) -> dict[str, dict[str, float]]:
        """Sets and reports whether the anchor reads the trained or the stored encoder: what `dev` prefers."""
        found: dict[str, dict[str, float]] = {}
        for choice in ("trained", "stored"):
            model.config.query_vector = choice
            started = time.monotonic()
            found[choice] = self.search_dev(model, dev)
            found[choice]["seconds"] = round(time.monotonic() - started, 2)
        model.config.query_vector = max(found, key=lambda choice: found[choice][self.config.train.metric])
        return found


def load_embedder(config: Config, folder: str | Path, device: str = "cpu") -> TextEncoder:
    """The encoder of the documents, set as the index says."""
    return TextEncoder.load(
        folder,
        pooling=config.embed.pooling,
        normalise=config.embed.normalise,
        max_length=config.embed.max_length,
        device=device,
    )


def fresh_model(config: Config, trie: Trie, values: int, encoder: TextEncoder, d_content: int) -> NCIModel:
    """A new decoder around a pretrained encoder."""
    settings = config.model
    d_model = settings.d_model or int(encoder.model.config.hidden_size)
    heads = settings.heads or max(1, d_model // 64)
    if d_model % heads:
        raise ConfigError(f"--model.d_model {d_model} is not a multiple of --model.heads {heads}")
    if settings.anchor != "none" and not config.embed.normalise:
        raise ConfigError("--model.anchor needs document vectors of length 1: use --embed.normalise true")
    model = NCIModel(
        NCIConfig(
            encoder=_encoder_shape(config, encoder),
            pooling=encoder.settings.pooling,
            d_model=d_model,
            decoder_layers=settings.decoder_layers,
            adapter_layers=settings.adapter_layers,
            heads=heads,
            d_ff=settings.d_ff or 4 * d_model,
            dropout=settings.dropout,
            head=settings.head,
            head_rank=settings.head_rank,
            adapter_start=settings.adapter_start,
            normalise=settings.normalise,
            anchor=settings.anchor,
            score=settings.score,
            kappa=settings.kappa,
            lexical=settings.lexical,
            query_vector="trained" if settings.query_vector == "auto" else settings.query_vector,
            content=settings.content,
            edge_bias=settings.edge_bias,
            positions=trie.positions,
            values=values,
            nodes=trie.nodes,
            d_content=d_content,
        )
    )
    wanted = model.encoder.state_dict()
    given = {name: value for name, value in encoder.model.state_dict().items() if name in wanted}
    model.encoder.load_state_dict(given, strict=True)
    return model


def _encoder_shape(config: Config, encoder: TextEncoder) -> dict[str, Any]:
    """The encoder's own configuration with our dropout and, where asked for, fewer layers."""
    shape: dict[str, Any] = encoder.model.config.to_dict()
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate", "dropout", "attention_dropout"):
        if name in shape:
            shape[name] = config.model.dropout
    layers = config.model.encoder_layers
    for name in ("num_hidden_layers", "num_layers", "n_layers"):
        if layers is not None and name in shape:
            if layers > shape[name]:
                raise ConfigError(f"--model.encoder_layers {layers}: the encoder has {shape[name]}")
            shape[name] = layers
    return shape
