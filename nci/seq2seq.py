"""What every generator of texts shares, and the ones of Hugging Face: sampling by seeds, training on pairs of texts.

A generator turns word pieces of a source into random targets; `Seq2Seq` is the contract, `HuggingFaceGenerator` runs any
encoder-decoder model by name or folder, `fit` trains that and the offline generator alike. Knows nothing of documents.
"""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList
from transformers.modeling_outputs import BaseModelOutput

from nci.config import PairsConfig, TrainConfig, content_key
from nci.embed import fingerprint
from nci.encoders import fetch_encoder
from nci.errors import DataError, MissingModelError
from nci.pairs import plan_batches
from nci.runtime import quiet
from nci.train import Curve, PlanTrainer, last_checkpoint, plan_arguments

log = logging.getLogger("nci")

IGNORED = -100
"""A label that no loss counts; transformers uses the same number."""


@dataclass(frozen=True)
class Sampling:
    """How many texts are drawn for a source, and how.

    Args:
        count: Texts per source.
        max_target: Tokens of a text at most.
        top_k: Draw among the k likeliest tokens; 0 means all.
        top_p: Draw among the likeliest tokens that together have this probability.
        temperature: Below 1 prefers the likely ones.
    """

    count: int
    max_target: int
    top_k: int
    top_p: float
    temperature: float

    def draws(self, seed: int) -> Tensor:
        """(count, max_target) numbers in [0, 1): all the chance in one source's texts, whatever its neighbours."""
        own = torch.Generator().manual_seed(seed)
        return torch.rand(self.count, self.max_target, dtype=torch.float64, generator=own)

    def pick(self, scores: Tensor, draws: Tensor) -> Tensor:
        """One token per row of `scores` (rows, tokens), logits or log-probabilities, by its draw (rows,)."""
        best, tokens = scores.topk(min(self.top_k or scores.shape[1], scores.shape[1]))  # (rows, k), best first
        mass = (best.double() / self.temperature).softmax(-1)
        mass = mass.masked_fill(mass.cumsum(-1) - mass >= self.top_p, 0.0)
        edges = mass.cumsum(-1)
        places = (edges <= (draws * edges[:, -1])[:, None]).sum(-1)
        places = places.minimum((mass > 0).sum(-1) - 1)  # a draw just below 1 may round up to the last edge
        return tokens.gather(1, places[:, None]).squeeze(1)


class Seq2Seq(Protocol):
    """Whatever writes texts about a source. `fingerprint` stands for its weights and its tokenizer."""

    fingerprint: str
    device: str

    def tokenize(self, texts: Sequence[str], max_length: int | None = None) -> list[list[int]]: ...
    def sample(
        self, rows: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling
    ) -> list[list[list[int]]]: ...
    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]: ...


# ---- training


class Batches(Dataset[dict[str, Tensor]]):
    """Item i is batch i of tokenised pairs of similar length, as the arguments of a model's forward.

    Args:
        sources: Word pieces of every source.
        targets: Word pieces of every target, its end included.
        rates: Says how many pairs a batch has, how many epochs there are, and the seed of their order.
        pad: Fills up sources.
        start: First input of the decoder; None where the model derives its inputs from the labels.
        ignored: Pieces that nobody should learn to write.
        shared: So many targets of one source are read together, the source encoded once; `source_rows` (targets,) then
            says which row of `input_ids` each belongs to. 1 gives every target its own row, and no `source_rows`.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        rates: TrainConfig,
        *,
        pad: int,
        start: int | None = None,
        ignored: Collection[int] = (),
        shared: int = 1,
    ) -> None:
        self.sources, self.targets, self.pad, self.start, self.ignored = sources, targets, pad, start, ignored
        self.shared = shared
        by_source: dict[tuple[int, ...], list[int]] = {}
        for pair, source in enumerate(sources):
            by_source.setdefault(tuple(source), []).append(pair)
        self.groups = [pairs[i : i + shared] for pairs in by_source.values() for i in range(0, len(pairs), shared)]
        lengths = np.array([len(sources[group[0]]) for group in self.groups], dtype=np.int32)
        none, real = np.zeros(len(lengths), dtype=np.int32), np.zeros(len(lengths), dtype=np.int8)
        order = PairsConfig(real=1.0, seed=rates.seed)
        size = max(1, round(rates.batch_size * len(self.groups) / len(sources)))  # groups with batch_size pairs
        self.plan = plan_batches(none, real, lengths, order, batch_size=size, epochs=rates.epochs)

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        groups = [self.groups[group] for group in self.plan[item] if group >= 0]
        targets = [self.targets[pair] for group in groups for pair in group]
        ids, mask = pad_rows([self.sources[group[0]] for group in groups], self.pad)
        labels = [[IGNORED if piece in self.ignored else piece for piece in row] for row in targets]
        batch = {"input_ids": ids, "attention_mask": mask, "labels": pad_rows(labels, IGNORED)[0]}
        if self.start is not None:
            batch["decoder_input_ids"] = pad_rows([[self.start, *row[:-1]] for row in targets], self.pad)[0]
        if self.shared > 1:
            batch["source_rows"] = torch.tensor([row for row, group in enumerate(groups) for _ in group])
        return batch


def pad_rows(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """(rows, longest) ids filled up on the right, and the mask of what is real."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
    return ids, (torch.arange(longest) < torch.tensor([len(row) for row in rows])[:, None]).long()


