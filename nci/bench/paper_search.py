"""The search of the paper's published code, to compare with: texts in, semantic ids with scores out.

Written anew from what that code does, waste included: float32; the decoder runs again over the whole prefix of every beam
at every step, without a cache and with the encoder states repeated per beam; the adapter reads the prefix and one learned
vector, and a linear layer widens its output to a full weight matrix for every row and position; the tree is nested
dictionaries walked from the root per beam; candidates are sorted out one by one on the host; a step for the end token
follows the last digit. Two things are kinder than the original: the vocabulary has as many positions as the tree is deep
(the original always ten), and prefixes still open after the last step are dropped. The weights are random. Knows nothing
of `nci`'s own model or search.
"""

from __future__ import annotations

import heapq
import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import T5EncoderModel
from transformers.models.t5.modeling_t5 import T5Stack

from nci.bench.shapes import WORD_PIECES, HashTokenizer, Shape, id_values, nested_dicts, walk
from nci.errors import ConfigError
from nci.records import SemanticId
from nci.trie import Trie

START, END, FIRST = 0, 1, 2  # tokens; the values of the first position begin at FIRST
_NEVER = -1e9  # the score of what must not be chosen
_REAL = -1e7  # a finished id with less than this came from a beam that was never open


class PaperModel(nn.Module):
    """T5 encoder, T5 decoder of its own vocabulary, and the prefix-aware head in its additive form."""

    def __init__(self, shape: Shape, *, positions: int, values: int) -> None:
        super().__init__()
        width = shape.width
        self.values = values
        self.vocabulary = FIRST + positions * values
        self.encoder = T5EncoderModel(shape.t5(WORD_PIECES, num_heads=shape.encoder_heads or shape.heads))
        self.decoder = T5Stack(
            shape.t5(self.vocabulary, num_layers=shape.decoder_layers, is_decoder=True, use_cache=False)
        )
        layer = nn.TransformerDecoderLayer(width, nhead=math.gcd(8, width), dim_feedforward=2048)
        self.adapter = nn.TransformerDecoder(layer, shape.adapter_layers)
        self.memory = nn.Parameter(torch.rand(1, 1, width))  # in the place of a query
        self.widen = nn.Linear(width, width * self.vocabulary, bias=False)

    @property
    def table(self) -> Tensor:
        """Input embedding and classifier at once: (vocabulary, width)."""
        return cast(Tensor, self.decoder.embed_tokens.weight)

    def decode(self, tokens: Tensor, states: Tensor, mask: Tensor) -> Tensor:
        """Decoder states of every position of every prefix, scaled: (rows, positions, width)."""
        decoded = self.decoder(
            input_ids=tokens, encoder_hidden_states=states, encoder_attention_mask=mask, use_cache=False
        )
        return cast(Tensor, decoded.last_hidden_state * self.table.shape[1] ** -0.5)

    def adapt(self, tokens: Tensor) -> Tensor:
        """Adapter states of every position of every prefix: (rows, positions, width)."""
        prefix = self.table[tokens].transpose(0, 1)  # (positions, rows, width)
        causal = nn.Transformer.generate_square_subsequent_mask(len(prefix), device=tokens.device)
        adapted = self.adapter(prefix, self.memory.expand(1, len(tokens), -1), tgt_mask=causal)
        return cast(Tensor, adapted.transpose(0, 1))

    def log_probs(self, tokens: Tensor, states: Tensor, mask: Tensor) -> Tensor:
        """log p of the next token of each prefix, among its position's values and the end: (rows, vocabulary)."""
        rows, length = tokens.shape
        width = self.table.shape[1]
        hidden = self.decode(tokens, states, mask)
        wide = self.widen(self.adapt(tokens)).view(rows, length, width, self.vocabulary)
        weights = wide + self.table.T  # (rows, positions, width, vocabulary), although one position is asked for
        logits = (hidden.unsqueeze(2) @ weights).squeeze(2)[:, -1]
        first = FIRST + (length - 1) * self.values
        closed = torch.full_like(logits, _NEVER)
        closed[:, first : first + self.values] = 0
        closed[:, END] = 0
        return cast(Tensor, (logits + closed).log_softmax(-1))


class _Finished:
    """The best complete ids of one query, at most `size`."""

    def __init__(self, size: int, length_penalty: float) -> None:
        self.size, self.length_penalty = size, length_penalty
        self.heap: list[tuple[float, list[int]]] = []

    def add(self, tokens: list[int], log_prob: float) -> None:
        """`tokens` begin with the start token and do not hold the end token, whose probability counts."""
        heapq.heappush(self.heap, (log_prob / len(tokens) ** self.length_penalty, tokens))
        if len(self.heap) > self.size:
            heapq.heappop(self.heap)

    def closed(self, best_open: float, length: int) -> bool:
        """Whether nothing open can enter any more, by the original's bound."""
        return len(self.heap) == self.size and self.heap[0][0] >= best_open / length**self.length_penalty


