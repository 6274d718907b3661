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
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nci import store
from nci.assembly import Assembly
from nci.calibrate import Calibration, compared, fewer_unseen, fit, found_first, kept_back, withheld
from nci.config import Config, content_key
from nci.corpus import Source, fingerprint, open_dataset, read_documents, write_documents
from nci.errors import ConfigError, IndexCorruptError, IndexNotFoundError
from nci.evaluate import check_metric
from nci.hubs import find_hubs
from nci.making import Made, Making, Stages
from nci.model import NCIModel
from nci.pack import DocumentFile, Parts, write_generation
from nci.plots import learning_curve
from nci.records import Document
from nci.rocchio import query_means
from nci.runtime import check_device
from nci.search.engine import is_query
from nci.sections import CALIBRATION_VERSION, INDEX_VERSION
from nci.shards import check_engine
from nci.training_data import TrainingData, TrainingQueries, training_data
from nci.tree import Tree

log = logging.getLogger("nci")

_SEARCHED = 1000  # withheld queries that are searched to say what calibration changed


def build(
    source: Source,
    out: str | Path,
    config: Config,
    *,
    queries: TrainingQueries | None = None,
    generated: TrainingQueries = (),
    held_out: TrainingQueries = (),
    shared: Path | None = None,
    engine: str = "local",
    device: str | None = None,
) -> Path:
    """Index `source` into the folder `out` and return the live generation; resumes by itself.

    Args:
        source: A BEIR folder, a file, a folder of texts, `irds:ID`, or documents in memory.
        queries: Training queries; a BEIR folder brings its own (`qrels/train.tsv`, and `dev.tsv` for selection).
        generated: Queries that a generator wrote for documents.
        held_out: The same by a generator that has not seen the queries which calibration withholds (`calibrate.withheld`);
            without them it uses `generated`, and trusts them more than it should.
        shared: Where stages are kept for several indexes, which may be built at once; none keeps them in the index.
        engine: Where shards are worked on.
        device: cpu or cuda; none takes a GPU where there is one.
    """
    out, device = Path(out), check_device(device)
    check_metric(config.train.metric)
    check_engine(engine)
    make_place(out)
    first = int(os.environ.get("RANK", "0")) == 0  # under torchrun one process writes, all train
    with store.writer_lock(out) if first else nullcontext():
        stages = Stages(out / "build") if shared is None else Stages(Path(shared), shared=True, training=out / "build")
        live = _build(
            source,
            out,
            stages,
            config,
            queries=queries,
            generated=generated,
            held_out=held_out,
            engine=engine,
            device=device,
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()  # nobody opens the index before it is published
    return live


def make_place(out: Path) -> None:
    """A folder for an index; one with other things is refused: who deletes or sends an index means the whole folder."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        names = sorted(path.name for path in out.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise ConfigError(f"-o {out}: no folder can be made there: {error.strerror}") from error
    if names and not ({"CURRENT", "LOCK", "build"} & set(names) or any(n.startswith("generation-") for n in names)):
        more = ", ..." if len(names) > 3 else ""
        raise ConfigError(f"-o {out}: the folder holds other files ({', '.join(names[:3])}{more}); name a new one")


def _build(
    source: Source,
    out: Path,
    stages: Stages,
    config: Config,
    *,
    queries: TrainingQueries | None,
    generated: TrainingQueries,
    held_out: TrainingQueries,
    engine: str,
    device: str,
) -> Path:
    documents, corpus_key = _documents_stage(source, out, stages, config)
    doc_ids = documents.doc_ids()
    data = training_data(
        open_dataset(source),
        {doc_id: row for row, doc_id in enumerate(doc_ids)},
        queries=queries,
        generated=generated,
        dev_queries=config.train.dev_queries,
        skip_unknown=config.corpus.on_error == "skip",
    )
    making = Making(documents, corpus_key, config, engine=engine, device=device)
    calibrated = (CALIBRATION_VERSION, list(held_out)) if config.calibrate.share else 0
    build_key = content_key(making.key(data), INDEX_VERSION, calibrated)
    if (live := _live(out, build_key)) is not None:
        log.info("%s is up to date", out)
        return live
    calibration = _calibrate(making, stages, data, doc_ids, held_out) if config.calibrate.share else None
    made = making.make(stages, data)
    if int(os.environ.get("RANK", "0")) != 0:
        return out
    assembly, model = made.assembly, made.model
    report: dict[str, Any] = {"build_key": build_key, "documents": len(doc_ids)}
    if made.pairs:
        report["pairs"] = made.pairs
    _keep_curve(made.folder, out / "reports")
    if config.model.query_vector == "auto" and data.dev:  # before what is found by these vectors
        report["query_vector"] = assembly.better_query_vector(model, data.dev)
    if calibration is not None:
        searching, known = assembly.engine(model), _known(made, data)
        moves = query_means(searching, known if calibration.reads_queries else ())
        hubs = find_hubs(searching, known, calibration.drawn_by, moves)
        counts = assembly.counts([row for _, row in data.real])
        assembly = _calibrated(assembly, calibration, counts, hubs, moves)
        calibration.apply(model)
        report["calibration"] = asdict(calibration)
    if data.dev:
        report["dev"] = assembly.search_dev(model, data.dev)
    generation = _publish(out, documents, made.tree, assembly, model, report)
    for folder in [*(out / "build").glob("train-*"), out / "build" / "calibrate"]:
        shutil.rmtree(folder, ignore_errors=True)
    store.collect_garbage(out)
    return generation


def _calibrate(
    making: Making, stages: Stages, data: TrainingData, doc_ids: Sequence[str], held_out: TrainingQueries
) -> Calibration | None:
    """Weights of the parts of the score, from a build that has not seen the queries of some documents."""
    config = making.config
    trains = bool(data.real and config.train.epochs)
    if config.model.anchor != "exact" or config.model.adapter_start != "learned" or not trains:
        log.info(
            "%-10s left out: needs --model.anchor exact, --model.adapter_start learned, training queries", "calibrate"
        )
        return None
    chosen = withheld((doc_ids[row] for _, row in data.real), config.calibrate)
    fold, held = data.without({row for row, doc_id in enumerate(doc_ids) if doc_id in chosen})
    dev = [(query.text, rows[0]) for query, rows in data.all_dev]
    known, judged = ([(text, doc_ids[row]) for text, row in pairs] for pairs in (fold.real, dev))
    fold, back = fold.without(texts=kept_back(known, judged, config.calibrate))
    if held_out:
        rows = {doc_id: row for row, doc_id in enumerate(doc_ids)}
        fold = replace(fold, generated=[(text, rows[doc_id]) for text, doc_id in held_out if doc_id in rows])
    if len(held) < config.calibrate.least:
        log.info("%-10s left out: only %d queries could be withheld", "calibrate", len(held))
        return None
    log.info("%-10s a first build without the queries of some documents", "calibrate")
    fewer = fewer_unseen(len(doc_ids), len(fold.seen_rows), len(data.seen_rows))
    file = (
        stages.folder / "calibrate" / f"{content_key(making.key(fold), held + back, fewer, CALIBRATION_VERSION)}.json"
    )
    inner = stages if stages.shared else Stages(stages.folder / "calibrate")
    if not file.exists():
        made = making.make(inner, fold, stages)
        if int(os.environ.get("RANK", "0")) == 0:
            asked = [(text, row) for text, row in dev + held + back if is_query(text)]
            leaves = made.assembly.leaf_of_row[[row for _, row in asked]]
            found = _fitted(made, fold, [text for text, _ in asked], leaves, fewer)
            file.parent.mkdir(exist_ok=True)
            staged = file.with_suffix(".tmp")
            staged.write_text(json.dumps(asdict(found)), encoding="utf-8")
            staged.replace(file)
    while not file.exists():  # under torchrun the first process fits
        time.sleep(0.2)
    calibration = Calibration(**json.loads(file.read_text(encoding="utf-8")))
    log.info("%-10s %s", "calibrate", calibration)
    return calibration


def _fitted(made: Made, data: TrainingData, texts: list[str], leaves: NDArray[np.int64], fewer: float) -> Calibration:
    """The weights for a build, and how many of some of the texts it finds with and without them; changes its model."""
    search, few = made.assembly.config.search, np.random.default_rng(1).permutation(len(texts))[:_SEARCHED]
    some, wanted = [texts[i] for i in few], leaves[few]
    engine, counts = made.assembly.engine(made.model), made.assembly.counts([row for _, row in data.real])
    known = _known(made, data)
    moves = query_means(engine, known)
    calibration, hubs = fit(engine, texts, leaves, counts, known=known, moves=moves, fewer=fewer)
    before = found_first(engine, some, wanted, search)
    calibration.apply(made.model)
    engine = _calibrated(made.assembly, calibration, counts, hubs, moves).engine(made.model)
    return compared(calibration, before, found_first(engine, some, wanted, search), counts[wanted] == 0)


def _calibrated(
    assembly: Assembly,
    calibration: Calibration,
    counts: NDArray[np.integer],
    hubs: NDArray[np.float32],
    moves: NDArray[np.float32],
) -> Assembly:
    """The parts around a model with what calibration gives to single documents."""
    moved = calibration.moves * moves if calibration.moves else None
    return replace(assembly, bias=calibration.bias(counts, hubs), moves=moved)


def _known(made: Made, data: TrainingData) -> list[tuple[str, int]]:
    """Training queries with the leaves they ask for."""
    return [(text, int(made.assembly.leaf_of_row[row])) for text, row in data.real]


def _documents_stage(source: Source, out: Path, stages: Stages, config: Config) -> tuple[DocumentFile, str]:
    """The corpus as one checked file; documents in memory are read first, since they can be read only once."""
    given = None
    if not isinstance(source, str | Path):
        listed = out / "reports" / "rejects.jsonl"
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
        return f"{len(ids):,} documents"

    folder = stages.run("documents", key, work)
    if (folder / "rejects.jsonl").exists() and int(os.environ.get("RANK", "0")) == 0:
        reports = out / "reports"
        reports.mkdir(exist_ok=True)
        shutil.copy(folder / "rejects.jsonl", reports / "rejects.jsonl")
        log.warning("bad lines were skipped: see %s", reports / "rejects.jsonl")
    return DocumentFile(folder), key


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


def _keep_curve(folder: Path, reports: Path) -> None:
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
