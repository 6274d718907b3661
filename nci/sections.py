"""Settings of every stage as frozen dataclasses: one per stage, checked when made, imports no torch.

A function takes the piece it needs (`TreeConfig`), never the whole; `nci.config` puts them together. What a network is and
how it learns is in `nci.network_sections`.
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
        max_length: Word pieces of a document that are read at once.
        batch_size: Documents per forward pass.
        shard_size: Documents per resumable shard, where one window is read of each; fewer where there are more.
        precision: auto takes bf16 where the device has it, which is twice as fast and as good; vectors stay float32.
        pieces: Also keep a vector of so many numbers, at most the encoder's, for every word piece of a document, for late
            interaction; 0 keeps none.
        windows: Windows of a long document whose word pieces are kept; 1 keeps those of its opening, which its vector is of.
    """

    encoder: str = "minilm"
    pooling: Literal["auto", "mean", "cls", "max"] = "auto"
    normalise: bool = True
    max_length: int = 256
    batch_size: int = 32
    shard_size: int = 4096
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    pieces: int = 0
    windows: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, {"pieces": 0, "windows": 1}, "--embed.")
        check(
            self.max_length > 2, "--embed.max_length must be at least 3: word pieces between the two that mark the ends"
        )
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
        late: Weight of a second loss, that of late interaction between word pieces; 0 leaves it out.
        layers: Only the last so many layers are trained, without dropout; 0 trains all of them, with it.
        max_length: Word pieces of a document that are read in training; 0 means as many as are embedded afterwards.
        seed: Same seed, same weights (on a CPU).
    """

    epochs: int = 0
    refreshes: int = 0
    negatives: int = 4
    generated: float = 0.0
    batch_size: int = 128
    lr: float = 7e-5
    temperature: float = 0.03
    late: float = 0.0
    layers: int = 0
    max_length: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        least = {"negatives": 1, "batch_size": 2}
        least |= dict.fromkeys(("epochs", "refreshes", "generated", "late", "layers", "max_length"), 0)
        check_least(self, least, "--tune.")
        check(self.max_length not in (1, 2), "--tune.max_length must be 0 or at least 3, the ends of a text included")
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
        rarity: How much less a word counts the more training queries have it; 0 leaves it as it is.
        k1: How soon repeated words stop counting.
        b: How much long documents are held back.
    """

    training: bool = False
    generated: int = 30
    phrases: float = 0.3
    rarity: float = 0.5
    k1: float = 0.5
    b: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, {"generated": 0, "phrases": 0, "rarity": 0}, "--lexical.")
        check(self.k1 >= 0 and 0 <= self.b <= 1, "--lexical.k1 is at least 0 and --lexical.b from 0 to 1")


INDEX_VERSION = 2
"""Part of the key of an index: raise it when the same weights begin to search in another way."""

CALIBRATION_VERSION = 7
"""Part of the key of all that is calibrated: raise it when equal queries begin to give other weights."""


@dataclass(frozen=True)
class CalibrateConfig(Section):
    """How the weights of the parts of a score are found: on queries of documents that training did not see.

    Args:
        share: Part of the training documents whose queries are withheld in a first build, which then fits the weights;
            0 leaves them as training does.
        least: Without so many withheld queries nothing is fitted. With fewer of `dev`, one query each of some documents that
            have others is kept back, too.
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
class SearchConfig(Section):
    """Defaults of search, stored with the index; every call may choose otherwise.

    Args:
        beam: Prefixes kept per level.
        length_penalty: Scores are log p / (digits + 1) ** length_penalty.
        batch_size: Queries per pass; 0 takes what suits the device.
        precision: auto takes bf16 on a GPU, int8 on a CPU with instructions for it, else fp32, the reference.
        candidates: Documents whose word pieces are compared with those of the query, where they are kept.
    """

    beam: int = 100
    length_penalty: float = 0.0
    batch_size: int = 0
    precision: Literal["auto", "fp32", "bf16", "int8"] = "auto"
    candidates: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, {"candidates": 1}, "--search.")
        check(self.beam >= 1, f"--search.beam is at least 1, not {self.beam}")
        check(self.batch_size >= 0, "--search.batch_size is at least 0")
