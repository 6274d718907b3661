"""Names of systems -> things that search a data set: the rows of `nci compare`.

    bm25  bm25-okapi  bm25+trainq  bm25+qg        lexical; + training or generated queries
    dense  dense-hnsw  knn  dpr  ance             dense; over training queries; trained dual encoders
    dsi  dsi-atomic  seal                         other generative ones
    nci  nci-untrained  nci-zeroed  nci-pure      the index; before training; without its generative part; without anchors
    nci-ensemble                                  all seeds of nci merged
    rrf:A+B  rerank:A                             built on others

A workbench holds the data and makes each system once, in a folder named by a hash of what it depends on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from nci.assembly import load_embedder
from nci.baselines import Baseline, Searcher
from nci.baselines.bm25 import BM25
from nci.baselines.dense import Dense
from nci.config import Config, CorpusConfig, content_key
from nci.corpus import Dataset, fingerprint
from nci.encoders import TextEncoder
from nci.errors import ConfigError
from nci.index import Index, build, search_many
from nci.records import Document, Hit
from nci.runtime import check_device

Pairs = list[tuple[str, str]]


@dataclass
class Workbench:
    """Everything systems are made of.

    Args:
        folder: Where systems are built and kept.
        config: Settings of the indexes and of the encoder of `dense`.
        generated: Generated queries as (query, doc_id); the same for every system that takes them.
        seeds: How many indexes stand behind a row of `nci` and its kin, each with its own tree and training.
    """

    dataset: Dataset
    folder: Path
    config: Config
    device: str | None = None
    generated: Sequence[tuple[str, str]] = ()
    seeds: int = 1
    made: dict[tuple[str, int], tuple[Searcher, int]] = field(default_factory=dict)

    @cached_property
    def documents(self) -> list[Document]:
        return list(self.dataset.documents(CorpusConfig()))

    @cached_property
    def pairs(self) -> Pairs:
        """Training queries with their documents."""
        if "train" not in self.dataset.splits():
            return []
        queries, qrels = self.dataset.split("train")
        return [(q.text, doc_id) for q in queries for doc_id, grade in qrels[q.query_id].items() if grade > 0]

    @cached_property
    def data_key(self) -> str:
        return content_key(fingerprint(self.dataset.folder, CorpusConfig()), self.pairs, list(self.generated))

    def check(self, name: str) -> None:
        """Refuse a name that stands for nothing, and what the data has not the parts for."""
        kind, _, inner = name.partition(":")
        if inner:
            if kind not in COMPOSED:
                raise ConfigError(f"--systems: {kind!r} is built on nothing; {', '.join(COMPOSED)} are")
            for part in parts_of(inner) if kind == "rrf" else [inner]:
                self.check(part)
        elif name not in MAKERS:
            known = ", ".join([*MAKERS, *(f"{kind}:..." for kind in COMPOSED)])
            raise ConfigError(f"--systems: there is no {name!r}; there are {known}")
        if kind in NEED_PAIRS and not self.pairs:
            raise ConfigError(f"--systems: {name} needs training queries, and the data has no qrels/train.tsv")
        if name in NEED_GENERATED and not self.generated:
            raise ConfigError(
                f"--systems: {name} needs generated queries: nci querygen makes them, --generated names them"
            )

    def seeds_of(self, name: str) -> int:
        """How many times a system is made: what has a tree of its own once per seed."""
        return self.seeds if name in SEEDED else 1

    def key(self, name: str, seed: int) -> str:
        """A hash of everything that decides what a system is."""
        return content_key(name, seed, self.seeds if name == "nci-ensemble" else 0, self.data_key, self.config)

    def make(self, name: str, seed: int = 0) -> tuple[Searcher, int]:
        """The system and the bytes of what it keeps."""
        if (name, seed) not in self.made:
            kind, _, inner = name.partition(":")
            self.made[name, seed] = COMPOSED[kind](self, inner) if inner else MAKERS[name](self, seed)
        return self.made[name, seed]

    def folder_of(self, name: str) -> Path:
        """Where a trained baseline is kept."""
        label = re.sub(r"[^A-Za-z0-9.-]+", "_", name)
        return self.folder / f"{label}-{self.key(name, 0)}"

    def flat(self) -> tuple[list[Document], TextEncoder, NDArray[np.float32]]:
        """Documents, the encoder of the settings, and the documents' vectors: those that the index was made of."""
        values = {**self.config.to_dict()}
        values["train"] = {**values["train"], "epochs": 0}
        out = self.folder / f"untrained-{content_key(self.data_key, values)}.index"
        index = build(self.dataset.folder, out, Config.from_dict(values), device=self.device)
        by_id = {document.doc_id: document for document in self.documents}
        encoder = load_embedder(index.config, index.generation / "embedder", check_device(self.device))
        return [by_id[doc_id] for doc_id in index.doc_ids], encoder, index.vectors()

    def index(self, seed: int, changes: dict[str, dict[str, Any]] | None = None, label: str = "nci") -> Index:
        """An index of the data with its own seeds; `changes` are merged into the sections of the settings."""
        values = self.config.to_dict()
        for section, fields in {**(changes or {}), "tree": {**(changes or {}).get("tree", {}), "seed": seed}}.items():
            values[section] = {**values[section], **fields}
        values["train"]["seed"] = values["pairs"]["seed"] = seed
        out = self.folder / f"{label}-{content_key(self.data_key, values)}.index"
        generated = self.generated if values["pairs"]["generated"] > 0 else ()
        return build(self.dataset.folder, out, Config.from_dict(values), generated=generated, device=self.device)


