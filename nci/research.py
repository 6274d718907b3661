"""The commands of people who measure: prepare, querygen, compare, bench. Heavy imports inside the functions."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nci import __version__
from nci.config import Config, changed
from nci.console import whole_numbers, words, write_json, writing
from nci.errors import ConfigError

if TYPE_CHECKING:
    from jsonargparse import Namespace

    from nci.workbench import Workbench

log = logging.getLogger("nci")


def prepare(args: Namespace) -> int:
    from nci.prepare import prepare as make

    if args.on_error not in ("fail", "skip"):
        raise ConfigError(f"--on-error is fail or skip, not {args.on_error!r}")
    source, out = Path(args.source), Path(args.out)
    report = make(args.kind, source, out, max_chars=args.max_chars, on_error=args.on_error, progress=not args.quiet)
    found = {"folder": str(report.folder), "documents": report.documents, "queries": dict(report.queries)}
    write_json(args.json, {**found, "duplicates": report.duplicates, "differences": report.differences})
    if args.json != "-":
        print(report)
    return 0


def querygen(args: Namespace) -> int:
    from nci.config import CorpusConfig
    from nci.corpus import open_dataset, read_documents
    from nci.recipe import QueryGenConfig, Recipe
    from nci.training_data import split_pairs

    names = [field.name for field in dataclasses.fields(QueryGenConfig)]
    recipe = Recipe(
        QueryGenConfig(**{name: getattr(args, name) for name in names}),
        encoder=args.encoder,
        generator=args.generator,
        fine_tune=args.fine_tune,
        epochs=args.epochs,
        keep=args.filter,
    )
    documents = list(read_documents(args.data, CorpusConfig()))
    pairs = split_pairs(open_dataset(args.data), "train")
    from nci.querygen import read_generated  # from here on with torch, which takes its time
    from nci.querygen_steps import make_queries
    from nci.runtime import check_device

    file = make_queries(documents, pairs, out=Path(args.out), recipe=recipe, device=check_device(args.device))
    queries = read_generated(file)
    print(f"{len(queries):,} queries for {len({d for _, d in queries}):,} of {len(documents):,} documents: {file}")
    return 0


def compare(args: Namespace) -> int:
    from nci.baselines.settings import BASELINES
    from nci.compare import METRICS, append_row, judged
    from nci.compare import check_names as rows_of
    from nci.compare import compare as run
    from nci.corpus import open_dataset
    from nci.evaluate import check_metric
    from nci.parsers import default_preset
    from nci.system_checks import check_names, generated_source

    dataset = open_dataset(args.data)
    if dataset is None:
        raise ConfigError(
            f"{args.data} is no BEIR folder: expected corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv in it"
        )
    for flag in ("seeds", "jobs", "variant_seeds"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} is at least 1, not {value}")
    out, names, splits = Path(args.out), _systems(args.systems), list(dict.fromkeys(words(args.split)))
    if not splits:
        raise ConfigError("--split names at least one split, as in test,dev")
    if args.tradeoff and len(splits) < 2:
        raise ConfigError("--tradeoff needs two splits: of documents with training queries, then of those without")
    check_names(names)
    preset = args.preset or default_preset(["--device", args.device] if args.device else [])
    config = changed(Config.preset(preset), args.set)
    metrics = tuple(dict.fromkeys(["R@1", *words(args.metrics)])) if args.metrics else METRICS
    for metric in metrics:
        check_metric(metric)
    for split in splits:
        dataset.qrels(split)
    generated = generated_source(args.generated, names, config, per_document=args.per_document)
    given = {name: vars(getattr(args, name)) for name in BASELINES}
    for name in BASELINES.keys() - {"bm25"}:  # there null is a value; elsewhere it means: as usual
        given[name] = {key: value for key, value in given[name].items() if value is not None}
    from nci.bench.timing import device_name  # from here on with torch, which takes its time
    from nci.jobs import rank_in_parallel
    from nci.overall import overall
    from nci.runtime import check_device
    from nci.workbench import Workbench

    device = check_device(args.device)
    workbench = Workbench(
        dataset,
        out / "systems",
        config,
        device=args.device,
        generated_from=generated,
        seeds=args.seeds,
        variant_seeds=args.variant_seeds,
        baselines=given,
    )
    for split in splits:  # before anything is made for another one
        judged(workbench, split)
    rows = rows_of(workbench, names)
    append = Path(args.append) if args.append else None

    def add_rows(name: str) -> None:
        if append is not None:
            for row, split in product([row for row in rows if rows[row] == name], splits):
                append_row(workbench, row, name, split, out, append, metrics=metrics)

    if args.jobs > 1:
        rank_in_parallel(workbench, [*dict.fromkeys(rows.values())], splits, out, jobs=args.jobs, on_ranked=add_rows)
    results = [run(workbench, names, splits[0], out, metrics=metrics, append=append)]
    for split in splits[1:]:
        results.append(run(workbench, names, split, out, metrics=metrics, append=append, timed=results[0]))
    facts: dict[str, Any] = {"rows": rows}
    both = overall(results) if len(results) > 1 else None
    if both:
        facts["mean"] = both.as_json()
    if args.tradeoff:
        facts["tradeoff"] = _tradeoff(workbench, rows, (splits[0], splits[1]), out, Path(args.tradeoff))
    facts |= {"preset": preset, "config": config.to_dict(), "nci": __version__, "device": device_name(device)}
    facts["baselines"] = {name: dataclasses.asdict(settings) for name, settings in workbench.settings.items()}
    write_json(args.json, {**results[0].as_json(), **facts, "splits": {r.split: r.as_json() for r in results}})
    usual: Sequence[str] = ("R@1", "R@10", "R@100", "RR@100")
    shown = metrics if args.metrics else usual
    if args.latex:
        with writing("--latex", args.latex):
            Path(args.latex).write_text("\n".join(result.latex(shown) for result in results), encoding="utf-8")
    if args.plot:
        from nci.plots import systems_plot

        with writing("--plot", args.plot):
            title = f"{results[0].data}, {results[0].split}: quality and cost"
            systems_plot(results[0].systems, results[0].latency_ms, Path(args.plot), title=title)
    if args.json != "-":
        tables = [*(result.text(shown) for result in results), *([both.text()] if both else [])]
        print("\n\n".join([*tables, results[0].notes()]))
    return 0


def _tradeoff(
    bench: Workbench, rows: Mapping[str, str], splits: tuple[str, str], out: Path, picture: Path
) -> dict[str, Any]:
    from nci.tradeoff import as_json, curves, draw

    found = curves(bench, rows, splits, out)
    with writing("--tradeoff", str(picture)):
        draw(found, splits, picture, bench.dataset.folder.resolve().name)
    return as_json(found, splits)


def _systems(text: str) -> list[str]:
    """Names of --systems, with those of the full table in place of the word table."""
    from nci.compare import split_names
    from nci.system_checks import PACKAGES, table_names

    names = split_names(text)
    if "table" not in names:
        return names
    usual, absent = table_names()
    if absent:
        packages = ", ".join(f"{name} (pip install {PACKAGES[name]})" for name in absent)
        log.warning("left out of the table, since a package is missing: %s", packages)
    place = names.index("table")
    return [*names[:place], *(name for name in usual if name not in names), *names[place + 1 :]]


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
