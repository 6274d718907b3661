"""Documents and (query, doc_id) pairs in, a fine-tuned encoder out: in-batch negatives (DPR), then mined ones (ANCE).

Training goes in rounds. Round 0 takes its negatives from the batch; each later one first ranks all passages with the
weights as they then are, and adds documents from the top of that ranking. Every round has an optimiser and random
numbers of its own, so the weights at its end are all that the next one needs: a killed training goes on there.

A plain loop and not sentence-transformers' trainer: that one needs the package `datasets`, holds one fixed table of
negatives, and keeps documents apart by their texts instead of by what is relevant. The loss is the same as its
MultipleNegativesRankingLoss. Knows nothing of search.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import get_linear_schedule_with_warmup

from nci.baselines.dual_data import Batch, DualSettings, Pairs, Passages, Rows, TokenRows, draw
from nci.encoders import TextEncoder, pool_tokens
from nci.progress import hide_bars
from nci.records import Document
from nci.runtime import quiet, uses_bf16

MAX_GRAD_NORM = 1.0
WEIGHT_DECAY = 0.01
_SCORES_AT_ONCE = 2**25  # entries of a block of the score matrix: 128 MiB


def autocast(encoder: TextEncoder, settings: DualSettings) -> torch.autocast:
    """The number format of forward passes, in training, mining and search alike."""
    device = encoder.model.device
    return torch.autocast(device.type, torch.bfloat16, enabled=uses_bf16(settings.precision, str(device)))


def embed(encoder: TextEncoder, rows: TokenRows) -> Tensor:
    """Vectors of length 1 for one batch of word pieces; keeps gradients."""
    ids, mask = encoder.pad(rows)
    hidden = encoder.model(input_ids=ids, attention_mask=mask).last_hidden_state  # (batch, tokens, width)
    return torch.nn.functional.normalize(pool_tokens(hidden, mask, encoder.settings.pooling).float(), dim=-1)


@torch.no_grad()
def embed_all(encoder: TextEncoder, rows: TokenRows, settings: DualSettings, *, label: str | None = None) -> Tensor:
    """Vectors of any number of texts, in their order, on the encoder's device."""
    encoder.model.eval()
    out = torch.empty(len(rows), encoder.width, device=encoder.model.device)  # (texts, width)
    order = np.argsort([-len(row) for row in rows], kind="stable")
    with tqdm(desc=label, total=len(rows), unit="text", disable=hide_bars(bool(label))) as bar:
        for start in range(0, len(order), settings.batch_size):
            places = order[start : start + settings.batch_size]
            with autocast(encoder, settings):
                out[_on(out, places)] = embed(encoder, [rows[i] for i in places])
            bar.update(len(places))
    return out


def contrastive_loss(
    queries: Tensor, passages: Tensor, targets: Tensor, forbidden: Tensor, *, temperature: float
) -> Tensor:
    """Mean of -log softmax of each query's own passage among all that are not forbidden.

    Args:
        queries: (queries, width)
        passages: (passages, width)
        targets: (queries,) the passage of each query.
        forbidden: (queries, passages) True where a passage is relevant too and therefore no negative.
    """
    logits = (queries @ passages.T / temperature).masked_fill(forbidden, float("-inf"))
    return torch.nn.functional.cross_entropy(logits, targets)


@dataclass(frozen=True)
class Mined:
    """Of each pair, the passage that stands for its document, and from where its hard negatives are drawn."""

    positives: Rows  # (pairs,)
    candidates: Rows  # (pairs, depth) best first, -1 where there are fewer


