"""Batch plan + model -> trained model: Hugging Face's Trainer with two learning rates, exact resume, selection on dev.

Writes into its folder: `checkpoint-N` while it runs (each counts only with its COMPLETE marker), `best/` (the weights that
searched `dev` best), `curve.csv`, and `TRAINED` at the very end. A killed run goes on from its last complete checkpoint
and ends with the same bits as one that was never interrupted, also under torchrun. Knows no index.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from tqdm import tqdm
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from nci.config import TrainConfig
from nci.lexical import LexicalScores
from nci.model import NCIModel
from nci.pairs import SOURCES, BatchPlan
from nci.progress import hide_bars
from nci.runtime import quiet, uses_bf16

log = logging.getLogger("nci")

DevSearch = Callable[[NCIModel], dict[str, float]]
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}


def train(
    model: NCIModel,
    plan: BatchPlan,
    config: TrainConfig,
    out: Path,
    *,
    leaf_of_document: NDArray[np.integer],
    lexical: LexicalScores | None = None,
    dev: DevSearch | None = None,
    device: str = "cpu",
) -> None:
    """Train `model` in place and leave its best state in it.

    Args:
        leaf_of_document: The plan counts documents as the corpus does, the model in leaf order.
        lexical: Lexical scores in leaf order, where the model's content score has them.
        dev: Searches held-out queries and returns metrics; the state that is best at `config.metric` is kept.
    """
    out.mkdir(parents=True, exist_ok=True)
    model.config.alpha, model.config.tau = config.alpha, config.tau
    model.config.use_cache = False  # as the Trainer leaves it, so that a resumed run stores the same bytes
    if (out / "TRAINED").exists():
        _restore_best(model, out)
        return
    model.to(device)  # type: ignore[arg-type]
    model.encoder.requires_grad_(not config.freeze_encoder)
    if config.freeze_embeddings:
        cast(Any, model.encoder).get_input_embeddings().requires_grad_(False)
    states = EncoderStates.build(model, plan, out / "states") if config.freeze_encoder else None
    world = int(os.environ.get("WORLD_SIZE", "1"))
    steps = max(1, len(plan) // (config.accumulation * world))
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=1,  # one item of the plan is one batch
        gradient_accumulation_steps=config.accumulation,
        lr_scheduler_type=_SCHEDULES[config.schedule],
        warmup_steps=round(config.warmup * steps),
        learning_rate=config.decoder_lr,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        bf16=uses_bf16(config.precision, device),
        use_cpu=device == "cpu",
        seed=config.seed,
        logging_steps=max(1, steps // 50),
        save_strategy="no",
        save_total_limit=2,
        remove_unused_columns=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=device.startswith("cuda"),
        disable_tqdm=True,  # its own bar prints raw logs; Curve draws ours
        report_to=["tensorboard"] if config.tensorboard else [],
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        average_tokens_across_devices=False,
    )
    arguments._n_gpu = (
        1  # several GPUs in one process would each want an item of the plan; torchrun gives them one each
    )
    dataset = PlanDataset(
        plan, leaf_of_document, pad=model.config.encoder.get("pad_token_id") or 0, lexical=lexical, states=states
    )
    trainer = PlanTrainer(model=model, args=arguments, train_dataset=dataset, data_collator=_only, rates=config)
    trainer.remove_callback(PrinterCallback)
    resume = last_checkpoint(out)
    if resume is not None:
        log.info("%-10s going on at step %s of %d", "train", resume.name.split("-")[1], steps)
    trainer.add_callback(Curve(trainer, out, config, steps, dev, resumed=resume))
    with quiet():
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    if trainer.is_world_process_zero():
        if not (out / "best").exists():
            _keep_best(model, out, step=steps, metrics={})
        (out / "TRAINED").write_text(json.dumps({"steps": steps}))
    if world > 1:
        torch.distributed.barrier()
    _restore_best(model, out)


def last_checkpoint(out: Path) -> Path | None:
    """The newest checkpoint whose marker was written; what is left of a torn one is removed."""
    found = sorted(out.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    complete = [path for path in found if (path / "COMPLETE").exists()]
    if int(os.environ.get("RANK", "0")) == 0:
        for path in found:
            if path not in complete:
                shutil.rmtree(path)
    return complete[-1] if complete else None


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
                ids, mask = _padded([plan.pair_tokens(p) for p in pairs], model.config.encoder.get("pad_token_id") or 0)
                hidden, pooled = model.encode(ids.to(model.device), mask.to(model.device))
                for row, pair in enumerate(pairs):
                    span = slice(plan.starts[pair], plan.starts[pair + 1])
                    states[span] = hidden[row, : int(plan.lengths[pair])].cpu().half().numpy()
                vectors[pairs] = pooled.cpu().numpy()
                start += size
                bar.update(len(pairs))
        states.flush()
        vectors.flush()
        (folder / "COMPLETE").touch()
        return cls(folder)


class PlanDataset(Dataset[dict[str, Tensor]]):
    """Item i is batch i of the plan, as the arguments of the model's forward."""

    def __init__(
        self,
        plan: BatchPlan,
        leaf_of_document: NDArray[np.integer],
        *,
        pad: int,
        lexical: LexicalScores | None,
        states: EncoderStates | None,
    ) -> None:
        self.plan, self.leaf_of_document, self.pad = plan, leaf_of_document, pad
        self.lexical, self.states = lexical, states

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        plan, pairs = self.plan, self.plan.rows(item)
        batch = {"documents": torch.as_tensor(self.leaf_of_document[plan.documents[pairs]]).long()}
        ids, batch["attention_mask"] = _padded([plan.pair_tokens(p) for p in pairs], self.pad)
        batch["closed"] = torch.as_tensor(np.asarray(plan.sources[pairs]) == SOURCES.index("real"))
        if self.states is None:
            batch["input_ids"] = ids
        else:
            hidden = torch.zeros(*ids.shape, self.states.states.shape[1])
            for row, pair in enumerate(pairs):
                span = slice(plan.starts[pair], plan.starts[pair + 1])
                hidden[row, : int(plan.lengths[pair])] = torch.as_tensor(np.array(self.states.states[span])).float()
            batch["encoder_states"] = hidden
            batch["query_vectors"] = torch.as_tensor(np.array(self.states.vectors[pairs]))
        if plan.vectors is not None:
            batch["query_vectors"] = torch.as_tensor(np.array(plan.vectors[pairs]))
        if self.lexical is not None:
            batch["lexical"] = torch.as_tensor(self.lexical.normalised_columns([plan.pair_words(p) for p in pairs]))
        return batch