class PaperSearch:
    """The system "paper-search".

    Args:
        trie: All semantic ids.
        shape: Size of the network.
        beam: Prefixes kept per query.
        device: Where the network runs.
        length: Tokens per query.
        length_penalty: Exponent of the length that divides log p; 0.8 in the paper.
        seed: Of the random weights.
    """

    name = "paper-search"

    def __init__(
        self,
        trie: Trie,
        shape: Shape,
        *,
        beam: int,
        device: str = "cpu",
        length: int = 32,
        length_penalty: float = 0.8,
        seed: int = 0,
    ) -> None:
        if beam < 1:
            raise ConfigError(f"--beam is at least 1, not {beam}")
        self.beam, self.device, self.length_penalty = beam, device, length_penalty
        self.positions, self.values = trie.positions, id_values(trie)
        self.tokenizer = HashTokenizer(WORD_PIECES, length)
        self.root = nested_dicts(trie, values=self.values, first=FIRST, end=END)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = PaperModel(shape, positions=self.positions, values=self.values)
        self.model = model.to(device).eval()

    @torch.inference_mode()
    def search(self, texts: list[str], k: int) -> list[list[tuple[SemanticId, float]]]:
        """The best k ids of each text with their scores; fewer where the beam found fewer."""
        input_ids, mask = (tensor.to(self.device) for tensor in self.tokenizer(texts))
        states = self.model.encoder(input_ids=input_ids, attention_mask=mask).last_hidden_state
        # (texts x beam, tokens, width): every beam has its own copy
        states, mask = states.repeat_interleave(self.beam, 0), mask.repeat_interleave(self.beam, 0)
        return [self._ranking(finished, k) for finished in self._beams(len(texts), states, mask)]

    def _beams(self, queries: int, states: Tensor, mask: Tensor) -> list[_Finished]:
        beam, vocabulary = self.beam, self.model.vocabulary
        finished = [_Finished(beam, self.length_penalty) for _ in range(queries)]
        done = [False] * queries
        tokens = torch.full((queries * beam, 1), START, device=self.device)
        scores = torch.full((queries, beam), _NEVER, device=self.device)
        scores[:, 0] = 0  # the beams begin equal: all but one wait
        for length in range(1, self.positions + 2):
            log_probs = self.model.log_probs(tokens, states, mask) + self._mask(tokens)
            total = log_probs.view(queries, beam, vocabulary) + scores.unsqueeze(-1)
            best, place = total.view(queries, -1).topk(2 * beam)
            kept: list[tuple[float, int, int]] = []  # score, token and row of every next beam
            for query in range(queries):
                if done[query]:
                    kept += [(0.0, START, query * beam)] * beam
                    continue
                chosen = self._sort_out(best[query], place[query], tokens, query, finished[query])
                kept += chosen
                done[query] = finished[query].closed(best[query].max().item(), length)
            if all(done):
                break
            scores = torch.tensor([score for score, _, _ in kept], device=self.device).view(queries, beam)
            rows = torch.tensor([row for _, _, row in kept], device=self.device)
            following = torch.tensor([token for _, token, _ in kept], device=self.device)
            tokens = torch.cat([tokens[rows], following.unsqueeze(1)], dim=1)
        return finished

    def _sort_out(
        self, best: Tensor, place: Tensor, tokens: Tensor, query: int, finished: _Finished
    ) -> list[tuple[float, int, int]]:
        """Complete ids go to `finished`, the next `beam` open prefixes come back; the tensors stay on the device."""
        chosen: list[tuple[float, int, int]] = []
        for rank in range(2 * self.beam):
            where = int(place[rank].item())
            row, token = query * self.beam + where // self.model.vocabulary, where % self.model.vocabulary
            if token != END:
                chosen.append((best[rank].item(), token, row))
            elif rank < self.beam:
                finished.add(tokens[row].tolist(), best[rank].item())
            if len(chosen) == self.beam:
                break
        return chosen

    def _mask(self, tokens: Tensor) -> Tensor:
        """0 for the children of each prefix and -inf elsewhere, made on the host; a path that is none can only end."""
        mask = torch.full((len(tokens), self.model.vocabulary), -torch.inf)
        for row in range(len(tokens)):
            node = walk(self.root, tokens[row].tolist()[1:])
            mask[row, list(node) if node else [END]] = 0
        return mask.to(self.device)

    def _ranking(self, finished: _Finished, k: int) -> list[tuple[SemanticId, float]]:
        ranked = sorted(finished.heap, key=lambda item: -item[0])
        return [(self._semantic_id(tokens), score) for score, tokens in ranked[:k] if score > _REAL]

    def _semantic_id(self, tokens: list[Any]) -> SemanticId:
        return tuple((token - FIRST) % self.values for token in tokens[1:])
