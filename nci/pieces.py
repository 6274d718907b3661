"""Word pieces of documents as small vectors: what a document says, where its one vector says what it is about.

In: texts and an encoder. Out: for every word piece a vector of length 1, as int8 in fewer numbers than the encoder has, by
one projection for all. `nci.search.late` compares the pieces of a query with them. Knows no trees and no scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nci.encoders import TextEncoder, pool_tokens
from nci.errors import DataError
from nci.shards import write_rows
from nci.windows import further_windows

UNIT = 127  # a code of 1.0


@dataclass(frozen=True)
class PieceVectors:
    """The pieces of document i are `codes[first[i] : first[i] + lengths[i]]`: of its opening, as much as is read at once."""

    codes: NDArray[np.int8]  # (pieces, width), UNIT times vectors of length 1
    first: NDArray[np.int64]  # (documents,)
    lengths: NDArray[np.int64]  # (documents,)
    projection: NDArray[np.float32]  # (width of the encoder, width)
    further: Windows | None = None  # what stands behind the openings of long documents

    def __len__(self) -> int:
        return len(self.lengths)

    def in_order(self, order: NDArray[np.integer]) -> PieceVectors:
        """The same codes for documents in another order."""
        further = None if self.further is None else self.further.in_order(order)
        return replace(self, first=self.first[order], lengths=self.lengths[order], further=further)

    def save(self, folder: Path) -> None:
        """`codes.npy` with the pieces of the documents one after the other, `lengths.npy`, `projection.npy`, `further/`."""
        _save(folder, self.codes, self.first, self.lengths)
        np.save(folder / "projection.npy", self.projection, allow_pickle=False)
        if self.further is not None:
            self.further.save(folder / "further")

    @classmethod
    def load(cls, folder: Path) -> PieceVectors:
        """Map what `save` wrote into memory, unread."""
        codes, lengths = _load(folder)
        projection = np.load(folder / "projection.npy", allow_pickle=False)
        further = Windows.load(folder / "further") if (folder / "further").exists() else None
        fit = lengths.sum() == len(codes) and projection.shape[1] == codes.shape[1]
        if not fit or (further is not None and not further.fit(len(lengths), codes.shape[1])):
            raise DataError(f"{folder}: codes, lengths and projection do not fit; build the index again")
        return cls(codes, np.cumsum(lengths) - lengths, lengths, projection, further)


@dataclass(frozen=True)
class Windows:
    """Windows behind the openings: those of document i are the `counts[i]` from window `first[i]` on."""

    codes: NDArray[np.int8]  # (pieces, width)
    lengths: NDArray[np.int64]  # (windows,) pieces of each, one window after the other
    first: NDArray[np.int64]  # (documents,)
    counts: NDArray[np.int64]  # (documents,) 0 where an encoder reads all at once

    @property
    def starts(self) -> NDArray[np.int64]:
        """(windows,) where the pieces of each begin."""
        return np.cumsum(self.lengths) - self.lengths

    def fit(self, documents: int, width: int) -> bool:
        """Whether the parts belong together, and to so many documents."""
        sizes = (self.lengths.sum(), self.counts.sum(), len(self.counts), self.codes.shape[1])
        return sizes == (len(self.codes), len(self.lengths), documents, width)

    def in_order(self, order: NDArray[np.integer]) -> Windows:
        """The same codes for documents in another order."""
        return replace(self, first=self.first[order], counts=self.counts[order])

    def save(self, folder: Path) -> None:
        """`codes.npy` and `lengths.npy` with the windows of the documents one after the other, `counts.npy`."""
        places = zip(self.first.tolist(), self.counts.tolist(), strict=True)
        order = np.array([n for first, count in places for n in range(first, first + count)], np.int64)
        _save(folder, self.codes, self.starts[order], self.lengths[order])
        np.save(folder / "counts.npy", self.counts.astype(np.int32), allow_pickle=False)

    @classmethod
    def load(cls, folder: Path) -> Windows:
        """Map what `save` wrote into memory, unread."""
        codes, lengths = _load(folder)
        counts = np.load(folder / "counts.npy", allow_pickle=False).astype(np.int64)
        return cls(codes, lengths, np.cumsum(counts) - counts, counts)


def _save(folder: Path, codes: NDArray[np.int8], first: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    each = (codes[start : start + length] for start, length in zip(first.tolist(), lengths.tolist(), strict=True))
    write_rows(folder / "codes.npy", each, (int(lengths.sum()), codes.shape[1]), np.dtype(np.int8))
    np.save(folder / "lengths.npy", lengths.astype(np.int32), allow_pickle=False)


def _load(folder: Path) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
    codes = np.load(folder / "codes.npy", mmap_mode="r", allow_pickle=False)
    return codes, np.load(folder / "lengths.npy", allow_pickle=False).astype(np.int64)


@torch.inference_mode()
def find_projection(encoder: TextEncoder, texts: Sequence[str], width: int) -> NDArray[np.float32]:
    """The directions in which the pieces of some documents differ most: (width of the encoder, width)."""
    total = torch.zeros(encoder.width, encoder.width, dtype=torch.float64)
    for _, states, mask in encoder.states(_prompted(encoder, texts), 32):
        pieces = torch.nn.functional.normalize(states[mask.bool()].float(), dim=-1)
        total += (pieces.T @ pieces).double().cpu()
    _, directions = torch.linalg.eigh(total)  # the strongest come last
    # a direction has no sign of its own: the largest entry is positive
    chosen = directions[:, -width:]
    signs = chosen.gather(0, chosen.abs().argmax(0, keepdim=True)).sign()
    return np.asarray((chosen * signs).float())


@torch.inference_mode()
def encode_pieces(
    encoder: TextEncoder,
    texts: Sequence[str],
    projection: NDArray[np.float32],
    *,
    batch_size: int = 32,
    windows: int = 1,
    progress: Callable[[int], object] | None = None,
) -> dict[str, NDArray[Any]]:
    """Of documents, in their order, `vectors` as the encoder gives them, `codes` of all pieces, and their `lengths`.

    With several `windows` also `further_codes` and `further_lengths` of those that it does not read at once, and
    `further_counts` of them for each document.
    """
    beyond = further_windows(texts, encoder, windows - 1)
    every = [*texts, *chain.from_iterable(beyond)]  # one after the other, so that those of one length share a pass
    vectors = np.empty((len(texts), encoder.width), dtype=np.float32)
    codes: list[NDArray[np.int8]] = [np.empty(0, np.int8)] * len(every)
    directions = torch.as_tensor(projection, device=encoder.model.device)
    for places, states, mask in encoder.states(_prompted(encoder, every), batch_size):
        pooled = pool_tokens(states, mask, encoder.settings.pooling)
        pooled = torch.nn.functional.normalize(pooled, dim=-1) if encoder.settings.normalise else pooled
        openings = places < len(texts)
        vectors[places[openings]] = pooled.float().cpu().numpy()[openings]
        found = project(states, directions).mul_(UNIT).round_().to(torch.int8).cpu().numpy()
        for place, row, length in zip(places.tolist(), found, mask.sum(1).tolist(), strict=True):
            codes[place] = row[:length]
        if progress is not None:
            progress(int(openings.sum()))
    lengths = np.array([len(each) for each in codes], np.int32)
    opening, rest = np.split(lengths, [len(texts)])
    made: dict[str, NDArray[Any]] = {
        "vectors": vectors,
        "codes": np.concatenate(codes[: len(texts)]),
        "lengths": opening,
    }
    if windows > 1:
        none = np.empty((0, projection.shape[1]), np.int8)
        made["further_codes"] = np.concatenate([none, *codes[len(texts) :]])
        made |= {"further_lengths": rest, "further_counts": np.array([len(each) for each in beyond], np.int32)}
    return made


def special_pieces(tokenizer: Any) -> list[int]:
    """Tokens that are no pieces of a text: those around it and those that stand for none, but not that of unknown words."""
    return sorted({*tokenizer.all_special_ids, *tokenizer("")["input_ids"]} - {tokenizer.unk_token_id})


def shares(ids: Tensor, mask: Tensor, special: Tensor) -> Tensor:
    """What each token of queries (queries, tokens) counts in a mean over their pieces; where all are special, they do."""
    counts = mask & (ids.unsqueeze(-1) != special).all(-1)
    counts = torch.where(counts.any(1, keepdim=True), counts, mask).float()
    return counts / counts.sum(1, keepdim=True).clamp(min=1e-12)


def project(states: Tensor, directions: Tensor) -> Tensor:
    """Vectors of length 1 (..., width) from states of an encoder (..., its width)."""
    return torch.nn.functional.normalize(states.float() @ directions, dim=-1)


def _prompted(encoder: TextEncoder, texts: Sequence[str]) -> list[str]:
    return [encoder.prompt("document") + text for text in texts]