def _padded(rows: list[NDArray[np.int32]], pad: int) -> tuple[Tensor, Tensor]:
    """(batch, tokens) ids and mask."""
    ids = torch.full((len(rows), max(map(len, rows))), pad)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
        mask[number, : len(row)] = 1
    return ids, mask


def _only(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    (item,) = items
    return item


class PlanTrainer(Trainer):  # type: ignore[misc]
    """Reads the plan in order and gives the encoder its own learning rate."""

    def __init__(self, *args: Any, rates: TrainConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rates = rates
        self.model_accepts_loss_kwargs = False  # each batch counts as one, whatever its number of pairs

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if getattr(self, "optimizer", None) is None:
            groups: dict[tuple[float, float], list[nn.Parameter]] = {}
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    rate = self.rates.encoder_lr if name.startswith("encoder.") else self.rates.decoder_lr
                    decay = self.rates.weight_decay if parameter.ndim > 1 else 0.0
                    groups.setdefault((rate, decay), []).append(parameter)
            self.optimizer = torch.optim.AdamW(
                [{"params": p, "lr": rate, "weight_decay": decay} for (rate, decay), p in groups.items()],
                betas=(0.9, 0.98),
                fused=True,
            )
        return self.optimizer


class Curve(TrainerCallback):  # type: ignore[misc]
    """Writes the learning curve, searches dev, keeps the best weights, and decides when to write a checkpoint."""

    def __init__(
        self,
        trainer: Trainer,
        out: Path,
        config: TrainConfig,
        steps: int,
        dev: DevSearch | None,
        *,
        resumed: Path | None,
    ) -> None:
        self.trainer, self.out, self.config, self.dev = trainer, out, config, dev
        count = config.evaluations if dev is not None else 0
        self.moments = {max(1, round(steps * (i + 1) / count)) for i in range(count)}
        self.started = self.saved = time.monotonic()
        self.rows: list[dict[str, Any]] = []
        self.bar: tqdm[Any] | None = None
        done = int(resumed.name.split("-")[1]) if resumed else 0
        if (out / "curve.csv").exists():
            with (out / "curve.csv").open(newline="") as stream:
                self.rows = [row for row in csv.DictReader(stream) if int(row["step"]) <= done]
            self.started -= max((float(row["seconds"]) for row in self.rows), default=0.0)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        if state.is_world_process_zero and "loss" in logs:
            if self.bar is not None:
                self.bar.set_postfix(loss=f"{float(logs['loss']):.3f}")
            self._add(state.global_step, {"loss": logs["loss"], "learning_rate": logs.get("learning_rate")})

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step in self.moments and state.is_world_process_zero and self.dev is not None:
            model = self.trainer.accelerator.unwrap_model(self.trainer.model)
            model.eval()
            metrics = self.dev(model)
            model.train()
            self._add(state.global_step, metrics)
            best = _best(self.out)
            if best is None or metrics[self.config.metric] > best["metrics"].get(self.config.metric, -1.0):
                _keep_best(model, self.out, step=state.global_step, metrics=metrics)
        if self.bar is not None:
            self.bar.update()
        due = time.monotonic() - self.saved >= 60 * self.config.checkpoint_minutes
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            flag = torch.tensor([float(due)], device=args.device)
            torch.distributed.broadcast(flag, src=0)
            due = bool(flag.item())
        control.should_save = due and state.global_step < state.max_steps

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()  # every process writes its own random state
        self.saved = time.monotonic()
        if state.is_world_process_zero:
            folder = self.out / f"checkpoint-{state.global_step}"
            for path in folder.rglob("*"):
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
            (folder / "COMPLETE").touch()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        hidden = hide_bars(bool(state.is_world_process_zero))
        self.bar = tqdm(desc="train", total=state.max_steps, initial=state.global_step, unit="step", disable=hidden)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.bar is not None:
            self.bar.close()

    def _add(self, step: int, values: dict[str, Any]) -> None:
        seconds = round(time.monotonic() - self.started, 1)
        same = self.rows and int(self.rows[-1]["step"]) == step
        row = self.rows.pop() if same else {"step": step, "seconds": seconds}
        self.rows.append(row | values)
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        temporary = self.out / "curve.csv.tmp"
        with temporary.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, names)
            writer.writeheader()
            writer.writerows(self.rows)
        temporary.replace(self.out / "curve.csv")


def _best(out: Path) -> dict[str, Any] | None:
    path = out / "best" / "best.json"
    return json.loads(path.read_text()) if path.exists() else None


def _keep_best(model: NCIModel, out: Path, *, step: int, metrics: dict[str, float]) -> None:
    staging = out / "best.tmp"
    shutil.rmtree(staging, ignore_errors=True)
    with quiet():
        model.save_pretrained(staging)
    (staging / "best.json").write_text(json.dumps({"step": step, "metrics": metrics}))
    shutil.rmtree(out / "best", ignore_errors=True)
    staging.rename(out / "best")


def _restore_best(model: NCIModel, out: Path) -> None:
    load_model(model, out / "best" / "model.safetensors", strict=True)  # knows that T5 stores shared weights once
    model.eval()
