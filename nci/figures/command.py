"""The commands of the paper's figures and tables: plot, efficiency, cited. Heavy imports inside the functions."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nci.console import plain, whole_numbers, words, write_json, writing
from nci.errors import ConfigError
from nci.figures import FIGURES
from nci.parsers import _parser

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

log = logging.getLogger("nci")


def plot_parser(argv: Sequence[str]) -> ArgumentParser:
    parser = _parser(
        "Draw the paper's figures for an index, as PNG and SVG: curve (learning curves, one line per INDEX), prefixes and "
        "tsne (where two groups of similar queries find their documents), beam (recall and time by beam), tree (depth and "
        "fan-out), frequency (recall by the number of training queries). All but curve are of the first INDEX."
    )
    parser.add_argument("indexes", metavar="INDEX", nargs="+", help="Index folders.")
    parser.add_argument(
        "--data", metavar="DATA", default=None, help="A BEIR folder, for prefixes, tsne, beam and frequency."
    )
    parser.add_argument("--split", default="test", help="Whose queries: qrels/SPLIT.tsv; several separated by commas.")
    parser.add_argument("--figures", default="all", help=f"Which of {', '.join(FIGURES)}, separated by commas; or all.")
    parser.add_argument("-o", "--out", metavar="DIR", default="figures", help="Folder for the pictures.")
    parser.add_argument(
        "--queries",
        metavar="FILE",
        nargs="+",
        default=[],
        help="For prefixes and tsne: two files are the two groups; in one file, or the split, groups are chosen.",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda.")
    parser.add_argument("--json", metavar="FILE", default=None, help="Write the numbers; - is standard output.")
    return parser


def plot(args: Namespace) -> int:
    names = list(FIGURES) if args.figures == "all" else list(dict.fromkeys(words(args.figures)))
    unknown = [name for name in names if name not in FIGURES]
    if unknown or not names:
        raise ConfigError(f"--figures are out of {', '.join(FIGURES)}, or all; not {args.figures!r}")
    out = Path(args.out)
    from nci import store
    from nci.corpus import open_dataset
    from nci.figures.scene import CannotDrawError, Scene
    from nci.figures.style import save, styled

    for folder in args.indexes:
        store.read_manifest(store.resolve(Path(folder)))
    dataset = open_dataset(args.data)
    if args.data is not None and dataset is None:
        raise ConfigError(
            f"{args.data} is no BEIR folder: expected corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv in it"
        )
    scene = Scene(args.indexes, dataset, words(args.split), args.queries, args.device)
    numbers: dict[str, Any] = {}
    problems: list[str] = []
    for name in names:
        try:
            with styled():
                drawing = import_module(f"nci.figures.{name}").draw(scene)
                with writing("-o", args.out):
                    out.mkdir(parents=True, exist_ok=True)
                    files = save(drawing.figure, out / name)
        except CannotDrawError as error:
            problems.append(f"{name}: {error}")
            continue
        numbers[name] = drawing.numbers
        if args.json != "-":
            for file in files:
                print(file)
    if not numbers:
        raise ConfigError(f"nothing could be drawn; {'; '.join(problems)}")
    for problem in problems:
        log.warning("no %s", problem)
    if "prefixes" in numbers or "tsne" in numbers:
        for query in (query for group in scene.groups for query in group):
            log.info("query %s: %s", query.query_id, plain(query.text))
    write_json(args.json, {"indexes": list(args.indexes), "split": scene.split, "figures": numbers})
    return 0


def efficiency_parser(argv: Sequence[str]) -> ArgumentParser:
    parser = _parser(
        "The paper's efficiency table: latency and throughput of small, base and large networks at beam 10 and 100, beside "
        "the paper's figures. Weights are random; the tree is that of INDEX, or one of NQ320k's shape."
    )
    parser.add_argument("index", metavar="INDEX", nargs="?", default=None, help="An index whose tree is searched.")
    parser.add_argument("--sizes", default="small,base,large", help="Also minilm, and tiny for a first look.")
    parser.add_argument("--beams", default="10,100", help="Prefixes kept per level, separated by commas.")
    parser.add_argument(
        "--batches", default=None, help="Queries per call, separated by commas; tried until throughput falls."
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="Length of each measurement.")
    parser.add_argument("--device", default=None, help="cpu or cuda; a GPU is used where there is one.")
    parser.add_argument("--latex", metavar="FILE", default=None, help="Write the table as a LaTeX tabular.")
    parser.add_argument("--json", metavar="FILE", default=None, help="Write one JSON object; - is standard output.")
    return parser


def efficiency(args: Namespace) -> int:
    from nci.bench import efficiency as table
    from nci.bench.compare import Settings
    from nci.bench.timing import device_name
    from nci.runtime import check_device

    device = check_device(args.device)
    settings = Settings(
        systems=("nci",),
        beams=list(dict.fromkeys(whole_numbers("--beams", args.beams))),
        batches=whole_numbers("--batches", args.batches or ("1,16,64,256,512,1024" if device != "cpu" else "1,8,32")),
        seconds=args.seconds,
    )
    trie = table.tree_of(args.index)
    lines = table.measure_sizes(trie, words(args.sizes), settings, device=device)
    write_json(args.json, table.as_json(lines, trie, device_name(device)))
    if args.latex:
        with writing("--latex", args.latex):
            Path(args.latex).write_text(table.latex(lines), encoding="utf-8")
    if args.json != "-":
        print(table.text(lines, trie, device_name(device)))
    return 0


def cited_parser(argv: Sequence[str]) -> ArgumentParser:
    parser = _parser("Print a main table of the paper, every row marked as cited, and your own rows beside it.")
    parser.add_argument("table", metavar="TABLE", help="nq320k or triviaqa.")
    parser.add_argument(
        "--beside", metavar="FILE", default=None, help="JSON of nci compare or nci evaluate, whose rows come first."
    )
    parser.add_argument("--json", metavar="FILE", default=None, help="Write one JSON object; - is standard output.")
    return parser


def cited(args: Namespace) -> int:
    from nci.cited import as_json, is_of, read_results, table_of, text

    table = table_of(args.table)
    ours = read_results(Path(args.beside), table) if args.beside else None
    if ours is not None and ours.data and not is_of(args.table, ours.data):
        log.warning("--beside %s is of %r, which does not look like %s", args.beside, ours.data, args.table)
    write_json(args.json, as_json(table, ours))
    if args.json != "-":
        print(text(table, ours))
    return 0
