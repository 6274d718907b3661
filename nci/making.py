"""Documents and queries -> a trained model: the stages between the corpus and an index.

A stage's folder is named by a hash of everything it depends on and counts only with its marker, written last; so a killed
build goes on where it was, and a changed setting redoes exactly what depends on it. Knows nothing of generations.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nci.assembly import Assembly, load_embedder
from nci.config import Config, content_key
from nci.corpus import load_documents
from nci.embed import embed_documents
from nci.embed import fingerprint as encoder_fingerprint
from nci.encoders import TextEncoder, fetch_encoder, read_settings
from nci.errors import ConfigError
from nci.expansion import VERSION as LEXICAL_VERSION
from nci.expansion import OwnScores, appended_queries, expanded_scores
from nci.lexical import LexicalScores
from nci.model import NCIModel
from nci.pack import DocumentFile
from nci.pairs import BatchPlan, make_pairs, write_plan
from nci.pieces import PieceVectors
from nci.records import Document
from nci.store import waiting_lock
from nci.train import train
from nci.training_data import TrainingData
from nci.tree import Tree, build_tree, query_vectors
from nci.trie import Trie
from nci.tune import tune_encoder

log = logging.getLogger("nci")


@dataclass
class Stages:
    """A build folder.

    Args:
        shared: Several indexes are made of it, maybe at once: a stage is made by one of them while the others wait for it,
            and stays when another key takes its name.
        training: Where checkpoints are kept, which only their own build may touch; none keeps them with the rest.
    """

    folder: Path
    shared: bool = False
    training: Path | None = None

    def run(self, name: str, key: str, work: Callable[[Path], str | None]) -> Path:
        """The folder of a finished stage; `work` fills it when it is not there yet."""
        folder = self.folder / f"{name}-{key}"
        marker = folder / "DONE"
        if marker.exists():
            log.info("%-10s already there", name)
            return folder
        if int(os.environ.get("RANK", "0")) != 0:  # under torchrun the first process does the work
            while not marker.exists():
                time.sleep(0.2)
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        with waiting_lock(folder / "LOCK") if self.shared else nullcontext():
            if marker.exists():
                return folder
            started = time.monotonic()
            result = work(folder)
            marker.touch()
        if not self.shared:
            for other in self.folder.glob(f"{name}-*"):
                if other != folder:
                    shutil.rmtree(other, ignore_errors=True)
        log.info("%-10s %s in %.1f s", name, result or "done", time.monotonic() - started)
        return folder


@dataclass(frozen=True)
class DocumentStream:
    """Documents read from the file each time they are asked for, with a length for the progress bar."""

    file: DocumentFile

    def __iter__(self) -> Iterator[Document]:
        return load_documents(self.file.path)

    def __len__(self) -> int:
        return len(self.file.offsets()) - 1


@dataclass(frozen=True)
class Made:
    """A trained model with the parts around it; `folder` is where it was trained."""

    tree: Tree
    assembly: Assembly
    model: NCIModel
    pairs: dict[str, int]
    folder: Path


@dataclass(frozen=True)
class Making:
    """Documents -> a trained model: the stages between the corpus and an index, for any training queries."""

    documents: DocumentFile
    corpus_key: str
    config: Config
    engine: str
    device: str

    @cached_property
    def other_encoder(self) -> bool:
        """Whether queries have an encoder of their own from the start."""
        return self.config.model.encoder not in (None, self.config.embed.encoder)

    @cached_property
    def query_key(self) -> str:
        return encoder_fingerprint(fetch_encoder(self.config.model.encoder or "")) if self.other_encoder else ""

    @cached_property
    def _can_be_tuned(self) -> bool:
        plain = read_settings(fetch_encoder(self.config.embed.encoder)).plain
        if not plain:
            log.warning(
                "the encoder is more than a transformer and its pooling: it is not tuned on the training queries"
            )
        return plain

    def tunes(self, data: TrainingData) -> bool:
        """Whether the encoder is trained before it embeds."""
        some = bool(data.real or (data.generated and self.config.tune.generated))
        return self.config.tune.epochs > 0 and some and self._can_be_tuned

    def tune_key(self, data: TrainingData) -> str:
        config, embed = self.config, replace(self.config.embed, pieces=0, windows=1)
        encoder = encoder_fingerprint(fetch_encoder(embed.encoder))
        generated = data.generated if config.tune.generated else []
        tuned = (config.tune, data.real, generated) if self.tunes(data) else ()
        return content_key(self.corpus_key, embed, encoder, *tuned)

    def embed_key(self, data: TrainingData) -> str:
        embed = self.config.embed
        return content_key(self.tune_key(data), embed.pieces, embed.windows if embed.pieces else 1)

    def tree_key(self, data: TrainingData) -> str:
        real = data.real if self.config.tree.source == "queries" else 0
        return content_key(self.embed_key(data), self.config.tree, real)

    def key(self, data: TrainingData) -> str:
        """Stands for everything that a trained model depends on."""
        return content_key(self.tree_key(data), self.query_key, self.config, data, LEXICAL_VERSION)

    def make(self, stages: Stages, data: TrainingData, shared: Stages | None = None) -> Made:
        """Run or take up all stages, the training last.

        Args:
            shared: Where vectors and tree are kept when they do not depend on the queries.
        """
        config, device = self.config, self.device
        free = not self.tunes(data) and config.tree.source != "queries"
        early = shared if shared is not None and free else stages
        encoder = self._tune(stages, data) if self.tunes(data) else config.embed.encoder

        def embed(folder: Path) -> str:
            documents, settings = DocumentStream(self.documents), replace(config.embed, encoder=str(encoder))
            embed_documents(documents, folder, settings, engine=self.engine, device=device)
            return f"{len(documents):,} documents"

        embedded = early.run("embed", self.embed_key(data), embed)
        vectors: NDArray[np.floating] = np.load(embedded / "vectors.npy", mmap_mode="r", allow_pickle=False)
        embedder = load_embedder(config, encoder, device)
        folder = early.run("tree", self.tree_key(data), lambda f: _tree(f, vectors, data, embedder, config, device))
        tree = Tree.load(folder / "tree.safetensors")
        trie, order = Trie.from_paths(tree.paths)
        lexical, own_lexical = _lexical_stage(stages, self.corpus_key, self.documents, data, config)
        query_encoder = TextEncoder.load(config.model.encoder or "", device=device) if self.other_encoder else embedder
        assembly = Assembly(config, trie, tree.values, order, vectors[order], embedder, query_encoder, None)
        if lexical is not None:
            assembly = replace(assembly, lexical=lexical.renumbered(assembly.leaf_of_row))
        # queries are compared piece by piece with documents that the same layers read
        same = not self.other_encoder and config.model.encoder_layers is None
        if config.model.anchor == "exact" and same and (embedded / "pieces").exists():
            assembly = replace(assembly, pieces=PieceVectors.load(embedded / "pieces").in_order(order))
        model = assembly.model(seen_rows=data.seen_rows if config.train.spare_unseen else None, device=device)
        # Another number of processes reads the plan in another order: it starts its own training.
        out = (stages.training or stages.folder) / f"train-{self.key(data)}-{os.environ.get('WORLD_SIZE', '1')}"
        counts: dict[str, int] = {}
        if has_pairs(data, config):
            input_key = content_key(self.embed_key(data), self.query_key)
            plan = _plan_stage(stages, input_key, self.documents, data, assembly, lexical, own_lexical)
            counts = plan.counts
            _train(model, plan, assembly, data, out, device=device)
        return Made(tree, assembly, model, counts, out)

    def _tune(self, stages: Stages, data: TrainingData) -> Path:
        """The folder of the encoder, trained on the pairs."""
        config = self.config

        def work(folder: Path) -> str:
            doc_ids = self.documents.doc_ids()
            real, generated = ([(text, doc_ids[row]) for text, row in pairs] for pairs in (data.real, data.generated))
            tune_encoder(
                list(load_documents(self.documents.path)),
                real,
                encoder=config.embed.encoder,
                out=folder / "encoder",
                config=config.tune,
                embed=config.embed,
                generated=generated,
                device=self.device,
            )
            return f"{len(real):,} pairs, {config.tune.epochs} + {config.tune.refreshes} epochs"

        return stages.run("tune", self.tune_key(data), work) / "encoder"


def _tree(
    folder: Path, vectors: NDArray[np.floating], data: TrainingData, embedder: TextEncoder, config: Config, device: str
) -> str:
    points = np.asarray(vectors, dtype=np.float32)
    if config.tree.source == "queries" and data.real:
        encoded = embedder.encode([text for text, _ in data.real], role="query", progress="embed queries")
        points = query_vectors(points, encoded, np.array([row for _, row in data.real]))
    tree = build_tree(points, config.tree, device=device)
    tree.save(folder / "tree.safetensors")
    return f"{len(tree.paths):,} leaves, {tree.paths.shape[1]} positions"


def _lexical_stage(
    stages: Stages, corpus_key: str, documents: DocumentFile, data: TrainingData, config: Config
) -> tuple[LexicalScores | None, OwnScores | None]:
    """BM25 weights in the order of the corpus, where the content score has them, and what appended queries score alone."""
    if config.model.anchor != "exact" or config.model.score != "dense+bm25":
        return None, None
    appended = appended_queries(config.lexical, real=data.real, generated=data.generated)
    asked = [text for text, _ in data.real] if config.lexical.rarity else []

    def work(folder: Path) -> str:
        contents = [document.content for document in load_documents(documents.path)]
        lexical, own = expanded_scores(contents, appended, config.lexical, asked)
        lexical.save(folder)
        np.save(folder / "own.npy", own, allow_pickle=False)
        return f"BM25 weights with {len(appended):,} queries" if appended else "BM25 weights"

    folder = stages.run("lexical", content_key(corpus_key, LEXICAL_VERSION, config.lexical, appended, asked), work)
    own = np.load(folder / "own.npy", allow_pickle=False)
    return LexicalScores.load(folder), OwnScores(appended, own) if appended else None


def has_pairs(data: TrainingData, config: Config) -> bool:
    """Whether there is anything to train on; without it an anchored index is still a useful one."""
    shares = config.pairs
    some = bool(shares.span_share or (data.real and shares.real) or (data.generated and shares.generated))
    if config.train.epochs > 0 and not some:
        if config.model.anchor == "none":
            raise ConfigError("there is nothing to train on, and without --model.anchor the index would rank by chance")
        log.warning("there are no training queries: the index ranks by its content score, untrained")
    return config.train.epochs > 0 and some


def _plan_stage(
    stages: Stages,
    input_key: str,
    documents: DocumentFile,
    data: TrainingData,
    assembly: Assembly,
    lexical: LexicalScores | None,
    own_lexical: OwnScores | None,
) -> BatchPlan:
    """The batch plan; it counts documents as the corpus does, so that another tree does not change it."""
    config, encoder, embedder = assembly.config, assembly.query_encoder, assembly.embedder
    prompt = encoder.prompt("query")
    stored = config.model.anchor != "none" and config.model.query_vector == "stored"
    depends = (data.real, data.generated, config.pairs, config.train.batch_size, config.train.epochs)
    words = None if lexical is None else (LEXICAL_VERSION, config.lexical)
    key = content_key(input_key, *depends, prompt, config.model.encoder, config.embed, words, stored)

    def work(folder: Path) -> str:
        plan = write_plan(
            folder / "plan",
            make_pairs(load_documents(documents.path), config.pairs, real=data.real, generated=data.generated),
            lambda texts: encoder.tokenize([prompt + text for text in texts], assembly.learned_length),
            config.pairs,
            batch_size=config.train.batch_size,
            epochs=config.train.epochs,
            words=lexical.columns if lexical is not None else None,
            own_lexical=own_lexical,
            vectors=(lambda texts: embedder.encode(texts, role="query")) if stored else None,
        )
        counts = ", ".join(f"{count:,} {source}" for source, count in plan.counts.items() if count)
        return f"{counts} pairs, {len(plan):,} batches"

    return BatchPlan(stages.run("pairs", key, work) / "plan")


def _train(model: NCIModel, plan: BatchPlan, assembly: Assembly, data: TrainingData, out: Path, *, device: str) -> None:
    started = time.monotonic()
    train(
        model,
        plan,
        assembly.config.train,
        out,
        leaf_of_document=assembly.leaf_of_row,
        lexical=assembly.lexical,
        dev=(lambda network: assembly.search_dev(network, data.dev)) if data.dev else None,
        device=device,
    )
    if int(os.environ.get("RANK", "0")) == 0:
        seconds = time.monotonic() - started
        log.info("%-10s %d batches of %d in %.1f s", "train", len(plan), assembly.config.train.batch_size, seconds)
