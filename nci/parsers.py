"""One argument parser per command, built only for the command that was typed. None imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from nci.config import (
    CalibrateConfig,
    Config,
    CorpusConfig,
    EmbedConfig,
    LexicalConfig,
    ModelConfig,
    PairsConfig,
    SearchConfig,
    TrainConfig,
    TreeConfig,
    TuneConfig,
    presets,
)
from nci.errors import ConfigError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

SECTIONS: dict[str, type] = {
    "corpus": CorpusConfig,
    "tune": TuneConfig,
    "embed": EmbedConfig,
    "lexical": LexicalConfig,
    "tree": TreeConfig,
    "pairs": PairsConfig,
    "model": ModelConfig,
    "train": TrainConfig,
    "calibrate": CalibrateConfig,
    "search": SearchConfig,
}


def _parser(description: str) -> ArgumentParser:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(description=description, default_env=False, exit_on_error=False)
    parser.add_argument("--quiet", action="store_true", help="No progress and no log lines.")
    return parser


def index(argv: Sequence[str]) -> ArgumentParser:
    parser = _parser(
        "Index a corpus: embed, cluster into a tree, train, publish. A killed run is resumed by the same command."
    )
    parser.add_argument(
        "corpus_source",
        metavar="CORPUS",
        help="BEIR folder, .jsonl(.gz), .csv, .tsv, .txt, a folder of .txt/.md, irds:ID.",
    )
    parser.add_argument("-o", "--out", metavar="DIR", required=True, help="Folder of the index.")
    parser.add_argument(
        "--preset",
        metavar="NAME",
        default=None,
        help=f"Settings to start from: {', '.join(presets())}; fast without a GPU, default with one; light is for a "
        "GPU, too, with a small encoder; paper-* are the paper's models.",
    )
    parser.add_argument(
        "--config", metavar="FILE", default=None, help="A YAML file of settings, of the form of the presets."
    )
    parser.add_argument("--print-config", action="store_true", help="Print the settings that would be used, and stop.")
    parser.add_argument("--engine", default="local", help="Where shards are worked on.")
    parser.add_argument("--device", default=None, help="cpu or cuda; a GPU is used where there is one.")
    parser.add_argument(
        "--generated",
        metavar="FILE",
        default=None,
        help="Generated queries to train on, too, as nci querygen writes them; auto makes them first, with a generator "
        "trained on the training queries (two where the index is calibrated).",
    )
    parser.add_argument("--on-error", default=None, help="What to do with a bad line: fail (default) or skip.")
    parser.add_argument("--id-field", default=None, help="Column of the ids.")
    parser.add_argument("--title-field", default=None, help="Column of the titles.")
    parser.add_argument("--text-fields", default=None, help="Columns joined to the text, separated by commas.")
    for name, section in SECTIONS.items():
        parser.add_class_arguments(section, name)
    start = _start_settings(argv).to_dict()
    parser.set_defaults({f"{name}.{key}": value for name, values in start.items() for key, value in values.items()})
    return parser


def _start_settings(argv: Sequence[str]) -> Config:
    """The preset or file named in the arguments: its values become the defaults that --section.field changes."""
    chosen: dict[str, str] = {}
    for place, word in enumerate(argv):
        for flag in ("--preset", "--config"):
            if word == flag and place + 1 < len(argv):
                chosen[flag] = argv[place + 1]
            elif word.startswith(f"{flag}="):
                chosen[flag] = word.split("=", 1)[1]
    if len(chosen) == 2:
        raise ConfigError("--preset and --config exclude each other: a settings file says everything itself")
    if "--config" in chosen and not chosen["--config"].endswith((".yaml", ".yml")):
        raise ConfigError(
            f"--config {chosen['--config']}: expected a .yaml file; shipped settings are chosen with --preset"
        )
    return Config.preset(next(iter(chosen.values()), None) or default_preset(argv))


def default_preset(argv: Sequence[str] = ()) -> str:
    """`default` where there is a GPU, `fast` where there is none; does not import torch to find out."""
    on_cpu = any(word == "cpu" or word == "--device=cpu" for word in argv)
    return "default" if Path("/proc/driver/nvidia/version").exists() and not on_cpu else "fast"


def _search_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--beam",
        default=None,
        help="Prefixes kept per level, as 100 or, level by level, as 30,100,50; the index's own, at least k, by default.",
    )
    parser.add_argument(
        "--stop-depth",
        type=int | None,
        default=None,
        help="Stop after so many digits and return whole clusters, best first, until they hold k documents.",
    )
    parser.add_argument(
        "--length-penalty", type=float | None, default=None, help="Scores are log p / (digits + 1) ** this."
    )
    parser.add_argument("--unconstrained", action="store_true", help="Do not use the tree (the paper's ablation).")
    parser.add_argument(
        "--merge", default="rrf", help="How several indexes are merged: rrf, or paper (sum of 1 / (rank / 5 + 1))."
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda.")
    parser.add_argument("--paranoid", action="store_true", help="Check every byte of the index before use.")
    parser.add_argument("--json", metavar="FILE", default=None, help="Write one JSON object; - is standard output.")


def search(argv: Sequence[str]) -> ArgumentParser:
    parser = _parser("Search one index, or several as an ensemble.")
    parser.add_argument(
        "words", metavar="INDEX... QUERY", nargs="+", help="One or more index folders (or Hub names), then the query."
    )
    parser.add_argument("-k", type=int, default=10, help="Hits to return.")
    parser.add_argument(
        "--queries", metavar="FILE", default=None, help="Many queries: queries.jsonl, .tsv or .txt; then no QUERY."
    )
    parser.add_argument("--run", metavar="FILE", default=None, help="Write a TREC run (with --queries).")
    parser.add_argument("--explain", action="store_true", help="Show how the probability of each hit came about.")
    _search_options(parser)
    return parser


def evaluate(argv: Sequence[str]) -> ArgumentParser:
    parser = _parser("Search the queries of a data set and print metrics.")
    parser.add_argument(
        "words", metavar="INDEX... DATA", nargs="+", help="One or more index folders, then a BEIR folder."
    )
    parser.add_argument("--split", default="test", help="Which qrels file: qrels/SPLIT.tsv.")
    parser.add_argument("--metrics", default="R@1,R@10,R@100,RR@100", help="ir-measures names, separated by commas.")
    parser.add_argument("-k", type=int, default=100, help="Depth of the rankings.")
    parser.add_argument("--run", metavar="FILE", default=None, help="Write the rankings as a TREC run.")
    parser.add_argument(
        "--system", default="trained", help="trained, untrained, or zeroed (trained, generative part left out)."
    )
    _search_options(parser)
    return parser


def verify(argv: Sequence[str]) -> ArgumentParser:
    parser = _parser(
        "Check an index: level 1 every byte against its checksum, level 2 also that the parts fit together."
    )
    parser.add_argument("index", metavar="INDEX")
    parser.add_argument("--level", type=int, default=2, help="1 or 2.")
    parser.add_argument("--json", metavar="FILE", default=None, help="Write one JSON object; - is standard output.")
    return parser


def compare(argv: Sequence[str]) -> ArgumentParser:
    parser = _parser(
        "Compare systems on a data set, all with the same documents, training pairs and queries. What is missing is built or "
        "trained and kept, so that a second call only prints and a killed one goes on. Systems: bm25, bm25-okapi, "
        "bm25+trainq, bm25+qg, bm25+qg50, dense, dense-hnsw, bert-bruteforce, bert-faiss, knn, dpr, ance, ance-maxp, dsi, "
        "dsi-atomic, seal, nci, nci-untrained, nci-zeroed, nci-pure, nci-qg, nci-qg50, nci-ensemble (all --seeds merged), "
        "rrf:A+B (by ranks), sum:A+B (by scores), const:A (one constant for documents without training queries), rerank:A; "
        "weights and constants are fitted on dev and on queries withheld from systems made for this alone. table stands for "
        "the full table. An index may have other settings, and a row a name: "
        "no-pawa=nci[model.head=tied,model.adapter_layers=0]; nci-unconstrained[...] and "
        "nci-pure-unconstrained[...] are searched without their tree. dense and "
        "dense-hnsw search the index's own vectors; with any --dense flag, vectors of their own."
    )
    parser.add_argument("data", metavar="DATA", help="A BEIR folder.")
    parser.add_argument(
        "--split",
        default="test",
        help="Which qrels file: qrels/SPLIT.tsv; several separated by commas.",
    )
    parser.add_argument(
        "--systems", default="bm25,bm25+trainq,dense,rrf:bm25+dense,nci", help="Which, separated by commas."
    )
    parser.add_argument("-o", "--out", metavar="DIR", default="compare", help="Folder for what is built and found.")
    parser.add_argument(
        "--preset", default=None, help=f"Settings of the indexes: {', '.join(presets())}, or a .yaml file."
    )
    parser.add_argument("--seeds", type=int, default=1, help="Indexes behind each row of nci and its kin.")
    parser.add_argument(
        "--variant-seeds",
        type=int,
        default=None,
        help="The same for nci-pure, nci-qg, nci-qg50, dsi and all with settings of their own; as --seeds.",
    )
    parser.add_argument(
        "--generated",
        metavar="FILE",
        default="auto",
        help="Generated queries, as nci querygen writes them; auto makes them when one of the systems takes them: bm25+qg, "
        "bm25+qg50, nci-qg, nci-qg50, nci-pure and any nci[pairs.generated=0.3]. nci takes none. none means none.",
    )
    parser.add_argument(
        "--per-document",
        type=int | None,
        default=None,
        help="How many auto makes for a document; 50 where a name ends in qg50, else 15.",
    )
    parser.add_argument("--jobs", type=int, default=1, help="Processes that make and search systems at once.")
    parser.add_argument(
        "--set",
        metavar="SECTION.FIELD=VALUE",
        action="append",
        default=[],
        help="Change a setting of the indexes, as in --set train.epochs=2; may be repeated.",
    )
    parser.add_argument("--metrics", default=None, help="ir-measures names, separated by commas.")
    parser.add_argument("--latex", metavar="FILE", default=None, help="Write the metrics as a LaTeX tabular.")
    parser.add_argument("--plot", metavar="FILE", default=None, help="Draw R@1 over latency (.png, .svg or .pdf).")
    parser.add_argument(
        "--tradeoff",
        metavar="FILE",
        default=None,
        help="Draw R@1 of the second split over that of the first, while a constant is added to the scores of documents "
        "without training queries, where good systems bend; the others stand in the legend (.png, with an .svg beside it).",
    )
    parser.add_argument(
        "--append", metavar="FILE", default=None, help="Add a line of JSON for every finished row to this file."
    )
    parser.add_argument("--device", default=None, help="cpu or cuda; a GPU is used where there is one.")
    parser.add_argument("--json", metavar="FILE", default=None, help="Write one JSON object; - is standard output.")
    from nci.baselines.settings import BASELINES, NAMED, usual_settings

    for name, section in BASELINES.items():
        parser.add_class_arguments(section, name, skip=NAMED.get(name, set()))
        usual = usual_settings(name, None, None)
        if name == "dense":  # any of its flags means vectors of its own, in place of the index's
            usual = dict.fromkeys(field.name for field in fields(section) if field.name not in NAMED[name])
        parser.set_defaults({f"{name}.{key}": value for key, value in usual.items()})
    return parser


def prepare(argv: Sequence[str]) -> ArgumentParser:
    parser = _parser(
        "Make a BEIR folder of a published data set from the files as they are downloaded: nq320k (Natural Questions, the "
        "original or the simplified files), triviaqa (Wikipedia domain), or a form that others have prepared. A run that was "
        "stopped goes on where it was; counts are compared with the published ones."
    )
    parser.add_argument("kind", metavar="KIND", help="nq320k, triviaqa, ...; a wrong name lists them all.")
    parser.add_argument("source", metavar="SRC", help="Folder with the downloaded files.")
    parser.add_argument("-o", "--out", metavar="DATA", required=True, help="BEIR folder to make.")
    parser.add_argument("--on-error", default="fail", help="What to do with a bad record: fail or skip.")
    parser.add_argument(
        "--max-chars", type=int | None, default=None, help="Cut the pages of triviaqa after so many characters."
    )
    parser.add_argument("--json", metavar="FILE", default=None, help="Write one JSON object; - is standard output.")
    return parser


def querygen(argv: Sequence[str]) -> ArgumentParser:
    parser = _parser(
        "Write queries for documents. With the training queries of the data a generator is trained here, from the encoder; "
        "--generator names another one (a docT5query model by folder or Hub name). Every document has its own seed, so that "
        "a rerun writes the same. --filter drops queries that do not find their own document again."
    )
    parser.add_argument("data", metavar="DATA", help="A BEIR folder; any corpus, where nothing is to be trained.")
    parser.add_argument("-o", "--out", metavar="DIR", required=True, help="Folder for queries.jsonl and the generator.")
    parser.add_argument(
        "--generator", metavar="NAME", default=None, help="A trained generator, or a model of Hugging Face."
    )
    parser.add_argument(
        "--fine-tune",
        metavar="NAME",
        default=None,
        help="A model of Hugging Face to train further on the training queries.",
    )
    parser.add_argument(
        "--encoder", default="minilm", help="What a generator is trained from, and dense search for the filter."
    )
    parser.add_argument("--epochs", type=float | None, default=None, help="Passes over the training queries.")
    parser.add_argument(
        "--filter",
        default="none",
        help="Keep every query (none), or one when dense or lexical search finds its document (any), or both do (all).",
    )
    parser.add_argument("--device", default=None, help="cpu or cuda; a GPU is used where there is one.")
    parser.add_argument("--per-document", type=int, default=15, help="Queries per document.")
    parser.add_argument("--top-k", type=int, default=50, help="Draw among the k likeliest word pieces; 0 means all.")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="Draw among those that together have this probability."
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="Below 1 prefers the likely ones.")
    parser.add_argument("--max-source", type=int, default=512, help="Word pieces of a document that are read.")
    parser.add_argument("--max-target", type=int, default=64, help="Word pieces of a query at most.")
    parser.add_argument("--batch-size", type=int, default=32, help="Documents at once.")
    parser.add_argument("--shard-size", type=int, default=512, help="Documents per shard: what a killed run may lose.")
    parser.add_argument("--seed", type=int, default=0, help="Same seed, same queries.")
    return parser


def bench(argv: Sequence[str]) -> ArgumentParser:
    parser = _parser(
        "Measure an index: latency of one query, throughput at the best batch, and the share of what the hardware could "
        "do, beside other systems on the same tree and queries. The two references (paper-search, hf-generate) have "
        "random weights of the same size and are slow: leave them out with --systems nci,encoder,dense,bm25."
    )
    parser.add_argument("index", metavar="INDEX")
    parser.add_argument(
        "--systems",
        default="nci,paper-search,hf-generate,encoder,dense,dense-hnsw,bm25",
        help="Which, separated by commas.",
    )
    parser.add_argument("--beams", default="10,100", help="Prefixes kept per level, separated by commas.")
    parser.add_argument(
        "--batches", default=None, help="Queries per call, separated by commas; tried until throughput falls."
    )
    parser.add_argument("--slow-batches", default="1,8", help="The same for the two references.")
    parser.add_argument(
        "--queries", metavar="FILE", default=None, help="queries.jsonl, .tsv or .txt; titles of documents by default."
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="Length of each measurement.")
    parser.add_argument("-k", type=int, default=10, help="Hits per query.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda.")
    parser.add_argument("--json", metavar="FILE", default=None, help="Write one JSON object; - is standard output.")
    return parser


def demo(argv: Sequence[str]) -> ArgumentParser:
    parser = _parser(
        "Index the documentation of the Python standard library on this machine, compare with BM25 and dense search."
    )
    parser.add_argument("-o", "--out", metavar="DIR", default="demo", help="Folder for data and index.")
    parser.add_argument("--preset", default="fast", help=f"Settings: {', '.join(presets())}.")
    parser.add_argument("--limit", type=int | None, default=None, help="Only so many entries, for a quick look.")
    parser.add_argument("--device", default=None, help="cpu or cuda; a GPU is used where there is one.")
    parser.add_argument("--json", metavar="FILE", default=None, help="Write one JSON object; - is standard output.")
    return parser
