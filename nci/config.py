"""All settings of an index: the sections of `nci.sections` together, presets, and the hash that stands for them.

Presets are YAML files in `nci/configs/`. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nci.errors import ConfigError
from nci.sections import (
    CalibrateConfig,
    CorpusConfig,
    EmbedConfig,
    LexicalConfig,
    ModelConfig,
    PairsConfig,
    SearchConfig,
    TrainConfig,
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


def content_key(*parts: object) -> str:
    """A short hash of settings and inputs: what a stage's output depends on."""
    plain = [dataclasses.asdict(p) if dataclasses.is_dataclass(p) and not isinstance(p, type) else p for p in parts]
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:16]
