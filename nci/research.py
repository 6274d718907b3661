"""The commands of people who measure: prepare, querygen, compare, bench. Heavy imports inside the functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nci.config import Config
from nci.console import whole_numbers, words, write_json, writing
from nci.errors import ConfigError

if TYPE_CHECKING:
    from jsonargparse import Namespace


def prepare(args: Namespace) -> int:
    from nci.prepare import prepare as make

    if args.on_error not in ("fail", "skip"):
        raise ConfigError(f"--on-error is fail or skip, not {args.on_error!r}")
    report = make(args.kind, Path(args.source), Path(args.out), on_error=args.on_error, progress=not args.quiet)
    found = {"folder": str(report.folder), "documents": report.documents, "queries": dict(report.queries)}
    write_json(args.json, {**found, "duplicates": report.duplicates, "differences": report.differences})
    if args.json != "-":
        print(report)
    return 0


def querygen(args: Namespace) -> int:
    from nci.baselines.bm25 import BM25
    from nci.baselines.dense import Dense
    from nci.config import CorpusConfig
    from nci.corpus import open_dataset, read_documents
    from nci.encoders import TextEncoder
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
    from nci.runtime import check_device

    settings = QueryGenConfig(
        per_document=args.per_document,
        top_k=args.top_k,
        top_p=args.top_p,
        temperature=args.temperature,
        batch_size=args.batch_size,
        seed=args.seed,
    )
    out, device = Path(args.out), check_device(args.device)
    documents = list(read_documents(args.data, CorpusConfig()))
    dataset = open_dataset(args.data)
    generator: str | Path | None = args.generator
    if generator is None and dataset is not None and "train" in dataset.splits():
        queries, qrels = dataset.split("train")
        pairs = [
            (query.text, doc_id) for query in queries for doc_id, grade in qrels[query.query_id].items() if grade > 0
        ]
        config = GeneratorConfig() if args.epochs is None else GeneratorConfig(epochs=args.epochs)
        generator = out / "generator"
        sources = source_pairs(documents, pairs)
        Generator.train(sources, out=generator, encoder=args.encoder, settings=config, device=device)
    folder = out / "all"
    written = generate_queries(documents, out=folder, generator=generator, settings=settings, device=device)
    pairs = read_generated(written)
    if not args.keep_all:
        encoder = TextEncoder.load(args.encoder, normalise=True, device=device)
        pairs = round_trip_filter(pairs, [Dense(documents, encoder), BM25(documents)])
    write_generated(out / FILE, pairs)
    print(
        f"{len(pairs):,} queries for {len({doc_id for _, doc_id in pairs}):,} of {len(documents):,} documents: {out / FILE}"
    )
    return 0


def compare(args: Namespace) -> int:
    from nci.compare import METRICS
    from nci.compare import compare as run
    from nci.corpus import open_dataset
    from nci.parsers import default_preset
    from nci.querygen import read_generated
    from nci.systems import Workbench

    dataset = open_dataset(args.data)
    if dataset is None:
        raise ConfigError(
            f"{args.data} is no BEIR folder: expected corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv in it"
        )
    if args.seeds < 1:
        raise ConfigError(f"--seeds is at least 1, not {args.seeds}")
    out = Path(args.out)
    workbench = Workbench(
        dataset,
        out / "systems",
        Config.preset(args.preset or default_preset(["--device", args.device] if args.device else [])),
        device=args.device,
        generated=read_generated(Path(args.generated)) if args.generated else (),
        seeds=args.seeds,
    )
    names, splits = words(args.systems), words(args.split)
    metrics = tuple(dict.fromkeys(["R@1", *words(args.metrics)])) if args.metrics else METRICS
    results = [run(workbench, names, split, out, metrics=metrics) for split in splits]
    write_json(args.json, {**results[0].as_json(), "splits": {r.split: r.as_json() for r in results}})
    if args.latex:
        with writing("--latex", args.latex):
            Path(args.latex).write_text("\n".join(result.latex() for result in results), encoding="utf-8")
    if args.plot:
        from nci.plots import systems_plot

        with writing("--plot", args.plot):
            systems_plot(results[0].systems, results[0].latency_ms, Path(args.plot))
    if args.json != "-":
        usual: Sequence[str] = ("R@1", "R@10", "R@100", "RR@100")
        shown = [name for name in usual if name in metrics]
        print("\n\n".join(result.text(shown) for result in results))
    return 0


def bench(args: Namespace) -> int:
    from nci.bench import as_json, table
    from nci.bench.compare import Settings, compare_index, content_ms, default_queries
    from nci.bench.timing import device_name
    from nci.corpus import read_queries
    from nci.index import load

    settings = Settings(
        systems=words(args.systems),
        beams=whole_numbers("--beams", args.beams),
        batches=whole_numbers("--batches", args.batches or ("1,16,64,256,512" if args.device != "cpu" else "1,8,32")),
        slow_batches=whole_numbers("--slow-batches", args.slow_batches),
        seconds=args.seconds,
        k=args.k,
    )
    opened = load(args.index, device=args.device)
    texts = [query.text for query in read_queries(args.queries)] if args.queries else default_queries(opened)
    rows = compare_index(opened, texts, settings)
    write_json(args.json, as_json(device_name(opened.engine.device), rows))
    if args.json != "-":
        print(table(rows))
        alone = content_ms(opened, texts)
        if alone is not None:
            print(f"the content score takes {alone:.2f} ms of a query; it grows with the documents")
    return 0
