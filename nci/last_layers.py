"""An encoder of which the last layers alone are trained: what the layers below say of a text is computed once a round.

    texts -> layers below, once, without gradients -> kept -> last layers, in every step -> states

That is a third of the work of training all layers, and needs no word vectors in the optimiser: an encoder can be tuned on
two CPU cores. Knows nothing of pairs and losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from nci.batches import ragged
from nci.encoders import TextEncoder, token_states, wide_mask
from nci.errors import ConfigError

if TYPE_CHECKING:
    from nci.contrastive_data import Rows, Tokens

_AT_ONCE = 2**14  # word pieces that the layers below read together


def train_only_last(model: Any, layers: int) -> None:
    """Let gradients reach the last layers alone, in place: so many of them, or all where there are fewer."""
    stack = _stack(model)
    model.requires_grad_(False)
    stack[-layers:].requires_grad_(True)


def _stack(model: Any) -> nn.ModuleList:
    """All layers of an encoder: its first list that has as many parts as it has layers."""
    count = model.config.num_hidden_layers
    for part in model.modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return part
    raise ConfigError(
        "the layers of this encoder cannot be told apart; --tune.layers and --dual.layers 0 train all of it"
    )


@dataclass(frozen=True)
class Kept:
    """States of many texts before the last layers of an encoder, in one array: those of text i are from `starts[i]` on."""

    model: Any
    layers: int
    pieces: Tensor  # (pieces of all texts, width)
    starts: Rows  # (texts + 1,)

    @classmethod
    @torch.no_grad()
    def read(cls, encoder: TextEncoder, tokens: Tokens, layers: int, *, most: float) -> Kept | None:
        """The states of all texts; none where there would be more than `most` bytes, or the encoder cannot be parted.

        The number format is that of the autocast around it.
        """
        model, pad = encoder.model, encoder.tokenizer.pad_token_id or 0
        if not _can_be_parted(model) or len(tokens.pieces) * encoder.width * 4 > most:
            return None
        pieces = None
        order = np.argsort(-tokens.lengths, kind="stable")  # those of one length together, since they are padded
        step = max(1, _AT_ONCE // max(1, int(tokens.lengths.max(initial=1))))
        for start in range(0, len(order), step):
            texts = order[start : start + step]
            ids, mask = (torch.from_numpy(each).to(model.device) for each in tokens.padded(texts, pad))
            with _only(model, slice(None, -layers)):
                states = token_states(model, ids, mask)  # (texts, tokens, width)
            if pieces is None:
                pieces = states.new_empty(len(tokens.pieces), states.shape[-1])
            places, own = ragged(tokens.starts, texts)
            pieces[torch.from_numpy(places[own]).to(pieces.device)] = states[mask]
        return None if pieces is None else cls(model, layers, pieces, tokens.starts)

    def states(self, texts: Rows, mask: Tensor) -> Tensor:
        """(texts, tokens, width) after the last layers, with gradients to these."""
        places, _ = ragged(self.starts, texts)
        below = self.pieces[torch.from_numpy(places).to(self.pieces.device)]  # (texts, tokens, width)
        wide = wide_mask(self.model.config, mask, self.model.dtype)
        with _only(self.model, slice(-self.layers, None)):
            return cast(Tensor, self.model.encoder(below, attention_mask=wide).last_hidden_state)


def _can_be_parted(model: Any) -> bool:
    """Whether states can go in between two layers: BERT and what is built like it, MPNet too."""
    there = isinstance(getattr(getattr(model, "encoder", None), "layer", None), nn.ModuleList)
    return there and wide_mask(model.config, torch.ones(1, 1, dtype=torch.bool)).dim() == 4


@contextmanager
def _only(model: Any, part: slice) -> Iterator[None]:
    """Some of the layers in place of all."""
    stack = model.encoder.layer
    model.encoder.layer = stack[part]
    try:
        yield
    finally:
        model.encoder.layer = stack