class Several(Baseline):
    """Several indexes as one system, merged by rank."""

    def __init__(self, indexes: Sequence[Index]) -> None:
        self._indexes = indexes

    def _answer(self, texts: list[str], k: int) -> list[list[Hit]]:
        return list(search_many(self._indexes, texts, k, method="paper"))


def parts_of(names: str) -> list[str]:
    """Names joined by +, some of which have a + of their own.

    >>> parts_of("bm25+trainq+nci+bm25")
    ['bm25+trainq', 'nci', 'bm25']
    """
    out: list[str] = []
    for word in names.split("+"):
        if out and f"{out[-1]}+{word}" in MAKERS:
            out[-1] += f"+{word}"
        else:
            out.append(word)
    return out


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _bm25(bench: Workbench, extra: Sequence[tuple[str, str]] = (), *, okapi: bool = False) -> tuple[Searcher, int]:
    more: dict[str, list[str]] = {}
    for query, doc_id in extra:
        more.setdefault(doc_id, []).append(query)
    system = BM25.rank_bm25(bench.documents) if okapi else BM25(bench.documents, extra=more)
    return system, system.index_bytes


def _dense(bench: Workbench) -> tuple[Searcher, int]:
    documents, encoder, vectors = bench.flat()
    return Dense(documents, encoder, vectors), vectors.nbytes


def _nci(bench: Workbench, seed: int, system: str = "trained") -> tuple[Searcher, int]:
    index = bench.index(seed)
    return cast(Searcher, index.system(system)), folder_bytes(index.generation)


PURE: dict[str, dict[str, Any]] = {"model": {"anchor": "none", "content": False, "edge_bias": False}}
DSI: dict[str, dict[str, Any]] = {
    "model": {
        **PURE["model"],
        "head": "tied",
        "adapter_layers": 0,
        "normalise": "position",
    },
    "pairs": {"generated": 0.0, "spans": 0},
    "train": {"alpha": 0.0, "spare_unseen": False},
}
DSI_ATOMIC = {**DSI, "tree": {"ids": "atomic"}, "model": {**DSI["model"], "normalise": "children"}}


def _changed(label: str, changes: dict[str, dict[str, Any]]) -> Callable[[Workbench, int], tuple[Searcher, int]]:
    def make(bench: Workbench, seed: int) -> tuple[Searcher, int]:
        index = bench.index(seed, changes, label)
        return cast(Searcher, index), folder_bytes(index.generation)

    return make


def _ensemble(bench: Workbench, _: int) -> tuple[Searcher, int]:
    indexes = [bench.index(seed) for seed in range(bench.seeds)]
    return Several(indexes), sum(folder_bytes(index.generation) for index in indexes)


