"""Names of systems -> things that search a data set: the rows of `nci compare`.

    bm25  bm25-okapi  bm25+trainq                 lexical; + training queries
    bm25+qg  bm25+qg50                            + at most 15 or 50 generated queries a document
    dense  dense-hnsw                             the index's own vectors, or any encoder's (--dense.encoder)
    bert-bruteforce  bert-faiss                   the same as the paper's rows have it, always exact
    knn  dpr  ance  ance-maxp                     over training queries; trained dual encoders
    dsi  dsi-atomic  seal                         other generative ones
    nci  nci-untrained  nci-zeroed  nci-pure      the index; before training; without its generative part; without anchors
    nci-qg  nci-qg50                              with at most 15 or 50 generated queries a document
    nci-unconstrained  nci-pure-unconstrained     searched without their tree, with model.normalise=position or vocabulary
    nci-ensemble                                  all seeds of nci merged
    nci[train.alpha=0.15,tree.k=10]               any of these indexes but the ensemble, with other settings
    rrf:A+B  sum:A+B  rerank:A                    built on others: by ranks, by scores, by a cross-encoder
    const:A                                       A with one constant added to documents without training queries

The numbers of sum: and const: are fitted on dev and on the queries of some documents, asked of systems that were made
without these queries (the fold); they are then used with systems made of everything.
A word before an equals sign is the name of the row: no-pawa=nci[model.head=tied,model.adapter_layers=0].
A system is made once, in a folder of the workbench named by a hash of what it depends on. What several systems share
(generated queries, vectors, an index) is named by `needs`, so that it can be made before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from nci.baselines import Baseline, Searcher
from nci.baselines.bm25 import BM25
from nci.baselines.dense import Dense
from nci.config import content_key
from nci.expansion import VERSION as LEXICAL_VERSION
from nci.names import FITTED, FOLD, INDEXES, QUERYLESS, config_of, kind_of, of_fold, parts_of, takes_generated
from nci.pairs import first_of_each
from nci.recipe import Recipe
from nci.records import Hits
from nci.sections import CALIBRATION_VERSION

if TYPE_CHECKING:  # both import torch; a name that was typed wrong is to be told at once
    from nci.index import Index
    from nci.workbench import Workbench

Made = tuple[Searcher, int]
"""A system and the bytes of what it keeps."""


def seeds_of(bench: Workbench, name: str) -> int:
    """How many times a system is made: what has a tree of its own once per seed."""
    if name in ("nci", "nci-untrained", "nci-zeroed"):
        return bench.seeds
    return bench.variant_seeds or bench.seeds if kind_of(name) in INDEXES else 1


def needs(bench: Workbench, name: str, seed: int) -> list[tuple[str, int]]:
    """What must be made before a system, as (name, seed): other systems, also those of the fold, and what SHARED names."""
    if name.startswith(FOLD):
        return [(of_fold(other), each) for other, each in needs(bench.fold, name.removeprefix(FOLD), seed)]
    kind = kind_of(name)
    found = [(part, 0) for part in parts_of(name)]
    folded = bench.fold is not bench
    if kind in FITTED and folded:
        found += [(of_fold(part), 0) for part in parts_of(name)]
    if takes_generated(bench.config, name) and isinstance(bench.generated_from, Recipe):
        found.append(("generated queries", 0))
        if folded and kind in INDEXES and config_of(bench.config, name).calibrate == bench.calibrate:
            found.append((of_fold("generated queries"), 0))
    if name in ("dense", "dense-hnsw") and not bench.baselines.get("dense"):
        found.append(("untrained index", 0))
    if name == "ance":
        found.append(("dpr", 0))
    if kind in INDEXES and INDEXES[kind].system != "trained":
        found.append((f"{INDEXES[kind].trained}{name.removeprefix(kind)}", seed))
    if name == "nci-ensemble":
        found += [("nci", each) for each in range(bench.seeds)]
    return found


def key(bench: Workbench, name: str, seed: int = 0) -> str:
    """A hash of everything that decides what a system is."""
    kind = kind_of(name)
    parts = [key(bench, part) for part in parts_of(name)]
    section = SECTION.get(kind)
    settings: Any = bench.settings[section] if section else None
    versions = (LEXICAL_VERSION, CALIBRATION_VERSION)
    if kind in INDEXES:
        settings = [config_of(bench.config, name).to_dict(), seed, *versions, *CHANGED.get(kind, ())]
    elif name == "nci-ensemble":
        settings = [config_of(bench.config, "nci").to_dict(), bench.seeds, *versions]
    elif name in ("dense", "dense-hnsw"):
        settings = bench.settings["dense"] if bench.baselines.get("dense") else bench.config.embed
    elif kind in FITTED:
        settings = [bench.dev, asdict(bench.calibrate), *CHANGED[kind]]
    generated = takes_generated(bench.config, name) and bench.generated_key
    return content_key(name, parts, bench.data_key, generated, settings)


def make(bench: Workbench, name: str, seed: int = 0) -> Made:
    """The system and the bytes of what it keeps, made or opened once."""
    if name.startswith(FOLD):
        return make(bench.fold, name.removeprefix(FOLD), seed)
    if bench.whole and name in QUERYLESS:
        return make(bench.whole, name)
    place = key(bench, name, seed)
    if place not in bench.made:
        kind = kind_of(name)
        if kind in INDEXES:
            bench.made[place] = _index(bench, name, seed)
        else:
            bench.made[place] = COMPOSED[kind](bench, name) if kind in COMPOSED else MAKERS[name](bench)
    return bench.made[place]


class Several(Baseline):
    """Several indexes as one system, merged by rank."""

    def __init__(self, indexes: Sequence[Index]) -> None:
        self._indexes = indexes

    def _answer(self, texts: list[str], k: int) -> list[Hits]:
        from nci.index import search_many

        return list(search_many(self._indexes, texts, k, method="paper"))


class Unconstrained(Baseline):
    """An index that is searched without its tree."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def _answer(self, texts: list[str], k: int) -> list[Hits]:
        return list(self._index.search(texts, k, mode="unconstrained"))


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _bm25(bench: Workbench, extra: Iterable[tuple[str, str]] = (), *, okapi: bool = False) -> Made:
    more: dict[str, list[str]] = {}
    for query, doc_id in extra:
        more.setdefault(doc_id, []).append(query)
    settings = asdict(bench.settings["bm25"])
    system = BM25.rank_bm25(bench.documents) if okapi else BM25(bench.documents, extra=more, **settings)
    return system, system.index_bytes


