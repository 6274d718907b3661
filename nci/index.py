"""The index as users hold it: build, load, search, verify. Thin: every part of the work lives in its own module."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from nci import store
from nci.assembly import Assembly, load_embedder
from nci.config import Config
from nci.corpus import Source
from nci.errors import ConfigError, DataError, IndexCorruptError, NciError
from nci.fuse import merge_hits
from nci.lexical import LexicalScores
from nci.model import NCIModel
from nci.pack import DocumentFile
from nci.pieces import PieceVectors
from nci.records import Hit, Hits, Query, Run
from nci.runtime import check_device, quiet
from nci.search import EdgeTable, Engine
from nci.search.content import DocumentVectors
from nci.search.engine import Beam, Mode
from nci.training_data import TrainingQueries
from nci.trie import Trie

_MOST_PENALTY = 10  # a larger power of the length leaves nothing of a score


class Index:
    """A searchable index. Make one with `nci.build`, open one with `nci.load`."""

    def __init__(self, folder: str | Path, *, device: str = "cpu", paranoid: bool = False) -> None:
        """Open the live generation of an index folder, or a bare generation; `paranoid` checks every byte first."""
        self.folder = Path(folder)
        self.generation = store.resolve(self.folder)
        self.manifest = store.read_manifest(self.generation)
        self.withheld = _withheld(self.manifest)
        store.check(self.generation, self.manifest, paranoid=paranoid)
        try:
            self.config = self._settings()
            self.documents = DocumentFile(self.generation)
            self.doc_ids = self.documents.doc_ids()
            self._offsets = self.documents.offsets()
            self._texts = self.documents.path.open("rb")  # kept open: a later generation may take this one's place
            self.trie = Trie.load(self.generation / "trie.safetensors")
            self.engine = self._engine(check_device(device))
        except (NciError, MemoryError):
            raise
        except Exception as error:
            raise IndexCorruptError(
                f"{self.generation} could not be opened: {error}; run: nci verify {self.folder}"
            ) from error
        if len(self.doc_ids) != self.trie.documents:
            raise IndexCorruptError(
                f"{self.generation} holds {len(self.doc_ids)} ids for {self.trie.documents} leaves; build the index again"
            )

    def _settings(self) -> Config:
        try:
            return Config.from_dict(self.manifest["config"])
        except ConfigError as error:
            raise ConfigError(
                f"{self.generation} is of another version of nci: {error}; build the index again"
            ) from error

    def _engine(self, device: str) -> Engine:
        from transformers import AutoTokenizer

        folder = self.generation
        with quiet():
            model, loading = NCIModel.from_pretrained(folder, local_files_only=True, output_loading_info=True)
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if loading["missing_keys"] or loading["unexpected_keys"]:
            names = sorted([*loading["missing_keys"], *loading["unexpected_keys"]])
            raise IndexCorruptError(
                f"{folder}/model.safetensors does not fit config.json: {names[0]}; build the index again"
            )
        needs_vectors = model.config.anchor != "none" or model.config.content
        edges = None
        if model.config.foldable:
            inner = int((np.diff(self.trie.child_start) > 0).sum())
            edges = EdgeTable.load(
                folder / "edges.safetensors", nodes=self.trie.nodes, inner=inner, d_model=model.config.d_model
            )
        hybrid = model.config.anchor == "exact" and model.config.score == "dense+bm25"
        lexical = LexicalScores.load(folder / "lexical") if hybrid else None
        stored = model.config.anchor != "none" and model.config.query_vector == "stored"
        return Engine(
            model.eval(),
            tokenizer,
            self.trie,
            vectors=DocumentVectors.load(folder) if needs_vectors else None,
            edges=edges,
            precision=self.config.search.precision,
            device=device,
            lexical=lexical,
            pieces=PieceVectors.load(folder / "pieces") if model.config.late else None,
            candidates=self.config.search.candidates,
            embedder=load_embedder(self.config, folder / "embedder", device) if stored else None,
            prompt=str(self.manifest.get("prompt", "")),
            max_length=int(self.manifest.get("query_length", self.config.pairs.max_length)),
        )

    def __repr__(self) -> str:
        return f"Index({str(self.folder)!r}, {len(self):,} documents, {self.generation.name})"

    def __len__(self) -> int:
        return len(self.doc_ids)

    @overload
    def search(  # type: ignore[overload-overlap]  # a str is a sequence of str, too
        self,
        queries: str,
        k: int = 10,
        *,
        beam: Beam | None = None,
        length_penalty: float | None = None,
        mode: Mode = "beam",
        stop_depth: int | None = None,
    ) -> Hits: ...
    @overload
    def search(
        self,
        queries: Sequence[str],
        k: int = 10,
        *,
        beam: Beam | None = None,
        length_penalty: float | None = None,
        mode: Mode = "beam",
        stop_depth: int | None = None,
    ) -> list[Hits]: ...
    def search(
        self,
        queries: str | Sequence[str],
        k: int = 10,
        *,
        beam: Beam | None = None,
        length_penalty: float | None = None,
        mode: Mode = "beam",
        stop_depth: int | None = None,
    ) -> Hits | list[Hits]:
        """The k best documents of a query, or of each of several queries.

        Args:
            beam: Prefixes kept per level, one number or one per level; a beam below k finds fewer than k hits. By default
                the index's own, at least k.
            length_penalty: Scores are log p / (digits + 1) ** length_penalty.
            mode: "beam"; "unconstrained" does not use the tree (an ablation); "exhaustive" scores every document.
            stop_depth: Stop after so many digits and return whole clusters, best first, until they hold k documents.
        """
        if not isinstance(queries, str | Sequence):
            raise DataError(f"a query is a string, or several of them a list; not {type(queries).__name__}")
        if k < 1:
            raise ConfigError(f"-k is at least 1, not {k}")
        beams = () if beam is None else (beam,) if isinstance(beam, int) else tuple(beam)
        if beam is not None and (not beams or min(beams) < 1):
            raise ConfigError(f"--beam is at least 1, not {','.join(map(str, beams)) or 'nothing'}")
        if length_penalty is None:
            length_penalty = self.config.search.length_penalty
        if not abs(length_penalty) <= _MOST_PENALTY:
            raise ConfigError(f"--length-penalty is from -{_MOST_PENALTY} to {_MOST_PENALTY}, not {length_penalty}")
        rankings = self.engine.search(
            [queries] if isinstance(queries, str) else list(queries),
            k=min(k, len(self)),
            beam=beam or max(self.config.search.beam, k),
            length_penalty=length_penalty,
            mode=mode,
            batch_size=self.config.search.batch_size,
            stop_depth=stop_depth,
        )
        out: list[Hits] = []
        for ranking in rankings:
            pairs = zip(ranking.scores.tolist(), ranking.documents.tolist(), strict=True)
            ranked = sorted(pairs, key=lambda pair: (-pair[0], self.doc_ids[pair[1]]))
            hits = (self._hit(rank, document, score) for rank, (score, document) in enumerate(ranked, start=1))
            out.append(Hits(hits, ranking.scored))
        return out[0] if isinstance(queries, str) else out

    def explain(self, query: str, doc_ids: Sequence[str]) -> str:
        """How p(d | q) of some documents came about: one line each, with the log-probability of every digit."""
        documents = [self._known[doc_id] for doc_id in doc_ids if doc_id in self._known]
        lines = []
        for number, parts in zip(documents, self.engine.explain(query, documents), strict=True):
            steps = " ".join(
                f"{d}:{p:.2f}" for d, p in zip(self.trie.semantic_id(number), parts["digits"], strict=False)
            )
            content = f"  content score {parts['content']:.2f}" if parts["content"] is not None else ""
            lines.append(f"{self.doc_ids[number]}: log p {sum(parts['digits']):.3f} = {steps}{content}")
        return "\n".join(lines)

    def system(self, name: str) -> Index:
        """The same index as another system: "untrained" as before training, "zeroed" without its generative part.

        What calibration found stays, moves towards training queries included: both are asked at the same operating point.
        """
        if name == "trained":
            return self
        other = copy.copy(self)
        other.withheld = None
        if name == "zeroed":
            other.engine = self.engine.zeroed()
        elif name == "untrained":
            other.engine = self._untrained()
        else:
            raise ConfigError(f"--system is trained, untrained or zeroed, not {name!r}")
        return other

    def _untrained(self) -> Engine:
        if self.config.model.encoder not in (None, self.config.embed.encoder):
            raise ConfigError("--system untrained: the query encoder's first weights are not part of this index")
        encoder = load_embedder(self.config, self.generation / "embedder")
        model = self.engine.model
        vectors = self.vectors()
        order = np.arange(len(self), dtype=np.int64)
        lexical = self.engine.lexical
        scored = self.engine.vectors
        bias = None if scored is None else scored.bias
        moves = None if scored is None or scored.moves is None else scored.moves.values
        parts = (encoder, encoder, lexical, bias, self.engine.pieces, moves)
        assembly = Assembly(self.config, self.trie, model.config.values, order, vectors, *parts)
        fresh = assembly.model(device=self.engine.device)
        if bias is not None and fresh.anchor_weights is not None and model.anchor_weights is not None:
            fresh.anchor_weights.data.copy_(model.anchor_weights)
            for name in ("late", "further", "chosen_by"):
                setattr(fresh.config, name, getattr(model.config, name))
        return replace(assembly.engine(fresh), max_length=self.engine.max_length)

    def vectors(self) -> NDArray[np.float32]:
        """Vectors of the documents, in the order of `doc_ids`: (documents, width)."""
        stored: NDArray[np.float16] = np.load(self.generation / "vectors.npy", mmap_mode="r", allow_pickle=False)
        return stored.astype(np.float32)

    def run(self, queries: Sequence[Query], k: int = 100, **options: Any) -> Run:
        """Rankings of many queries as {query id: {doc_id: score}}."""
        results = self.search([query.text for query in queries], k, **options)
        pairs = zip(queries, results, strict=True)
        return {query.query_id: {hit.doc_id: hit.score for hit in hits} for query, hits in pairs}

    @cached_property
    def _known(self) -> dict[str, int]:
        return {doc_id: number for number, doc_id in enumerate(self.doc_ids)}

    def document(self, doc_id_or_number: str | int) -> dict[str, Any]:
        """One stored document with all its fields."""
        if isinstance(doc_id_or_number, str) and doc_id_or_number not in self._known:
            raise DataError(f'there is no document "{doc_id_or_number}" in {self.folder}')
        number = self._known[doc_id_or_number] if isinstance(doc_id_or_number, str) else doc_id_or_number
        start, stop = int(self._offsets[number]), int(self._offsets[number + 1])
        line = os.pread(self._texts.fileno(), stop - start, start)
        try:
            stored = json.loads(line)
            return {
                "doc_id": stored["doc_id"],
                "title": stored["title"],
                "text": stored["text"],
                "fields": stored["fields"],
            }
        except (ValueError, KeyError, TypeError) as error:
            where = f"{self.documents.path}, bytes {start} to {stop}"
            raise IndexCorruptError(f"{where}: not a document; run: nci verify {self.folder}") from error

    def _hit(self, rank: int, document: int, score: float) -> Hit:
        stored = self.document(document)
        return Hit(
            rank, self.doc_ids[document], score, stored["title"], stored["text"], self.trie.semantic_id(document)
        )

    def verify(self, level: int = 1) -> list[str]:
        """Problems found, none when all is well: level 1 checks every byte, level 2 also that the parts fit together."""
        from nci.structure import check_structure

        problems = store.verify_checksums(self.generation)
        return problems if problems or level < 2 else check_structure(self)

    def push_to_hub(self, name: str, **options: Any) -> str:
        """Upload the generation as a model repository on the Hugging Face Hub; needs a login."""
        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(name, exist_ok=True, **options)
        return str(api.upload_folder(repo_id=name, folder_path=str(self.generation), commit_message="Upload nci index"))


def search_many(
    indexes: Sequence[Index], texts: Sequence[str], k: int, *, method: Literal["rrf", "paper"] = "rrf", **options: Any
) -> list[Hits]:
    """Search one index, or several whose rankings are merged by rank (an ensemble)."""
    if method not in ("rrf", "paper"):
        raise ConfigError(f"--merge is rrf or paper, not {method!r}")
    if len(indexes) == 1:
        return indexes[0].search(list(texts), k, **options)
    depth = max(k, 100)
    found = [index.search(list(texts), depth, **options) for index in indexes]
    out = []
    for lists in zip(*found, strict=True):
        scored = sum(hits.documents_scored for hits in lists)
        out.append(Hits(merge_hits(lists, method=method, k=k), scored))
    return out


def snippet(text: str, width: int = 100) -> str:
    """The beginning of a text, cut between words."""
    flat = " ".join(text[: 4 * width].split())
    return flat if len(flat) <= width else flat[:width].rsplit(" ", 1)[0] + " ..."


def build(
    corpus: Source,
    out: str | Path,
    config: Config | str | None = None,
    *,
    queries: TrainingQueries | None = None,
    generated: TrainingQueries = (),
    held_out: TrainingQueries = (),
    shared: Path | None = None,
    device: str | None = None,
) -> Index:
    """Index a corpus into the folder `out` and open it; a second call with the same input does nothing again.

    Args:
        corpus: A BEIR folder, a file, a folder of texts, `irds:ID`, or a list or iterator of strings, dicts, Documents.
        config: Settings, or the name of a preset; "fast" without a GPU and "default" with one when not given.
        queries: Training queries as (query, doc_id); a BEIR folder brings its own.
        generated: Queries that a generator wrote, as (query, doc_id).
        held_out: The same by a generator that has not seen the queries which calibration withholds.
        shared: A folder for what indexes of the same corpus have in common; none keeps it in `out`.
        device: cpu or cuda, for building and for searching afterwards; a GPU where there is one when not given.
    """
    from nci.parsers import default_preset
    from nci.pipeline import build as build_index  # the trainer beneath it takes seconds to import

    if config is None:
        config = default_preset(["--device", device] if device else [])
    settings = Config.preset(config) if isinstance(config, str) else config
    build_index(
        corpus,
        out,
        settings,
        queries=queries,
        generated=generated,
        held_out=held_out,
        shared=shared,
        device=device,
    )
    return Index(out, device=check_device(device))


def load(folder: str | Path, *, device: str = "cpu", paranoid: bool = False) -> Index:
    """Open an index: a folder, a bare generation, or a repository name on the Hugging Face Hub."""
    path = Path(folder)
    if not os.path.exists(path) and _is_hub_name(str(folder)):
        from huggingface_hub import snapshot_download

        from nci.errors import IndexNotFoundError

        try:
            path = Path(snapshot_download(str(folder)))
        except Exception as error:
            raise IndexNotFoundError(
                f"{folder}: no such folder here, and the Hub did not give it ({type(error).__name__})"
            ) from error
    return Index(path, device=device, paranoid=paranoid)


def _is_hub_name(name: str) -> bool:
    """Whether `owner/name` can be meant; where there is a folder `owner` here, a file of it was."""
    owner, slash, rest = name.partition("/")
    return bool(slash and rest) and "/" not in rest and not name.startswith((".", "~")) and not Path(owner).is_dir()


def _withheld(manifest: Mapping[str, Any]) -> float | None:
    """R@1 of the queries that an index was calibrated on, of seen and unseen documents alike, before it knew all queries."""
    found = manifest.get("report", {}).get("calibration", {}).get("found", {})
    kinds = [kind for kind, count in found.get("queries", {}).items() if count]
    return sum(found["after"][kind] for kind in kinds) / len(kinds) if kinds else None
