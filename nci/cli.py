"""The command line: one parser per command, heavy imports inside the functions, errors as one line.

Exit codes: 0 all is well, 1 something is wrong with the data, the index or the settings, 2 the command was typed wrong.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nci import __version__, parsers, research
from nci.config import Config
from nci.console import Typed, check_arguments, plain, set_up_logging, whole_numbers, write_json, writing
from nci.errors import ConfigError, NciError
from nci.figures import command as figures

if TYPE_CHECKING:
    from jsonargparse import Namespace

    from nci.index import Index
    from nci.records import Hits

log = logging.getLogger("nci")


def index(args: Namespace) -> int:
    sections = {name: getattr(args, name) for name in parsers.SECTIONS}
    values = {name: {key: getattr(section, key) for key in vars(section)} for name, section in sections.items()}
    flags = {"on_error": args.on_error, "id_field": args.id_field, "title_field": args.title_field}
    values["corpus"] |= {name: value for name, value in flags.items() if value is not None}
    if args.text_fields is not None:
        values["corpus"]["text_fields"] = [name.strip() for name in args.text_fields.split(",")]
    config = Config.from_dict(values)
    if args.print_config:
        import yaml

        print(yaml.safe_dump(config.to_dict(), sort_keys=False), end="")
        return 0
    from nci.pipeline import build

    started = time.monotonic()
    generated, held_out = _generated(args, config)
    build(
        args.corpus_source,
        args.out,
        config,
        generated=generated,
        held_out=held_out,
        engine=args.engine,
        device=args.device,
    )
    if int(os.environ.get("RANK", "0")) == 0:
        log.info(
            '%-10s %s in %.1f s; search it with: nci search %s "..."',
            "ready",
            args.out,
            time.monotonic() - started,
            args.out,
        )
    return 0


def _generated(args: Namespace, config: Config) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The generated queries that an index trains on, and those for its calibration."""
    from nci.pipeline import make_place
    from nci.querygen import read_generated

    if args.generated != "auto":
        return (read_generated(Path(args.generated)) if args.generated else []), []
    from nci.corpus import open_dataset
    from nci.recipe import QueryGenConfig, Recipe
    from nci.training_data import split_pairs
    from nci.workbench import Workbench

    dataset = open_dataset(args.corpus_source)
    if dataset is None or not split_pairs(dataset, "train"):
        raise ConfigError(
            f"--generated auto needs queries to learn from, and {args.corpus_source} has no qrels/train.tsv; "
            "nci querygen --generator takes a model that has learned"
        )
    make_place(Path(args.out))
    recipe = Recipe(QueryGenConfig(per_document=config.pairs.generated_queries), encoder=config.embed.encoder)
    bench = Workbench(dataset, Path(args.out) / "build", config, generated_from=recipe, device=args.device)
    return bench.generated, bench.held_out(config.calibrate)


def search(args: Namespace) -> int:
    from nci.corpus import read_queries
    from nci.evaluate import write_run

    if args.queries is None and len(args.words) < 2:
        raise Typed('give an index and a query: nci search INDEX "what you look for"')
    indexes = _open(args.words if args.queries else args.words[:-1], args)
    if args.queries is not None:
        queries = read_queries(args.queries)
        found = _search_all(indexes, [query.text for query in queries], args)
        if args.run:
            run = {
                query.query_id: {hit.doc_id: hit.score for hit in hits}
                for query, hits in zip(queries, found, strict=True)
            }
            with writing("--run", args.run):
                write_run(args.run, run)
        results = [{"query_id": q.query_id, **_as_json(hits)} for q, hits in zip(queries, found, strict=True)]
        write_json(args.json, {"queries": results})
        if not args.run and not args.json:
            for query, hits in zip(queries, found, strict=True):
                print(f"\n{plain(query.text)}")
                _print_hits(hits)
        return 0
    query = args.words[-1]
    if os.path.exists(os.path.join(query, "CURRENT")):
        raise Typed('the query comes last: nci search INDEX "what you look for"')
    hits = _search_all(indexes, [query], args)[0]
    write_json(args.json, _as_json(hits))
    if args.json != "-":
        _print_hits(hits)
        if args.explain:
            for number, opened in enumerate(indexes):
                print(f"\nhow index {number + 1} came to it:" if len(indexes) > 1 else "\nhow it came about:")
                print(opened.explain(query, [hit.doc_id for hit in hits]))
            if not args.unconstrained and any(opened.engine.rounds for opened in indexes):
                print("(exact; search rounds, so that its scores differ a little)")
        log.info("%d hits, %d of %d documents scored", len(hits), hits.documents_scored, sum(map(len, indexes)))
    return 0


