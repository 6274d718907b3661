"""Batch plan -> tensors: item i is batch i of the plan, as the arguments of the model's forward.

Beside it what can be computed once for a whole plan: the outputs of a frozen encoder. Knows files of arrays and tensors, no
optimiser.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset
from tqdm import tqdm

from nci.lexical import LexicalScores
from nci.model import NCIModel
from nci.pairs import SOURCES, BatchPlan
from nci.progress import hide_bars


class EncoderStates:
    """Outputs of a frozen encoder for every pair of a plan, computed once, read by slices."""

    def __init__(self, folder: Path) -> None:
        self.states = np.load(folder / "states.npy", mmap_mode="r")  # (tokens of all pairs, width) f16
        self.vectors = np.load(folder / "vectors.npy", mmap_mode="r")  # (pairs, width) f32

    @classmethod
    @torch.no_grad()
    def build(cls, model: NCIModel, plan: BatchPlan, folder: Path, *, tokens_per_batch: int = 4096) -> EncoderStates:
        if (folder / "COMPLETE").exists():
            return cls(folder)
        if int(os.environ.get("RANK", "0")) != 0:
            while not (folder / "COMPLETE").exists():
                time.sleep(0.2)
            return cls(folder)
        folder.mkdir(parents=True, exist_ok=True)
        model.eval()
        width = int(cast(Any, model.encoder).config.hidden_size)
        states = np.lib.format.open_memmap(
            folder / "states.npy", mode="w+", dtype=np.float16, shape=(int(plan.starts[-1]), width)
        )
        vectors = np.lib.format.open_memmap(
            folder / "vectors.npy", mode="w+", dtype=np.float32, shape=(len(plan.lengths), width)
        )
        order = np.argsort(plan.lengths, kind="stable")
        with tqdm(desc="encode queries", total=len(order), unit="query", disable=hide_bars()) as bar:
            start = 0
            while start < len(order):
                size = max(1, tokens_per_batch // int(plan.lengths[order[min(len(order), start + 64) - 1]]))
                pairs = order[start : start + size]
                places, mask = ragged(plan.starts, pairs)
                ids = np.where(mask, plan.tokens[places], model.config.encoder.get("pad_token_id") or 0)
                on_device = (torch.as_tensor(array).long().to(model.device) for array in (ids, mask))
                hidden, pooled = model.encode(*on_device)
                states[places[mask]] = hidden.cpu().half().numpy()[mask]
                vectors[pairs] = pooled.cpu().numpy()
                start += size
                bar.update(len(pairs))
        states.flush()
        vectors.flush()
        (folder / "COMPLETE").touch()
        return cls(folder)


class PlanDataset(Dataset[dict[str, Any]]):
    """Item i is batch i of the plan, as the arguments of the model's forward.

    Args:
        leaf_of_document: The plan counts documents as the corpus does, the model in leaf order.
        depths: (documents,) digits of each document's id, in leaf order.
        lexical: Lexical scores in leaf order, where the model's content score has them.
        words_only: Leave the scores to be added up on the device: give `words`, `word_counts` (rows,), `postings` and, where
            the plan has them, `own_lexical` (rows,) instead.
        states: Outputs of a frozen encoder, instead of word pieces.
        multiple: Rows are filled up to a multiple of so many tokens, so that batches have few different shapes.
    """

    def __init__(
        self,
        plan: BatchPlan,
        leaf_of_document: NDArray[np.integer],
        *,
        pad: int,
        depths: NDArray[np.integer],
        lexical: LexicalScores | None = None,
        words_only: bool = False,
        states: EncoderStates | None = None,
        multiple: int = 1,
    ) -> None:
        self.plan, self.leaf_of_document, self.pad, self.depths = plan, leaf_of_document, pad, depths
        self.lexical, self.words_only, self.states, self.multiple = lexical, words_only, states, multiple
        self.longest = int(plan.lengths.max())  # no encoder reads more than its limit

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, item: int) -> dict[str, Any]:
        plan, pairs = self.plan, self.plan.rows(item)
        leaves = np.asarray(self.leaf_of_document)[plan.documents[pairs]]
        places, mask = ragged(plan.starts, pairs, self.multiple, self.longest)  # (rows, tokens)
        batch: dict[str, Any] = {
            "documents": torch.as_tensor(leaves).long(),
            "attention_mask": torch.as_tensor(mask).long(),
            "closed": torch.as_tensor(np.asarray(plan.sources[pairs]) == SOURCES.index("real")),
            "positions": int(self.depths[leaves].max()),
        }
        if self.states is None:
            batch["input_ids"] = torch.as_tensor(np.where(mask, plan.tokens[places], self.pad)).long()
        else:
            hidden = self.states.states[places].astype(np.float32) * mask[..., None]
            batch["encoder_states"] = torch.as_tensor(hidden)
            batch["query_vectors"] = torch.as_tensor(np.array(self.states.vectors[pairs]))
        if plan.vectors is not None:
            batch["query_vectors"] = torch.as_tensor(np.array(plan.vectors[pairs]))
        own = None if plan.own_lexical is None else np.asarray(plan.own_lexical[pairs])
        if self.lexical is not None and self.words_only:
            places, mask = ragged(plan.word_starts, pairs)
            words = np.asarray(plan.words[places[mask]], dtype=np.int64)
            batch["words"], batch["word_counts"] = torch.as_tensor(words), torch.as_tensor(mask.sum(1))
            batch["postings"] = self.lexical.count_postings(words)
            if own is not None:
                batch["own_lexical"] = torch.as_tensor(own)
        elif self.lexical is not None:
            words_of = [plan.pair_words(pair) for pair in pairs]
            batch["lexical"] = torch.as_tensor(self.lexical.normalised_columns(words_of, own=own, documents=leaves))
        return batch


def ragged(
    starts: NDArray[np.int64], rows: NDArray[np.int64], multiple: int = 1, most: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Places of some rows of a flat array as a rectangle (rows, longest), and which of them are the rows' own.

    It is as wide as the longest row, or the next multiple of `multiple`, but not more than `most`.

    >>> ragged(np.array([0, 2, 3]), np.array([1, 0]))[0].tolist()
    [[2, 2], [0, 1]]
    """
    lengths = starts[rows + 1] - starts[rows]
    width = -(-int(lengths.max(initial=0)) // multiple) * multiple
    columns = np.arange(width if most is None else min(width, most))
    mask = columns < lengths[:, None]
    return np.minimum(starts[rows][:, None] + columns, max(0, int(starts[-1]) - 1)), mask
