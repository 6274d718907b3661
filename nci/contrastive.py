"""Passages and queries of pairs in, a fine-tuned encoder out: in-batch negatives (DPR), then mined ones (ANCE).

Training goes in rounds. Round 0 takes its negatives from the batch; each later one first ranks all passages with the
weights as they then are, and adds documents from the top of that ranking. Every round has an optimiser and random
numbers of its own, so the weights at its end are all that the next one needs: a killed training goes on there.

A plain loop and not sentence-transformers' trainer: that one needs the package `datasets`, holds one fixed table of
negatives, and keeps documents apart by their texts instead of by what is relevant. The loss is the same as its
MultipleNegativesRankingLoss. Nothing in a step of all layers waits for a GPU. Knows nothing of search.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import get_linear_schedule_with_warmup

from nci.contrast_settings import ContrastSettings
from nci.contrastive_data import Batch, Pairs, Passages, Rows, Tokens, draw, split_epoch
from nci.encoders import TextEncoder, pool_tokens, token_states
from nci.last_layers import Kept, train_only_last
from nci.pieces import shares, special_pieces
from nci.progress import hide_bars
from nci.runtime import quiet, uses_bf16

MAX_GRAD_NORM = 1.0
WEIGHT_DECAY = 0.01
_KEPT = 1 / 6  # of the device's memory, for what gradients need: others may be at work beside this training
_SCORES_AT_ONCE = 2**25  # entries of a block of the score matrix: 128 MiB


def autocast(encoder: TextEncoder, settings: ContrastSettings) -> torch.autocast:
    """The number format of forward passes, in training, mining and search alike."""
    device = encoder.model.device
    return torch.autocast(device.type, torch.bfloat16, enabled=uses_bf16(settings.precision, str(device)))


def embed(encoder: TextEncoder, tokens: Tokens, texts: Rows, *, at_once: int) -> Tensor:
    """Vectors of length 1 for some of the texts, in their order, `at_once` per forward pass; keeps gradients."""
    return torch.cat([part.vectors for part in read(encoder, tokens, texts, at_once=at_once)])  # (texts, width)


class Seen(NamedTuple):
    """Texts as an encoder read them."""

    vectors: Tensor  # (texts, width) of length 1
    states: Tensor  # (texts, tokens, width)
    ids: Tensor  # (texts, tokens)
    mask: Tensor  # (texts, tokens)


def read(
    encoder: TextEncoder,
    tokens: Tokens,
    texts: Rows,
    *,
    at_once: int,
    keep: float = float("inf"),
    below: Kept | None = None,
) -> list[Seen]:
    """Some of the texts, in their order, `at_once` per forward pass; keeps gradients.

    Args:
        keep: Tokens whose way through the layers is kept for the gradients. What is beyond them goes the same way again.
        below: What the layers that are not trained say of all texts; without it all layers read them.
    """
    device, pad = encoder.model.device, encoder.tokenizer.pad_token_id or 0
    out = []
    for part in np.array_split(texts, -(-len(texts) // at_once)):
        ids, mask = (_on(device, each) for each in tokens.padded(part, pad))
        fits = ids.numel() <= keep
        keep -= ids.numel() * fits
        way = partial(token_states, encoder.model, ids, mask) if below is None else partial(below.states, part, mask)
        again = not fits and torch.is_grad_enabled()
        states = checkpoint(way, use_reentrant=False) if again else way()  # (texts, tokens, width)
        pooled = pool_tokens(states, mask.long(), encoder.settings.pooling).float()
        out.append(Seen(torch.nn.functional.normalize(pooled, dim=-1), states, ids, mask))
    return out


def kept_tokens(encoder: TextEncoder, *, bf16: bool) -> float:
    """Tokens whose way through all layers fits into about a sixth of the device's memory."""
    # bytes for each number of a state and layer, as measured: a CPU writes all attention down
    config, device = encoder.model.config, encoder.model.device
    each = (40 if bf16 else 80) if device.type == "cuda" else 160
    return float(_memory(device) * _KEPT / (each * config.num_hidden_layers * config.hidden_size))


