"""NCIModel -> the same network as plain functions over packed weights, for search only.

Queries in, encoder states, query vectors and decoder states out. BERT, MPNet and T5 encoders are run here with
fused projections and, on a CPU, without padding; any other encoder runs as Hugging Face wrote it. Knows nothing of trees:
the rows of a level come with their states and the lines of their ancestors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nci.encoders import pool_tokens
from nci.layers import Block
from nci.model import NCIModel
from nci.search.linear import Linear, Precision, make_linear
from nci.search.ops import TorchOps


@dataclass(frozen=True)
class Memory:
    """What the decoder's layers see of the queries: keys and values of all layers side by side."""

    lines: Tensor  # (queries, tokens, layers * 2 * d)
    lengths: Tensor | None  # (queries,) tokens in use; none where all are


class Layout:
    """Tokens of queries of different lengths: all places, or on a CPU only those in use."""

    def __init__(self, lengths: Tensor, tokens: int, *, packed: bool) -> None:
        self.shape = (len(lengths), tokens)
        self.lengths: Tensor | None = lengths
        self.index: Tensor | None = None
        if packed:
            seen = torch.arange(tokens) < lengths.unsqueeze(1)
            whole = bool(seen.all())
            self.index = None if whole else seen.flatten().nonzero().squeeze(1)
            self.lengths = None if whole else lengths

    def pack(self, x: Tensor) -> Tensor:
        """(queries, tokens, d) -> (lines, d)."""
        flat = x.flatten(0, 1)
        return flat if self.index is None else flat.index_select(0, self.index)

    def pad(self, x: Tensor) -> Tensor:
        """(lines, d) -> (queries, tokens, d)."""
        if self.index is not None:
            x = x.new_zeros(self.shape[0] * self.shape[1], x.shape[1]).index_copy_(0, self.index, x)
        return x.view(*self.shape, -1)


