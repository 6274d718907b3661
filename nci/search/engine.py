"""Texts in, numbers of documents out: tokenises and encodes queries, then asks the tree.

The same engine serves a finished index and the search of `dev` during training. Knows no doc_ids and no files.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from nci.encoders import TextEncoder
from nci.errors import ConfigError, DataError
from nci.lexical import LexicalScores
from nci.model import NCIModel
from nci.search.beam import EncodedQueries, Found, beam_search
from nci.search.exhaustive import exhaustive_search
from nci.search.fold import EdgeTable, fold
from nci.search.unconstrained import unconstrained_search

Mode = Literal["beam", "unconstrained", "exhaustive"]
MAX_QUERY_CHARS = 10_000


class Ranking(NamedTuple):
    """Documents of one query, best first, and how many documents were scored to find them."""

    documents: NDArray[np.int64]  # (hits,)
    scores: NDArray[np.float32]  # (hits,)
    scored: int


@dataclass
class Engine:
    """A bound model in eval mode and what turns texts into its inputs.

    Args:
        tokenizer: The encoder's tokenizer.
        edges: Folded edge table; made by `for_model` where the model allows it.
        lexical: Lexical scores in leaf order, where the content score has them.
        embedder: The stored encoder, where the query vector comes from it.
        prompt: What the encoder wants before a query.
        max_length: Word pieces of a query that are read.
    """

    model: NCIModel
    tokenizer: Any
    edges: EdgeTable | None = None
    lexical: LexicalScores | None = None
    embedder: TextEncoder | None = None
    prompt: str = ""
    max_length: int = 64

    @classmethod
    def for_model(cls, model: NCIModel, tokenizer: Any, **kwargs: Any) -> Engine:
        """An engine whose edge table is folded now."""
        return cls(model.eval(), tokenizer, edges=fold(model) if model.config.foldable else None, **kwargs)

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> EncodedQueries:
        """Everything about some queries that does not depend on the beam."""
        device = self.model.device
        batch = self.tokenizer(
            [self.prompt + text for text in texts],
            truncation=True,
            max_length=self.max_length,
            padding=True,
            return_tensors="pt",
        ).to(device)
        states, vectors = self.model.encode(batch["input_ids"], batch["attention_mask"])
        asked = vectors
        if self.embedder is not None:
            stored = self.embedder.encode(texts, role="query")
            asked = torch.nn.functional.normalize(torch.as_tensor(stored, device=device), dim=-1)
        lexical = None
        if self.lexical is not None:
            lexical = torch.as_tensor(self.lexical.normalised(texts), device=device)
        anchors = self.model.anchors(asked, lexical)
        return EncodedQueries(states, batch["attention_mask"], vectors, anchors)

    @torch.inference_mode()
    def search(
        self,
        texts: Sequence[str],
        *,
        k: int,
        beam: int,
        length_penalty: float = 0.0,
        mode: Mode = "beam",
        batch_size: int = 32,
    ) -> list[Ranking]:
        """The best documents of each text, in the order of the texts."""
        cleaned = [clean_query(text) for text in texts]
        order = sorted(range(len(cleaned)), key=lambda i: len(cleaned[i]))
        out: dict[int, Ranking] = {}
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            queries = self.encode([cleaned[i] for i in chosen])
            found = self._find(queries, k=k, beam=beam, length_penalty=length_penalty, mode=mode)
            documents, scores = found.documents.cpu().numpy(), found.scores.float().cpu().numpy()
            for row, i in enumerate(chosen):
                real = np.isfinite(scores[row]) & (documents[row] >= 0)
                out[i] = Ranking(documents[row][real], scores[row][real], int(found.scored[row]))
        return [out[i] for i in range(len(texts))]

    @torch.inference_mode()
    def explain(self, text: str, documents: Sequence[int]) -> list[dict[str, Any]]:
        """For each document the log-probability of every digit of its id and, where there is one, its content score."""
        if not documents:
            return []
        queries = self.encode([clean_query(text)])
        rows = torch.zeros(len(documents), dtype=torch.long, device=self.model.device)
        numbers = torch.as_tensor(list(documents), device=self.model.device)
        vectors = queries.vectors[rows] if queries.vectors is not None else None
        anchors = queries.anchors[rows] if queries.anchors is not None else None
        mask = queries.mask[rows][:, None, None, :].bool()
        log_probs, _, real = self.model.path_log_probs(
            self.model.memories(queries.states[rows]), mask, numbers, vectors, anchors
        )
        leaves = torch.as_tensor(self.model.tables.trie.leaves, device=numbers.device).long()[numbers]
        return [
            {
                "digits": log_probs[i][real[i]].tolist(),
                "content": None if anchors is None else float(anchors[i, leaves[i]]),
            }
            for i in range(len(documents))
        ]

    def zeroed(self) -> Engine:
        """The same engine without what the decoder learned: content scores alone."""
        if self.model.config.anchor == "none":
            raise ConfigError("--system zeroed needs an index with an anchor: without one nothing is left")
        model = copy.copy(self.model)  # all weights shared but those of the head
        model._modules = dict(self.model._modules)
        model.head = copy.deepcopy(self.model.head)
        torch.nn.init.zeros_(model.head.out.weight)
        if model.head.bias is not None:
            torch.nn.init.zeros_(model.head.bias)
        edges = self.edges
        if edges is not None:
            edges = EdgeTable(torch.zeros_like(edges.vectors), torch.zeros_like(edges.bias))
        return replace(self, model=model, edges=edges)

    def _find(self, queries: EncodedQueries, *, k: int, beam: int, length_penalty: float, mode: Mode) -> Found:
        if mode not in get_args(Mode):
            raise ConfigError(f"mode is one of {', '.join(get_args(Mode))}; not {mode!r}")
        if mode == "exhaustive":
            return exhaustive_search(self.model, queries, k=k, length_penalty=length_penalty)
        if mode == "unconstrained":
            return unconstrained_search(self.model, queries, beam=beam, k=k, length_penalty=length_penalty)
        return beam_search(self.model, queries, edges=self.edges, beam=beam, k=k, length_penalty=length_penalty)


def clean_query(text: str) -> str:
    """The text a model may see; refuses what cannot be a query."""
    if not isinstance(text, str):
        raise DataError(f"a query is a string, not {type(text).__name__}")
    text = text[:MAX_QUERY_CHARS].replace("\x00", " ")
    if not text.strip():
        raise DataError("the query is empty; type at least one word")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError("the query holds a lone surrogate, which is no character; send valid Unicode") from error
    return text
