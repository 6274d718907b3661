"""Documents and training pairs -> filtered queries in a folder: the steps of `nci querygen`, in order.

Train or fine-tune a generator where that is asked for, let it write, keep what finds its own document. Each step takes up
what is there. Knows nothing of command lines or of what the queries are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from nci.baselines.bm25 import BM25
from nci.baselines.dense import Dense
from nci.encoders import TextEncoder
from nci.errors import ConfigError
from nci.generator import Generator, GeneratorConfig
from nci.querygen import (
    FILE,
    QueryGenConfig,
    generate_queries,
    read_generated,
    round_trip_filter,
    source_pairs,
    write_generated,
)
from nci.records import Document
from nci.seq2seq import FineTuneConfig, HuggingFaceGenerator


@dataclass(frozen=True)
class Recipe:
    """How queries come about.

    Args:
        settings: How many queries, and how they are drawn.
        encoder: What a generator is trained from, and dense search for the filter.
        generator: A trained one by folder or Hub name; none trains one where there are training pairs.
        fine_tune: A Hugging Face model by folder or Hub name, to be trained further on the pairs.
        epochs: Passes over the pairs; none takes what the kind of generator usually needs.
        keep: Queries whose document dense or lexical search finds (any), both find (all), or every one (none).
    """

    settings: QueryGenConfig = field(default_factory=QueryGenConfig)
    encoder: str = "minilm"
    generator: str | None = None
    fine_tune: str | None = None
    epochs: float | None = None
    keep: Literal["any", "all", "none"] = "any"

    def __post_init__(self) -> None:
        if self.keep not in ("any", "all", "none"):
            raise ConfigError(f"--filter is any, all or none, not {self.keep!r}")
        if self.generator and self.fine_tune:
            raise ConfigError("--generator is used as it is and --fine-tune is trained further: give one of them")
        if self.epochs is not None and not self.epochs > 0:
            raise ConfigError(f"--epochs is above 0, not {self.epochs}")


def make_queries(
    documents: Sequence[Document], pairs: Sequence[tuple[str, str]], *, out: Path, recipe: Recipe, device: str
) -> Path:
    """Write `out/queries.jsonl` and return it; `out/all` holds the queries before the filter.

    Args:
        documents: What to write queries for.
        pairs: Training queries with their doc_ids.
        out: Folder of the results and of the trained generator.
    """
    generator = _generator(source_pairs(documents, pairs), out / "generator", recipe, device)
    written = generate_queries(documents, out=out / "all", generator=generator, settings=recipe.settings, device=device)
    queries = read_generated(written)
    if recipe.keep != "none":
        encoder = TextEncoder.load(recipe.encoder, normalise=True, device=device)
        queries = round_trip_filter(queries, [Dense(documents, encoder), BM25(documents)], need=recipe.keep)
    return write_generated(out / FILE, queries)


def _generator(sources: Sequence[tuple[str, str]], out: Path, recipe: Recipe, device: str) -> str | Path | None:
    """Name or folder of the generator, trained first where it must be; none where there is nothing to train on."""
    source, target = recipe.settings.max_source, recipe.settings.max_target
    if recipe.fine_tune:
        if not sources:
            raise ConfigError("--fine-tune needs training queries, and the data has no qrels/train.tsv")
        tuning = FineTuneConfig(max_source=source, max_target=target)
        tuning = replace(tuning, epochs=recipe.epochs or tuning.epochs)
        HuggingFaceGenerator.fine_tune(recipe.fine_tune, sources, out=out, settings=tuning, device=device)
        return out
    if recipe.generator or not sources:
        return recipe.generator
    training = GeneratorConfig(max_source=source, max_target=target)
    training = replace(training, epochs=recipe.epochs or training.epochs)
    Generator.train(sources, out=out, encoder=recipe.encoder, settings=training, device=device)
    return out
