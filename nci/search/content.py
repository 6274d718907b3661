"""Content scores at search time: query vectors and texts in, A_c(q) of every node out. No training, no gradients.

The same numbers as `nci.anchors` gives, made for speed: one product with all document vectors (int8 on a CPU that has the
instructions, float16 on a GPU, memory-mapped in an index) and one with their moves where there are any, BM25 where the score
has it, then the log-sum-exp up the tree, level by level, over neighbours. Costs grow with the documents, unlike
those of the beam; `nci bench` measures it apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nci.anchors import node_means, node_sizes
from nci.errors import DataError
from nci.lexical import LexicalScores
from nci.model import NCIModel
from nci.postings import Postings
from nci.search.late import Asked, LateScores, mapped
from nci.search.linear import Precision
from nci.trie import Trie

_DOCUMENTS_AT_ONCE = 65536


@dataclass(frozen=True)
class DocumentVectors:
    """One vector a document in leaf order, the same as int8, and what else the content score knows of each document."""

    values: NDArray[np.floating]  # (documents, width)
    codes: NDArray[np.int8] | None = None  # (documents, width)
    scales: NDArray[np.float32] | None = None  # (documents,) values = codes * scales, nearly
    bias: NDArray[np.float32] | None = None  # (documents,) added to the content scores
    moves: DocumentVectors | None = None  # added to the vectors once candidates are chosen, see `nci.rocchio`

    def quantised(self) -> DocumentVectors:
        """With codes, computed now where there are none."""
        if self.codes is not None:
            return self
        codes = np.empty(self.values.shape, np.int8)
        scales = np.empty(len(self.values), np.float32)
        for start in range(0, len(codes), _DOCUMENTS_AT_ONCE):
            part = np.asarray(self.values[start : start + _DOCUMENTS_AT_ONCE], dtype=np.float32)
            scale = np.maximum(np.abs(part).max(1, initial=0.0), 1e-12) / 127
            codes[start : start + len(part)] = np.rint(part / scale[:, None])
            scales[start : start + len(part)] = scale
        return replace(self, codes=codes, scales=scales)

    def save(self, folder: Path) -> None:
        """`vectors.npy` as float16, `codes.npy` as int8 with their scales; `bias.npy` and the folder `moves` if there are any."""
        coded = self.quantised()
        np.save(folder / "vectors.npy", np.asarray(self.values, dtype=np.float16), allow_pickle=False)
        for name, array in (("codes", coded.codes), ("scales", coded.scales)):
            assert array is not None
            np.save(folder / f"{name}.npy", array, allow_pickle=False)
        if self.bias is not None:
            np.save(folder / "bias.npy", self.bias, allow_pickle=False)
        if self.moves is not None:
            (folder / "moves").mkdir(exist_ok=True)
            self.moves.save(folder / "moves")

    @classmethod
    def load(cls, folder: Path) -> DocumentVectors:
        """Map what `save` wrote into memory, unread."""
        if not (folder / "codes.npy").exists():
            raise DataError(
                f"{folder.name} was written by an earlier version and has no codes.npy; build the index again"
            )
        values, codes, scales = (
            np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            for name in ("vectors", "codes", "scales")
        )
        if codes.shape != values.shape or scales.shape != values.shape[:1]:
            raise DataError(f"codes.npy {codes.shape} and vectors.npy {values.shape} do not fit; build the index again")
        bias = np.load(folder / "bias.npy", allow_pickle=False) if (folder / "bias.npy").exists() else None
        if bias is not None and bias.shape != scales.shape:
            raise DataError(f"bias.npy {bias.shape} and vectors.npy {values.shape} do not fit; build the index again")
        moves = cls.load(folder / "moves") if (folder / "moves").exists() else None
        if moves is not None and moves.values.shape != values.shape:
            shapes = f"moves {moves.values.shape} and vectors.npy {values.shape}"
            raise DataError(f"{shapes} do not fit; build the index again")
        return cls(values, codes, scales, bias, moves)


class Content:
    """The anchors of a model over its documents.

    Args:
        lexical: BM25 in leaf order, where the score has it.
        late: Late interaction, where the score has it.
    """

    def __init__(
        self,
        model: NCIModel,
        trie: Trie,
        vectors: DocumentVectors,
        lexical: LexicalScores | None,
        late: LateScores | None = None,
        *,
        precision: Precision,
        device: str,
    ) -> None:
        assert model.anchor_weights is not None
        kappa, weight = model.anchor_weights.detach().float().exp().tolist()
        self.kappa, self.weight = float(kappa), float(weight)
        self.exact = model.config.anchor == "exact"
        self.late, self.late_weight, self.share = late, float(model.config.late), float(model.config.further)
        self.choosing = model.config.chosen_by or (self.kappa, self.weight)  # weights by which late chooses
        self.device = device
        self.lexical = lexical if self.exact else None
        self.postings = Postings(self.lexical, device) if self.lexical is not None and device != "cpu" else None
        if self.exact:
            self.products = Products(vectors, precision, device)
        else:
            self.log_sizes = torch.as_tensor(np.log(node_sizes(trie)), device=device).unsqueeze(1)
            means = DocumentVectors(node_means(trie, np.asarray(vectors.values, dtype=np.float32)))
            self.products = Products(means, "fp32", device)
        moves = vectors.moves if self.exact else None
        self.moves = None if moves is None else Products(moves, precision, device)
        self.bias = None if vectors.bias is None else torch.as_tensor(vectors.bias, device=device).unsqueeze(1)
        self.sums = LevelSums(trie, device) if self.exact else None

    @torch.inference_mode()
    def words(self, texts: Sequence[str]) -> Tensor | None:
        """(queries, documents) BM25 of every document as a share of the highest; none where the score has no such part."""
        if self.postings is not None:
            return self.postings.normalised(texts)
        return None if self.lexical is None else torch.from_numpy(self.lexical.normalised(texts))

    @torch.inference_mode()
    def anchors(self, query_vectors: Tensor, words: Tensor | None = None, asked: Asked | None = None) -> Tensor:
        """(queries, nodes of the tree), in the memory order of its transpose; late interaction reads `asked`."""
        products = self.products(query_vectors)  # (documents, queries), or (nodes, queries)
        if self.sums is None:
            return (self.log_sizes + self.kappa * products).T
        late = None
        if self.late is not None and asked is not None:
            first = products * self.choosing[0]
            if words is not None:
                first.add_(words.T, alpha=self.choosing[1])
            late = self.late.best(first.T, asked)
        if self.moves is not None:
            products.add_(self.moves(query_vectors))
        scores = products.mul_(self.kappa)
        if words is not None:
            scores.add_(words.T, alpha=self.weight)
        if self.bias is not None:
            scores.add_(self.bias)
        if late is not None:
            scores.scatter_add_(0, late.documents.T, late.together(self.share).T * self.late_weight)
        return self.sums(scores).T


class Products:
    """Similarity of every vector to every query."""

    def __init__(self, vectors: DocumentVectors, precision: Precision, device: str) -> None:
        self.codes: Tensor | None = None
        if precision == "int8" and vectors.values.shape[1] >= 16:  # the product of narrower ones is not reliable
            coded = vectors.quantised()
            self.codes, self.scales = mapped(coded.codes), mapped(coded.scales).unsqueeze(1)
        else:
            # float16 has three bits more than bfloat16, and numbers below 1 need no wider range
            dtype = torch.float32 if precision == "fp32" else torch.float16
            self.rows = mapped(vectors.values).to(device, dtype)

    def __call__(self, queries: Tensor) -> Tensor:
        """(queries, width) -> (vectors, queries)"""
        if self.codes is None:
            return (self.rows @ queries.to(self.rows.dtype).T).float()
        scale = queries.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        codes = (queries / scale).round_().to(torch.int8)
        return torch._int_mm(self.codes, codes.T.contiguous()).float().mul_(self.scales).mul_(scale.T)


class LevelSums:
    """Log-sum-exp of leaf scores up the tree. The children of a node are neighbours, so each level is one segment sum."""

    def __init__(self, trie: Trie, device: str) -> None:
        counts = np.diff(trie.child_start)
        document = np.full(trie.nodes, -1)
        document[trie.leaves] = np.arange(trie.documents)
        self.levels: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []
        for start, stop in zip(trie.level_start[:-1], trie.level_start[1:], strict=True):
            inner = counts[start:stop] > 0
            sizes = counts[start:stop][inner]
            parts: list[Any] = [
                np.flatnonzero(~inner),
                document[start:stop][~inner],
                np.flatnonzero(inner),
                sizes,
                np.repeat(np.arange(len(sizes)), sizes),
            ]
            leaf, documents, place, lengths, parent = (torch.as_tensor(p, device=device).long() for p in parts)
            self.levels.append((leaf, documents, place, lengths, parent))

    def __call__(self, scores: Tensor) -> Tensor:
        """(documents, queries) in leaf order -> (nodes, queries)."""
        outs: list[Tensor] = []
        below: Tensor | None = None
        for leaf, documents, place, lengths, parent in reversed(self.levels):
            own = scores.index_select(0, documents)
            if below is not None and len(place):
                peak = torch.segment_reduce(below, "max", lengths=lengths, unsafe=True)
                shares = (below - peak.index_select(0, parent)).exp_()
                sums = peak + torch.segment_reduce(shares, "sum", lengths=lengths, unsafe=True).log_()
                own = scores.new_empty(len(leaf) + len(place), scores.shape[1]).index_copy_(0, leaf, own)
                own.index_copy_(0, place, sums)
            below = own
            outs.append(own)
        return torch.cat(outs[::-1])
