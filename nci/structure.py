"""Level 2 of verify: whether the parts of an opened index belong together. Reads everything, changes nothing."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from nci.errors import IndexCorruptError
from nci.index import Index
from nci.search import EdgeTable, fold
from nci.search.content import DocumentVectors

_AT_ONCE = 65536  # documents


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
    elif (scored := index.engine.vectors) is not None:
        if not _are_codes_of(scored, vectors):
            problems.append("codes.npy: are not the codes of vectors.npy")
        if scored.moves is not None and not _are_codes_of(scored.moves, scored.moves.values):
            problems.append("moves/codes.npy: are not the codes of moves/vectors.npy")
    centroids = np.load(index.generation / "centroids.npy", mmap_mode="r", allow_pickle=False)
    inner = int((np.diff(index.trie.child_start) > 0).sum()) - 1
    if len(centroids) != inner or not np.isfinite(centroids).all():
        problems.append(f"centroids.npy: expected {inner} finite centroids, found shape {centroids.shape}")
    pieces = index.engine.pieces
    if pieces is not None and len(pieces) != documents:
        problems.append(f"pieces: expected those of {documents} documents, found {len(pieces)}")
    if pieces is not None and not np.isfinite(pieces.projection).all():
        problems.append("pieces/projection.npy: holds values that are not finite")
    if index.engine.model.config.further and (pieces is None or pieces.further is None):
        problems.append("pieces/further: is missing, though the model reads it")
    for name, parameter in index.engine.model.named_parameters():
        if not bool(parameter.isfinite().all()):
            problems.append(f"model.safetensors: {name} holds values that are not finite")
    edges = index.engine.edges
    if edges is not None and not _is_same_table(fold(index.engine.reference), edges):
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
    """Equal within the rounding of bfloat16."""
    near = {"vectors": 1e-3, "states": 1e-2, "asks": 1e-2, "bias": 1e-5}
    return all(
        torch.allclose(getattr(a, name).float().cpu(), getattr(b, name).float().cpu(), atol=atol, rtol=1e-2)
        for name, atol in near.items()
    )


def _are_codes_of(coded: DocumentVectors, vectors: NDArray[np.floating]) -> bool:
    """Whether the int8 vectors are the others within their rounding; true where no search reads either."""
    if coded.codes is None or coded.scales is None:
        return True
    for start in range(0, len(vectors), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        scales = np.asarray(coded.scales[part])[:, None]
        near = np.abs(coded.codes[part] * scales - vectors[part].astype(np.float32)) <= scales + 1e-3
        if not near.all():  # nor where a number is none
            return False
    return True