def evaluate(args: Namespace) -> int:
    from nci.corpus import open_dataset
    from nci.evaluate import evaluate as score
    from nci.evaluate import table, write_run

    if len(args.words) < 2:
        raise Typed("give an index and a data set: nci evaluate INDEX DATA --split test")
    dataset = open_dataset(args.words[-1])
    if dataset is None:
        raise ConfigError(
            f"{args.words[-1]} is no BEIR folder: expected corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv in it"
        )
    queries, qrels = dataset.split(args.split)
    indexes = [opened.system(args.system) for opened in _open(args.words[:-1], args)]
    from nci.bench.timing import device_name

    started = time.monotonic()
    found = _search_all(indexes, [query.text for query in queries], args)
    seconds = time.monotonic() - started
    run = {query.query_id: {hit.doc_id: hit.score for hit in hits} for query, hits in zip(queries, found, strict=True)}
    names = [name.strip() for name in args.metrics.split(",")]
    metrics = score(run, qrels, names)
    if args.run:
        with writing("--run", args.run):
            write_run(args.run, run)
    scored = sum(hits.documents_scored for hits in found) / max(1, len(found))
    result = {"metrics": metrics, "queries": len(queries), "seconds": round(seconds, 3), "documents_scored": scored}
    facts = {
        "data": dataset.folder.resolve().name,
        "split": args.split,
        "indexes": [str(opened.folder) for opened in indexes],
        "system": args.system,
        "config": indexes[0].config.to_dict(),
        "nci": __version__,
        "device": device_name(indexes[0].engine.device),
    }
    write_json(args.json, {**result, **facts})
    if args.json != "-":
        print(table({"nci" if args.system == "trained" else f"nci {args.system}": metrics}, names))
        effort = f"{scored:.0f} of {sum(map(len, indexes))} documents scored per query"
        print(f"{len(queries)} queries of {args.split} in {seconds:.1f} s, {effort}")
    return 0


def verify(args: Namespace) -> int:
    if args.level not in (1, 2):
        raise ConfigError(f"--level is 1 or 2, not {args.level}")
    from nci import store

    generation = store.resolve(Path(args.index))
    store.read_manifest(generation)
    problems = store.verify_checksums(generation)
    if not problems and args.level == 2:
        from nci.index import Index

        problems = Index(args.index).verify(level=2)
    write_json(
        args.json, {"index": str(args.index), "generation": generation.name, "level": args.level, "problems": problems}
    )
    if args.json != "-":
        print("\n".join(problems) if problems else f"{args.index}: {generation.name} is whole (level {args.level})")
    return 1 if problems else 0


def demo(args: Namespace) -> int:
    from nci.demo import run_demo

    result = run_demo(Path(args.out), preset=args.preset, device=args.device, limit=args.limit, show=args.json != "-")
    write_json(args.json, result)
    return 0


COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], Any], Callable[[Any], int]]] = {
    "demo": ("index the documentation of Python's standard library, evaluate, search", parsers.demo, demo),
    "index": ("make an index of a corpus", parsers.index, index),
    "search": ("search an index, or several as an ensemble", parsers.search, search),
    "evaluate": ("metrics on the queries of a data set", parsers.evaluate, evaluate),
    "verify": ("check that an index is whole", parsers.verify, verify),
    "prepare": ("make a data set of published files", parsers.prepare, research.prepare),
    "querygen": ("write queries for documents", parsers.querygen, research.querygen),
    "compare": ("several systems on a data set, side by side", parsers.compare, research.compare),
    "plot": ("draw the paper's figures for an index", figures.plot_parser, figures.plot),
    "efficiency": ("the paper's efficiency table, measured here", figures.efficiency_parser, figures.efficiency),
    "cited": ("the paper's main tables, beside your own rows", figures.cited_parser, figures.cited),
    "bench": ("measure how fast an index is, beside other systems", parsers.bench, research.bench),
}