def mine(encoder: TextEncoder, pairs: Pairs, passages: Passages, settings: DualSettings, *, hard: bool) -> Mined:
    """Rank the passages for every training query with the weights as they are.

    The ranking is exact, one product on the encoder's device: the same negatives whatever packages are installed.

    Args:
        hard: Whether candidates are wanted; without them, and with one passage per document, nothing is computed.
    """
    positives = passages.starts[pairs.documents]
    candidates = np.full((len(positives), settings.depth if hard else 0), -1, np.int64)
    if not hard and settings.passage == "firstp":
        return Mined(positives, candidates)
    stored = embed_all(encoder, passages.tokens, settings, label="mine: documents")
    asked = embed_all(encoder, pairs.tokens, settings, label="mine: queries")
    block, depth = max(1, _SCORES_AT_ONCE // len(stored)), min(settings.depth, len(stored))
    for begin in range(0, len(asked), block):
        scores = asked[begin : begin + block] @ stored.T  # (queries, passages)
        here = range(begin, begin + len(scores))
        if settings.passage == "maxp":
            rows, own = passages.of([[int(pairs.documents[pair])] for pair in here])
            values = scores[_on(scores, rows), _on(scores, own)].cpu().numpy()
            # by row, then from the worst to the best of its passages: the last one stays
            order = np.lexsort((-own, values, rows))
            positives[begin + rows[order]] = own[order]
        rows, relevant = passages.of([pairs.relevant[pair] for pair in here])
        scores[_on(scores, rows), _on(scores, relevant)] = float("-inf")
        if hard:
            best, found = scores.topk(depth, dim=1)
            candidates[begin : begin + len(scores), :depth] = found.masked_fill(best.isneginf(), -1).cpu().numpy()
    return Mined(positives, candidates)


def _on(tensor: Tensor, rows: Rows) -> Tensor:
    return torch.from_numpy(rows).to(tensor.device)


def train_round(
    encoder: TextEncoder, pairs: Pairs, passages: Passages, mined: Mined, settings: DualSettings, *, number: int
) -> None:
    """One round of training, in place; `number` is part of the seed."""
    epochs = settings.refresh_epochs if number else settings.epochs
    random = np.random.default_rng([settings.seed, number])
    per_epoch = -(-len(pairs.tokens) // settings.batch_size)
    parameters = [parameter for parameter in encoder.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.lr, weight_decay=WEIGHT_DECAY)
    steps = epochs * per_epoch
    schedule = get_linear_schedule_with_warmup(optimizer, round(settings.warmup * steps), steps)
    device = encoder.model.device
    label = f"{settings.name} round {number} of {settings.refreshes}"
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpus), tqdm(desc=label, total=steps, unit="step", disable=hide_bars()) as bar:
        torch.manual_seed(int(random.integers(2**62)))  # dropout
        encoder.model.train()
        for _ in range(epochs):
            for chosen in np.array_split(random.permutation(len(pairs.tokens)), per_epoch):
                negatives = draw(mined.candidates[chosen], settings.negatives, random)
                relevant = [pairs.relevant[i] for i in chosen]
                batch = Batch.make(mined.positives[chosen], negatives, relevant, passages.owners)
                with autocast(encoder, settings):
                    queries = embed(encoder, [pairs.tokens[i] for i in chosen])
                    columns = embed(encoder, [passages.tokens[i] for i in batch.passages])
                loss = contrastive_loss(
                    queries,
                    columns,
                    _on(queries, batch.targets),
                    torch.from_numpy(batch.forbidden).to(device),
                    temperature=settings.temperature,
                )
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
                optimizer.step()
                schedule.step()
                bar.update()
        encoder.model.eval()


def train_encoder(
    encoder: TextEncoder,
    documents: Sequence[Document],
    pairs: Sequence[tuple[str, str]],
    folder: Path,
    settings: DualSettings,
) -> TextEncoder:
    """All rounds, each left in `folder` until the next is complete; goes on after the last complete one found there."""
    device = str(encoder.model.device)
    read = Pairs.read(pairs, documents, encoder, settings)
    passages = Passages.cut(documents, encoder, settings)
    folder.mkdir(parents=True, exist_ok=True)
    done = sorted(int(path.parent.name) for path in folder.glob("*/COMPLETE"))
    if done:
        encoder = TextEncoder.load(folder / str(done[-1]), max_length=settings.max_length, device=device)
    for number in range(done[-1] + 1 if done else 0, settings.refreshes + 1):
        if number or settings.epochs:
            mined = mine(encoder, read, passages, settings, hard=number > 0)
            train_round(encoder, read, passages, mined, settings, number=number)
        here = folder / str(number)
        shutil.rmtree(here, ignore_errors=True)  # what a killed run left
        here.mkdir()
        with quiet():
            encoder.save(here)
        (here / "COMPLETE").touch()
        shutil.rmtree(folder / str(number - 1), ignore_errors=True)
    return encoder


def weights_digest(encoder: TextEncoder) -> str:
    """A name for the exact weights of an encoder."""
    digest = hashlib.sha256()
    for name, tensor in sorted(encoder.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