def fit(model: nn.Module, batches: Batches, rates: TrainConfig, *, out: Path, key: str, device: str) -> None:
    """Train in place; `out` keeps checkpoints of the work that `key` stands for until `finish`, a rerun goes on there."""
    if _read(out / "KEY") != key:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        (out / "KEY").write_text(key)
    steps = len(batches)
    arguments = plan_arguments(rates, out, steps, device)
    trainer = PlanTrainer(model=model, args=arguments, train_dataset=batches, rates=rates)
    resume = last_checkpoint(out)
    log.info("%-10s a model that writes: %d pairs, %d steps", "training", len(batches.sources), steps)
    trainer.add_callback(Curve(trainer, out, rates, steps, None, resumed=resume))
    with quiet():
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    model.eval()


def is_complete(out: Path, key: str) -> bool:
    """Whether a model of exactly this work lies in the folder."""
    return _read(out / "COMPLETE") == key


def finish(out: Path, key: str) -> None:
    """Declare the model in the folder whole; what only a resumed training needs is removed."""
    (out / "COMPLETE").write_text(key)
    for path in [*(out / "training").glob("checkpoint-*")]:
        shutil.rmtree(path)


def _read(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


# ---- Hugging Face


@dataclass(frozen=True)
class FineTuneConfig:
    """How a Hugging Face generator is fine-tuned on the user's pairs.

    Args:
        max_source: Word pieces of a document that are read.
        max_target: Word pieces of a query.
        epochs: Passes over the pairs.
        batch_size: Pairs per step.
        learning_rate: Of all weights; rises over the first steps, then falls to 0.
        precision: auto takes bf16 on a GPU and on a CPU that has it, else fp32.
        checkpoint_minutes: A killed run loses at most about this much.
        seed: Same seed, same weights (on a CPU).
    """

    max_source: int = 512
    max_target: int = 64
    epochs: float = 3
    batch_size: int = 32
    learning_rate: float = 3e-4
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    checkpoint_minutes: float = 2.0
    seed: int = 0

    @property
    def rates(self) -> TrainConfig:
        """The same in the words of the trainer."""
        return TrainConfig(
            epochs=self.epochs,
            batch_size=self.batch_size,
            encoder_lr=self.learning_rate,
            decoder_lr=self.learning_rate,
            precision=self.precision,
            checkpoint_minutes=self.checkpoint_minutes,
            seed=self.seed,
        )


class HuggingFaceGenerator:
    """Any encoder-decoder model of transformers: docT5query, T5, BART."""

    def __init__(self, model: Any, tokenizer: Any, *, fingerprint: str) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.fingerprint = fingerprint
        self.device = str(model.device)

    @classmethod
    def load(cls, name: str | Path, *, device: str = "cpu") -> HuggingFaceGenerator:
        """Load a folder or a Hub name; in bf16 on a GPU. Weights in pickle files are not opened."""
        folder = fetch_encoder(name)
        model, tokenizer = _load(folder, torch.bfloat16 if device.startswith("cuda") else torch.float32)
        return cls(model.to(device), tokenizer, fingerprint=fingerprint(folder))

    @classmethod
    def fine_tune(
        cls,
        name: str | Path,
        pairs: Sequence[tuple[str, str]],
        *,
        out: Path,
        settings: FineTuneConfig | None = None,
        device: str = "cpu",
    ) -> HuggingFaceGenerator:
        """Train a model further on (document text, query) pairs, the paper's qg-ft; `out` is then a folder for `load`.

        A killed run goes on where it was; one that is complete, with the same pairs and settings, is loaded.
        """
        config = settings or FineTuneConfig()
        check_pairs(pairs)
        folder = fetch_encoder(name)
        key = work_key(config, fingerprint(folder), pairs)
        if not is_complete(out, key):
            torch.manual_seed(config.seed)
            model, tokenizer = _load(folder, torch.float32)
            texts = cls(model.to(device), tokenizer, fingerprint="")
            sources = texts.tokenize([source for source, _ in pairs], config.max_source)
            targets = texts.tokenize([target for _, target in pairs], config.max_target)
            batches = Batches(sources, targets, config.rates, pad=tokenizer.pad_token_id or 0)
            fit(model, batches, config.rates, out=out / "training", key=key, device=device)
            with quiet():
                model.save_pretrained(out)
                tokenizer.save_pretrained(out)
            finish(out, key)
        return cls.load(out, device=device)

    def tokenize(self, texts: Sequence[str], max_length: int | None = None) -> list[list[int]]:
        """Word pieces of sources."""
        # past this, tokenising a whole book to keep its first page costs more than the forward pass
        cut = [text[: 16 * max_length] if max_length else text for text in texts]
        options = {"truncation": True, "max_length": max_length} if max_length else {}
        return list(self.tokenizer(cut, return_attention_mask=False, **options)["input_ids"])

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Texts of generated pieces."""
        return [str(text).strip() for text in self.tokenizer.batch_decode(rows, skip_special_tokens=True)]

    @torch.inference_mode()
    def sample(self, rows: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling) -> list[list[list[int]]]:
        """Some random targets of every tokenised source, each source with its own seed, all in one batch."""
        ids, mask = (tensor.to(self.device) for tensor in pad_rows(rows, self.tokenizer.pad_token_id or 0))
        states = self.model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state  # (sources, pieces, d)
        draws = torch.cat([sampling.draws(seed) for seed in seeds]).to(self.device)
        settings = copy.deepcopy(self.model.generation_config)
        # the processor below does the sampling, so to transformers this is greedy search
        settings.update(do_sample=False, num_beams=1, max_new_tokens=sampling.max_target, max_length=None)
        settings.update(min_new_tokens=1)  # an empty text says nothing
        written = self.model.generate(
            encoder_outputs=BaseModelOutput(last_hidden_state=states.repeat_interleave(sampling.count, dim=0)),
            attention_mask=mask.repeat_interleave(sampling.count, dim=0),
            generation_config=settings,
            logits_processor=LogitsProcessorList([_Draw(draws, sampling)]),
        )[:, 1:].tolist()
        return [written[first : first + sampling.count] for first in range(0, len(written), sampling.count)]


class _Draw(LogitsProcessor):  # type: ignore[misc]
    """Leaves one token per row: the one that the row's own random number picks."""

    def __init__(self, draws: Tensor, sampling: Sampling) -> None:
        self.draws, self.sampling = draws, sampling

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens = self.sampling.pick(scores, self.draws[:, input_ids.shape[1] - 1])
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)


def check_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """Refuses to train on nothing."""
    if not pairs:
        raise DataError("there is nothing to train a generator on; give pairs of a document's text and a query")


def work_key(config: Any, weights: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Stands for a training: settings that change its result, the weights it begins with, and its pairs."""
    return content_key(1, replace(config, checkpoint_minutes=0.0), weights, [list(pair) for pair in pairs])


def _load(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    if not [*folder.glob("*.safetensors")] and [*folder.glob("*.bin")]:
        cure = "write them anew once, with save_pretrained of a recent transformers, and give that folder"
        raise MissingModelError(f"{folder} has its weights in a pickle file only, which is never opened; {cure}")
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = AutoModelForSeq2SeqLM.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, dtype=dtype
            )
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        expected = "expected an encoder-decoder model of Hugging Face with a tokenizer and model.safetensors"
        raise MissingModelError(f"no generator could be read from {folder}: {reason}; {expected}") from error
    return model, tokenizer
