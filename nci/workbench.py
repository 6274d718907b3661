"""What systems are made of: the data, the settings, and a folder where everything made is kept.

Every folder is named by a hash of what its contents depend on, so that a second call takes up what is there. Knows how
queries are generated and indexes are built, but no system by name; `nci.systems` does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nci.assembly import load_embedder
from nci.baselines import Searcher
from nci.baselines.settings import BASELINES, usual_settings
from nci.calibrate import fewer_unseen, kept_back, withheld
from nci.config import CalibrateConfig, Config, CorpusConfig, content_key
from nci.corpus import Dataset, fingerprint
from nci.encoders import TextEncoder
from nci.expansion import VERSION as LEXICAL_VERSION
from nci.index import Index, build, load
from nci.querygen import FILE, read_generated
from nci.querygen_steps import make_queries
from nci.recipe import Recipe
from nci.records import Document
from nci.runtime import check_device
from nci.sections import CALIBRATION_VERSION
from nci.store import waiting_lock
from nci.training_data import split_pairs


@dataclass
class Workbench:
    """Everything systems are made of.

    Args:
        folder: Where systems are built and kept.
        config: Settings of the indexes; the baselines take its encoder.
        generated_from: Where generated queries come from: a file, or how to make them; none means that there are none.
        seeds: How many indexes stand behind a row of `nci`, each with its own tree and training.
        variant_seeds: The same for its variants and for dsi; none means as many.
        baselines: Settings of the baselines that differ from the usual, by section and name.
        made: Systems that are open, by their keys, with the bytes of what they keep.
        whole: The workbench that this one is a fold of.
        hidden: Documents whose training queries a fold does without.
        kept_back: Other training queries that it does without.
    """

    dataset: Dataset
    folder: Path
    config: Config
    device: str | None = None
    generated_from: Path | Recipe | None = None
    seeds: int = 1
    variant_seeds: int | None = None
    baselines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    made: dict[str, tuple[Searcher, int]] = field(default_factory=dict)
    whole: Workbench | None = None
    hidden: frozenset[str] = frozenset()
    kept_back: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.settings: dict[str, Any] = {}
        encoder, tune = self.config.embed.encoder, self.config.tune
        for section, kind in BASELINES.items():
            given = self.baselines.get(section, {})
            alike = tune.epochs > 0 and given.get("encoder", encoder) == encoder
            self.settings[section] = kind(**{**usual_settings(section, encoder, tune.layers if alike else 0), **given})

    @cached_property
    def documents(self) -> list[Document]:
        return self.whole.documents if self.whole else list(self.dataset.documents(CorpusConfig()))

    @cached_property
    def pairs(self) -> list[tuple[str, str]]:
        """Training queries with their documents; a fold has no query that asks for a hidden one."""
        pairs = self.whole.pairs if self.whole else split_pairs(self.dataset, "train")
        unknown = self.kept_back.union(query for query, doc_id in pairs if doc_id in self.hidden)
        return [pair for pair in pairs if pair[0] not in unknown]

    @cached_property
    def dev(self) -> list[tuple[str, str]]:
        """Queries of `dev` with their documents."""
        return self.whole.dev if self.whole else split_pairs(self.dataset, "dev")

    @cached_property
    def seen(self) -> frozenset[str]:
        """Documents with training queries."""
        return frozenset(doc_id for _, doc_id in self.pairs)

    @property
    def calibrate(self) -> CalibrateConfig:
        """What `fold` withholds: what the indexes do, and a tenth where they withhold nothing."""
        return self.config.calibrate if self.config.calibrate.share else CalibrateConfig(share=0.1)

    @cached_property
    def fold(self) -> Workbench:
        """The same without the training queries of some documents, so that weights can be fitted on these queries."""
        return self._without(self.calibrate)

    @property
    def withheld(self) -> list[tuple[str, str]]:
        """The pairs that the fold does without."""
        known = set(self.fold.pairs)
        return [pair for pair in self.pairs if pair not in known]

    @property
    def fewer_unseen(self) -> float:
        """What an unseen document of the fold counts, so that there are as many as in all."""
        return fewer_unseen(len(self.documents), len(self.fold.seen), len(self.seen))

    def _without(self, calibrate: CalibrateConfig) -> Workbench:
        hidden = withheld(self.seen, calibrate)
        if not hidden:
            return self
        fold = replace(self, whole=self, hidden=frozenset(hidden), kept_back=frozenset())
        back = kept_back(fold.pairs, self.dev, calibrate)
        return replace(fold, kept_back=back) if back else fold

    @cached_property
    def generated(self) -> list[tuple[str, str]]:
        """Generated queries with their documents: the same for every system that takes them; made where they are missing."""
        source = self.generated_from
        if isinstance(source, Recipe):
            folder = self.folder / f"querygen-{self.generated_key}"
            folder.mkdir(parents=True, exist_ok=True)
            with waiting_lock(folder / "LOCK"):
                if not (folder / FILE).exists():
                    device = check_device(self.device)
                    make_queries(self.documents, self.pairs, out=folder, recipe=source, device=device)
            source = folder
        return read_generated(source) if source else []

    def held_out(self, calibrate: CalibrateConfig) -> list[tuple[str, str]]:
        """Generated queries for calibration, by a generator that has not seen what is withheld; none from a file."""
        if not isinstance(self.generated_from, Recipe) or not calibrate.share:
            return []
        return self._without(calibrate).generated

    @cached_property
    def data_key(self) -> str:
        """A hash of documents and training queries."""
        documents = self.whole.data_key if self.whole else fingerprint(self.dataset.folder, CorpusConfig())
        return content_key(documents, self.pairs)

    @cached_property
    def generated_key(self) -> str:
        """A hash of all that decides the generated queries; they need not be made for it."""
        recipe = isinstance(self.generated_from, Recipe)
        return content_key(self.data_key, self.generated_from) if recipe else content_key(self.generated)

    def folder_of(self, name: str, key: str) -> Path:
        """Where a system is kept."""
        return self.folder / f"{file_name(name)}-{key}"

    def flat(self) -> tuple[list[Document], TextEncoder, NDArray[np.float32]]:
        """Documents, the encoder of the settings, and the documents' vectors: those that indexes are made of."""
        config = Config.from_dict({"embed": self.config.to_dict()["embed"], "train": {"epochs": 0}})
        out = self.folder / f"untrained-{content_key(self.data_key, config)}.index"
        index = self._built(out, config)
        by_id = {document.doc_id: document for document in self.documents}
        encoder = load_embedder(index.config, index.generation / "embedder", check_device(self.device))
        return [by_id[doc_id] for doc_id in index.doc_ids], encoder, index.vectors()

    def index(self, seed: int, changes: Mapping[str, Mapping[str, Any]] | None = None, label: str = "nci") -> Index:
        """An index of the data with its own seeds; `changes` are merged into the sections of the settings."""
        values = self.config.to_dict()
        for section, fields in (changes or {}).items():
            values[section] |= fields
        for section in ("tree", "train", "pairs"):
            values[section]["seed"] = seed
        generated = values["pairs"]["generated"] > 0
        made_of = (self.data_key, generated and self.generated_from and self.generated_key, values)
        key = content_key(*made_of, LEXICAL_VERSION, CALIBRATION_VERSION)
        return self._built(self.folder / f"{label}-{key}.index", Config.from_dict(values), generated=generated)

    def _built(self, out: Path, config: Config, *, generated: bool = False) -> Index:
        """An index from its folder; its name stands for all it depends on, so one that is there need not be looked into."""
        if (out / "CURRENT").exists():
            return load(out, device=check_device(self.device))
        return build(
            self.dataset.folder,
            out,
            config,
            queries=self.pairs if self.whole else None,
            generated=self.generated if generated else [],
            held_out=self.held_out(config.calibrate) if generated else [],
            shared=self.folder / "stages",
            device=self.device,
        )


def file_name(name: str) -> str:
    """The name of a system as part of a file's name.

    >>> file_name("rrf:bm25+dense")
    'rrf_bm25_dense'
    """
    return re.sub(r"[^A-Za-z0-9.-]+", "_", name)