def _memory(device: torch.device) -> int:
    """Bytes that a device has in all."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def late_scores(queries: Seen, passages: Sequence[Seen], special: Tensor) -> Tensor:
    """Late interaction of every query with every passage: (queries, passages), see `nci.search.late`."""
    asked = torch.nn.functional.normalize(queries.states, dim=-1)  # (queries, tokens, width)
    weights = shares(queries.ids, queries.mask, special)
    parts = []
    for part in passages:
        pieces = torch.nn.functional.normalize(part.states, dim=-1)  # (passages, pieces, width)
        cosines = asked.flatten(0, 1) @ pieces.flatten(0, 1).T
        cosines = cosines.view(len(cosines), *part.mask.shape).masked_fill(~part.mask, -1.0)
        best = cosines.amax(2).view(*asked.shape[:2], -1)  # (queries, tokens, passages)
        parts.append((best * weights.unsqueeze(-1)).sum(1))
    return torch.cat(parts, dim=1)


@torch.no_grad()
def embed_all(encoder: TextEncoder, tokens: Tokens, settings: ContrastSettings, *, label: str | None = None) -> Tensor:
    """Vectors of all texts, in their order, on the encoder's device."""
    encoder.model.eval()
    out = torch.empty(len(tokens), encoder.width, device=encoder.model.device)  # (texts, width)
    order = np.argsort(-tokens.lengths, kind="stable")
    with tqdm(desc=label, total=len(tokens), unit="text", disable=hide_bars(bool(label))) as bar:
        for start in range(0, len(order), settings.batch_size):
            places = order[start : start + settings.batch_size]
            with autocast(encoder, settings):
                out[_on(out.device, places)] = embed(encoder, tokens, places, at_once=len(places))
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
    return choice_loss(queries @ passages.T / temperature, targets, forbidden)


def choice_loss(logits: Tensor, targets: Tensor, forbidden: Tensor) -> Tensor:
    """Mean of -log softmax of each row's target among what is not forbidden."""
    return torch.nn.functional.cross_entropy(logits.masked_fill(forbidden, float("-inf")), targets)


@dataclass(frozen=True)
class Mined:
    """Of each pair, the passage that stands for its document, and from where its hard negatives are drawn."""

    positives: Rows  # (pairs,)
    candidates: Rows  # (pairs, depth) best first, -1 where there are fewer


