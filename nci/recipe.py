"""How queries for documents come about, as settings: checked when made, imports no torch. `nci.querygen_steps` makes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from nci.config import content_key
from nci.errors import ConfigError

if TYPE_CHECKING:
    from nci.seq2seq import Sampling

VERSION = 1
"""Part of every shard's key: raise it when equal settings begin to give other queries."""


@dataclass(frozen=True)
class QueryGenConfig:
    """How queries are generated. The first six are the paper's setting: random sampling, 15 queries per document.

    Args:
        per_document: Queries per document.
        max_source: Word pieces of a document that the generator reads, at most as many as it can.
        max_target: Word pieces of a query at most.
        top_k: Draw among the k likeliest word pieces; 0 means all.
        top_p: Draw among the likeliest word pieces that together have this probability.
        temperature: Below 1 prefers the likely ones.
        batch_size: Documents at once.
        seed: Same seed, same queries.
        shard_size: Documents per resumable shard.
    """

    per_document: int = 15
    max_source: int = 512
    max_target: int = 64
    top_k: int = 50
    top_p: float = 1.0
    temperature: float = 1.0
    batch_size: int = 32
    seed: int = 0
    shard_size: int = 512

    def __post_init__(self) -> None:
        for name in ("per_document", "max_source", "max_target", "batch_size", "shard_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is at least 1, not {getattr(self, name)}")
        if self.top_k < 0:
            raise ConfigError(f"--top-k is at least 0 (0 means all word pieces), not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p is above 0 and at most 1, not {self.top_p}")
        if not 0 < self.temperature < float("inf"):
            raise ConfigError(f"--temperature is above 0, not {self.temperature}")

    @property
    def sampling(self) -> Sampling:
        """What a generator must know."""
        from nci.seq2seq import Sampling

        return Sampling(self.per_document, self.max_target, self.top_k, self.top_p, self.temperature)

    @property
    def key(self) -> str:
        """Stands for what changes the queries: not how many documents go together."""
        return content_key(VERSION, self.sampling, self.max_source, self.seed)


@dataclass(frozen=True)
class Recipe:
    """How queries come about.

    Args:
        settings: How many queries, and how they are drawn.
        encoder: What a generator is trained from, and dense search for the filter.
        generator: A trained one by folder or Hub name; none trains one where there are training pairs.
        fine_tune: A Hugging Face model by folder or Hub name, to be trained further on the pairs.
        epochs: Passes over the pairs; none takes what the kind of generator usually needs.
        keep: Every query (none), those whose document dense or lexical search finds (any), or both (all). A query that
            does not find its document often has the words that the document lacks: BM25 is better with all of them.
    """

    settings: QueryGenConfig = field(default_factory=QueryGenConfig)
    encoder: str = "minilm"
    generator: str | None = None
    fine_tune: str | None = None
    epochs: float | None = None
    keep: Literal["any", "all", "none"] = "none"

    def __post_init__(self) -> None:
        if self.keep not in ("any", "all", "none"):
            raise ConfigError(f"--filter is any, all or none, not {self.keep!r}")
        if self.generator and self.fine_tune:
            raise ConfigError("--generator is used as it is and --fine-tune is trained further: give one of them")
        if self.epochs is not None and not self.epochs > 0:
            raise ConfigError(f"--epochs is above 0, not {self.epochs}")
