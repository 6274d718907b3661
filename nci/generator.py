"""A generator trained from the embedded encoder: (source, target) texts in, a folder that writes such targets out.

Needs no Hub: encoder, tokenizer and word vectors are those of any encoder folder, see `pointer.py` for the network.
`sample` draws whole texts; `start`, `step` and `State.select` serve constrained decoding. Knows nothing of documents,
shards or indexes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nci.config import TrainConfig
from nci.embed import fingerprint
from nci.encoders import TextEncoder, fetch_encoder
from nci.errors import ConfigError, MissingModelError, check_least
from nci.pointer import Network, State
from nci.runtime import quiet
from nci.seq2seq import Batches, Sampling, check_pairs, finish, fit, is_complete, work_key

_SHARED = 4  # targets of one source per batch: training is a few times faster, and a batch still has many sources


@dataclass(frozen=True)
class GeneratorConfig:
    """How the offline generator is made and trained.

    Args:
        decoder_layers: Layers of the decoder.
        dropout: In the decoder; the encoder keeps its own.
        pieces: The softmax knows the word pieces seen in the targets (the pointer brings the others, where the source
            has them), or all pieces of the tokenizer, as constrained decoding needs.
        max_source: Word pieces of a source that are read.
        max_target: Word pieces of a target, its end included.
        epochs: Passes over the pairs.
        batch_size: Pairs per step.
        encoder_lr: Learning rate of the encoder; 0 leaves it as it is, and a step takes less than half as long.
        decoder_lr: Learning rate of everything else.
        freeze_embeddings: Leave the word vectors, which encoder, decoder and softmax share, as they are.
        precision: auto takes bf16 on a GPU and on a CPU that has it, else fp32; sampling is in fp32 in any case.
        checkpoint_minutes: A killed training loses at most about this much.
        seed: Same seed, same weights (on a CPU).
    """

    decoder_layers: int = 2
    dropout: float = 0.1
    pieces: Literal["seen", "all"] = "seen"
    max_source: int = 512
    max_target: int = 64
    epochs: float = 4
    batch_size: int = 128
    encoder_lr: float = 1e-4
    decoder_lr: float = 1e-3
    freeze_embeddings: bool = True
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    checkpoint_minutes: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.pieces not in ("seen", "all"):
            raise ConfigError(f"pieces is seen or all, not {self.pieces!r}")
        check_least(self, {"decoder_layers": 1, "max_source": 3, "max_target": 2, "batch_size": 1})
        if not self.epochs > 0 or not 0 <= self.dropout < 1:
            raise ConfigError(f"epochs is above 0 and dropout from 0 to below 1, not {self.epochs} and {self.dropout}")

    @property
    def rates(self) -> TrainConfig:
        """The part of the trainer, in its words."""
        names = ("epochs", "batch_size", "encoder_lr", "decoder_lr", "precision", "checkpoint_minutes", "seed")
        return TrainConfig(**{name: getattr(self, name) for name in names})


class Generator:
    """A trained network with its tokenizer."""

    def __init__(self, network: Network, encoder: TextEncoder, config: GeneratorConfig, *, fingerprint: str) -> None:
        self.network = network.eval()
        self.encoder = encoder
        self.config = config
        self.fingerprint = fingerprint
        self.device = str(encoder.model.device)
        self.start_piece, self.end_piece, _ = _special(encoder)

    @functools.cached_property
    def _rows(self) -> Tensor:
        return self.network.rows().detach()

    @classmethod
    def train(
        cls,
        pairs: Sequence[tuple[str, str]],
        *,
        out: Path,
        encoder: str | Path = "minilm",
        settings: GeneratorConfig | None = None,
        device: str = "cpu",
    ) -> Generator:
        """Learn to write the target of each (source, target); `out` is then what `load` reads.

        A killed training goes on where it was; one that is complete, with the same pairs and settings, is loaded.
        """
        config = settings or GeneratorConfig()
        check_pairs(pairs)
        folder = fetch_encoder(encoder)
        key = work_key(config, fingerprint(folder), pairs)
        if not is_complete(out, key):
            torch.manual_seed(config.seed)
            texts = TextEncoder.load(folder, max_length=config.max_source, device=device)
            start, end, blocked = _special(texts)
            sources = texts.tokenize([source for source, _ in pairs])
            # what comes before the text, such as [CLS], is the decoder's first input instead
            skipped = len(texts.tokenize([""])[0]) - 1
            targets = [row[skipped:] for row in texts.tokenize([target for _, target in pairs], config.max_target)]
            ignored = {*blocked} - {end}
            known, bias = _vocabulary(targets, ignored, texts.model.get_input_embeddings().num_embeddings, config)
            network = _network(texts, known, torch.tensor(blocked), config)
            network.bias.data.copy_(bias)
            network.encoder.requires_grad_(config.encoder_lr > 0)
            network.encoder.get_input_embeddings().requires_grad_(not config.freeze_embeddings)
            pad = texts.tokenizer.pad_token_id or 0
            batches = Batches(sources, targets, config.rates, pad=pad, start=start, ignored=ignored, shared=_SHARED)
            fit(network.to(device), batches, config.rates, out=out / "training", key=key, device=device)
            cls(network, texts, config, fingerprint="").save(out)
            finish(out, key)
        return cls.load(out, device=device)

    def save(self, folder: Path) -> None:
        """Write the encoder, the other weights and the settings; no pickle."""
        folder.mkdir(parents=True, exist_ok=True)
        with quiet():
            self.encoder.save(folder / "encoder")
        own = {name: t for name, t in self.network.state_dict().items() if not name.startswith("encoder.")}
        save_file({name: tensor.contiguous() for name, tensor in own.items()}, folder / "decoder.safetensors")
        (folder / "generator.json").write_text(json.dumps(dataclasses.asdict(self.config), indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path, *, device: str = "cpu") -> Generator:
        """Read what `train` or `save` wrote."""
        try:
            config = GeneratorConfig(**json.loads((folder / "generator.json").read_bytes()))
            own = load_file(folder / "decoder.safetensors")
        except (OSError, ValueError, TypeError) as error:
            expected = "expected generator.json, decoder.safetensors and encoder/, as `Generator.train` writes them"
            raise MissingModelError(f"no generator could be read from {folder}: {error}; {expected}") from error
        texts = TextEncoder.load(folder / "encoder", max_length=config.max_source, device=device)
        network = _network(texts, own["vocabulary"], own["blocked"], config)
        network.load_state_dict(own, strict=False)
        return cls(network.to(device), texts, config, fingerprint=fingerprint(folder))

    # ---- one step at a time

    def start(self, texts: Sequence[str]) -> State:
        """Read some sources: a state with one row for each. The first `step` takes `start_piece`."""
        return self._read(self.tokenize(texts))

    @torch.no_grad()
    def step(self, state: State, tokens: Tensor) -> Tensor:
        """Append a piece to every row (rows,): log-probabilities of all next pieces, (rows, pieces).

        `state` moves on; to keep several continuations of a row, `state.select` it as often first.
        """
        return self.network.advance(state, tokens, self._rows).log()

    @torch.no_grad()
    def _read(self, rows: Sequence[Sequence[int]]) -> State:
        pieces, mask = self.encoder.pad(rows)
        return self.network.read(pieces, mask.bool())

    # ---- whole texts

    def tokenize(self, texts: Sequence[str], max_length: int | None = None) -> list[list[int]]:
        """Word pieces of sources."""
        return self.encoder.tokenize(texts, max_length)

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Texts of generated pieces."""
        return [str(text).strip() for text in self.encoder.tokenizer.batch_decode(rows, skip_special_tokens=True)]

    @torch.no_grad()
    def sample(self, rows: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling) -> list[list[list[int]]]:
        """Some random targets of every tokenised source, each source with its own seed, all in one batch.

        The numbers of a source move in their last bits with its neighbours in the batch: for equal texts whatever the
        batch, ask for one source at a time.
        """
        state = self._read(rows)
        count = sampling.count
        draws = torch.cat([sampling.draws(seed) for seed in seeds]).to(state.pieces.device)
        state = state.select(torch.arange(len(rows), device=draws.device).repeat_interleave(count))
        out: list[list[int]] = [[] for _ in range(len(rows) * count)]
        active = torch.arange(len(out), device=draws.device)
        tokens = torch.full_like(active, self.start_piece)
        for number in range(min(sampling.max_target, self.config.max_target)):
            chances = self.network.advance(state, tokens, self._rows)
            if number == 0:
                chances[:, self.end_piece] = 0.0  # an empty text says nothing
            best, pieces = chances.topk(min(sampling.top_k or chances.shape[1], chances.shape[1]))
            # logarithms of the best only: those of the many zeros take longer than the network
            tokens = pieces.gather(1, sampling.pick(best.log(), draws[active, number])[:, None]).squeeze(1)
            open_rows = (tokens != self.end_piece).nonzero().squeeze(1)
            if len(open_rows) < len(active):
                active, tokens = active[open_rows], tokens[open_rows]
                if not len(active):
                    break
                state = state.select(open_rows)
            for row, token in zip(active.tolist(), tokens.tolist(), strict=True):
                out[row].append(token)
        return [out[first : first + count] for first in range(0, len(out), count)]