def mine(encoder: TextEncoder, pairs: Pairs, passages: Passages, settings: ContrastSettings, *, hard: bool) -> Mined:
    """Rank the passages for every training query with the weights as they are.

    The ranking is exact, one product on the encoder's device: the same negatives whatever packages are installed.

    Args:
        hard: Whether candidates are wanted; without them, and with one passage per document, nothing is computed.
    """
    positives = passages.starts[pairs.documents]
    candidates = np.full((len(positives), settings.depth if hard else 0), -1, np.int64)
    if not hard and not passages.several:
        return Mined(positives, candidates)
    stored = embed_all(encoder, passages.tokens, settings, label="mine: documents")
    asked = embed_all(encoder, pairs.tokens, settings, label="mine: queries")
    block, depth = max(1, _SCORES_AT_ONCE // len(stored)), min(settings.depth, len(stored))
    for begin in range(0, len(asked), block):
        scores = asked[begin : begin + block] @ stored.T  # (queries, passages)
        here = range(begin, begin + len(scores))
        if passages.several:
            rows, own = passages.of([[int(pairs.documents[pair])] for pair in here])
            values = scores[_on(scores.device, rows), _on(scores.device, own)].cpu().numpy()
            # by row, then from the worst to the best of its passages: the last one stays
            order = np.lexsort((-own, values, rows))
            positives[begin + rows[order]] = own[order]
        rows, relevant = passages.of([pairs.relevant[pair] for pair in here])
        scores[_on(scores.device, rows), _on(scores.device, relevant)] = float("-inf")
        if hard:
            best, found = scores.topk(depth, dim=1)
            candidates[begin : begin + len(scores), :depth] = found.masked_fill(best.isneginf(), -1).cpu().numpy()
    return Mined(positives, candidates)


def _on(device: torch.device, array: Rows | NDArray[np.bool_]) -> Tensor:
    there = torch.from_numpy(array)
    # only from pinned memory does a copy to a GPU go on beside the program
    return there.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else there


def train_round(
    encoder: TextEncoder, pairs: Pairs, passages: Passages, mined: Mined, settings: ContrastSettings, *, number: int
) -> None:
    """One round of training, in place; `number` is part of the seed."""
    epochs = settings.refresh_epochs if number else settings.epochs
    random = np.random.default_rng([settings.seed, number])
    lengths = passages.tokens.lengths[mined.positives]
    per_epoch = -(-len(lengths) // settings.batch_size)
    parameters = [parameter for parameter in encoder.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.lr, weight_decay=WEIGHT_DECAY, fused=True)
    steps = epochs * per_epoch
    schedule = get_linear_schedule_with_warmup(optimizer, round(settings.warmup * steps), steps)
    device = encoder.model.device
    special = torch.tensor(special_pieces(encoder.tokenizer), device=device)
    asked, stored = _below(encoder, pairs, passages, settings)
    keep = kept_tokens(encoder, bf16=uses_bf16(settings.precision, str(device)))
    label = f"train encoder: round {number} of {settings.refreshes}"
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpus), tqdm(desc=label, total=steps, unit="step", disable=hide_bars()) as bar:
        torch.manual_seed(int(random.integers(2**62)))  # dropout
        encoder.model.train(not settings.layers)
        for _ in range(epochs):
            for chosen in split_epoch(lengths, len(passages.starts) - 1, settings.batch_size, random):
                negatives = draw(mined.candidates[chosen], settings.negatives, random)
                relevant = [pairs.relevant[i] for i in chosen]
                batch = Batch.make(mined.positives[chosen], negatives, relevant, passages.owners)
                # hard negatives are of any length: of similar length they share a pass
                batch = batch.by_length(passages.tokens.lengths)
                targets, forbidden = _on(device, batch.targets), _on(device, batch.forbidden)
                with autocast(encoder, settings):
                    (queries,) = read(encoder, pairs.tokens, chosen, at_once=len(chosen), below=asked)
                    columns = read(
                        encoder, passages.tokens, batch.passages, at_once=settings.batch_size, keep=keep, below=stored
                    )
                    late = late_scores(queries, columns, special) if settings.late else None
                vectors = torch.cat([part.vectors for part in columns])
                loss = contrastive_loss(queries.vectors, vectors, targets, forbidden, temperature=settings.temperature)
                if late is not None:
                    loss = loss + settings.late * choice_loss(
                        late.float() / settings.late_temperature, targets, forbidden
                    )
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
                optimizer.step()
                schedule.step()
                bar.update()
        encoder.model.eval()


def _below(
    encoder: TextEncoder, pairs: Pairs, passages: Passages, settings: ContrastSettings
) -> tuple[Kept | None, Kept | None]:
    """What the layers that are not trained say of queries and passages, as far as it can be kept."""
    if not settings.layers:
        return None, None
    encoder.model.eval()
    most = _memory(encoder.model.device) * _KEPT
    with autocast(encoder, settings):
        asked = Kept.read(encoder, pairs.tokens, settings.layers, most=most / 2)
        return asked, Kept.read(encoder, passages.tokens, settings.layers, most=most / 2)


def train_encoder(
    encoder: TextEncoder, pairs: Pairs, passages: Passages, folder: Path, settings: ContrastSettings
) -> None:
    """All rounds, in place, each left in `folder` until the next is complete; goes on after the last one found there."""
    folder.mkdir(parents=True, exist_ok=True)
    if settings.layers:
        train_only_last(encoder.model, settings.layers)
    done = sorted(int(path.parent.name) for path in folder.glob("*/COMPLETE"))
    if done:
        # the weights alone: a tokenizer that was stored and read is not written like the original
        encoder.model.load_state_dict(TextEncoder.load(folder / str(done[-1])).model.state_dict())
    for number in range(done[-1] + 1 if done else 0, settings.refreshes + 1):
        if number or settings.epochs:
            mined = mine(encoder, pairs, passages, settings, hard=number > 0)
            train_round(encoder, pairs, passages, mined, settings, number=number)
        here = folder / str(number)
        shutil.rmtree(here, ignore_errors=True)  # what a killed run left
        here.mkdir()
        with quiet():
            encoder.save(here)
        (here / "COMPLETE").touch()
        shutil.rmtree(folder / str(number - 1), ignore_errors=True)


def weights_digest(encoder: TextEncoder) -> str:
    """A name for the exact weights of an encoder."""
    digest = hashlib.sha256()
    for name, tensor in sorted(encoder.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
