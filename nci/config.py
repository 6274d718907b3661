"""All settings of an index: the sections of `nci.sections` together, presets, and the hash that stands for them.

Presets are YAML files in `nci/configs/`. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from nci.errors import ConfigError
from nci.network_sections import ModelConfig, PairsConfig, TrainConfig
from nci.sections import (
    CalibrateConfig,
    CorpusConfig,
    EmbedConfig,
    LexicalConfig,
    SearchConfig,
    TreeConfig,
    TuneConfig,
    check,
)

__all__ = [
    "CalibrateConfig",
    "Config",
    "CorpusConfig",
    "EmbedConfig",
    "LexicalConfig",
    "ModelConfig",
    "PairsConfig",
    "SearchConfig",
    "TrainConfig",
    "TreeConfig",
    "TuneConfig",
    "changed",
    "content_key",
    "presets",
]

PRESETS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class Config:
    """All settings of an index."""

    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    embed: EmbedConfig = field(default_factory=EmbedConfig)
    lexical: LexicalConfig = field(default_factory=LexicalConfig)
    tree: TreeConfig = field(default_factory=TreeConfig)
    pairs: PairsConfig = field(default_factory=PairsConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    search: SearchConfig = field(default_factory=SearchConfig)

    def __post_init__(self) -> None:
        check(
            self.tree.ids != "atomic" or self.model.head == "tied",
            "--tree.ids atomic has one digit per document and needs --model.head tied --model.adapter_layers 0",
        )
        same = self.model.encoder is None or self.model.encoder == self.embed.encoder
        check(
            same or self.model.anchor == "none" or self.model.query_vector == "stored",
            f"--model.encoder {self.model.encoder} differs from --embed.encoder {self.embed.encoder}, so its query vectors do "
            "not match the document vectors: use --model.query_vector stored or --model.anchor none",
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written into the manifest."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        """The settings of `to_dict`, or of a preset that names only what it changes; unknown names are errors."""
        sections: dict[str, Any] = {}
        kinds = {f.name: f.default_factory for f in dataclasses.fields(cls)}
        for name, section in values.items():
            kind = kinds.get(name)
            check(kind is not None, f"unknown section {name!r} in the settings; there are: {', '.join(kinds)}")
            known = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
            unknown = set(section or {}) - known
            check(
                not unknown, f"unknown setting {name}.{min(unknown, default='')}; there are: {', '.join(sorted(known))}"
            )
            fixed = {key: tuple(v) if isinstance(v, list) else v for key, v in (section or {}).items()}
            sections[name] = kind(**fixed)  # type: ignore[operator, misc]
        return cls(**sections)

    @classmethod
    def preset(cls, name: str) -> Config:
        """One of the shipped presets, or a YAML file of the same form.

        >>> Config.preset("paper-base").model.decoder_layers
        6
        """
        import yaml

        path = Path(name) if name.endswith((".yaml", ".yml")) else PRESETS / f"{name}.yaml"
        if not path.is_file():
            raise ConfigError(f"no preset {name!r}; there are: {', '.join(presets())}, or give a .yaml file")
        try:
            return cls.from_dict(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
        except (yaml.YAMLError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: not a settings file: {error}") from error


def presets() -> list[str]:
    """Names of the shipped presets."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def changed(config: Config, changes: Sequence[str], flag: str = "--set") -> Config:
    """Settings with some fields changed, each as SECTION.FIELD=VALUE; `flag` is named where one is wrong."""
    import yaml

    values = config.to_dict()
    for change in changes:
        name, equals, text = change.partition("=")
        section, dot, key = name.strip().partition(".")
        if not equals or not dot:
            raise ConfigError(f"{flag} {change}: expected SECTION.FIELD=VALUE, as in train.epochs=2")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{flag} {change}: {text!r} is no value") from error
        kind = get_type_hints(type(getattr(config, section, None))).get(key, Any)
        if get_origin(kind) is not Literal and kind is not Any:  # choices are checked by the section
            value = _fitting(value, kind, f"{flag} {change}")
        values.setdefault(section, {})[key] = value
    try:
        return Config.from_dict(values)
    except ConfigError as error:  # which names the flags of nci index
        raise ConfigError(re.sub(rf"--(?=({'|'.join(config.to_dict())})\.)", f"{flag} ", str(error))) from error


_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a list",
    NoneType: "null",
}


def _fitting(value: Any, kind: Any, change: str) -> Any:
    """The value, as a field of this type takes it."""
    options = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    kinds = [get_origin(option) or option for option in options]
    if float in kinds and isinstance(value, str):
        try:
            return float(value)  # YAML reads 1e-4 as a text
        except ValueError:
            pass
    given = tuple if isinstance(value, list) else type(value)
    if given not in kinds and not (given is int and float in kinds):
        raise ConfigError(f"{change}: expected {' or '.join(_KINDS[each] for each in kinds)}")
    return value


def content_key(*parts: object) -> str:
    """A short hash of settings and inputs: what a stage's output depends on."""
    plain = [dataclasses.asdict(p) if dataclasses.is_dataclass(p) and not isinstance(p, type) else p for p in parts]
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:16]
