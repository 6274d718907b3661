"""BM25 on a GPU: the sparse columns of `LexicalScores`, added up there. Words in, scores of every document out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nci.lexical import LexicalScores


class Postings:
    """The weights of every word in the memory of a device."""

    def __init__(self, lexical: LexicalScores, device: str) -> None:
        self.lexical, self.device = lexical, device
        data, indices, indptr = lexical.postings
        self.data = torch.tensor(data, device=device)
        self.rows = torch.tensor(indices, device=device).long()
        self.starts = torch.tensor(indptr, device=device)

    def normalised(self, texts: Sequence[str]) -> Tensor:
        """(queries, documents), as a share of each query's highest."""
        columns = self.lexical.columns(texts)
        words = np.concatenate([*columns, np.zeros(0, np.int32)]).astype(np.int64)
        plan = torch.from_numpy(np.concatenate([words, [len(each) for each in columns]]).astype(np.int64))
        on_device = plan.to(self.device)  # in one piece: each transfer costs more than its bytes
        return self.add(on_device[: len(words)], on_device[len(words) :], self.lexical.count_postings(words))

    def add(
        self,
        words: Tensor,
        counts: Tensor,
        total: int,
        *,
        own: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """The same for queries that are given as columns. Waits for nothing on the device.

        Args:
            words: Columns of the words, one query after the other.
            counts: (queries,) words of each query.
            total: Postings of all these words (`LexicalScores.count_postings`).
            own: (queries,) the score, before it is normalised, that one document of each query has instead; NaN to leave it.
            documents: (queries,) which document that is.
        """
        queries, width = len(counts), self.lexical.documents
        query = torch.repeat_interleave(counts, output_size=len(words))
        first = self.starts[words]
        sizes = self.starts[words + 1] - first
        word = torch.repeat_interleave(sizes, output_size=total)
        posting = torch.arange(total, device=self.data.device) + (first - sizes.cumsum(0) + sizes)[word]
        scores = torch.zeros(queries * width, device=self.data.device)
        scores.index_add_(0, self.rows[posting] + query[word] * width, self.data[posting])
        scores = scores.view(queries, width)
        if own is not None and documents is not None:
            row = torch.arange(queries, device=self.data.device)
            scores[row, documents] = torch.where(own.isnan(), scores[row, documents], own)
        return scores / scores.amax(1, keepdim=True).clamp(min=1e-12)
