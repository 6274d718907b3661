"""Settings of what is trained: the pairs, the network and the training. Frozen dataclasses, checked when made, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nci.sections import Section, check


@dataclass(frozen=True)
class PairsConfig(Section):
    """Which (query, document) pairs the model is trained on.

    Args:
        real: Share of the real training queries taken per epoch; 2 means each of them twice.
        spans: Random groups of consecutive terms per document used as queries (the paper: 10).
        terms: Terms in a group (the paper: 64).
        span_share: Share of the document pieces (first terms and groups) taken per epoch; 0 leaves them out.
        generated: Share of the generated queries taken per epoch, where there are some.
        generated_queries: Generated queries used per document, at most (the paper: 15).
        sampling: pair takes every pair equally often; document gives every document the same number of pairs.
        max_length: Word pieces of a query that training reads; search with an anchor reads --embed.max_length, if that is more.
        seed: Same seed, same batches.
    """

    real: float = 1.0
    spans: int = 10
    terms: int = 64
    span_share: float = 0.25
    generated: float = 0.3
    generated_queries: int = 15
    sampling: Literal["pair", "document"] = "pair"
    max_length: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("real", "span_share", "generated"):
            check(getattr(self, name) >= 0, f"--pairs.{name} is a share of at least 0, not {getattr(self, name)}")
        check(self.real + self.span_share + self.generated > 0, "--pairs.real, span_share and generated are all 0")
        check(self.spans >= 0, "--pairs.spans is at least 0")
        check(self.generated_queries >= 0, "--pairs.generated_queries is at least 0")
        check(self.terms >= 1, "--pairs.terms is at least 1")
        check(self.max_length >= 3, "--pairs.max_length is at least 3")


@dataclass(frozen=True)
class ModelConfig(Section):
    """The encoder, the decoder and the head.

    Args:
        encoder: Encoder of the queries, by name or folder; none means the one that embeds the documents.
        encoder_layers: Keep only the first layers of the encoder; none means all.
        d_model: Width of the decoder; none means the encoder's, another width is projected.
        decoder_layers: Layers of the decoder (M2).
        adapter_layers: Layers of the prefix-aware weight adapter (M3); 0 means none.
        heads: Attention heads; none means one per 64 columns.
        d_ff: Width of the feed-forward layers; none means four times d_model.
        dropout: In decoder, adapter and, where it is trained, the encoder.
        head: tied; additive (w = e + M a, the authors' code); product (w = A(a) e, the paper's equation).
        head_rank: Rank of M or A; 0 means full matrices.
        adapter_start: First input of the adapter: a learned vector, or the query (which cannot be folded).
        normalise: Softmax over a node's real children, over a position's values, or over the whole vocabulary.
        anchor: Content score on the edges: none, mean or exact.
        score: Content score behind the exact anchor: dense, or dense plus a normalised lexical score.
        kappa: Start value of the weight of the dense similarity; trained.
        lexical: Start value of the weight of the lexical score; trained.
        late: Weight of late interaction, where word pieces are kept (--embed.pieces); calibrated, not trained.
        further: What a better window behind the opening of a long document counts in it, a share: calibrated, but for 0.
        query_vector: Vector behind the anchor: of the trained encoder, of the stored one, or what dev prefers.
        content: Let the mean vector of the documents below a child speak in its logit.
        edge_bias: Give every edge a bias of its own.
    """

    encoder: str | None = None
    encoder_layers: int | None = None
    d_model: int | None = None
    decoder_layers: int = 2
    adapter_layers: int = 1
    heads: int | None = None
    d_ff: int | None = None
    dropout: float = 0.1
    head: Literal["tied", "additive", "product"] = "additive"
    head_rank: int = 16
    adapter_start: Literal["learned", "query"] = "learned"
    normalise: Literal["children", "position", "vocabulary"] = "children"
    anchor: Literal["none", "mean", "exact"] = "exact"
    score: Literal["dense", "dense+bm25"] = "dense+bm25"
    kappa: float = 20.0
    lexical: float = 8.0
    late: float = 30.0
    further: float = 1.0
    query_vector: Literal["trained", "stored", "auto"] = "trained"
    content: bool = True
    edge_bias: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.decoder_layers >= 1, "--model.decoder_layers is at least 1")
        for name in ("encoder_layers", "d_model", "heads", "d_ff"):
            value = getattr(self, name)
            check(value is None or value >= 1, f"--model.{name} is at least 1, not {value}")
        check(0 <= self.adapter_layers <= 8, f"--model.adapter_layers is 0 to 8, not {self.adapter_layers}")
        check(
            (self.head == "tied") == (self.adapter_layers == 0),
            f"--model.head {self.head} with --model.adapter_layers {self.adapter_layers}: a tied head has 0 adapter layers, "
            "additive and product need at least 1",
        )
        check(0 <= self.dropout < 1, f"--model.dropout is at least 0 and below 1, not {self.dropout}")
        check(self.head_rank >= 0, "--model.head_rank is at least 0 (0 means full matrices)")
        for name in ("content", "edge_bias"):
            check(
                self.normalise == "children" or not getattr(self, name),
                f"--model.{name} needs --model.normalise children: other normalisers have columns that are no edges",
            )
        check(
            self.normalise == "children" or self.anchor == "none",
            f"--model.anchor {self.anchor} needs --model.normalise children; use --model.anchor none with {self.normalise}",
        )
        for name in ("kappa", "lexical", "late"):
            check(getattr(self, name) > 0, f"--model.{name} is positive, not {getattr(self, name)}")
        check(0 <= self.further <= 1, f"--model.further is a share, from 0 to 1, not {self.further}")


@dataclass(frozen=True)
class TrainConfig(Section):
    """How the model is trained.

    Args:
        epochs: Passes over the pairs; 0 leaves the index untrained.
        batch_size: Queries per batch and process.
        accumulation: Batches per step of the optimiser.
        encoder_lr: Learning rate of the encoder.
        decoder_lr: Learning rate of decoder, adapter, head and anchor.
        freeze_embeddings: Leave the encoder's word vectors as they are: a fifth faster, and rare words cannot drift.
        freeze_encoder: Train the decoder on stored outputs of the encoder: fast, and the content score cannot drift.
        schedule: Decay of the learning rates after the warm-up.
        warmup: Share of the steps in which the rates rise.
        weight_decay: Of all matrices; vectors and scalars have none.
        max_grad_norm: Gradients are scaled down to this norm.
        alpha: Weight of the consistency loss; 0 saves the second pass.
        tau: Temperature of the consistency loss.
        spare_unseen: A document without any real query is no negative for real queries (with normalise children only).
        precision: auto takes bf16 on a GPU and on a CPU that has it, else fp32.
        evaluations: How often `dev` is searched during training.
        dev_queries: Queries of `dev` used for that; the final choice too.
        metric: The metric on `dev` by which the best state is chosen.
        checkpoint_minutes: A killed run loses at most about this much.
        tensorboard: Also write TensorBoard files.
        seed: Same seed, same weights (on a CPU).
    """

    epochs: float = 6
    batch_size: int = 512
    accumulation: int = 1
    encoder_lr: float = 1e-4
    decoder_lr: float = 1e-3
    freeze_embeddings: bool = True
    freeze_encoder: bool = False
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    warmup: float = 0.05
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    alpha: float = 0.0
    tau: float = 1.0
    spare_unseen: bool = True
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    evaluations: int = 5
    dev_queries: int = 500
    metric: str = "R@1"
    checkpoint_minutes: float = 2.0
    tensorboard: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.epochs >= 0, f"--train.epochs is at least 0, not {self.epochs}")
        check(self.batch_size >= 1, "--train.batch_size is at least 1")
        check(self.accumulation >= 1, "--train.accumulation is at least 1")
        check(self.encoder_lr >= 0 and self.decoder_lr >= 0, "--train.encoder_lr and decoder_lr are at least 0")
        check(0 <= self.warmup < 1, f"--train.warmup is a share of the steps, from 0 to below 1, not {self.warmup}")
        check(self.weight_decay >= 0, f"--train.weight_decay is at least 0, not {self.weight_decay}")
        check(self.max_grad_norm >= 0, f"--train.max_grad_norm is at least 0, not {self.max_grad_norm}")
        check(self.alpha >= 0, f"--train.alpha is at least 0, not {self.alpha}")
        check(self.tau > 0, f"--train.tau is positive, not {self.tau}")
        check(self.evaluations >= 0, "--train.evaluations is at least 0")
        check(self.dev_queries >= 1, "--train.dev_queries is at least 1")
        check(self.checkpoint_minutes >= 0, "--train.checkpoint_minutes is at least 0")
