"""The system "nci", on a network of any shape with random weights, or on a real index. Texts in, results on the host out.

Random weights cost the same time as trained ones: every shape is fixed by the tree and the beam. On a CPU, which drops
rows without hope, they cost more, because nothing stands out. Knows nothing of the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nci.bench.cost import Cost, encoder_cost, search_cost
from nci.bench.shapes import WORD_PIECES, HashTokenizer, Shape, id_values
from nci.model import NCIModel
from nci.model_config import NCIConfig
from nci.search import Engine, make_plan
from nci.search.backend import Backend, choose_precision
from nci.search.engine import FEW
from nci.search.fold import EdgeTable
from nci.search.plan import Plan
from nci.trie import Trie

_BLOCK = 65536  # random rows made at a time


def random_backend(trie: Trie, shape: Shape, *, device: str, precision: str = "auto", seed: int = 0) -> Backend:
    """A network of this shape over this tree, as a folded index would have it, without a content score."""
    model, table = random_parts(trie, shape, device=device, seed=seed)
    return Backend(model, trie, table, None, precision=choose_precision(precision, device), device=device)


def random_parts(trie: Trie, shape: Shape, *, device: str, seed: int = 0) -> tuple[NCIModel, EdgeTable]:
    """The weights and the edge table of such a network."""
    torch.manual_seed(seed)
    inner = int((np.diff(trie.child_start) > 0).sum())
    with torch.device(device):
        model = NCIModel(random_config(trie, shape)).eval()
        table = EdgeTable(
            _rows(trie.nodes, shape.width, 0.05, device),
            torch.zeros(trie.nodes),
            _rows(inner, shape.width, 1.0, device),
            _rows(inner, shape.width, 0.3, device),
        )
    return model, table


def random_config(trie: Trie, shape: Shape) -> NCIConfig:
    """MiniLM's encoder is a BERT, all others are T5's."""
    heads = shape.encoder_heads or shape.heads
    encoder: dict[str, Any] = shape.t5(WORD_PIECES, num_heads=heads).to_dict()
    if shape.name == "minilm":
        encoder = {
            "model_type": "bert",
            "vocab_size": WORD_PIECES,
            "hidden_size": shape.width,
            "num_hidden_layers": shape.encoder_layers,
            "num_attention_heads": heads,
            "intermediate_size": shape.d_ff,
        }
    return NCIConfig(
        encoder=encoder,
        d_model=shape.width,
        decoder_layers=shape.decoder_layers,
        adapter_layers=1,  # folded into the table: its size has no part in a search
        heads=shape.heads,
        d_ff=shape.d_ff,
        head_rank=1,
        anchor="exact",
        positions=trie.positions,
        values=id_values(trie),
    )


def _rows(count: int, width: int, size: float, device: str) -> Tensor:
    block = (torch.randn(min(count, _BLOCK), width, device=device) * size).bfloat16()
    out = torch.empty(count, width, dtype=torch.bfloat16, device=device)
    for start in range(0, count, _BLOCK):
        out[start : start + _BLOCK] = block[: len(out[start : start + _BLOCK])]
    return out


@dataclass
class RandomNci:
    """The system "nci" on random weights; a query has as many tokens as the tokenizer gives it."""

    backend: Backend
    tokenizer: HashTokenizer
    beam: int
    name: str = "nci"
    plans: dict[tuple[int, int, bool], Plan] = field(default_factory=dict)

    def ids(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """Tokens and how many, on the host."""
        ids, mask = self.tokenizer(texts)
        lengths = mask.sum(1)
        return (ids.pin_memory(), lengths.pin_memory()) if self.backend.on_gpu else (ids, lengths)

    def plan(self, k: int, batch: int, *, certain: bool = False) -> Plan:
        """As the engine plans it, made once: that takes a look at every node."""
        fixed, least = self.backend.on_gpu, 0 if batch <= FEW else 8
        key = (k, least, certain)
        if key not in self.plans:
            self.plans[key] = make_plan(
                self.backend.trie, beam=self.beam, k=k, fixed=fixed, certain=certain or not fixed, least=least
            )
        return self.plans[key]

    def search(self, texts: list[str], k: int) -> list[list[int]]:
        """Nodes of the best documents of each text; a query that needed more rows is searched again."""
        ids, lengths = self.ids(texts)
        found = self.backend.search(ids, lengths, texts, self.plan(k, len(texts)))
        nodes, short = found.nodes.tolist(), found.short.nonzero().flatten()
        if len(short):
            again = self.backend.search(ids[short], lengths[short], [""] * len(short), self.plan(k, 1, certain=True))
            for i, longer in zip(short.tolist(), again.nodes.tolist(), strict=True):
                nodes[i] = longer
        return nodes  # type: ignore[no-any-return]

    def encode(self, texts: list[str]) -> Tensor:
        """Query vectors, by the same encoder in the same precision, recorded in the same way."""
        ids, lengths = self.ids(texts)
        return _vectors(self.backend, ids, lengths)

    def rows(self, texts: list[str], k: int) -> float:
        """Rows decoded per query."""
        return self.backend.search(*self.ids(texts), texts, self.plan(k, len(texts))).lines / len(texts)

    def cost(self, config: NCIConfig, k: int, batch: int, rows: float | None = None) -> Cost:
        """Operations and bytes of one call."""
        return search_cost(
            config,
            self.backend.trie,
            self.plan(k, batch),
            tokens=self.tokenizer.length,
            batch=batch,
            precision=self.backend.precision,
            rows=rows,
        )

    def encoder_cost(self, config: NCIConfig, batch: int) -> Cost:
        return encoder_cost(config, tokens=self.tokenizer.length, batch=batch, precision=self.backend.precision)


@dataclass
class IndexNci:
    """The system "nci" on a real index, content score and tokenizer included."""

    engine: Engine
    beam: int
    name: str = "nci"

    def search(self, texts: list[str], k: int) -> Any:
        return self.engine.search(texts, k=k, beam=self.beam, batch_size=len(texts))

    def encode(self, texts: list[str]) -> Tensor:
        """Query vectors of the index's encoder."""
        backend = self.engine.backend
        assert backend is not None
        tokens = self.engine.tokenise(texts)
        order: Sequence[list[int]] = tokens
        ids, lengths = backend.pad(order, pad=int(self.engine.tokenizer.pad_token_id or 0), most=self.engine.max_length)
        return _vectors(backend, ids, lengths)[: len(texts)]


@torch.inference_mode()
def _vectors(backend: Backend, ids: Tensor, lengths: Tensor) -> Tensor:
    def encode(ids: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        return (backend.network.encode(ids, lengths)[1],)

    if backend.recorder is None:
        return encode(ids, lengths)[0]
    return backend.recorder.run(("vectors", tuple(ids.shape)), encode, ids, lengths)[0]
