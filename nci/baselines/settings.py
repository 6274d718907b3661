"""Settings of the baselines as the command line has them, without what they set: imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from nci.analyser import Analyser
from nci.contrast_settings import ContrastSettings
from nci.errors import ConfigError, check_least
from nci.lexical import check_parameters


@dataclass(frozen=True)
class BM25Settings:
    """How BM25 reads texts and weighs words; bm25-okapi has its own.

    Args:
        k1: How soon repeated words stop counting.
        b: How much long documents are held back.
        stemmer: A Snowball algorithm by name (english, german, ...), or null to keep words as they are.
        stopwords: en, or null to keep every word.
        runs: Every run of letters and digits is a word, as in an index: snake_case is two. Else as bm25s has it.
    """

    k1: float = 0.9
    b: float = 0.4
    stemmer: str | None = "english"
    stopwords: Literal["en"] | None = "en"
    runs: bool = False

    def __post_init__(self) -> None:
        check_parameters(self.k1, self.b)
        Analyser(self.stemmer, self.stopwords, self.runs)  # which knows the stemmers


@dataclass(frozen=True)
class DenseSettings:
    """Which encoder, and how two vectors are compared.

    Args:
        encoder: "minilm", "mpnet", a folder, or a name on the Hugging Face Hub (a sentence-transformers or plain encoder).
        similarity: cosine, or dot for the inner product of the vectors as the encoder gives them.
        pooling: auto takes what the encoder's folder says, else mean; Condenser and its kin need cls.
        max_length: Word pieces of a text that are read.
        batch_size: Texts per forward pass.
        precision: auto takes bf16 where the device has it.
        backend: What does the product; auto takes faiss where it is installed.
    """

    encoder: str = "minilm"
    similarity: Literal["cosine", "dot"] = "cosine"
    pooling: Literal["auto", "mean", "cls", "max"] = "auto"
    max_length: int = 256
    batch_size: int = 32
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    backend: Literal["auto", "faiss", "numpy"] = "auto"

    def __post_init__(self) -> None:
        check_similarity(self.similarity)
        if self.max_length < 3 or self.batch_size < 1:
            raise ConfigError("max_length of dense search is at least 3, the ends of a text included, and batch_size 1")


@dataclass(frozen=True)
class KnnSettings:
    """How queries are compared, and how the training queries of a document count together.

    Args:
        encoder: "minilm", "mpnet", a folder, or a name on the Hugging Face Hub.
        weighting: best takes the most similar training query of a document; softmax lets all of them count, by the
            share of a softmax over all training queries that falls to the document.
        temperature: Of the softmax; towards 0 it becomes best.
        max_length: Word pieces of a query that are read.
        batch_size: Queries per forward pass.
    """

    encoder: str = "minilm"
    weighting: Literal["best", "softmax"] = "softmax"
    temperature: float = 0.05
    max_length: int = 256
    batch_size: int = 128

    def __post_init__(self) -> None:
        if self.weighting not in ("best", "softmax"):
            raise ConfigError(f"the weighting of knn is best or softmax, not {self.weighting!r}")
        if not self.temperature > 0:
            raise ConfigError(f"the temperature of knn is positive, not {self.temperature}")
        if self.max_length < 3 or self.batch_size < 1:
            raise ConfigError("max_length of knn is at least 3, the ends of a text included, and batch_size 1")


@dataclass(frozen=True)
class DualSettings(ContrastSettings):
    """How a dual encoder is trained. With `refreshes=0` it is DPR, with more it is ANCE.

    Args:
        encoder: "minilm", "mpnet", a folder or a Hub name; the folder of a trained one goes on from there (with epochs 0).
        epochs: Passes over the pairs with the other documents of the batch as negatives.
        refreshes: How often hard negatives are mined afterwards, each time with the newest weights.
        refresh_epochs: Passes over the pairs after each mining.
        negatives: Hard negatives per query, drawn anew in each pass.
        depth: They are drawn from the best so many passages of documents that are not relevant.
        batch_size: Pairs per step.
        lr: Highest learning rate of each round.
        warmup: Share of a round's steps in which the learning rate rises; it falls to zero over the rest.
        temperature: Divides the cosines in the softmax.
        passage: firstp reads the start of "title [SEP] text", maxp the text in passages, of which the best one counts.
        max_length: Word pieces per passage.
        max_passages: Passages per document with maxp; what comes after them is not read.
        query_length: Word pieces per query.
        layers: Only the last so many layers are trained, without dropout, on what those below say; 0 trains all of them. In a
            comparison as many as the index tunes of the same encoder, where nobody says otherwise.
        seed: Same seed, same weights on a CPU.
        precision: auto trains in bf16 where the device has it; weights and vectors are float32 in any case.
    """

    encoder: str = "minilm"
    passage: Literal["firstp", "maxp"] = "firstp"
    max_length: int = 256
    max_passages: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.passage not in ("firstp", "maxp"):
            raise ConfigError(f"passage is one of firstp, maxp; not {self.passage!r}")
        for name, least in {"max_length": 3, "query_length": 3, "max_passages": 1}.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is at least {least}, not {getattr(self, name)}")

    @property
    def name(self) -> str:
        """The method these settings amount to."""
        return "ance" if self.refreshes else "dpr"


@dataclass(frozen=True)
class SealSettings:
    """How SEAL is trained and searched.

    Args:
        model: A sequence-to-sequence model by name or folder; none trains a small one from `encoder`.
        encoder: The encoder that the small model is trained from.
        max_tokens: Tokens of a document that are indexed; none means all.
        length: Tokens of an n-gram.
        spans: N-grams of the relevant document that a training query is to give.
        temperature: The lower, the more these n-grams are those that share rare words with the query.
        unsupervised: Training pairs per document without a query: one part of it asks for another.
        source_words: Words of such a part.
        epochs: Passes over the training pairs; 0 leaves a model given by name or folder as it is.
        batch_size: Training pairs per step.
        learning_rate: Of a model given by name or folder.
        beam: N-grams kept per step of decoding.
        power: Exponent of the weights of n-grams.
        repetition: How much less an n-gram counts whose tokens others have brought.
        max_occurrences: N-grams that are more frequent are left out of the scores.
        queries_at_once: Queries decoded together.
        seed: Same seed, same training pairs, same weights (on a CPU).
    """

    model: str | None = None
    encoder: str = "minilm"
    max_tokens: int | None = None
    length: int = 10
    spans: int = 10
    temperature: float = 0.1
    unsupervised: int = 3
    source_words: int = 32
    epochs: int = 2
    batch_size: int = 256
    learning_rate: float = 3e-5
    beam: int = 15
    power: float = 2.0
    repetition: float = 0.8
    max_occurrences: int = 10_000
    queries_at_once: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"length": 1, "spans": 1, "unsupervised": 0, "source_words": 1, "epochs": 0, "batch_size": 1, "beam": 1}
        check_least(self, least | {"max_occurrences": 1, "queries_at_once": 1}, "--seal.")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"--seal.max_tokens is at least 1, not {self.max_tokens}")
        for name in ("temperature", "power", "learning_rate"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"--seal.{name} is above 0 and finite, not {getattr(self, name)}")
        if self.epochs == 0 and self.model is None:
            raise ConfigError("--seal.epochs 0 needs a trained model: give one with --seal.model")
        if not 0 <= self.repetition <= 1:
            raise ConfigError(f"--seal.repetition is from 0 to 1, not {self.repetition}")


@dataclass(frozen=True)
class RerankSettings:
    """How a cross-encoder reads, and how it is trained.

    Args:
        encoder: What training starts from: "minilm", "mpnet", a folder, or a name on the Hugging Face Hub.
        depth: How many hits of the searcher are read, in search and to draw wrong documents from in training.
        max_length: Word pieces of query and document together.
        epochs: Passes over the pairs.
        batch_size: Queries per step; each comes with its document and the wrong ones.
        negatives: Wrong documents per query.
        lr: Highest learning rate; it rises over the first tenth of the steps and falls to 0.
        score_batch: Pairs per forward pass in search.
        precision: auto takes bf16 where the device has it.
        seed: Same seed, same weights on a CPU.
    """

    encoder: str = "minilm"
    depth: int = 50
    max_length: int = 192
    epochs: int = 1
    batch_size: int = 16
    negatives: int = 7
    lr: float = 5e-5
    score_batch: int = 128
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        numbers = ("depth", "epochs", "batch_size", "negatives", "score_batch")
        small = [name for name in numbers if getattr(self, name) < 1]
        if small or self.max_length < 8 or not self.lr > 0:
            raise ConfigError(f"rerank needs {', '.join(numbers)} >= 1, max_length >= 8 and lr > 0: {self}")
        if self.precision not in ("auto", "fp32", "bf16"):
            raise ConfigError(f"the precision of rerank is auto, fp32 or bf16, not {self.precision!r}")


BASELINES: dict[str, type] = {
    "bm25": BM25Settings,
    "dense": DenseSettings,
    "knn": KnnSettings,
    "dual": DualSettings,
    "seal": SealSettings,
    "rerank": RerankSettings,
}
"""Sections of settings of the baselines, as the command line calls them."""

USUAL: dict[str, dict[str, Any]] = {"dual": {"refreshes": 3}}
"""Where a comparison's defaults are not those of the section; dpr never refreshes its negatives."""

NAMED: dict[str, set[str]] = {"dense": {"similarity", "backend"}, "dual": {"passage"}}
"""What the name of a system decides, so that no flag does."""


def usual_settings(section: str, encoder: str | None, layers: int | None) -> dict[str, Any]:
    """What a comparison sets of a section where nobody says otherwise: USUAL, and what the index does.

    Args:
        encoder: The index's encoder.
        layers: How many of its last layers are tuned; 0 means all.
    """
    index = {"encoder": encoder, "layers": layers}
    names = {each.name for each in fields(BASELINES[section])}
    return {name: value for name, value in index.items() if name in names} | USUAL.get(section, {})


def check_similarity(similarity: str) -> None:
    """Refuses a similarity that is none."""
    if similarity not in ("cosine", "dot"):
        raise ConfigError(f"the similarity of dense search is cosine or dot, not {similarity!r}")
