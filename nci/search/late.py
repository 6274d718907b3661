"""Late interaction at search time: word pieces of queries and of some documents in, one similarity each out.

    late(q, d) = mean over the pieces of q of the best cosine with a piece of d

Only the best documents of each query by the other parts of the content score are compared, and what is added to a score
is how far a document is above the worst of these: the others lose nothing that they might have had.

Of a long document that is its opening. Where the windows behind it are kept, too, a candidate gains by a better one among
them, a share of by how much the best is nearer. One window at a time: all pieces of a long text together have a good match
for anything. Knows no weights and no training.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nci.pieces import UNIT, PieceVectors, Windows, project, shares
from nci.search.linear import Precision

_NUMBERS_AT_ONCE = 2**27  # codes that are compared together


class Asked(NamedTuple):
    """Queries as an encoder read them."""

    states: Tensor  # (queries, tokens, width of the encoder)
    ids: Tensor  # (queries, tokens)
    mask: Tensor  # (queries, tokens) true where there is a token


class Compared(NamedTuple):
    """Candidates of some queries, each (queries, candidates)."""

    documents: Tensor
    above: Tensor  # how far the opening of each is above the worst of them
    nearer: Tensor | None = None  # by how much the best window behind it is nearer, where there are any

    def together(self, share: float) -> Tensor:
        """What each candidate gets, a nearer window counting a share."""
        return self.above if self.nearer is None else self.above + share * self.nearer

    def spread(self, scores: Tensor, values: Tensor) -> Tensor:
        """Values of the candidates among those of all documents, of the shape of `scores`; 0 for the others."""
        return torch.zeros_like(scores).scatter_(1, self.documents, values)


class LateScores:
    """The pieces of all documents on one device.

    Args:
        pieces: In leaf order.
        special: Tokens that are no pieces of a query: its beginning, its end.
        candidates: Documents compared per query.
        precision: int8, on a CPU, compares codes of the queries' pieces.
    """

    def __init__(
        self,
        pieces: PieceVectors,
        special: Sequence[int],
        *,
        candidates: int,
        device: str,
        precision: Precision = "fp32",
    ) -> None:
        self.device, self.candidates = device, min(candidates, len(pieces))
        self.codes = mapped(pieces.codes).to(device)
        self.first = torch.as_tensor(pieces.first, device=device)
        self.last = torch.as_tensor(pieces.lengths - 1, device=device)
        self.longest = int(pieces.lengths.max())
        self.directions = torch.as_tensor(pieces.projection, device=device)
        self.special = torch.as_tensor(list(special), dtype=torch.long, device=device)
        # what a GPU multiplies fast, and what a CPU does
        self.dtype = torch.float32 if device == "cpu" else torch.float16
        self.int8 = precision == "int8" and device == "cpu" and pieces.codes.shape[1] >= 16
        self.windows: WindowScores | None = None
        if (further := pieces.further) is not None:
            each = PieceVectors(further.codes, further.starts, further.lengths, pieces.projection)
            late = LateScores(each, special, candidates=1, device=device, precision=precision)
            self.windows = WindowScores(late, further)

    def best(self, scores: Tensor, asked: Asked) -> Compared:
        """The best documents of each query, compared.

        Args:
            scores: (queries, documents) by which candidates are chosen.
        """
        chosen = scores.topk(self.candidates, dim=1).indices
        similar = self.compare(asked, chosen)
        nearer = None if self.windows is None else self.windows.nearer(asked, chosen, similar)
        return Compared(chosen, similar - similar.amin(1, keepdim=True), nearer)

    def compare(self, asked: Asked, chosen: Tensor) -> Tensor:
        """late(q, d) of some documents (queries, documents) of each query."""
        counts = shares(asked.ids, asked.mask, self.special)
        return torch.einsum("qdt,qt->qd", self.cosines(asked, chosen), counts)

    def cosines(self, asked: Asked, chosen: Tensor) -> Tensor:
        """Best cosine of each piece of a query with a piece of each of its documents: (queries, documents, tokens)."""
        most = max(1, _NUMBERS_AT_ONCE // (self.longest * self.codes.shape[1]))
        if chosen.shape[1] > most:
            return torch.cat([self.cosines(asked, part) for part in torch.split(chosen, most, dim=1)], dim=1)
        pieces = project(asked.states, self.directions).to(self.dtype)  # (queries, tokens, width)
        numbers = chosen.shape[1] * self.longest * self.codes.shape[1]
        step = max(1, _NUMBERS_AT_ONCE // numbers) if self.device != "cpu" else 1
        best = self._best_codes if self.int8 else self._best
        parts = [best(pieces[i : i + step], chosen[i : i + step]) for i in range(0, len(pieces), step)]
        return torch.cat(parts) / UNIT

    def _rows(self, chosen: Tensor) -> tuple[Tensor, torch.Size]:
        """Codes of documents (queries, documents), one below the other, and their shape (queries, documents, longest)."""
        first, last = self.first[chosen], self.last[chosen]  # (queries, documents)
        longest = self.longest if self.device != "cpu" else int(last.max()) + 1
        steps = torch.arange(longest, device=first.device)
        # behind its end a document goes on with its last piece, which changes no maximum
        places = first.unsqueeze(-1) + torch.minimum(steps, last.unsqueeze(-1))
        return self.codes.index_select(0, places.flatten()), places.shape

    def _best(self, pieces: Tensor, chosen: Tensor) -> Tensor:
        """The same in codes, of queries that are compared together."""
        rows, shape = self._rows(chosen)
        rows = rows.to(self.dtype).view(len(chosen), -1, rows.shape[1])
        cosines = torch.bmm(rows, pieces.transpose(1, 2))  # (queries, documents x longest, tokens)
        return cosines.view(*shape, -1).amax(2).float()

    def _best_codes(self, pieces: Tensor, chosen: Tensor) -> Tensor:
        """The same for one query, by a product of whole numbers."""
        scale = pieces[0].abs().amax(1, keepdim=True).clamp(min=1e-12) / 127  # (tokens, 1)
        asked = (pieces[0] / scale).round_().to(torch.int8)
        rows, shape = self._rows(chosen)
        cosines = torch._int_mm(rows, asked.T.contiguous())  # (documents x longest, tokens)
        return cosines.view(*shape, -1).amax(2).float() * scale.T


class WindowScores:
    """Windows behind the openings of documents, each compared like a document of its own."""

    def __init__(self, late: LateScores, further: Windows) -> None:
        self.late = late
        self.first = torch.as_tensor(further.first, device=late.device)
        self.counts = torch.as_tensor(further.counts, device=late.device)
        self.steps = torch.arange(int(further.counts.max()), device=late.device)

    def nearer(self, asked: Asked, chosen: Tensor, opening: Tensor) -> Tensor:
        """By how much the best window is nearer than the opening (queries, documents), 0 where none is."""
        there = self.steps < self.counts[chosen].unsqueeze(-1)  # (queries, documents, most windows)
        windows = (self.first[chosen].unsqueeze(-1) + self.steps).masked_fill(~there, 0)
        if self.late.device != "cpu":  # one shape for all
            similar = self.late.compare(asked, windows.flatten(1)).view(there.shape)
        else:  # nothing in vain
            similar = torch.zeros(there.shape)
            for i in there.any(2).any(1).nonzero().flatten().tolist():
                query = Asked(asked.states[i : i + 1], asked.ids[i : i + 1], asked.mask[i : i + 1])
                similar[i, there[i]] = self.late.compare(query, windows[i, there[i]].unsqueeze(0))[0]
        best = similar.masked_fill(~there, -torch.inf).amax(2)
        return (best - opening).clamp(min=0)


def mapped(array: NDArray[Any] | None) -> Tensor:
    """A tensor over the same memory, also where that may only be read."""
    assert array is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing here writes to it
        return torch.from_numpy(np.asarray(array))
