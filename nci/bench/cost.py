"""A plan and the sizes of a network -> operations and bytes that a search needs. Counted, not measured.

Operations are those of matrix products and attention, two per multiply-add, of the rows that were decoded. Bytes are what
must be read at least once per call: weights, once for the encoder and once per level for the decoder, and per query the
rows of the edge table and the keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nci.errors import ConfigError
from nci.model_config import NCIConfig
from nci.search.plan import Plan
from nci.trie import Trie

BYTES = {"fp32": 4, "bf16": 2, "int8": 1}


@dataclass(frozen=True)
class Cost:
    """Of one call."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class EncoderSizes:
    """Of an encoder, whatever its configuration calls them."""

    layers: int
    width: int
    inner: int  # of all attention heads together
    wide: int
    ups: int  # matrices from `width` to `wide`
    heads: int


def encoder_sizes(config: NCIConfig) -> EncoderSizes:
    """Read off the encoder's configuration."""
    sizes = config.encoder

    def first(*names: str) -> int:
        found = next((sizes[name] for name in names if sizes.get(name)), None)
        if found is None:
            raise ConfigError(f"nci bench does not know the size of a {sizes.get('model_type')} encoder: no {names[0]}")
        return int(found)

    width, heads = first("hidden_size", "d_model", "dim"), first("num_attention_heads", "num_heads", "n_heads")
    return EncoderSizes(
        layers=first("num_hidden_layers", "num_layers", "n_layers"),
        width=width,
        inner=heads * int(sizes.get("d_kv") or width // heads),
        wide=first("intermediate_size", "d_ff", "hidden_dim"),
        ups=2 if "gated" in str(sizes.get("feed_forward_proj", "")) else 1,
        heads=heads,
    )


def encoder_cost(config: NCIConfig, *, tokens: int, batch: int, precision: str) -> Cost:
    """The encoder alone."""
    e = encoder_sizes(config)
    weights = e.layers * (4 * e.width * e.inner + (1 + e.ups) * e.width * e.wide)
    return Cost(batch * tokens * (2 * weights + e.layers * 4 * tokens * e.inner), weights * BYTES[precision])


def search_cost(
    config: NCIConfig, trie: Trie, plan: Plan, *, tokens: int, batch: int, precision: str, rows: float | None = None
) -> Cost:
    """A whole search of `batch` queries of so many tokens, without the content score.

    Args:
        rows: Rows decoded per query, where that is less than the plan says: a CPU drops those without hope.
    """
    encoder = encoder_cost(config, tokens=tokens, batch=batch, precision=precision)
    d, layers, wide = int(config.d_model), int(config.decoder_layers), int(config.d_ff)
    cross = layers * 2 * d * encoder_sizes(config).width
    # The first layer's self-attention and the question of its cross-attention are stored with the tree.
    decoder = layers * (6 * d**2 + 2 * d * wide) - 5 * d**2
    counts = np.diff(trie.child_start)
    edges = attention = 0.0
    for number, level in enumerate(plan.levels):
        own = counts[trie.level_start[number] : trie.level_start[number + 1]]
        edges += level.rows * float(own[own > 0].mean())
        attention += level.rows * 4 * d * ((layers - 1) * (number + 1) + layers * tokens)
    decoded = (plan.rows if rows is None else rows) / plan.rows
    edges, attention = edges * decoded, attention * decoded
    flops = encoder.flops + batch * (2 * tokens * cross + 2 * plan.rows * decoded * decoder + attention + 2 * d * edges)
    passes = len(plan.levels) - bool(plan.first_children)
    numbers = cross + passes * decoder
    activations = 2 if precision == "bf16" else 4
    stored = 2 * d * edges + activations * passes * tokens * layers * 2 * d  # the edge table is bf16 everywhere
    return Cost(flops, encoder.bytes + numbers * BYTES[precision] + batch * stored)