HELP = f"""usage: nci COMMAND ...

nci {__version__}: a neural corpus indexer. One model is the search index.

commands:
{chr(10).join(f"  {name:<12}{text}" for name, (text, _, _) in COMMANDS.items())}

begin with:
  nci demo                                     everything at once, offline, in minutes
  nci index docs.jsonl -o my.index             one JSON object a line: {{"id": ..., "title": ..., "text": ...}}
  nci search my.index "what I look for"

`nci COMMAND --help` explains a command. In Python: import nci; nci.build(...), nci.load(...).search(...)"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `nci` and `python -m nci`."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(HELP)
        return 0 if argv else 2
    if argv[0] in ("--version", "version"):
        print(__version__)
        return 0
    if argv[0] not in COMMANDS:
        print(f"nci: no command {argv[0]!r}; there are: {', '.join(COMMANDS)} (nci --help)", file=sys.stderr)
        return 2
    _, make_parser, command = COMMANDS[argv[0]]
    try:
        args = _parse(make_parser, argv)
        _set_up(quiet=args.quiet)
        check_arguments(args)
        return command(args)
    except Typed as error:
        print(f"nci {argv[0]}: {error}", file=sys.stderr)
        return 2
    except NciError as error:
        print(f"nci {argv[0]}: {plain(str(error))}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe went away: nothing to say
        return 0
    except OSError as error:
        print(f"nci {argv[0]}: {plain(str(error))[:300]}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nnci {argv[0]}: stopped; the same command goes on where this one was", file=sys.stderr)
        return 130


def _parse(make_parser: Callable[[Sequence[str]], Any], argv: Sequence[str]) -> Any:
    """The arguments of a command; a mistake is one line, not a page of usage."""
    from jsonargparse import ArgumentError

    parser = make_parser(argv[1:])
    parser.prog = f"nci {argv[0]}"
    try:
        return parser.parse_args(argv[1:])
    except ArgumentError as error:
        raise Typed(f"{plain(str(error))} (nci {argv[0]} --help)") from error


def _set_up(*, quiet: bool) -> None:
    """Log lines for people on standard error; the libraries beneath say only what is wrong."""
    if quiet:
        os.environ["TQDM_DISABLE"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    set_up_logging(logging.WARNING if quiet else logging.INFO)


def _open(names: Iterable[str], args: Namespace) -> list[Index]:
    from nci.index import load

    for name in names:
        if name.startswith(("http://", "https://")):
            raise ConfigError(f"{name}: searching a server is not part of this version; give an index folder")
    return [load(name, device=args.device, paranoid=args.paranoid) for name in names]


def _search_all(indexes: Sequence[Index], texts: list[str], args: Namespace) -> list[Hits]:
    from nci.index import search_many

    return search_many(
        indexes,
        texts,
        args.k,
        method=args.merge,
        beam=None if args.beam is None else whole_numbers("--beam", args.beam),
        length_penalty=args.length_penalty,
        mode="unconstrained" if args.unconstrained else "beam",
        stop_depth=args.stop_depth,
    )


def _as_json(hits: Hits) -> dict[str, Any]:
    names = ("rank", "doc_id", "score", "title", "semantic_id", "source")
    rows = [{name: getattr(hit, name) for name in names} for hit in hits]
    return {"hits": rows, "documents_scored": hits.documents_scored}


def _print_hits(hits: Hits) -> None:
    from nci.index import snippet

    for hit in hits:
        print(
            f"{hit.rank:>3}  {hit.score:8.3f}  {plain(hit.title or hit.doc_id)}"
            + (f"  [{plain(hit.doc_id)}]" if hit.title else "")
        )
        print(f"               {plain(snippet(hit.text))}")
