"""Stage outputs -> the files of one generation, written into a staging folder; `store.publish` makes them durable.

Documents, vectors and ids are laid out in leaf order, so that a cluster is one slice of each file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nci.assembly import Assembly
from nci.model import NCIModel
from nci.runtime import quiet
from nci.search import fold
from nci.tree import Tree
from nci.trie import Trie


@dataclass(frozen=True)
class DocumentFile:
    """Documents as json lines with random access: the lines' offsets (one more than documents) and the doc_ids."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "documents.jsonl"

    def offsets(self) -> NDArray[np.int64]:
        return np.load(self.folder / "offsets.npy", mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]

    def doc_ids(self) -> list[str]:
        return json.loads((self.folder / "doc_ids.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]

    def copy_in_order(self, folder: Path, order: NDArray[np.integer]) -> None:
        """The same three files with the documents in another order."""
        offsets, doc_ids = self.offsets(), self.doc_ids()
        lengths = np.diff(offsets)[order]
        with self.path.open("rb") as source, (folder / "documents.jsonl").open("wb") as target:
            for number in order:
                source.seek(int(offsets[number]))
                target.write(source.read(int(offsets[number + 1] - offsets[number])))
        np.save(folder / "offsets.npy", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
        ids = json.dumps([doc_ids[number] for number in order], ensure_ascii=False)
        (folder / "doc_ids.json").write_text(ids, encoding="utf-8")


@dataclass(frozen=True)
class Parts:
    """Everything that goes into a generation; `documents` are in the order of the corpus."""

    documents: DocumentFile
    tree: Tree
    assembly: Assembly
    model: NCIModel
    report: Mapping[str, Any]


def write_generation(folder: Path, parts: Parts) -> dict[str, object]:
    """Write all files and return the entries of the manifest."""
    assembly, model = parts.assembly, parts.model
    config, trie = assembly.config, assembly.trie
    with quiet():
        model.save_pretrained(folder)
        assembly.embedder.save(folder / "embedder")
    assembly.query_encoder.tokenizer.save_pretrained(folder)
    trie.save(folder / "trie.safetensors")
    if model.config.foldable:
        fold(model).save(folder / "edges.safetensors")
    assembly.document_vectors.save(folder)
    np.save(folder / "centroids.npy", centroids_by_node(trie, parts.tree), allow_pickle=False)
    parts.documents.copy_in_order(folder, assembly.order)
    if assembly.lexical is not None:
        assembly.lexical.save(folder / "lexical")
    if assembly.pieces is not None:
        kept = assembly.pieces if model.config.further else replace(assembly.pieces, further=None)
        kept.save(folder / "pieces")
    (folder / "README.md").write_text(model_card(parts), encoding="utf-8")
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):  # safetensors makes files that only their owner can read
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
    return {
        "config": config.to_dict(),
        "seeds": {"tree": config.tree.seed, "pairs": config.pairs.seed, "train": config.train.seed},
        "counts": {"documents": trie.documents, "nodes": trie.nodes, "positions": trie.positions},
        "folded_through_seq": 0,
        "prompt": assembly.query_encoder.prompt("query"),
        "query_length": assembly.query_length,
        "report": dict(parts.report),
    }


def centroids_by_node(trie: Trie, tree: Tree) -> NDArray[np.float32]:
    """Centroids of the clusters in the order of their nodes: row j belongs to the j-th inner node below the root."""
    node_of: dict[tuple[int, ...], int] = {(): 0}
    inner = np.flatnonzero(np.diff(trie.child_start) > 0)
    prefix_of: dict[int, tuple[int, ...]] = {0: ()}
    for node in inner[inner > 0].tolist():  # breadth first: a parent comes before its children
        prefix_of[node] = (*prefix_of[int(trie.parent[node])], int(trie.value[node]))
        node_of[prefix_of[node]] = node
    place = {node: row for row, node in enumerate(inner[inner > 0].tolist())}
    out = np.zeros((len(place), tree.centroids.shape[1]), dtype=np.float32)
    for prefix, centroid in zip(tree.centroid_prefixes, tree.centroids, strict=True):
        node = node_of.get(tuple(int(digit) for digit in prefix if digit >= 0))
        if node:
            out[place[node]] = centroid
    return out


def model_card(parts: Parts) -> str:
    """A README for people who find the folder on the Hub."""
    config, trie, report = parts.assembly.config, parts.assembly.trie, parts.report
    metrics = report.get("dev") or {}
    counts = ", ".join(f"{count:,} {source}" for source, count in report.get("pairs", {}).items() if count)
    training = f"{config.train.epochs:g} epochs, {counts} pairs" if counts else "none"
    rows = "\n".join(f"| {name} | {100 * value:.2f} |" for name, value in metrics.items())
    table = f"\n## On `dev`\n| metric | % |\n|---|---|\n{rows}\n" if rows else ""
    return f"""---
library_name: nci
tags: [neural-corpus-indexer, generative-retrieval, information-retrieval]
pipeline_tag: text-retrieval
---
# A neural index of {trie.documents:,} documents

One model is the index: it reads a query and writes the identifiers of the best documents.

```python
import nci
index = nci.load("this/folder")
for hit in index.search("a question", k=5):
    print(hit.rank, hit.doc_id, hit.title)
```
{table}
## How it was made
- documents embedded by `{config.embed.encoder}`, tree of {trie.nodes:,} nodes, {trie.positions} positions,
  k = {config.tree.k}, c = {config.tree.c}, ids {config.tree.ids}
- decoder {config.model.decoder_layers} layers, head {config.model.head}, anchor {config.model.anchor}, score {config.model.score}
- training: {training}
- seeds: tree {config.tree.seed}, train {config.train.seed}

The documents in this folder keep their own licence. All settings are in `manifest.json`.
"""