def _network(texts: TextEncoder, vocabulary: Tensor, blocked: Tensor, config: GeneratorConfig) -> Network:
    sizes = {"layers": config.decoder_layers, "max_target": config.max_target}
    return Network(texts.model, vocabulary, blocked, dropout=config.dropout, **sizes)


def _special(encoder: TextEncoder) -> tuple[int, int, list[int]]:
    """The pieces a target begins and ends with, and all that are no part of a text."""
    frame = list(encoder.tokenizer("")["input_ids"])
    if not frame:
        raise ConfigError("this encoder's tokenizer puts no token at the end of a text; take another, such as minilm")
    start = frame[0] if len(frame) > 1 else encoder.tokenizer.pad_token_id or 0
    return start, frame[-1], sorted({*encoder.tokenizer.all_special_ids, *frame})


def _vocabulary(
    targets: Sequence[Sequence[int]], ignored: set[int], size: int, config: GeneratorConfig
) -> tuple[Tensor, Tensor]:
    """The pieces of the softmax, and the biases it begins with: how often a piece is said need not be learned."""
    counts = np.bincount([piece for row in targets for piece in row], minlength=size)
    known = np.setdiff1d(np.flatnonzero(counts) if config.pieces == "seen" else np.arange(size), [*ignored])
    bias = np.log(counts[known] + 0.1)
    return torch.as_tensor(known), torch.as_tensor(bias - bias.mean())
