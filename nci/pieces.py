"""Word pieces of documents as small vectors: what a document says, where its one vector says what it is about.

In: texts and an encoder. Out: for every word piece a vector of length 1, as int8 in fewer numbers than the encoder has, by
one projection for all. `nci.search.late` compares the pieces of a query with them. Knows no trees and no scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nci.encoders import TextEncoder, pool_tokens
from nci.errors import DataError
from nci.shards import write_rows

UNIT = 127  # a code of 1.0


@dataclass(frozen=True)
class PieceVectors:
    """The pieces of document i are `codes[first[i] : first[i] + lengths[i]]`."""

    codes: NDArray[np.int8]  # (pieces, width), UNIT times vectors of length 1
    first: NDArray[np.int64]  # (documents,)
    lengths: NDArray[np.int64]  # (documents,)
    projection: NDArray[np.float32]  # (width of the encoder, width)

    def __len__(self) -> int:
        return len(self.lengths)

    def in_order(self, order: NDArray[np.integer]) -> PieceVectors:
        """The same codes for documents in another order."""
        return replace(self, first=self.first[order], lengths=self.lengths[order])

    def save(self, folder: Path) -> None:
        """`codes.npy` with the pieces of the documents one after the other, `lengths.npy`, `projection.npy`."""
        folder.mkdir(parents=True, exist_ok=True)
        shape = (int(self.lengths.sum()), self.codes.shape[1])
        places = zip(self.first.tolist(), self.lengths.tolist(), strict=True)
        each = (self.codes[start : start + length] for start, length in places)
        write_rows(folder / "codes.npy", each, shape, np.dtype(np.int8))
        np.save(folder / "lengths.npy", self.lengths.astype(np.int32), allow_pickle=False)
        np.save(folder / "projection.npy", self.projection, allow_pickle=False)

    @classmethod
    def load(cls, folder: Path) -> PieceVectors:
        """Map what `save` wrote into memory, unread."""
        names = ("codes", "lengths", "projection")
        codes, lengths, projection = (
            np.load(folder / f"{name}.npy", mmap_mode="r" if name == "codes" else None, allow_pickle=False)
            for name in names
        )
        lengths = lengths.astype(np.int64)
        first = np.cumsum(lengths) - lengths
        if lengths.sum() != len(codes) or projection.shape[1] != codes.shape[1]:
            raise DataError(f"{folder}: codes, lengths and projection do not fit; build the index again")
        return cls(codes, first, lengths, projection)


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
    progress: Callable[[int], object] | None = None,
) -> dict[str, NDArray[Any]]:
    """Of documents, in their order, `vectors` as the encoder gives them, `codes` of all pieces, and their `lengths`."""
    vectors = np.empty((len(texts), encoder.width), dtype=np.float32)
    codes: list[NDArray[np.int8]] = [np.empty(0, np.int8)] * len(texts)
    directions = torch.as_tensor(projection, device=encoder.model.device)
    for places, states, mask in encoder.states(_prompted(encoder, texts), batch_size):
        pooled = pool_tokens(states, mask, encoder.settings.pooling)
        pooled = torch.nn.functional.normalize(pooled, dim=-1) if encoder.settings.normalise else pooled
        vectors[places] = pooled.float().cpu().numpy()
        found = project(states, directions).mul_(UNIT).round_().to(torch.int8).cpu().numpy()
        for place, row, length in zip(places.tolist(), found, mask.sum(1).tolist(), strict=True):
            codes[place] = row[:length]
        if progress is not None:
            progress(len(places))
    lengths = np.array([len(each) for each in codes], np.int32)
    return {"vectors": vectors, "codes": np.concatenate(codes), "lengths": lengths}


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
