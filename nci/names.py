"""Names of systems as `nci compare` takes them -> what they are made of. Knows no data, and neither builds nor searches.

    few=rrf:bm25+trainq+nci-pure[tree.k=3,train.alpha=0.1]     ROW=KIND:PART+PART[SECTION.FIELD=VALUE,...]

Settings stand in brackets behind the name of an index. They come last: what the name itself changes, and how long it is
trained, they may change again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nci.config import Config, changed
from nci.errors import ConfigError


@dataclass(frozen=True)
class Variant:
    """How an index differs from that of the settings.

    Args:
        changes: Fields that differ, by section.
        longer: Factor on the epochs: what has no anchor must learn everything, and its encoder must move.
        system: What is searched: trained, untrained, zeroed; or unconstrained, which is trained and leaves the tree.
        trained: Whose index that is, where it is another one's.
    """

    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    longer: int = 1
    system: str = "trained"
    trained: str = "nci"


FREE_LR = 1e-4  # of an encoder without anchors, at least
PURE: dict[str, dict[str, Any]] = {"model": {"anchor": "none", "content": False, "edge_bias": False}}
DSI: dict[str, dict[str, Any]] = {
    "model": {**PURE["model"], "head": "tied", "adapter_layers": 0, "normalise": "position"},
    "pairs": {"generated": 0.0, "spans": 0},
    "train": {"alpha": 0.0, "spare_unseen": False},
}
PLAIN: dict[str, dict[str, Any]] = {"pairs": {"generated": 0.0}}  # what `nci index` makes of the same data
DSI_ATOMIC = {**DSI, "tree": {"ids": "atomic"}, "model": {**DSI["model"], "normalise": "children"}}
INDEXES = {
    "dsi": Variant(DSI, longer=6),
    "dsi-atomic": Variant(DSI_ATOMIC, longer=6),
    "nci": Variant(PLAIN),
    "nci-untrained": Variant(PLAIN, system="untrained"),
    "nci-zeroed": Variant(PLAIN, system="zeroed"),
    "nci-unconstrained": Variant(PLAIN, system="unconstrained"),
    "nci-pure": Variant(PURE, longer=6),
    "nci-pure-unconstrained": Variant(PURE, longer=6, system="unconstrained", trained="nci-pure"),
    "nci-qg": Variant({"lexical": {"generated": 15}}),  # as many as it trains on, also where there are 50
    "nci-qg50": Variant({"pairs": {"generated_queries": 50}}),
}
WITH_PLUS = {"bm25+trainq", "bm25+qg", "bm25+qg50"}  # the other systems have none in their names
QUERYLESS = {"bm25", "bm25-okapi", "dense", "dense-hnsw", "bert-bruteforce", "bert-faiss"}  # know documents alone
FITTED = {"sum", "const"}  # on queries that the systems they are built on have not seen
NEED_PAIRS = {
    *("bm25+trainq", "knn", "dpr", "ance", "ance-maxp", "seal", "dsi", "dsi-atomic", "rerank"),
    *("nci-pure", "nci-pure-unconstrained"),
}
NEED_GENERATED = {"bm25+qg", "bm25+qg50", "nci-qg", "nci-qg50"}
FOLD = "fold:"  # before the name of a system: the one made without the queries of the withheld documents


def split_outside(text: str, at: str) -> list[str]:
    """The parts of a text between separators that stand outside of brackets.

    >>> split_outside("bm25,nci[tree.k=3,tree.c=3]", ",")
    ['bm25', 'nci[tree.k=3,tree.c=3]']
    """
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == at and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def kind_of(name: str) -> str:
    """The name of a system without its settings, or the first word of one that is built on others.

    >>> kind_of("nci-pure[train.alpha=0.15]"), kind_of("rrf:nci[tree.k=3]+bm25")
    ('nci-pure', 'rrf')
    """
    return name.partition("[")[0].partition(":")[0]


def labelled(spec: str) -> tuple[str, str]:
    """The name of the row and of the system.

    >>> labelled("few=nci[tree.k=3]"), labelled("nci[tree.k=3]")
    (('few', 'nci[tree.k=3]'), ('nci[tree.k=3]', 'nci[tree.k=3]'))
    """
    label, equals, _ = spec.partition("[")[0].partition("=")
    return (label.strip(), spec[len(label) + 1 :].strip()) if equals else (spec, spec)


def leaves(name: str) -> list[str]:
    """The systems at the bottom of one that is built on others; itself where it is not.

    >>> leaves("rerank:rrf:bm25+trainq+dense")
    ['bm25+trainq', 'dense']
    """
    parts = parts_of(name)
    return [leaf for part in parts for leaf in leaves(part)] if parts else [name]


def parts_of(name: str) -> list[str]:
    """What a system is built on: names joined by +, some of which have a + of their own.

    >>> parts_of("rrf:bm25+trainq+nci+bm25")
    ['bm25+trainq', 'nci', 'bm25']
    """
    kind = kind_of(name)
    if not name.startswith(f"{kind}:"):
        return []
    inner = name.removeprefix(f"{kind}:")
    if kind in ("rerank", "const"):
        return [inner]
    out: list[str] = []
    for word in split_outside(inner, "+"):
        if out and f"{out[-1].rpartition(':')[2]}+{word}" in WITH_PLUS:
            out[-1] += f"+{word}"
        else:
            out.append(word)
    return out


def of_fold(name: str) -> str:
    """The name of a system in the fold, which is the same system where it knows no queries.

    >>> of_fold("ance"), of_fold("bm25")
    ('fold:ance', 'bm25')
    """
    return name if name in QUERYLESS else FOLD + name


def config_of(config: Config, name: str) -> Config:
    """The settings of an index by name, where `config` is that of nci."""
    kind = kind_of(name)
    values = config.to_dict()
    for section, fields in INDEXES[kind].changes.items():
        values[section] |= fields
    values["train"]["epochs"] *= INDEXES[kind].longer
    if INDEXES[kind].longer > 1:
        values["train"]["encoder_lr"] = max(values["train"]["encoder_lr"], FREE_LR)
    return changed(Config.from_dict(values), _settings(name), "--systems")


def takes_generated(config: Config, name: str) -> bool:
    """Whether a system reads generated queries: that is for its name and settings to say, whatever stands beside it.

    >>> [takes_generated(Config(), name) for name in ("nci", "nci-qg", "nci[pairs.generated=0.3]", "nci-pure", "bm25+qg")]
    [False, True, True, True, True]
    """
    kind = kind_of(name)
    return config_of(config, name).pairs.generated > 0 if kind in INDEXES else kind in NEED_GENERATED


def one_name(config: Config, name: str) -> str:
    """The same for all names of a system: settings that change nothing are left out, the others stand in one order.

    >>> one_name(Config(), "nci[tree.c=30, train.alpha=0.10,tree.k=3]")
    'nci[tree.k=3,train.alpha=0.1]'
    """
    kind = kind_of(name)
    if parts := parts_of(name):
        return f"{kind}:{'+'.join(one_name(config, part) for part in parts)}"
    if kind not in INDEXES:
        return name
    usual = config_of(config, kind).to_dict()
    settings = [
        f"{section}.{key}={_as_yaml(value)}"
        for section, fields in config_of(config, name).to_dict().items()
        for key, value in fields.items()
        if value != usual[section][key]
    ]
    return f"{kind}[{','.join(settings)}]" if settings else kind


def _as_yaml(value: object) -> str:
    import yaml

    return yaml.safe_dump(value, default_flow_style=True, width=float("inf")).removesuffix("...\n").strip()


def _settings(name: str) -> list[str]:
    brackets = name.removeprefix(kind_of(name))
    if brackets and not (brackets.startswith("[") and brackets.endswith("]")):
        raise ConfigError(f"--systems {name}: settings stand in brackets at its end, as in nci[train.alpha=0.15]")
    return [part.strip() for part in split_outside(brackets[1:-1], ",")] if brackets else []
