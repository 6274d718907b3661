"""Hugging Face's encoders made to train faster: the same weights by the same names, the same numbers but for rounding.

Under autocast a norm gives float32, which every layer behind it converts again; T5's norms are six kernels each besides, and
T5 and MPNet may write down all their attention, a number for each two tokens, head and layer, several times over. Here
norms give what is read next, so that states between layers are bf16, too, and attention is one kernel. Knows nothing of what
the network is for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder, MPNetSelfAttention
from transformers.models.t5.modeling_t5 import T5DenseActDense, T5DenseGatedActDense, T5LayerNorm, T5Stack

from nci.layers import Norm, as_read, is_mixed, norm_as_read


def make_lean(encoder: nn.Module) -> None:
    """Replace norms of an encoder, and what else T5 and MPNet do in more steps than they must, in place."""
    for module in list(encoder.modules()):
        if type(module) in _LEAN and not getattr(module, "is_decoder", False):
            module.__class__ = _LEAN[type(module)]
        for name, child in module.named_children():
            if type(child) is T5LayerNorm:
                setattr(module, name, _norm(child))


def _norm(plain: Any) -> Norm:
    norm = Norm(len(plain.weight), eps=plain.variance_epsilon)
    norm.weight = plain.weight
    return norm


class _LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return norm_as_read(F.layer_norm, x, self.normalized_shape, self.weight, self.bias, eps=self.eps)


# ---- T5


class _FeedForward(T5DenseActDense):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return _out(self.wo, self.dropout(self.act(self.wi(x))))


class _GatedFeedForward(T5DenseGatedActDense):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return _out(self.wo, self.dropout(self.act(self.wi_0(x)) * self.wi_1(x)))


def _out(layer: nn.Linear, x: Tensor) -> Tensor:
    # weights may be kept in float32 where the others are not
    return layer(x if is_mixed(x) else x.to(layer.weight.dtype))  # type: ignore[no-any-return]


class _Stack(T5Stack):  # type: ignore[misc]
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> BaseModelOutput:
        x, tokens = self.dropout(as_read(self.embed_tokens(input_ids))), input_ids.shape[1]
        bias = self.block[0].layer[0].SelfAttention.compute_bias(tokens, tokens, device=x.device)
        if attention_mask is not None:
            bias = bias.masked_fill(~attention_mask.bool()[:, None, None, :], torch.finfo(bias.dtype).min)
        bias = as_read(bias)  # (1 or texts, heads, tokens, tokens)
        for attending, forward in (block.layer for block in self.block):
            layer = attending.SelfAttention
            y = attending.layer_norm(x)
            read = _attend(layer, y, bias, layer.key_value_proj_dim, layer.dropout, scale=1.0)
            x = forward(x + attending.dropout(read))
        return BaseModelOutput(last_hidden_state=self.dropout(self.final_layer_norm(x)))


# ---- MPNet


class _Encoder(MPNetEncoder):  # type: ignore[misc]
    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any) -> BaseModelOutput:
        # positions are the same for all texts, and for all layers
        bias = self.compute_position_bias(hidden_states[:1])
        bias = as_read(bias if attention_mask is None else bias + attention_mask)  # (1 or texts, heads, tokens, tokens)
        for layer in self.layer:
            (hidden_states,) = layer(hidden_states, None, bias)
        return BaseModelOutput(last_hidden_state=hidden_states)


class _Attention(MPNetSelfAttention):  # type: ignore[misc]
    def forward(self, hidden_states: Tensor, attention_mask: None, position_bias: Tensor, **_: Any) -> tuple[Tensor]:
        return (_attend(self, hidden_states, position_bias, self.attention_head_size, self.dropout.p),)


def _attend(layer: Any, x: Tensor, bias: Tensor, width: int, dropout: float, scale: float | None = None) -> Tensor:
    """Attention of all texts' tokens to each other, by the products q, k, v and o of a layer; heads have some width."""
    q, k, v = (each(x).unflatten(-1, (-1, width)).transpose(1, 2) for each in (layer.q, layer.k, layer.v))
    dropout = dropout if layer.training else 0.0
    read = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype), dropout_p=dropout, scale=scale)
    return layer.o(read.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


_LEAN: dict[type[nn.Module], type[nn.Module]] = {
    nn.LayerNorm: _LayerNorm,
    T5DenseActDense: _FeedForward,
    T5DenseGatedActDense: _GatedFeedForward,
    T5Stack: _Stack,
    MPNetEncoder: _Encoder,
    MPNetSelfAttention: _Attention,
}
