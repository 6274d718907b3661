"""Corpus -> index: the stages in order, each skipped when its output for the same input and settings is there.

A stage's folder in `build/` is named by a hash of everything it depends on and counts only with its marker, written
last; so a killed build goes on where it was, and a changed setting redoes exactly what depends on it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nci import store
from nci.assembly import Assembly, load_embedder
from nci.config import Config, content_key
from nci.corpus import Source, fingerprint, load_documents, open_dataset, read_documents, write_documents
from nci.embed import embed_documents
from nci.embed import fingerprint as encoder_fingerprint
from nci.encoders import TextEncoder, fetch_encoder
from nci.errors import ConfigError, IndexCorruptError, IndexNotFoundError
from nci.evaluate import check_metric
from nci.lexical import LexicalScores
from nci.model import NCIModel
from nci.pack import DocumentFile, Parts, write_generation
from nci.pairs import BatchPlan, make_pairs, write_plan
from nci.plots import learning_curve
from nci.records import Document
from nci.runtime import check_device
from nci.train import train
from nci.training_data import TrainingData, TrainingQueries, training_data
from nci.tree import Tree, build_tree, query_vectors
from nci.trie import Trie

log = logging.getLogger("nci")


def build(
    source: Source,
    out: str | Path,
    config: Config,
    *,
    queries: TrainingQueries | None = None,
    generated: TrainingQueries = (),
    engine: str = "local",
    device: str | None = None,
) -> Path:
    """Index `source` into the folder `out` and return the live generation; resumes by itself.

    Args:
        source: A BEIR folder, a file, a folder of texts, `irds:ID`, or documents in memory.
        queries: Training queries; a BEIR folder brings its own (`qrels/train.tsv`, and `dev.tsv` for selection).
        generated: Queries that a generator wrote for documents.
        engine: Where shards are worked on.
        device: cpu or cuda; none takes a GPU where there is one.
    """
    out, device = Path(out), check_device(device)
    check_metric(config.train.metric)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"-o {out}: no folder can be made there: {error.strerror}") from error
    first = int(os.environ.get("RANK", "0")) == 0  # under torchrun one process writes, all train
    with store.writer_lock(out) if first else nullcontext():
        live = _build(source, out, config, queries=queries, generated=generated, engine=engine, device=device)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()  # nobody opens the index before it is published
    return live


def _build(
    source: Source,
    out: Path,
    config: Config,
    *,
    queries: TrainingQueries | None,
    generated: TrainingQueries,
    engine: str,
    device: str,
) -> Path:
    stages = Stages(out / "build")
    documents, corpus_key = _documents_stage(source, stages, config)
    doc_ids = documents.doc_ids()
    data = training_data(
        open_dataset(source),
        {doc_id: row for row, doc_id in enumerate(doc_ids)},
        queries=queries,
        generated=generated,
        dev_queries=config.train.dev_queries,
        skip_unknown=config.corpus.on_error == "skip",
    )
    embed_key = content_key(corpus_key, config.embed, encoder_fingerprint(fetch_encoder(config.embed.encoder)))
    tree_key = content_key(embed_key, config.tree, data.real if config.tree.source == "queries" else 0)
    other = config.model.encoder not in (None, config.embed.encoder)
    query_key = encoder_fingerprint(fetch_encoder(config.model.encoder or "")) if other else ""
    build_key = content_key(tree_key, query_key, config, data)
    if (live := _live(out, build_key)) is not None:
        log.info("%s is up to date", out)
        return live

    def embed(folder: Path) -> str:
        embed_documents(DocumentStream(documents), folder, config.embed, engine=engine, device=device)
        return f"{len(doc_ids):,} documents"

    folder = stages.run("embed", embed_key, embed)
    vectors: NDArray[np.floating] = np.load(folder / "vectors.npy", mmap_mode="r", allow_pickle=False)
    embedder = load_embedder(config, config.embed.encoder, device)
    folder = stages.run("tree", tree_key, lambda f: _tree(f, vectors, data, embedder, config, device))
    tree = Tree.load(folder / "tree.safetensors")
    trie, order = Trie.from_paths(tree.paths)
    lexical = _lexical_stage(stages, corpus_key, documents, config)
    query_encoder = TextEncoder.load(config.model.encoder or "", device=device) if other else embedder
    assembly = Assembly(config, trie, tree.values, order, vectors[order], embedder, query_encoder, None)
    if lexical is not None:
        assembly = replace(assembly, lexical=lexical.renumbered(assembly.leaf_of_row))
    model = assembly.model(seen_rows=data.seen_rows if config.train.spare_unseen else None, device=device)
    report: dict[str, Any] = {"build_key": build_key, "documents": len(doc_ids)}
    if _has_pairs(data, config):
        plan = _plan_stage(stages, content_key(embed_key, query_key), documents, data, assembly, lexical)
        report["pairs"] = plan.counts
        _train(model, plan, assembly, data, out, key=build_key, device=device)
    if int(os.environ.get("RANK", "0")) != 0:
        return out
    if config.model.query_vector == "auto" and data.dev:
        report["query_vector"] = assembly.better_query_vector(model, data.dev)
    if data.dev:
        report["dev"] = assembly.search_dev(model, data.dev)
    generation = _publish(out, documents, tree, assembly, model, report)
    for folder in (out / "build").glob("train-*"):
        shutil.rmtree(folder, ignore_errors=True)
    store.collect_garbage(out)
    return generation


@dataclass
class Stages:
    """The build folder of one index."""

    folder: Path

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
        started = time.monotonic()
        result = work(folder)
        marker.touch()
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


def _documents_stage(source: Source, stages: Stages, config: Config) -> tuple[DocumentFile, str]:
    """The corpus as one checked file; documents in memory are read first, since they can be read only once."""
    given = None
    if not isinstance(source, str | Path):
        listed = stages.folder.parent / "reports" / "rejects.jsonl"
        listed.parent.mkdir(parents=True, exist_ok=True)
        given = list(read_documents(source, config.corpus, rejects=listed))
    if given is None:
        key = content_key(fingerprint(source, config.corpus))
    else:
        key = content_key([(d.doc_id, d.title, d.text, dict(d.fields)) for d in given])

    def work(folder: Path) -> str:
        rejects = folder / "rejects.jsonl"
        documents = read_documents(source, config.corpus, rejects=rejects) if given is None else given
        ids: list[str] = []

        def noted() -> Iterator[Document]:
            for document in documents:
                ids.append(document.doc_id)
                yield document

        write_documents(folder / "documents.jsonl", noted())
        (folder / "doc_ids.json").write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
        with (folder / "documents.jsonl").open("rb") as stream:
            offsets = np.cumsum([0, *map(len, stream)], dtype=np.int64)
        np.save(folder / "offsets.npy", offsets)
        if rejects.exists():
            reports = stages.folder.parent / "reports"
            reports.mkdir(exist_ok=True)
            shutil.copy(rejects, reports / "rejects.jsonl")
            log.warning("bad lines were skipped: see %s", reports / "rejects.jsonl")
        return f"{len(ids):,} documents"

    return DocumentFile(stages.run("documents", key, work)), key


def _live(out: Path, build_key: str) -> Path | None:
    """The live generation when it was built from the same input and settings."""
    try:
        generation = store.resolve(out)
        manifest = store.read_manifest(generation)
        store.check(generation, manifest, paranoid=True)
    except (IndexNotFoundError, IndexCorruptError):  # nothing there, or nothing whole: built again
        return None
    report = manifest.get("report")
    return generation if isinstance(report, dict) and report.get("build_key") == build_key else None


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


def _lexical_stage(stages: Stages, corpus_key: str, documents: DocumentFile, config: Config) -> LexicalScores | None:
    """BM25 weights in the order of the corpus, where the content score has them."""
    if config.model.anchor != "exact" or config.model.score != "dense+bm25":
        return None

    def work(folder: Path) -> str:
        LexicalScores.build([document.content for document in load_documents(documents.path)]).save(folder)
        return "BM25 weights"

    return LexicalScores.load(stages.run("lexical", corpus_key, work))


def _has_pairs(data: TrainingData, config: Config) -> bool:
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
) -> BatchPlan:
    """The batch plan; it counts documents as the corpus does, so that another tree does not change it."""
    config, encoder, embedder = assembly.config, assembly.query_encoder, assembly.embedder
    prompt = encoder.prompt("query")
    stored = config.model.anchor != "none" and config.model.query_vector == "stored"
    depends = (data.real, data.generated, config.pairs, config.train.batch_size, config.train.epochs)
    key = content_key(input_key, *depends, prompt, config.model.encoder, config.embed, lexical is None, stored)

    def work(folder: Path) -> str:
        plan = write_plan(
            folder / "plan",
            make_pairs(load_documents(documents.path), config.pairs, real=data.real, generated=data.generated),
            lambda texts: encoder.tokenize([prompt + text for text in texts], assembly.query_length),
            config.pairs,
            batch_size=config.train.batch_size,
            epochs=config.train.epochs,
            words=lexical.columns if lexical is not None else None,
            vectors=(lambda texts: embedder.encode(texts, role="query")) if stored else None,
        )
        counts = ", ".join(f"{count:,} {source}" for source, count in plan.counts.items() if count)
        return f"{counts} pairs, {len(plan):,} batches"

    return BatchPlan(stages.run("pairs", key, work) / "plan")


def _train(
    model: NCIModel, plan: BatchPlan, assembly: Assembly, data: TrainingData, out: Path, *, key: str, device: str
) -> None:
    # Another number of processes reads the plan in another order: it starts its own training.
    folder = out / "build" / f"train-{key}-{os.environ.get('WORLD_SIZE', '1')}"
    started = time.monotonic()
    train(
        model,
        plan,
        assembly.config.train,
        folder,
        leaf_of_document=assembly.leaf_of_row,
        lexical=assembly.lexical,
        dev=(lambda network: assembly.search_dev(network, data.dev)) if data.dev else None,
        device=device,
    )
    if int(os.environ.get("RANK", "0")) == 0:
        seconds = time.monotonic() - started
        log.info("%-10s %d batches of %d in %.1f s", "train", len(plan), assembly.config.train.batch_size, seconds)
        reports = out / "reports"
        reports.mkdir(exist_ok=True)
        if (folder / "curve.csv").exists():
            shutil.copy(folder / "curve.csv", reports / "curve.csv")
            learning_curve(reports / "curve.csv", reports / "curve.png")


def _publish(
    out: Path, documents: DocumentFile, tree: Tree, assembly: Assembly, model: NCIModel, report: dict[str, Any]
) -> Path:
    started = time.monotonic()
    parts = Parts(documents, tree, assembly, model.to("cpu").eval(), report)  # type: ignore[arg-type]
    generation = store.publish(out, lambda staging: write_generation(staging, parts))
    log.info("%-10s %s in %.1f s", "publish", generation.name, time.monotonic() - started)
    return generation
