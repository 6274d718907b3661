"""Late interaction at search time: word pieces of queries and of some documents in, one similarity each out.

    late(q, d) = mean over the pieces of q of the best cosine with a piece of d

Only the best documents of each query by the other parts of the content score are compared, and what is added to a score
is how far a document is above the worst of these: the others lose nothing that they might have had. No training.

Of a long document an encoder reads the opening. Where the windows behind it are kept, too, a share of how much nearer these
are than the opening is added to what a candidate has; the share is calibrated, and may be below 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nci.pieces import UNIT, PieceVectors, project, shares
from nci.search.linear import Precision

_NUMBERS_AT_ONCE = 2**27  # codes that are compared together


class Asked(NamedTuple):
    """Queries as an encoder read them."""

    states: Tensor  # (queries, tokens, width of the encoder)
    ids: Tensor  # (queries, tokens)
    mask: Tensor  # (queries, tokens) true where there is a token


class LateScores:
    """The pieces of all documents on one device.

    Args:
        pieces: In leaf order.
        special: Tokens that are no pieces of a query: its beginning, its end.
        candidates: Documents compared per query.
        precision: int8, on a CPU, compares codes of the queries' pieces.
        share: What windows behind the opening count, where there are any.
    """

    def __init__(
        self,
        pieces: PieceVectors,
        special: Sequence[int],
        *,
        candidates: int,
        device: str,
        precision: Precision = "fp32",
        share: float = 0.0,
    ) -> None:
        self.device, self.candidates, self.share = device, min(candidates, len(pieces)), share
        self.codes = mapped(pieces.codes).to(device)
        # where a document has no piece, any other stands for it, and is not counted
        self.there = torch.as_tensor(pieces.lengths > 0, device=device)
        self.first = torch.as_tensor(np.minimum(pieces.first, len(pieces.codes) - 1), device=device)
        self.last = torch.as_tensor(np.maximum(pieces.lengths - 1, 0), device=device)
        self.longest = int(pieces.lengths.max())
        self.directions = torch.as_tensor(pieces.projection, device=device)
        self.special = torch.as_tensor(list(special), dtype=torch.long, device=device)
        # what a GPU multiplies fast, and what a CPU does
        self.dtype = torch.float32 if device == "cpu" else torch.float16
        self.int8 = precision == "int8" and device == "cpu" and pieces.codes.shape[1] >= 16
        self.beyond = pieces.further

    @cached_property
    def rest(self) -> LateScores | None:
        """The same of windows behind the openings; on the device when they are asked for."""
        if self.beyond is None:
            return None
        precision: Precision = "int8" if self.int8 else "fp32"
        special = self.special.tolist()
        return LateScores(self.beyond, special, candidates=self.candidates, device=self.device, precision=precision)

    def above(self, scores: Tensor, asked: Asked) -> tuple[Tensor, Tensor]:
        """Candidates of each query, and what each gets: 2 x (queries, candidates).

        That is how far it is above the worst of them, and the share of how much nearer its rest is.

        Args:
            scores: (queries, documents) by which candidates are chosen.
        """
        chosen, similar = self.best(scores, asked)
        above = similar - similar.amin(1, keepdim=True)
        if self.share:
            above = above + self.share * self.further(asked, chosen, similar)
        return chosen, above

    def best(self, scores: Tensor, asked: Asked) -> tuple[Tensor, Tensor]:
        """Candidates of each query, the highest of (queries, documents), and late(q, d) of each: 2 x (queries, candidates)."""
        chosen = scores.topk(self.candidates, dim=1).indices
        return chosen, self.compare(asked, chosen)

    def further(self, asked: Asked, chosen: Tensor, opening: Tensor) -> Tensor:
        """How much nearer than its opening the rest of each document is, 0 where there is none: (queries, documents)."""
        if self.rest is None:
            return torch.zeros_like(opening)
        return torch.where(self.rest.there[chosen], self.rest.compare(asked, chosen) - opening, 0.0)

    def compare(self, asked: Asked, chosen: Tensor) -> Tensor:
        """late(q, d) of some documents (queries, documents) of each query."""
        counts = shares(asked.ids, asked.mask, self.special)
        return torch.einsum("qdt,qt->qd", self.cosines(asked, chosen), counts)

    def cosines(self, asked: Asked, chosen: Tensor) -> Tensor:
        """Best cosine of each piece of a query with a piece of each of its documents: (queries, documents, tokens)."""
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


def mapped(array: NDArray[Any] | None) -> Tensor:
    """A tensor over the same memory, also where that may only be read."""
    assert array is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing here writes to it
        return torch.from_numpy(np.asarray(array))
