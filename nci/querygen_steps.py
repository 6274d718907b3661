"""Documents and training pairs -> queries in a folder: the steps of `nci querygen`, in order.

Train or fine-tune a generator where that is asked for, let it write, drop what does not find its own document where that
is asked for, too. Each step takes up what is there. Knows nothing of command lines or of what the queries are for.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nci.baselines.bm25 import BM25
from nci.baselines.dense import Dense
from nci.config import content_key
from nci.embed import fingerprint
from nci.encoders import TextEncoder, fetch_encoder
from nci.errors import ConfigError
from nci.generator import Generator, GeneratorConfig
from nci.querygen import (
    FILE,
    generate_queries,
    read_generated,
    round_trip_filter,
    source_pairs,
    write_generated,
)
from nci.recipe import Recipe
from nci.records import Document
from nci.seq2seq import FineTuneConfig, HuggingFaceGenerator

log = logging.getLogger("nci")

KEY = "queries.key"
"""Beside the queries: a hash of all that they depend on."""


def make_queries(
    documents: Sequence[Document], pairs: Sequence[tuple[str, str]], *, out: Path, recipe: Recipe, device: str
) -> Path:
    """Write `out/queries.jsonl` and return it; `out/all` holds the queries before the filter. What is there is kept.

    Args:
        documents: What to write queries for.
        pairs: Training queries with their doc_ids.
        out: Folder of the results and of the trained generator.
    """
    sources = source_pairs(documents, pairs)
    if recipe.fine_tune and not sources:
        raise ConfigError("--fine-tune needs training queries, and the data has no qrels/train.tsv")
    key = _key(documents, pairs, recipe)
    if (out / FILE).is_file() and (out / KEY).is_file() and (out / KEY).read_text() == key:
        log.info("%-10s %s is complete", "querygen", out / FILE)
        return out / FILE
    generator = _generator(sources, out / "generator", recipe, device)
    written = generate_queries(documents, out=out / "all", generator=generator, settings=recipe.settings, device=device)
    queries = read_generated(written)
    if recipe.keep != "none":
        encoder = TextEncoder.load(recipe.encoder, normalise=True, device=device)
        queries = round_trip_filter(queries, [Dense(documents, encoder), BM25(documents)], need=recipe.keep)
    (out / KEY).unlink(missing_ok=True)  # first: it never stands beside other queries than its own
    file = write_generated(out / FILE, queries)
    (out / KEY).write_text(key)
    return file


def _key(documents: Sequence[Document], pairs: Sequence[tuple[str, str]], recipe: Recipe) -> str:
    """Stands for all that the queries depend on, the weights of models included."""
    digest = hashlib.sha256()
    for each in documents:
        digest.update(json.dumps([each.doc_id, each.title, each.text]).encode())
    given = recipe.generator or recipe.fine_tune
    own = recipe.keep != "none" or (pairs and not given)
    models = [fingerprint(fetch_encoder(name)) for name in (given, recipe.encoder if own else None) if name]
    how = (recipe.settings.key, bool(recipe.fine_tune), recipe.epochs, recipe.keep)
    return content_key(how, models, digest.hexdigest(), pairs if not recipe.generator else [])


def _generator(sources: Sequence[tuple[str, str]], out: Path, recipe: Recipe, device: str) -> str | Path | None:
    """Name or folder of the generator, trained first where it must be; none where there is nothing to train on."""
    source, target = recipe.settings.max_source, recipe.settings.max_target
    if recipe.fine_tune:
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
