"""The index as users hold it: build, load, search, verify. Thin: every part of the work lives in its own module."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
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
from nci.records import Hit, Query, Run
from nci.runtime import check_device, quiet
from nci.search import EdgeTable, Engine
from nci.search.engine import Mode
from nci.training_data import TrainingQueries
from nci.trie import Trie


class Hits(list[Hit]):
    """The hits of one query, best first; `documents_scored` says how many documents were looked at to find them."""

    documents_scored: int = 0


class Index:
    """A searchable index. Make one with `nci.build`, open one with `nci.load`."""

    def __init__(self, folder: str | Path, *, device: str = "cpu", paranoid: bool = False) -> None:
        """Open the live generation of an index folder, or a bare generation; `paranoid` checks every byte first."""
        self.folder = Path(folder)
        self.generation = store.resolve(self.folder)
        self.manifest = store.read_manifest(self.generation)
        store.check(self.generation, self.manifest, paranoid=paranoid)
        try:
            self.config = Config.from_dict(self.manifest["config"])
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
        model.bind(self.trie, self.vectors() if needs_vectors else None)
        model.to(device).eval()
        edges = None
        if model.config.foldable:
            table = EdgeTable.load(folder / "edges.safetensors", nodes=self.trie.nodes, d_model=model.config.d_model)
            edges = EdgeTable(table.vectors.to(device), table.bias.to(device))
        hybrid = model.config.anchor == "exact" and model.config.score == "dense+bm25"
        lexical = LexicalScores.load(folder / "lexical") if hybrid else None
        stored = model.config.anchor != "none" and model.config.query_vector == "stored"
        return Engine(
            model,
            tokenizer,
            edges=edges,
            lexical=lexical,
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
        beam: int | None = None,
        length_penalty: float | None = None,
        mode: Mode = "beam",
    ) -> Hits: ...
    @overload
    def search(
        self,
        queries: Sequence[str],
        k: int = 10,
        *,
        beam: int | None = None,
        length_penalty: float | None = None,
        mode: Mode = "beam",
    ) -> list[Hits]: ...
    def search(
        self,
        queries: str | Sequence[str],
        k: int = 10,
        *,
        beam: int | None = None,
        length_penalty: float | None = None,
        mode: Mode = "beam",
    ) -> Hits | list[Hits]:
        """The k best documents of a query, or of each of several queries.

        Args:
            beam: Prefixes kept per level; a beam below k finds fewer than k hits. By default the index's own, at least k.
            length_penalty: Scores are log p / (digits + 1) ** length_penalty.
            mode: "beam"; "unconstrained" does not use the tree (an ablation); "exhaustive" scores every document.
        """
        if not isinstance(queries, str | Sequence):
            raise DataError(f"a query is a string, or several of them a list; not {type(queries).__name__}")
        if k < 1:
            raise ConfigError(f"-k is at least 1, not {k}")
        if beam is not None and beam < 1:
            raise ConfigError(f"--beam is at least 1, not {beam}")
        rankings = self.engine.search(
            [queries] if isinstance(queries, str) else list(queries),
            k=min(k, len(self)),
            beam=beam or max(self.config.search.beam, k),
            length_penalty=self.config.search.length_penalty if length_penalty is None else length_penalty,
            mode=mode,
            batch_size=self.config.search.batch_size,
        )
        out: list[Hits] = []
        for ranking in rankings:
            pairs = zip(ranking.scores.tolist(), ranking.documents.tolist(), strict=True)
            ranked = sorted(pairs, key=lambda pair: (-pair[0], self.doc_ids[pair[1]]))
            hits = Hits(self._hit(rank, document, score) for rank, (score, document) in enumerate(ranked, start=1))
            hits.documents_scored = ranking.scored
            out.append(hits)
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
        """The same index as another system: "untrained" as before training, "zeroed" without its generative part."""
        if name == "trained":
            return self
        other = copy.copy(self)
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
        assembly = Assembly(self.config, self.trie, model.config.values, order, vectors, encoder, encoder, lexical)
        return assembly.engine(assembly.model(device=str(model.device)))

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
        merged = Hits(merge_hits(lists, method=method, k=k))
        merged.documents_scored = sum(hits.documents_scored for hits in lists)
        out.append(merged)
    return out


def snippet(text: str, width: int = 100) -> str:
    """The beginning of a text, cut between words."""
    flat = " ".join(text[: 4 * width].split())
    return flat if len(flat) <= width else flat[:width].rsplit(" ", 1)[0] + " ..."


def check_structure(index: Index) -> list[str]:
    """Level 2 of verify: trie, ids, documents, vectors and weights belong together and are finite."""
    problems: list[str] = []
    documents = index.trie.documents
    if len(set(index.doc_ids)) != documents:
        problems.append("doc_ids.json: an id occurs twice")
    offsets = np.asarray(index._offsets)
    if len(offsets) != documents + 1 or (np.diff(offsets) <= 0).any():
        problems.append("offsets.npy: does not name one line per document")
    elif offsets[-1] != index.documents.path.stat().st_size:
        problems.append("offsets.npy: does not end where documents.jsonl ends")
    else:
        wrong = next((n for n in range(documents) if not _is_at_home(index, n)), None)
        if wrong is not None:
            problems.append(f"documents.jsonl: line {wrong + 1} is not the document that doc_ids.json names")
    vectors = np.load(index.generation / "vectors.npy", mmap_mode="r", allow_pickle=False)
    if vectors.shape != (documents, index.engine.model.config.d_content) or not np.isfinite(vectors).all():
        problems.append(f"vectors.npy: expected {documents} finite vectors, found shape {vectors.shape}")
    centroids = np.load(index.generation / "centroids.npy", mmap_mode="r", allow_pickle=False)
    inner = int((np.diff(index.trie.child_start) > 0).sum()) - 1
    if len(centroids) != inner or not np.isfinite(centroids).all():
        problems.append(f"centroids.npy: expected {inner} finite centroids, found shape {centroids.shape}")
    for name, parameter in index.engine.model.named_parameters():
        if not bool(parameter.isfinite().all()):
            problems.append(f"model.safetensors: {name} holds values that are not finite")
    edges = index.engine.edges
    if edges is not None:
        from nci.search import fold

        if not _is_same_table(fold(index.engine.model), edges):
            problems.append("edges.safetensors: is not the fold of this model")
    if (
        index.trie.positions != index.engine.model.config.positions
        or index.trie.nodes != index.engine.model.config.nodes
    ):
        problems.append("trie.safetensors: belongs to another model")
    return problems


def _is_at_home(index: Index, number: int) -> bool:
    """Whether the line of a document holds the document that its id names."""
    try:
        return bool(index.document(number)["doc_id"] == index.doc_ids[number])
    except IndexCorruptError:
        return False


def _is_same_table(a: EdgeTable, b: EdgeTable) -> bool:
    """Equal within rounding."""
    import torch

    return bool(torch.allclose(a.vectors, b.vectors, atol=1e-3) and torch.allclose(a.bias, b.bias, atol=1e-5))


def build(
    corpus: Source,
    out: str | Path,
    config: Config | str | None = None,
    *,
    queries: TrainingQueries | None = None,
    generated: TrainingQueries = (),
    device: str | None = None,
) -> Index:
    """Index a corpus into the folder `out` and open it; a second call with the same input does nothing again.

    Args:
        corpus: A BEIR folder, a file, a folder of texts, `irds:ID`, or a list or iterator of strings, dicts, Documents.
        config: Settings, or the name of a preset; "fast" without a GPU and "default" with one when not given.
        queries: Training queries as (query, doc_id); a BEIR folder brings its own.
        generated: Queries that a generator wrote, as (query, doc_id).
        device: cpu or cuda, for building and for searching afterwards; a GPU where there is one when not given.
    """
    from nci.parsers import default_preset
    from nci.pipeline import build as build_index  # the trainer beneath it takes seconds to import

    if config is None:
        config = default_preset(["--device", device] if device else [])
    settings = Config.preset(config) if isinstance(config, str) else config
    build_index(corpus, out, settings, queries=queries, generated=generated, device=device)
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
