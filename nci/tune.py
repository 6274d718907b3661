"""Documents and pairs -> an encoder trained on them: a folder that is read like any other encoder, before documents are embedded.

Documents are read exactly as `nci.embed` reads them, so that what is trained is what is stored. The training itself is
`nci.contrastive`. Knows nothing of vectors on disk, trees or searches.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from nci.config import EmbedConfig, TuneConfig, content_key
from nci.contrast_settings import ContrastSettings
from nci.contrastive import train_encoder
from nci.contrastive_data import Pairs, Passages, Tokens
from nci.embed import fingerprint
from nci.encoders import ForeignEncoder, TextEncoder, fetch_encoder
from nci.errors import ConfigError, DataError
from nci.records import Document

VERSION = 1
"""Part of the key of a tuned encoder: raise it when equal input begins to give other weights."""

DEPTH = 50
"""Hard negatives are drawn from so many documents at the top of a query's ranking."""

Pair = tuple[str, str]


def tune_encoder(
    documents: Sequence[Document],
    pairs: Sequence[Pair],
    *,
    encoder: str | Path,
    out: Path,
    config: TuneConfig,
    embed: EmbedConfig,
    generated: Sequence[Pair] = (),
    device: str = "cpu",
) -> Path:
    """Train `encoder` on pairs of a query and a doc_id and return its folder: `out`, or with 0 epochs the encoder's own.

    A document that is a negative and never a positive would be pushed away from all queries and not be found again.
    So only documents with at least one pair take part, real or generated and drawn: they are the negatives of a batch
    and those that are mined. A document without any pair has no influence, in either direction.

    `out` appears when it is whole, `COMPLETE` in it. A killed run left its last whole round beside it, in
    `<out>.partial`, and a rerun goes on there; an encoder tuned on the same input is returned at once, another one is
    replaced.

    Args:
        documents: The corpus.
        pairs: Real queries.
        encoder: "minilm", "mpnet", a folder or a Hub name.
        out: Folder to write.
        config: How it is trained.
        embed: How the documents will be embedded: what is read of them, and how token vectors are pooled.
        generated: Queries that a generator wrote; each is taken as often as its share says, the fraction by lot.
        device: "cpu" or "cuda".
    """
    source = fetch_encoder(encoder)
    if not config.epochs:
        return source
    chosen = [*pairs, *_draw(generated, config)]
    known = {doc_id for _, doc_id in chosen}
    covered = [document for document in documents if document.doc_id in known]
    if len({document.doc_id for document in covered}) < len(covered):
        raise DataError("two documents to tune an encoder on have the same doc_id; give each its own")
    if source.resolve().is_relative_to(out.resolve()):
        raise ConfigError(f"{out} holds the encoder that is to be tuned; give another folder to write to")
    reading = (embed.pooling, embed.normalise, embed.max_length)
    texts = _digest([document.doc_id, document.content] for document in covered)
    key = "tuned " + content_key(VERSION, config, reading, fingerprint(source), texts, _digest(chosen))
    found = _read(out / "COMPLETE")
    if found == key:
        return out
    if out.exists() and not found.startswith("tuned ") and (out.is_file() or any(out.iterdir())):
        raise ConfigError(f"{out} holds something else than a tuned encoder; give an empty folder or a new one")
    last = _train(source, covered, chosen, config, embed, device, rounds=out.with_name(out.name + ".partial"), key=key)
    (last / "COMPLETE").write_text(key)
    shutil.rmtree(out, ignore_errors=True)
    os.replace(last, out)
    shutil.rmtree(last.parent)
    return out


def _draw(generated: Sequence[Pair], config: TuneConfig) -> list[Pair]:
    draws = np.random.default_rng(config.seed).random(len(generated))
    times = np.floor(config.generated + draws).astype(int)
    return [pair for pair, count in zip(generated, times.tolist(), strict=True) for _ in range(count)]


def _train(
    source: Path,
    documents: Sequence[Document],
    pairs: Sequence[Pair],
    config: TuneConfig,
    embed: EmbedConfig,
    device: str,
    *,
    rounds: Path,
    key: str,
) -> Path:
    """The folder of the last round; `rounds` is emptied first where it holds those of another key."""
    options = {"pooling": embed.pooling, "normalise": embed.normalise, "max_length": embed.max_length}
    encoder = TextEncoder.load(source, **options, device=device)  # type: ignore[arg-type]
    if isinstance(encoder, ForeignEncoder):
        raise ConfigError(
            f"the encoder {source} has layers beyond its transformer; take one without, or --tune.epochs 0"
        )
    settings = ContrastSettings(
        epochs=config.epochs,
        refreshes=config.refreshes,
        negatives=config.negatives,
        depth=max(DEPTH, config.negatives),
        batch_size=config.batch_size,
        lr=config.lr,
        temperature=config.temperature,
        late=config.late,
        layers=config.layers,
        seed=config.seed,
    )
    read, prompt = Pairs.read(pairs, documents, encoder, settings), encoder.prompt("document")
    contents = [prompt + document.content for document in documents]
    tokens = Tokens.of(encoder.tokenize(contents, config.max_length or None))
    if _read(rounds / "KEY") != key:
        shutil.rmtree(rounds, ignore_errors=True)
        rounds.mkdir(parents=True)
        (rounds / "KEY").write_text(key)
    train_encoder(encoder, read, Passages(tokens, np.arange(len(documents) + 1)), rounds, settings)
    return rounds / str(config.refreshes)


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _digest(items: Iterable[object]) -> str:
    digest = hashlib.sha256()
    for item in items:
        digest.update(json.dumps(item).encode())
    return digest.hexdigest()