def _dense(bench: Workbench) -> Made:
    """The index's own vectors; with a --dense flag, vectors of its own."""
    if bench.baselines.get("dense"):
        return _encoded(bench, "dense", "cosine", "auto")
    documents, encoder, vectors = bench.flat()
    return Dense(documents, encoder, vectors), vectors.nbytes


def _hnsw(bench: Workbench) -> Made:
    from nci.baselines.dense_hnsw import DenseHnsw

    folder = _folder(bench, "dense-hnsw")
    if bench.baselines.get("dense"):
        settings, device = bench.settings["dense"], _device(bench)
        system = DenseHnsw.build(bench.documents, out=folder, settings=settings, device=device)
        return system, system.index_bytes
    flat = bench.flat()
    folder.mkdir(parents=True, exist_ok=True)
    return DenseHnsw(*flat, folder=folder), folder_bytes(folder)


def _encoded(
    bench: Workbench, name: str, similarity: Literal["cosine", "dot"], backend: Literal["auto", "faiss", "numpy"]
) -> Made:
    settings = replace(bench.settings["dense"], similarity=similarity, backend=backend)
    out, device = _folder(bench, name), _device(bench)
    system = Dense.build(bench.documents, out=out, settings=settings, device=device, name=name)
    return system, system.index_bytes


def _folder(bench: Workbench, name: str) -> Path:
    return bench.folder_of(name, key(bench, name))


def _device(bench: Workbench) -> str:
    from nci.runtime import check_device

    return check_device(bench.device)


def _trained(bench: Workbench, name: str, kind: Any, settings: Any, **more: Any) -> Made:
    """A baseline from its folder, trained into it first where that is not complete."""
    folder = _folder(bench, name)
    more["device"] = _device(bench)
    if not (folder / "COMPLETE").exists():
        kind.train(bench.documents, bench.pairs, out=folder, settings=settings, **more)
    return kind.load(folder, bench.documents, **more), folder_bytes(folder)


def _knn(bench: Workbench) -> Made:
    from nci.baselines.knn import Knn

    return _trained(bench, "knn", Knn, bench.settings["knn"])


def _dual(bench: Workbench, name: str, **fixed: Any) -> Made:
    from nci.baselines.dual import DualEncoder

    return _trained(bench, name, DualEncoder, replace(bench.settings["dual"], **fixed))


