"""Encoder, decoder, softmax and pointer as one network: word pieces in, probabilities of the next piece out.

The decoder is a small stack over the encoder's own word pieces, tied to its pretrained word vectors. A pointer beside the
softmax copies pieces of the source, so that rare words can be said without having been learned:
p(v) = (1 - g) softmax(v) + g (attention on the places where the source has v). Whole targets (`forward`) and single steps
with a cache (`advance`) give the same numbers. Knows nothing of texts, tokenizers or files.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nci.encoders import token_states
from nci.errors import ConfigError
from nci.layers import Stack, StackCache
from nci.seq2seq import IGNORED


@dataclass
class State:
    """Where the decoder stands with every row: what it has read of the sources, and the rows' own past.

    Rows of one source share its memory; a source with fewer rows than another has idle slots.
    """

    memories: list[tuple[Tensor, Tensor]]  # per layer 2 x (sources, heads, pieces, d / heads)
    pointer: Tensor  # (sources, pieces, d) keys of the copy mechanism
    pieces: Tensor  # (sources, pieces) ids
    seen: Tensor  # (sources, pieces) true where there is a piece
    copied: Tensor  # (sources, pieces) true where it may be copied
    cache: StackCache
    ancestors: Tensor  # (sources, slots, steps) places in the cache
    slots: Tensor  # (rows,) place of each row among sources x slots

    def of_sources(self, sources: Tensor) -> State:
        """The state with these sources, a source perhaps several times; rows and their past are the caller's to fit."""

        def taken(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, sources)  # its gradient is many times faster than that of tensor[sources]

        return State(
            [(taken(keys), taken(values)) for keys, values in self.memories],
            taken(self.pointer),
            taken(self.pieces),
            taken(self.seen),
            taken(self.copied),
            StackCache([taken(keys) for keys in self.cache.keys], [taken(values) for values in self.cache.values]),
            self.ancestors,
            self.slots,
        )

    def select(self, rows: Tensor) -> State:
        """The state of some rows, in this order; a row may come more than once, or not at all."""
        width = self.ancestors.shape[1]
        old = self.slots[rows]
        sources, source = torch.unique(old // width, return_inverse=True)
        counts = source.bincount(minlength=len(sources))
        order = source.argsort(stable=True)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[source[order]]
        slots = source * int(counts.max()) + rank
        ancestors = self.ancestors[sources, :1].repeat(1, int(counts.max()), 1)  # idle slots have some valid past
        ancestors.flatten(0, 1)[slots] = self.ancestors.flatten(0, 1)[old]
        kept = self.of_sources(sources) if len(sources) < len(self.pieces) else self
        cache = StackCache([*kept.cache.keys], [*kept.cache.values])  # steps of the one must not show in the other
        return dataclasses.replace(kept, cache=cache, ancestors=ancestors, slots=slots)


class Network(nn.Module):
    """Encoder, decoder, softmax and pointer. `vocabulary` are the pieces the softmax knows, `blocked` are not copied."""

    vocabulary: Tensor
    blocked: Tensor

    def __init__(
        self, encoder: Any, vocabulary: Tensor, blocked: Tensor, *, layers: int, dropout: float, max_target: int
    ) -> None:
        super().__init__()
        words = encoder.get_input_embeddings().weight
        size, width = words.shape
        if width != encoder.config.hidden_size:
            raise ConfigError("this encoder's word vectors are narrower than its output; take another, such as minilm")
        heads = max(1, width // 64)
        self.encoder = encoder
        self.input_norm = nn.RMSNorm(width, eps=1e-6)
        self.places = nn.Embedding(max_target, width)
        self.decoder = Stack(layers, width, heads, 4 * width, dropout, cross=True)
        self.out = nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(len(vocabulary)))
        self.pointer_query = nn.Linear(width, width, bias=False)
        self.pointer_key = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 1)
        nn.init.normal_(self.places.weight, std=0.1)
        self.register_buffer("vocabulary", vocabulary)
        self.register_buffer("blocked", blocked)
        column = torch.full((size,), -1)
        column[vocabulary] = torch.arange(len(vocabulary))
        self.register_buffer("column", column, persistent=False)

    def embed(self, pieces: Tensor, place: int) -> Tensor:
        """Decoder inputs of pieces (..., n) that begin at a place: (..., n, d)."""
        places = torch.arange(place, place + pieces.shape[-1], device=pieces.device)
        words: Tensor = self.encoder.get_input_embeddings().weight[pieces]
        return self.input_norm(words) + self.places(places)  # type: ignore[no-any-return]

    def rows(self) -> Tensor:
        """(vocabulary, d) word vectors behind the softmax."""
        return self.encoder.get_input_embeddings().weight[self.vocabulary]  # type: ignore[no-any-return]

    def read(self, pieces: Tensor, seen: Tensor) -> State:
        """Encode sources (sources, pieces); one row each, nothing decoded yet."""
        states = token_states(self.encoder, pieces, seen)  # (sources, pieces, d)
        count = len(pieces)
        return State(
            self.decoder.memories(states),
            self.pointer_key(states),
            pieces,
            seen,
            seen & ~torch.isin(pieces, self.blocked),
            StackCache(),
            torch.zeros(count, 1, 0, dtype=torch.long, device=pieces.device),
            torch.arange(count, device=pieces.device),
        )

    def distributions(self, hidden: Tensor, state: State, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of decoder outputs (sources, n, d): log softmax (.., vocabulary), pointer (.., pieces), gate logits (.., 1).

        Where a source has nothing to copy, the pointer is zero and the gate is shut.
        """
        softmax = (F.linear(self.out(hidden), rows) + self.bias).float().log_softmax(-1)
        weights = self.pointer_query(hidden) @ state.pointer.transpose(1, 2) / math.sqrt(hidden.shape[-1])
        hidden_places = ~state.copied[:, None, :]
        nothing = hidden_places.all(-1, keepdim=True)
        pointer = weights.float().masked_fill(hidden_places & ~nothing, -math.inf).softmax(-1) * ~nothing
        gate = self.gate(hidden).float().masked_fill(nothing, -1e9)
        return softmax, pointer, gate

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        decoder_input_ids: Tensor,
        labels: Tensor,
        source_rows: Tensor,
    ) -> Any:
        """The mean of -log p over the real tokens of `labels` (targets, n); `source_rows` (targets,) are their sources."""
        state = self.read(input_ids, attention_mask.bool()).of_sources(source_rows)
        hidden = self.decoder(self.embed(decoder_input_ids, 0), state.memories, state.seen[:, None, None, :])
        softmax, pointer, gate = self.distributions(hidden, state, self.rows())
        real = labels != IGNORED
        column = self.column[labels.clamp(min=0)]  # type: ignore[index]
        said = softmax.gather(-1, column.clamp(min=0)[..., None]).squeeze(-1).masked_fill(column < 0, -1e9)
        copied = (pointer * (state.pieces[:, None, :] == labels[..., None])).sum(-1)
        both = torch.logaddexp(
            F.logsigmoid(-gate.squeeze(-1)) + said, F.logsigmoid(gate.squeeze(-1)) + copied.clamp(min=1e-30).log()
        )
        return {"loss": -(both * real).sum() / real.sum().clamp(min=1)}

    def advance(self, state: State, tokens: Tensor, rows: Tensor) -> Tensor:
        """Read one token per row; probabilities of the next one, (rows, all pieces). Changes `state`."""
        sources, width, steps = state.ancestors.shape
        if steps >= self.places.num_embeddings:
            raise ConfigError(f"this generator was made for at most {self.places.num_embeddings} tokens (max_target)")
        grid = torch.zeros(sources * width, dtype=torch.long, device=tokens.device)
        grid[state.slots] = tokens
        begin = state.cache.keys[0].shape[2] if state.cache.keys else 0
        own = torch.arange(begin, begin + width, device=tokens.device).view(1, -1, 1).expand(sources, -1, -1)
        state.ancestors = torch.cat([state.ancestors, own], dim=2)
        inputs = self.embed(grid.view(sources, width, 1), steps).squeeze(2)
        hidden = self.decoder.step(
            inputs, state.ancestors, state.cache, state.memories, state.seen[:, None, None, :]
        )  # (sources, slots, d)
        softmax, pointer, gate = self.distributions(hidden, state, rows)
        opened = gate.sigmoid()
        both = torch.zeros(sources, width, len(self.column), device=hidden.device)  # type: ignore[arg-type]
        both[..., self.vocabulary] = softmax.exp() * (1 - opened)
        both.scatter_add_(2, state.pieces[:, None, :].expand(-1, width, -1), pointer * opened)
        return both.flatten(0, 1)[state.slots]