def _hnsw(bench: Workbench) -> tuple[Searcher, int]:
    from nci.baselines.dense_hnsw import DenseHnsw

    flat = bench.flat()
    folder = bench.folder_of("dense-hnsw")
    folder.mkdir(parents=True, exist_ok=True)
    system = DenseHnsw(*flat, folder=folder)
    return system, folder_bytes(folder)


def _trained(bench: Workbench, name: str, train: Callable[..., Any], load: Callable[..., Any], **more: Any) -> Any:
    """A baseline from its folder, trained into it first where that is not complete."""
    folder = bench.folder_of(name)
    device = check_device(bench.device)
    if not (folder / "COMPLETE").exists():
        settings = more.pop("settings")
        train(bench.documents, bench.pairs, out=folder, settings=settings, device=device, **more)
    more.pop("settings", None)
    return load(folder, bench.documents, device=device, **more), folder_bytes(folder)


def _knn(bench: Workbench) -> tuple[Searcher, int]:
    from nci.baselines.knn import Knn, KnnSettings

    made: tuple[Searcher, int] = _trained(
        bench, "knn", Knn.train, Knn.load, settings=KnnSettings(encoder=bench.config.embed.encoder)
    )
    return made


def _dual(bench: Workbench, name: str, refreshes: int) -> tuple[Searcher, int]:
    from nci.baselines.dual import DualEncoder
    from nci.baselines.dual_data import DualSettings

    settings = DualSettings(encoder=bench.config.embed.encoder, refreshes=refreshes)
    made: tuple[Searcher, int] = _trained(bench, name, DualEncoder.train, DualEncoder.load, settings=settings)
    return made


def _seal(bench: Workbench) -> tuple[Searcher, int]:
    from nci.baselines.seal import Seal, SealSettings

    settings = SealSettings(encoder=bench.config.embed.encoder)
    made: tuple[Searcher, int] = _trained(bench, "seal", Seal.train, Seal.load, settings=settings)
    return made


def _fused(bench: Workbench, inner: str) -> tuple[Searcher, int]:
    from nci.baselines.fusion import RankFusion

    parts = {name: bench.make(name) for name in parts_of(inner)}
    fused = RankFusion({name: system for name, (system, _) in parts.items()})
    return fused, sum(size for _, size in parts.values())


def _reranked(bench: Workbench, inner: str) -> tuple[Searcher, int]:
    from nci.baselines.rerank import Rerank, RerankSettings

    base, size = bench.make(inner)
    settings = RerankSettings(encoder=bench.config.embed.encoder)
    system, own = _trained(bench, f"rerank:{inner}", Rerank.train, Rerank.load, settings=settings, base=base)
    return system, size + own


MAKERS: dict[str, Callable[[Workbench, int], tuple[Searcher, int]]] = {
    "bm25": lambda bench, _: _bm25(bench),
    "bm25-okapi": lambda bench, _: _bm25(bench, okapi=True),
    "bm25+trainq": lambda bench, _: _bm25(bench, bench.pairs),
    "bm25+qg": lambda bench, _: _bm25(bench, bench.generated),
    "dense": lambda bench, _: _dense(bench),
    "dense-hnsw": lambda bench, _: _hnsw(bench),
    "knn": lambda bench, _: _knn(bench),
    "dpr": lambda bench, _: _dual(bench, "dpr", 0),
    "ance": lambda bench, _: _dual(bench, "ance", 3),
    "seal": lambda bench, _: _seal(bench),
    "dsi": _changed("dsi", DSI),
    "dsi-atomic": _changed("dsi-atomic", DSI_ATOMIC),
    "nci": _nci,
    "nci-untrained": lambda bench, seed: _nci(bench, seed, "untrained"),
    "nci-zeroed": lambda bench, seed: _nci(bench, seed, "zeroed"),
    "nci-pure": _changed("nci-pure", PURE),
    "nci-ensemble": _ensemble,
}
COMPOSED: dict[str, Callable[[Workbench, str], tuple[Searcher, int]]] = {"rrf": _fused, "rerank": _reranked}
NEED_PAIRS = {"bm25+trainq", "knn", "dpr", "ance", "seal", "dsi", "dsi-atomic", "nci-pure", "rerank"}
NEED_GENERATED = {"bm25+qg"}
SEEDED = {"nci", "nci-untrained", "nci-zeroed", "nci-pure", "dsi", "dsi-atomic"}
