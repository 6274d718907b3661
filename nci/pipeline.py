"""Corpus -> index: the stages in order, each skipped when its output for the same input and settings is there.

A stage's folder in `build/` is named by a hash of everything it depends on and counts only with its marker, written last;
so a killed build goes on where it was, and a changed setting redoes exactly what depends on it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nci import store
from nci.config import Config, content_key
from nci.corpus import Dataset, fingerprint, load_documents, open_dataset, read_documents, write_documents
from nci.embed import embed_documents
from nci.embed import fingerprint as encoder_fingerprint
from nci.encoders import TextEncoder, fetch_encoder
from nci.errors import ConfigError, DataError
from nci.evaluate import evaluate
from nci.lexical import LexicalScores
from nci.model import NCIConfig, NCIModel
from nci.pack import DocumentFile, Parts, write_generation
from nci.pairs import BatchPlan, make_pairs, write_plan
from nci.records import Document, Query
from nci.search import Engine
from nci.train import train
from nci.tree import Tree, build_tree, query_vectors
from nci.trie import Trie

log = logging.getLogger("nci")

Corpus = str | Path | Iterable[Any]
TrainingQueries = Sequence[tuple[str, str]]
"""Pairs of a query and the doc_id it should find."""


@dataclass
class Stages:
    """The build folder of one index."""

    folder: Path

    def run(self, name: str, key: str, work: Callable[[Path], object]) -> Path:
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


def build(
    source: Corpus,
    out: str | Path,
    config: Config,
    *,
    queries: TrainingQueries | None = None,
    engine: str = "local",
    device: str | None = None,
) -> Path:
    """Index `source` into the folder `out` and return the live generation; resumes by itself.

    Args:
        source: A BEIR folder, a file, a folder of texts, `irds:ID`, or documents in memory.
        queries: Training queries; a BEIR folder brings its own (`qrels/train.tsv`, and `dev.tsv` for selection).
        engine: Where shards are worked on.
        device: cpu or cuda; none takes a GPU where there is one.
    """
    out, device = Path(out), device or ("cuda" if torch.cuda.is_available() else "cpu")
    stages = Stages(out / "build")
    documents, corpus_key = _documents_stage(source, stages, config)
    doc_ids = documents.doc_ids()
    rows = {doc_id: row for row, doc_id in enumerate(doc_ids)}
    dataset = open_dataset(source)
    pairs, dev = _training_queries(dataset, queries, rows, config)
    encoder_key = encoder_fingerprint(fetch_encoder(config.embed.encoder))
    embed_key = content_key(corpus_key, config.embed, encoder_key)
    tree_key = content_key(embed_key, config.tree, pairs if config.tree.source == "queries" else 0)
    build_key = content_key(tree_key, config, pairs, dev)
    if (live := _live(out, build_key)) is not None:
        log.info("%s is up to date", out)
        return live

    folder = stages.run(
        "embed",
        embed_key,
        lambda f: (
            f"{len(embed_documents(_Stream(documents, len(doc_ids)), f, config.embed, engine=engine, device=device)):,} documents"
        ),
    )
    vectors: NDArray[np.floating] = np.load(folder / "vectors.npy", mmap_mode="r", allow_pickle=False)
    embedder = TextEncoder.load(
        config.embed.encoder,
        pooling=config.embed.pooling,
        normalise=config.embed.normalise,
        max_length=config.embed.max_length,
        device=device,
    )
    folder = stages.run("tree", tree_key, lambda f: _tree(f, vectors, pairs, embedder, config, device))
    tree = Tree.load(folder / "tree.safetensors")
    trie, order = Trie.from_paths(tree.paths)
    leaf_of_row = np.empty(len(order), dtype=np.int64)
    leaf_of_row[order] = np.arange(len(order))

    lexical = None
    if config.model.anchor == "exact" and config.model.score == "dense+bm25":
        folder = stages.run(
            "lexical",
            content_key(corpus_key),
            lambda f: LexicalScores.build([d.content for d in load_documents(documents.path)]).save(f),
        )
        lexical = LexicalScores.load(folder)

    torch.manual_seed(config.train.seed)
    query_encoder = (
        embedder
        if config.model.encoder in (None, config.embed.encoder)
        else TextEncoder.load(config.model.encoder, device=device)
    )
    model = make_model(config, trie, tree.values, query_encoder, embedder.width)
    model.bind(trie, np.asarray(vectors, dtype=np.float32)[order])
    model.to(device).eval()  # type: ignore[arg-type]
    lexical_by_leaf = lexical.renumbered(leaf_of_row) if lexical is not None else None
    prompt = query_encoder.prompt("query")

    def make_engine(network: NCIModel) -> Engine:
        stored = embedder if network.config.query_vector == "stored" else None
        return Engine.for_model(
            network,
            query_encoder.tokenizer,
            lexical=lexical_by_leaf,
            embedder=stored,
            prompt=prompt,
            max_length=config.pairs.max_length,
        )

    def search_dev(network: NCIModel) -> dict[str, float]:
        return dev_metrics(make_engine(network), dev, leaf_of_row, config)

    report: dict[str, Any] = {"build_key": build_key, "documents": len(doc_ids)}
    if config.train.epochs > 0:
        words = lexical.columns if lexical is not None else None
        stored_vectors = _stored_vectors(config, embedder)
        plan_key = content_key(
            corpus_key,
            pairs,
            config.pairs,
            config.train.batch_size,
            config.train.epochs,
            prompt,
            config.model.encoder,
            words is None,
            stored_vectors is None,
        )
        folder = stages.run(
            "pairs",
            plan_key,
            lambda f: _summary(
                write_plan(
                    f / "plan",
                    make_pairs(load_documents(documents.path), config.pairs, real=pairs),
                    lambda texts: query_encoder.tokenize([prompt + text for text in texts], config.pairs.max_length),
                    config.pairs,
                    batch_size=config.train.batch_size,
                    epochs=config.train.epochs,
                    words=words,
                    vectors=stored_vectors,
                )
            ),
        )
        plan = BatchPlan(folder / "plan")
        report["pairs"] = plan.counts
        train_folder = out / "build" / f"train-{content_key(build_key, plan_key)}"
        started = time.monotonic()
        train(
            model,
            plan,
            config.train,
            train_folder,
            leaf_of_document=leaf_of_row,
            lexical=lexical_by_leaf,
            dev=search_dev if dev else None,
            device=device,
        )
        log.info(
            "%-10s %d batches of %d in %.1f s", "train", len(plan), config.train.batch_size, time.monotonic() - started
        )
        _save_curve(train_folder, out / "reports")
    if int(os.environ.get("RANK", "0")) != 0:
        return out
    if config.model.query_vector == "auto":
        model.config.query_vector = _better_query_vector(
            model, search_dev if dev else None, config.train.metric, report
        )
    if dev:
        report["dev"] = search_dev(model)
    parts = Parts(
        config,
        documents,
        vectors,
        tree,
        trie,
        order,
        model.to("cpu").eval(),
        query_encoder.tokenizer,
        embedder,
        prompt,
        lexical_by_leaf,
        report,
    )  # type: ignore[arg-type]
    started = time.monotonic()
    generation = store.publish(out, lambda staging: write_generation(staging, parts))
    log.info("%-10s %s in %.1f s", "publish", generation.name, time.monotonic() - started)
    for folder in (out / "build").glob("train-*"):
        shutil.rmtree(folder, ignore_errors=True)
    store.collect_garbage(out)
    return generation


class _Stream:
    """Documents read from the file each time they are asked for, with a length for the progress bar."""

    def __init__(self, documents: DocumentFile, count: int) -> None:
        self.documents, self.count = documents, count

    def __iter__(self) -> Any:
        return load_documents(self.documents.path)

    def __len__(self) -> int:
        return self.count


def _documents_stage(source: Corpus, stages: Stages, config: Config) -> tuple[DocumentFile, str]:
    """The corpus as one checked file; documents in memory are read first, since they can be read only once."""
    if isinstance(source, str | Path):
        key = fingerprint(source, config.corpus)
    else:
        source = list(read_documents(source, config.corpus))
        key = content_key([(d.doc_id, d.title, d.text, dict(d.fields)) for d in source])

    def work(folder: Path) -> str:
        rejects = folder / "rejects.jsonl"
        documents = read_documents(source, config.corpus, rejects=rejects) if isinstance(source, str | Path) else source
        ids: list[str] = []

        def noted() -> Iterable[Document]:
            for document in documents:
                ids.append(document.doc_id)
                yield document

        write_documents(folder / "documents.jsonl", noted())
        (folder / "doc_ids.json").write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
        np.save(folder / "offsets.npy", _line_offsets(folder / "documents.jsonl"))
        if rejects.exists():
            reports = stages.folder.parent / "reports"
            reports.mkdir(exist_ok=True)
            shutil.copy(rejects, reports / "rejects.jsonl")
            log.warning("bad lines were skipped: see %s", reports / "rejects.jsonl")
        return f"{len(ids):,} documents"

    key = content_key(key)
    return DocumentFile(stages.run("documents", key, work)), key


def _line_offsets(path: Path) -> NDArray[np.int64]:
    offsets = [0]
    with path.open("rb") as stream:
        for line in stream:
            offsets.append(offsets[-1] + len(line))
    return np.array(offsets, dtype=np.int64)


def _training_queries(
    dataset: Dataset | None, queries: TrainingQueries | None, rows: dict[str, int], config: Config
) -> tuple[list[tuple[str, int]], list[tuple[Query, list[int]]]]:
    """Training pairs as (text, row) and dev queries with their relevant rows."""

    def row(doc_id: str, where: str) -> int | None:
        if doc_id not in rows and config.corpus.on_error == "fail":
            raise DataError(
                f'{where} names the document "{doc_id}", which is not in the corpus; --on-error skip leaves it out'
            )
        return rows.get(doc_id)

    pairs: list[tuple[str, int]] = []
    dev: list[tuple[Query, list[int]]] = []
    if queries is not None:
        pairs = [(text, found) for text, doc_id in queries if (found := row(doc_id, "a training query")) is not None]
    elif dataset is not None and "train" in dataset.splits():
        found_queries, qrels = dataset.split("train")
        for query in found_queries:
            for doc_id, grade in qrels[query.query_id].items():
                if grade > 0 and (found := row(doc_id, "qrels/train.tsv")) is not None:
                    pairs.append((query.text, found))
    if dataset is not None and "dev" in dataset.splits():
        found_queries, qrels = dataset.split("dev")
        for query in found_queries[: config.train.dev_queries]:
            relevant = [
                r for d, g in qrels[query.query_id].items() if g > 0 and (r := row(d, "qrels/dev.tsv")) is not None
            ]
            dev.append((query, relevant))
    return pairs, dev


def _live(out: Path, build_key: str) -> Path | None:
    """The live generation when it was built from the same input and settings."""
    if not (out / "CURRENT").exists():
        return None
    generation = store.resolve(out)
    report = store.read_manifest(generation).get("report")
    return generation if isinstance(report, dict) and report.get("build_key") == build_key else None


def _tree(
    folder: Path,
    vectors: NDArray[np.floating],
    pairs: list[tuple[str, int]],
    embedder: TextEncoder,
    config: Config,
    device: str,
) -> str:
    points = np.asarray(vectors, dtype=np.float32)
    if config.tree.source == "queries" and pairs:
        encoded = embedder.encode([text for text, _ in pairs], role="query", progress="embed queries")
        points = query_vectors(points, encoded, np.array([row for _, row in pairs]))
    tree = build_tree(points, config.tree, device=device)
    tree.save(folder / "tree.safetensors")
    return f"{len(tree.paths):,} leaves, {tree.paths.shape[1]} positions"


def make_model(config: Config, trie: Trie, values: int, encoder: TextEncoder, d_content: int) -> NCIModel:
    """A fresh model around a pretrained encoder."""
    settings = config.model
    encoder_config = encoder.model.config.to_dict()
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate", "dropout", "attention_dropout"):
        if name in encoder_config:
            encoder_config[name] = settings.dropout
    for name in ("num_hidden_layers", "num_layers", "n_layers"):
        if settings.encoder_layers is not None and name in encoder_config:
            if settings.encoder_layers > encoder_config[name]:
                raise ConfigError(
                    f"--model.encoder_layers {settings.encoder_layers}: the encoder has {encoder_config[name]}"
                )
            encoder_config[name] = settings.encoder_layers
    d_model = settings.d_model or int(encoder.model.config.hidden_size)
    heads = settings.heads or max(1, d_model // 64)
    if d_model % heads:
        raise ConfigError(f"--model.d_model {d_model} is not a multiple of --model.heads {heads}")
    if settings.anchor != "none" and not config.embed.normalise:
        raise ConfigError(
            "--model.anchor needs document vectors of length 1: use --embed.normalise true or --model.anchor none"
        )
    model = NCIModel(
        NCIConfig(
            encoder=encoder_config,
            pooling=encoder.settings.pooling,
            d_model=d_model,
            decoder_layers=settings.decoder_layers,
            adapter_layers=settings.adapter_layers,
            heads=heads,
            d_ff=settings.d_ff or 4 * d_model,
            dropout=settings.dropout,
            head=settings.head,
            head_rank=settings.head_rank,
            adapter_start=settings.adapter_start,
            normalise=settings.normalise,
            anchor=settings.anchor,
            score=settings.score,
            kappa=settings.kappa,
            lexical=settings.lexical,
            query_vector="trained" if settings.query_vector == "auto" else settings.query_vector,
            content=settings.content,
            edge_bias=settings.edge_bias,
            positions=trie.positions,
            values=values,
            nodes=trie.nodes,
            d_content=d_content,
        )
    )
    wanted = model.encoder.state_dict()
    given = {name: value for name, value in encoder.model.state_dict().items() if name in wanted}
    model.encoder.load_state_dict(given, strict=True)
    return model


def _stored_vectors(config: Config, embedder: TextEncoder) -> Callable[[list[str]], NDArray[np.float32]] | None:
    """Vectors behind the anchor where they do not come from the encoder in training."""
    if config.model.anchor == "none" or config.model.query_vector != "stored":
        return None
    return lambda texts: embedder.encode(texts, role="query")


def dev_metrics(
    engine: Engine, dev: list[tuple[Query, list[int]]], leaf_of_row: NDArray[np.int64], config: Config
) -> dict[str, float]:
    """Metrics of held-out queries, searched as a finished index would."""
    rankings = engine.search(
        [query.text for query, _ in dev],
        k=100,
        beam=config.search.beam,
        length_penalty=config.search.length_penalty,
        batch_size=config.search.batch_size,
    )
    run = {
        query.query_id: {str(d): float(s) for d, s in zip(ranking.documents, ranking.scores, strict=True)}
        for (query, _), ranking in zip(dev, rankings, strict=True)
    }
    qrels = {query.query_id: {str(leaf_of_row[row]): 1 for row in relevant} for query, relevant in dev}
    return evaluate(run, qrels, list(dict.fromkeys([config.train.metric, "R@1", "R@10", "RR@100"])))


def _better_query_vector(
    model: NCIModel, search_dev: Callable[[NCIModel], dict[str, float]] | None, metric: str, report: dict[str, Any]
) -> str:
    """Whether the anchor reads the trained or the stored encoder: what `dev` prefers."""
    if search_dev is None:
        return "trained"
    found: dict[str, dict[str, float]] = {}
    for choice in ("trained", "stored"):
        model.config.query_vector = choice
        started = time.monotonic()
        found[choice] = search_dev(model)
        found[choice]["seconds"] = round(time.monotonic() - started, 2)
    report["query_vector"] = found
    return max(found, key=lambda choice: found[choice][metric])


def _summary(plan: BatchPlan) -> str:
    counts = ", ".join(f"{count:,} {source}" for source, count in plan.counts.items() if count)
    return f"{counts} pairs, {len(plan):,} batches"


def _save_curve(train_folder: Path, reports: Path) -> None:
    if int(os.environ.get("RANK", "0")) == 0 and (train_folder / "curve.csv").exists():
        reports.mkdir(exist_ok=True)
        shutil.copy(train_folder / "curve.csv", reports / "curve.csv")
        from nci.plots import learning_curve

        learning_curve(reports / "curve.csv", reports / "curve.png")