def _ance(bench: Workbench) -> Made:
    """Goes on from dpr, which is its first round."""
    make(bench, "dpr")
    return _dual(bench, "ance", encoder=str(_folder(bench, "dpr") / "encoder"), epochs=0)


def _seal(bench: Workbench) -> Made:
    from nci.baselines.seal import Seal

    return _trained(bench, "seal", Seal, bench.settings["seal"])


def _index(bench: Workbench, name: str, seed: int) -> Made:
    kind = kind_of(name)
    variant = INDEXES[kind]
    label = kind if variant.system == "trained" else variant.trained
    index = bench.index(seed, config_of(bench.config, name).to_dict(), label)
    free = variant.system == "unconstrained"
    searcher = Unconstrained(index) if free else cast(Searcher, index.system(variant.system))
    return searcher, folder_bytes(index.generation)


def _ensemble(bench: Workbench) -> Made:
    settings = config_of(bench.config, "nci").to_dict()
    indexes = [bench.index(seed, settings) for seed in range(bench.seeds)]
    return Several(indexes), sum(folder_bytes(index.generation) for index in indexes)


def _parts(bench: Workbench, name: str) -> tuple[dict[str, Searcher], int]:
    parts = {part: make(bench, part) for part in parts_of(name)}
    return {part: system for part, (system, _) in parts.items()}, sum(size for _, size in parts.values())


def _fused(bench: Workbench, name: str) -> Made:
    from nci.baselines.fusion import RankFusion

    parts, size = _parts(bench, name)
    return RankFusion(parts), size


def _fit(bench: Workbench, name: str) -> Made:
    """Fitted in the fold, used with systems made of everything."""
    from nci.baselines.fusion import ScoreFusion

    out = _folder(bench, name)
    if not (out / "COMPLETE").exists():
        asked = bench.dev + bench.withheld
        parts, seen = _parts(bench.fold, name)[0], bench.fold.seen
        ScoreFusion.train(parts, asked, out=out, seen=seen, fewer=bench.fewer_unseen)
    parts, size = _parts(bench, name)
    return ScoreFusion.load(out, parts, seen=bench.seen), size


def _reranked(bench: Workbench, name: str) -> Made:
    from nci.baselines.rerank import Rerank

    (inner,) = parts_of(name)
    base, size = make(bench, inner)
    system, own = _trained(bench, name, Rerank, bench.settings["rerank"], base=base)
    return system, size + own


MAKERS: dict[str, Callable[[Workbench], Made]] = {
    "bm25": _bm25,
    "bm25-okapi": lambda bench: _bm25(bench, okapi=True),
    "bm25+trainq": lambda bench: _bm25(bench, bench.pairs),
    "bm25+qg": lambda bench: _bm25(bench, first_of_each(bench.generated, 15)),
    "bm25+qg50": lambda bench: _bm25(bench, first_of_each(bench.generated, 50)),
    "dense": _dense,
    "dense-hnsw": _hnsw,
    "bert-bruteforce": lambda bench: _encoded(bench, "bert-bruteforce", "cosine", "numpy"),
    "bert-faiss": lambda bench: _encoded(bench, "bert-faiss", "dot", "faiss"),
    "knn": _knn,
    "dpr": lambda bench: _dual(bench, "dpr", refreshes=0),
    "ance": _ance,
    "ance-maxp": lambda bench: _dual(bench, "ance-maxp", passage="maxp"),
    "seal": _seal,
    "nci-ensemble": _ensemble,
}
COMPOSED: dict[str, Callable[[Workbench, str], Made]] = {"rrf": _fused, "sum": _fit, "const": _fit, "rerank": _reranked}
SHARED: dict[str, Callable[[Workbench], object]] = {
    "generated queries": lambda bench: bench.generated,
    "fold:generated queries": lambda bench: bench.fold.generated,
    "fold:fold:generated queries": lambda bench: bench.fold.fold.generated,
    "fold:fold:fold:generated queries": lambda bench: bench.fold.fold.fold.generated,
    "untrained index": lambda bench: bench.flat(),
}
SECTION = {
    **{"bert-bruteforce": "dense", "bert-faiss": "dense", "knn": "knn", "seal": "seal", "rerank": "rerank"},
    **dict.fromkeys(("dpr", "ance", "ance-maxp"), "dual"),
    **dict.fromkeys(("bm25", "bm25+trainq", "bm25+qg", "bm25+qg50"), "bm25"),
}
# What a name stood for before was another system.
CHANGED = {"nci-untrained": ["calibrated"], "sum": ["both kinds"], "const": ["both kinds"]}
