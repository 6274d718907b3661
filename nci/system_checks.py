"""Names of systems as somebody typed them -> what is wrong with them, and where their generated queries come from.

Nothing is made here, and torch is not needed: a mistake is to be told at once.
"""

from __future__ import annotations

import importlib.util
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nci.errors import ConfigError
from nci.names import (
    FITTED,
    INDEXES,
    NEED_GENERATED,
    NEED_PAIRS,
    config_of,
    kind_of,
    labelled,
    leaves,
    parts_of,
    takes_generated,
)
from nci.recipe import QueryGenConfig, Recipe
from nci.systems import COMPOSED, MAKERS

if TYPE_CHECKING:
    from nci.config import Config
    from nci.workbench import Workbench

log = logging.getLogger("nci")

TABLE = (
    *("bm25", "bm25-okapi", "bm25+trainq", "bm25+qg", "dense", "dense-hnsw", "knn", "dpr", "ance", "seal", "dsi"),
    *("const:bm25+trainq", "const:ance", "rrf:bm25+trainq+ance", "sum:bm25+trainq+ance", "rerank:bm25+trainq"),
    *("nci", "nci-zeroed", "nci-qg", "nci-pure", "nci-ensemble"),
)
PACKAGES = {"dense-hnsw": "faiss", "seal": "pydivsufsort"}


def check_names(names: Sequence[str]) -> None:
    """Refuse names that stand for nothing, whatever the data."""
    if not names:
        raise ConfigError("--systems names no system; give one or more, as in bm25,nci")
    rows = Counter(labelled(name)[0] for name in names)
    for row, times in rows.items():
        if times > 1:
            raise ConfigError(f"--systems names {row} {times} times; each system is one row")
        if not row:
            raise ConfigError("--systems: a row has no name; expected ROW=SYSTEM, or SYSTEM alone")
    for name in names:
        _check_name(labelled(name)[1])


def _check_name(name: str, fitted: int = 0) -> None:
    kind = kind_of(name)
    fitted += kind in FITTED
    if fitted > 2:  # SHARED names no more folds of folds
        raise ConfigError(f"--systems: {name} is inside of two others that are sum or const; expected one at most")
    composed = name.startswith(f"{kind}:")
    if composed and kind not in COMPOSED:
        raise ConfigError(f"--systems: {kind!r} is built on nothing; {', '.join(COMPOSED)} are")
    if not composed and kind not in MAKERS and kind not in INDEXES:
        known = ", ".join([*MAKERS, *INDEXES, *(f"{kind}:..." for kind in COMPOSED)])
        raise ConfigError(f"--systems: there is no {name!r}; there are {known}")
    if kind in MAKERS and name != kind:
        raise ConfigError(f"--systems {name}: {kind} has no settings in brackets; {', '.join(INDEXES)} have")
    parts = parts_of(name)
    for part in parts:
        _check_name(part, fitted)
    if kind in ("rrf", "sum") and len(set(parts)) < 2:
        raise ConfigError(f"--systems: {name} needs two systems or more, joined by +")


def check(bench: Workbench, name: str) -> None:
    """Refuse wrong settings, and what the data has not the parts for."""
    kind = kind_of(name)
    if kind in INDEXES:
        model = config_of(bench.config, name).model
        if INDEXES[kind].system == "unconstrained" and model.normalise == "children":
            raise ConfigError(
                f"--systems {name}: only a model that knows more than a node's real children is searched without its tree: "
                "add [model.normalise=position,model.anchor=none,model.content=false,model.edge_bias=false]"
            )
    for part in parts_of(name):
        check(bench, part)
    if (kind in NEED_PAIRS or kind == "const") and not bench.pairs:
        raise ConfigError(f"--systems: {name} needs training queries, and the data has no qrels/train.tsv")
    if kind in FITTED and not (bench.dev or bench.fold.kept_back):
        raise ConfigError(
            f"--systems: {name} needs held-out queries: qrels/dev.tsv, or training documents with several queries each"
        )
    if kind in NEED_GENERATED and not takes_generated(bench.config, name):
        raise ConfigError(
            f"--systems: {name} with pairs.generated 0 would be nci by another name; leave one of them out"
        )
    if kind in NEED_GENERATED and bench.generated_from is None:
        raise ConfigError(
            f"--systems: {name} needs generated queries: --generated auto makes them, --generated FILE names them"
        )


def table_names() -> tuple[list[str], list[str]]:
    """The systems of the full table, and those left out because a package is not here."""
    absent = [name for name, package in PACKAGES.items() if importlib.util.find_spec(package) is None]
    return [name for name in TABLE if name not in absent], absent


def generated_source(
    option: str, names: Sequence[str], config: Config, *, per_document: int | None
) -> Path | Recipe | None:
    """Where generated queries come from: none, a file, or, where one of the systems takes them, how to make them.

    Args:
        option: none, auto, or the name of a file.
        config: Settings of nci; its encoder is what the generator is trained from.
        per_document: Queries per document; none means 50 where a name ends in qg50, else 15.
    """
    if option == "none":
        return None
    asked = [leaf for name in names for leaf in leaves(labelled(name)[1]) if takes_generated(config, leaf)]
    if option != "auto":
        if not asked:
            log.warning("--generated %s: no system of this call takes generated queries; nci-qg, bm25+qg do", option)
        return Path(option)
    if not asked:
        return None
    usual = 50 if any(kind_of(name).endswith("qg50") for name in asked) else 15
    count = usual if per_document is None else per_document
    return Recipe(QueryGenConfig(per_document=count), encoder=config.embed.encoder)
