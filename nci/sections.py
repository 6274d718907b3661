"""Settings of every stage as frozen dataclasses: one per stage, checked when made, imports no torch.

A function takes the piece it needs (`TreeConfig`), never the whole; `nci.config` puts them together.
The paper's values are in `configs/paper-*.yaml`; the defaults here are the ones that work best on a small machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

from nci.errors import ConfigError, check_least


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


class Section:
    """What all sections check: a choice is one of its words, a number is finite."""

    def __post_init__(self) -> None:
        section = type(self).__name__.removesuffix("Config").lower()
        hints = get_type_hints(type(self))
        for name, value in vars(self).items():
            choices = get_args(hints[name]) if get_origin(hints[name]) is Literal else ()
            wrong = bool(choices) and value not in choices
            check(not wrong, f"--{section}.{name} is one of {', '.join(map(str, choices))}; not {value!r}")
            infinite = isinstance(value, float) and not math.isfinite(value)
            check(not infinite, f"--{section}.{name} is a finite number, not {value}")


@dataclass(frozen=True)
class CorpusConfig(Section):
    """How files become documents.

    Args:
        id_field: Name of the id column; found by itself when it is _id, id, doc_id or docno.
        title_field: Name of the title column; "title" when there is one.
        text_fields: Columns joined to the text; found by itself when it is text, contents, content or body.
        on_error: What to do with a bad line: stop at the first one, or skip and list it in a rejects file.
        max_line_bytes: A longer line is refused before it is parsed.
        max_text_chars: Longer texts are cut, and the cut is counted.
    """

    id_field: str | None = None
    title_field: str | None = None
    text_fields: tuple[str, ...] | None = None
    on_error: Literal["fail", "skip"] = "fail"
    max_line_bytes: int = 16 * 2**20
    max_text_chars: int = 1_000_000

    def __post_init__(self) -> None:
        check(self.on_error in ("fail", "skip"), f"--on-error is fail or skip, not {self.on_error!r}")
        super().__post_init__()
        check(self.max_line_bytes > 0, "--corpus.max_line_bytes must be positive")
        check(self.max_text_chars > 0, "--corpus.max_text_chars must be positive")


@dataclass(frozen=True)
class EmbedConfig(Section):
    """How documents become vectors.

    Args:
        encoder: "minilm", "mpnet" (all-mpnet-base-v2; needs packages of its own), a folder, or a name on the Hugging Face Hub.
        pooling: mean, cls or max over the tokens; auto reads what the encoder's folder says, else mean.
        normalise: Scale vectors to length 1.
        max_length: Word pieces of a document that are read.
        batch_size: Documents per forward pass.
        shard_size: Documents per resumable shard.
        precision: auto takes bf16 where the device has it, which is twice as fast and as good; vectors stay float32.
    """

    encoder: str = "minilm"
    pooling: Literal["auto", "mean", "cls", "max"] = "auto"
    normalise: bool = True
    max_length: int = 256
    batch_size: int = 32
    shard_size: int = 4096
    precision: Literal["auto", "fp32", "bf16"] = "fp32"

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.max_length > 0, "--embed.max_length must be positive")
        check(self.batch_size > 0, "--embed.batch_size must be positive")
        check(self.shard_size > 0, "--embed.shard_size must be positive")


@dataclass(frozen=True)
class TuneConfig(Section):
    """How the encoder of the documents is trained on the pairs before it embeds them (contrastively, both sides).

    Args:
        epochs: Passes over the pairs with the other documents of a batch as negatives; 0 leaves the encoder as it is.
        refreshes: How often hard negatives are mined afterwards, each time with the newest weights, for a pass each.
        negatives: Hard negatives per query.
        generated: Share of the generated queries taken beside the real ones.
        batch_size: Pairs per step.
        lr: Highest learning rate of each round.
        temperature: Divides the cosines in the softmax.
        seed: Same seed, same weights (on a CPU).
    """

    epochs: int = 0
    refreshes: int = 0
    negatives: int = 4
    generated: float = 0.0
    batch_size: int = 128
    lr: float = 7e-5
    temperature: float = 0.03
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        least = {"epochs": 0, "refreshes": 0, "negatives": 1, "batch_size": 2, "generated": 0}
        check_least(self, least, "--tune.")
        check(0 < self.lr < 1 and self.temperature > 0, "--tune.lr and --tune.temperature are positive, lr below 1")
        check(
            self.epochs > 0 or not self.refreshes,
            "--tune.refreshes needs --tune.epochs: negatives come after a first round",
        )


@dataclass(frozen=True)
class LexicalConfig(Section):
    """What BM25 in the content score reads of a document.

    Args:
        training: Append a document's training queries to its text; a query is not counted where it itself is learned.
        generated: Append so many of its generated queries, where there are some.
        phrases: What two neighbouring words count when they meet as such, where a word counts 1; 0 reads words only.
        k1: How soon repeated words stop counting.
        b: How much long documents are held back.
    """

    training: bool = False
    generated: int = 30
    phrases: float = 0.3
    k1: float = 0.9
    b: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, {"generated": 0, "phrases": 0}, "--lexical.")
        check(self.k1 >= 0 and 0 <= self.b <= 1, "--lexical.k1 is at least 0 and --lexical.b from 0 to 1")


@dataclass(frozen=True)
class CalibrateConfig(Section):
    """How the weights of the parts of a score are found: on queries of documents that training did not see.

    Args:
        share: Part of the training documents whose queries are withheld in a first build, which then fits the weights;
            0 leaves them as training does.
        least: Without so many withheld queries nothing is fitted.
        seed: Which documents are withheld.
    """

    share: float = 0.0
    least: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0 <= self.share < 1, f"--calibrate.share is from 0 to below 1, not {self.share}")
        check(self.least >= 1, "--calibrate.least is at least 1")


@dataclass(frozen=True)
class TreeConfig(Section):
    """Hierarchical k-means (Algorithm 1 of the paper).

    Args:
        k: Clusters per split.
        c: A cluster of at most c documents is a leaf cluster.
        ids: semantic; random permutes the documents over the same tree shape; atomic gives each document one digit.
        source: Cluster the documents' vectors, or the mean vectors of their training queries where they have some.
        backend: auto takes torch on a GPU, else faiss where it is installed, else scikit-learn.
        iterations: Lloyd iterations per split.
        points_per_centroid: A split is trained on at most k times this many points.
        max_depth: A deeper branch is split by order instead of by distance, so that the tree always ends.
        seed: Same seed, same tree.
    """

    k: int = 30
    c: int = 30
    ids: Literal["semantic", "random", "atomic"] = "semantic"
    source: Literal["documents", "queries"] = "documents"
    backend: Literal["auto", "faiss", "sklearn", "torch"] = "auto"
    iterations: int = 20
    points_per_centroid: int = 256
    max_depth: int = 12
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.k >= 2, f"--tree.k is at least 2, not {self.k}")
        check(self.c >= 1, f"--tree.c is at least 1, not {self.c}")
        check(self.iterations >= 1, "--tree.iterations is at least 1")
        check(self.points_per_centroid >= 1, "--tree.points_per_centroid is at least 1")
        check(self.max_depth >= 2, "--tree.max_depth is at least 2")


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
        max_length: Word pieces of a query that are read.
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
        check(self.kappa > 0 and self.lexical > 0, "--model.kappa and --model.lexical are positive")


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


@dataclass(frozen=True)
class SearchConfig(Section):
    """Defaults of search, stored with the index; every call may choose otherwise.

    Args:
        beam: Prefixes kept per level.
        length_penalty: Scores are log p / (digits + 1) ** length_penalty.
        batch_size: Queries per pass; 0 takes what suits the device.
        precision: auto takes bf16 on a GPU, int8 on a CPU with instructions for it, else fp32, the reference.
    """

    beam: int = 100
    length_penalty: float = 0.0
    batch_size: int = 0
    precision: Literal["auto", "fp32", "bf16", "int8"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.beam >= 1, f"--search.beam is at least 1, not {self.beam}")
        check(self.batch_size >= 0, "--search.batch_size is at least 0")