class Network:
    """The parts of a search that are the same for every tree."""

    def __init__(self, model: NCIModel, *, precision: Precision, device: str, ops: TorchOps) -> None:
        self.ops, self.device, self.precision = ops, device, precision
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.pooling = model.config.pooling
        self.heads = int(model.config.heads)
        self.d = int(model.config.d_model)
        self.encoder = _encoder(model, self._linear, self._vector, ops, device, self.dtype)
        blocks = [cast(Block, block) for block in model.decoder.blocks]
        bridge = model.bridge.weight.float() if isinstance(model.bridge, nn.Linear) else None
        self.cross = self._linear(torch.cat([_keys_and_values(block, bridge) for block in blocks]))
        self.layers = [_Layer(block, self._linear) for block in blocks]

    def _linear(self, weight: Tensor, bias: Tensor | None = None, *, outliers: bool = False) -> Linear:
        shift = None if bias is None else bias.detach()
        return make_linear(weight.detach().float(), shift, self.precision, self.device, outliers=outliers)

    def _vector(self, values: Tensor) -> Tensor:
        return values.detach().to(self.device, self.dtype)

    def encode(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encoder states (queries, tokens, width) and the query vectors, of length 1, in float32."""
        states = self.encoder(ids, lengths)
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)
        return states, F.normalize(pool_tokens(states, mask, self.pooling).float(), dim=-1)

    def memory(self, states: Tensor, lengths: Tensor) -> Memory:
        """Keys and values of every cross-attention, once per query."""
        whole = self.device == "cpu" and bool((lengths == states.shape[1]).all())
        return Memory(self.cross(states.flatten(0, 1)).view(*states.shape[:2], -1), None if whole else lengths)

    def cache(self, lines: int) -> list[Tensor]:
        """Room for the self-attention of all rows of a search; the first layer needs none."""
        return [torch.empty(lines, 3 * self.d, dtype=self.dtype, device=self.device) for _ in self.layers[1:]]

    def step(self, x: Tensor, q: Tensor, places: Tensor, first: int, cache: list[Tensor], memory: Memory) -> Tensor:
        """Decoder states (lines, d) of one level, from the states and questions that the edge table has stored.

        Overwrites `x`; lines first .. of `cache` become those of this level.
        """
        ops, batch, rows = self.ops, len(memory.lines), len(x)
        for number, layer in enumerate(self.layers):
            if number:
                layer.qkv.into(cache[number - 1][first : first + rows], ops.rms_norm(x, 1e-6))
                x = layer.self_out.add_to(x, ops.ancestors(cache[number - 1], first, places, self.heads))
                q = layer.query(ops.rms_norm(x, 1e-6))
            keys = memory.lines[..., 2 * number * self.d : (2 * number + 1) * self.d]
            values = memory.lines[..., (2 * number + 1) * self.d : (2 * number + 2) * self.d]
            seen = ops.attend(q.view(batch, -1, self.d), keys, values, self.heads, memory.lengths)
            x = layer.cross_out.add_to(x, seen.view(rows, self.d))
            x = layer.ff_out.add_to(x, layer.ff_in.gelu(ops.rms_norm(x, 1e-6)))
        return ops.rms_norm(x, 1e-6)


MakeLinear = Callable[..., Linear]
MakeVector = Callable[[Tensor], Tensor]


class _Layer:
    """One decoder block."""

    def __init__(self, block: Block, linear: MakeLinear) -> None:
        own, cross = block.self_attention, block.cross_attention
        assert cross is not None and block.cross_norm is not None
        # The weight of a norm is part of the layer that reads it.
        self.qkv = linear(torch.cat([own.query.weight, own.key.weight, own.value.weight]) * block.self_norm.weight)
        self.self_out, self.cross_out = linear(own.out.weight), linear(cross.out.weight)
        self.query = linear(cross.query.weight * block.cross_norm.weight)
        self.ff_in, self.ff_out = linear(block.ff_in.weight * block.ff_norm.weight), linear(block.ff_out.weight)


def _keys_and_values(block: Block, bridge: Tensor | None) -> Tensor:
    assert block.cross_attention is not None
    weight = torch.cat([block.cross_attention.key.weight, block.cross_attention.value.weight]).float()
    return weight if bridge is None else weight @ bridge


Encoder = Callable[[Tensor, Tensor], Tensor]


def _encoder(
    model: NCIModel, linear: MakeLinear, vector: MakeVector, ops: TorchOps, device: str, dtype: torch.dtype
) -> Encoder:
    """(ids (queries, tokens), lengths) -> states (queries, tokens, width)."""
    config: Any = model.encoder.config
    packed = device == "cpu"
    plain_bert = config.model_type == "bert" and getattr(config, "position_embedding_type", "absolute") == "absolute"
    if plain_bert and config.hidden_act == "gelu":
        return _Bert(model.encoder, linear, vector, ops, packed)
    if config.model_type == "mpnet" and config.hidden_act == "gelu":
        return _MPNet(model.encoder, linear, vector, ops, packed)
    if config.model_type in ("t5", "mt5") and config.feed_forward_proj in ("relu", "gated-gelu"):
        return _T5(model.encoder, linear, vector, ops, packed)
    return _AsWritten(model.encoder, device, torch.float32 if packed else dtype)


class _Biases:
    """Tables of relative positions, the same for every query of a length; a few are kept, each a part of the next."""

    def __init__(self, make: Callable[[int], Tensor], vector: MakeVector) -> None:
        self.make, self.vector = make, vector
        self.kept: dict[int, Tensor] = {}

    def __call__(self, tokens: int) -> Tensor:
        """(heads, tokens, tokens)."""
        size = max(16, 1 << (tokens - 1).bit_length())
        if size not in self.kept:
            with torch.no_grad():
                self.kept[size] = self.vector(self.make(size)[0]).contiguous()
        return self.kept[size][:, :tokens, :tokens].contiguous()  # the table itself where it is whole


class _Bert:
    """BERT: norms behind the sums, learned positions."""

    outliers = False  # among what the two layers behind the attention read

    def __init__(self, encoder: Any, linear: MakeLinear, vector: MakeVector, ops: TorchOps, packed: bool) -> None:
        self.ops, self.packed = ops, packed
        self.heads, self.eps = encoder.config.num_attention_heads, encoder.config.layer_norm_eps
        table = encoder.embeddings
        self.words = vector(table.word_embeddings.weight)
        self.positions = vector(self.table_of_positions(table))
        self.norm = vector(table.LayerNorm.weight), vector(table.LayerNorm.bias)
        self.layers = []
        for layer in encoder.encoder.layer:
            *parts, out, norm = self.attention(layer.attention)
            wide, narrow = layer.intermediate.dense, layer.output
            self.layers.append(
                (
                    linear(torch.cat([p.weight for p in parts]), torch.cat([p.bias for p in parts])),
                    linear(out.weight),
                    (vector(out.bias), vector(norm.weight), vector(norm.bias)),
                    linear(wide.weight, wide.bias, outliers=self.outliers),
                    linear(narrow.dense.weight, outliers=self.outliers),
                    (vector(narrow.dense.bias), vector(narrow.LayerNorm.weight), vector(narrow.LayerNorm.bias)),
                )
            )

    def table_of_positions(self, table: Any) -> Tensor:
        """What is added to the words by their places."""
        return cast(Tensor, table.position_embeddings.weight + table.token_type_embeddings.weight[0])

    def attention(self, layer: Any) -> tuple[Any, ...]:
        """Projections to questions, keys and values, the one behind them, and the norm."""
        return layer.self.query, layer.self.key, layer.self.value, layer.output.dense, layer.output.LayerNorm

    def places(self, ids: Tensor) -> Tensor:
        """(tokens, width), or for each query its own."""
        return self.positions[: ids.shape[1]]

    def bias(self, tokens: int) -> Tensor | None:
        """Added to the logits of the attention."""
        return None

    def __call__(self, ids: Tensor, lengths: Tensor) -> Tensor:
        tokens, ops = ids.shape[1], self.ops
        layout, bias = Layout(lengths, tokens, packed=self.packed), self.bias(tokens)
        x = layout.pack(self.words[ids] + self.places(ids))
        x = ops.layer_norm(x, None, *self.norm, self.eps)
        for qkv, out, after_attention, wide, narrow, after in self.layers:
            q, k, v = layout.pad(qkv(x)).chunk(3, dim=-1)
            seen = layout.pack(ops.attend(q, k, v, self.heads, layout.lengths, bias))
            x = ops.layer_norm(out.add_to(x, seen), *after_attention, self.eps)
            hidden = wide.gelu(x)
            x = ops.layer_norm(narrow.add_to(x, hidden), *after, self.eps)
        return layout.pad(x)


class _MPNet(_Bert):
    """MPNet: BERT without token types, and with one table of relative positions for all layers."""

    # 600 times the mean in all-mpnet-base-v2: with these layers in int8 too, query vectors turn by 26 degrees instead of 3
    outliers = True

    def __init__(self, encoder: Any, linear: MakeLinear, vector: MakeVector, ops: TorchOps, packed: bool) -> None:
        super().__init__(encoder, linear, vector, ops, packed)
        self.padding = int(encoder.embeddings.padding_idx)
        stack = encoder.encoder
        like = stack.relative_attention_bias.weight
        self.biases = _Biases(lambda tokens: stack.compute_position_bias(like.new_empty(1, tokens)), vector)

    def table_of_positions(self, table: Any) -> Tensor:
        """No token types."""
        return cast(Tensor, table.position_embeddings.weight)

    def attention(self, layer: Any) -> tuple[Any, ...]:
        """Other names for the same."""
        return layer.attn.q, layer.attn.k, layer.attn.v, layer.attn.o, layer.LayerNorm

    def places(self, ids: Tensor) -> Tensor:
        """Counted from behind the place of the padding, which a text may name, too."""
        real = ids != self.padding
        return self.positions[real.cumsum(1) * real + self.padding]

    def bias(self, tokens: int) -> Tensor:
        """(heads, tokens, tokens)."""
        return self.biases(tokens)


class _T5:
    """T5: norms before the layers, no scale in the attention, one table of relative positions for all layers."""

    def __init__(self, encoder: Any, linear: MakeLinear, vector: MakeVector, ops: TorchOps, packed: bool) -> None:
        self.ops, self.packed = ops, packed
        self.heads, self.eps = encoder.config.num_heads, encoder.config.layer_norm_epsilon
        stack = encoder.encoder
        self.words = vector(encoder.shared.weight)
        first = stack.block[0].layer[0].SelfAttention
        device = first.relative_attention_bias.weight.device
        self.bias = _Biases(lambda tokens: first.compute_bias(tokens, tokens, device=device), vector)
        self.norm = vector(stack.final_layer_norm.weight)
        self.layers = []
        for block in stack.block:
            own, ff = block.layer[0], block.layer[1]
            dense, parts = ff.DenseReluDense, (own.SelfAttention.q, own.SelfAttention.k, own.SelfAttention.v)
            gated = hasattr(dense, "wi_0")
            self.layers.append(
                (
                    linear(torch.cat([p.weight for p in parts]) * own.layer_norm.weight),
                    linear(own.SelfAttention.o.weight),
                    linear(
                        (torch.cat([dense.wi_0.weight, dense.wi_1.weight]) if gated else dense.wi.weight)
                        * ff.layer_norm.weight
                    ),
                    gated,
                    linear(dense.wo.weight),
                )
            )

    def __call__(self, ids: Tensor, lengths: Tensor) -> Tensor:
        tokens, ops = ids.shape[1], self.ops
        layout, bias = Layout(lengths, tokens, packed=self.packed), self.bias(tokens)
        x = layout.pack(self.words[ids])
        for qkv, out, wide, gated, narrow in self.layers:
            q, k, v = layout.pad(qkv(ops.rms_norm(x, self.eps))).chunk(3, dim=-1)
            x = out.add_to(x, layout.pack(ops.attend(q, k, v, self.heads, layout.lengths, bias, 1.0)))
            y = ops.rms_norm(x, self.eps)
            if gated:
                gate, value = wide(y).chunk(2, dim=-1)
                hidden = F.gelu(gate, approximate="tanh") * value
            else:
                hidden = wide.relu(y)
            x = narrow.add_to(x, hidden)
        return layout.pad(ops.rms_norm(x, self.eps) * self.norm)


class _AsWritten:
    """Any other encoder, run by the library that wrote it."""

    def __init__(self, encoder: nn.Module, device: str, dtype: torch.dtype) -> None:
        same = next(encoder.parameters()).dtype == dtype
        self.encoder: Any = encoder.to(device) if same else _copy(encoder).to(device, dtype)
        self.encoder.eval()

    def __call__(self, ids: Tensor, lengths: Tensor) -> Tensor:
        mask = (torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)).long()
        return cast(Tensor, self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state)


def _copy(module: nn.Module) -> nn.Module:
    import copy

    return copy.deepcopy(module)
