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
from torch.utils.data import SequentialSampler
from tqdm import tqdm
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from nci.batches import EncoderStates, PlanDataset
from nci.config import TrainConfig
from nci.graphs import Recorder
from nci.lexical import LexicalScores
from nci.model import NCIModel
from nci.pairs import BatchPlan
from nci.postings import Postings
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
    arguments = plan_arguments(config, out, steps, device, tensorboard=config.tensorboard)
    on_gpu = device.startswith("cuda")
    alone = "LOCAL_RANK" not in os.environ  # torchrun wraps the model, even for one process
    dataset = PlanDataset(
        plan,
        leaf_of_document,
        pad=model.config.encoder.get("pad_token_id") or 0,
        depths=model.tables.trie.depth[model.tables.trie.leaves],
        lexical=lexical,
        words_only=on_gpu,
        states=states,
        multiple=8 if on_gpu else 1,
    )
    trainer = PlanTrainer(
        model=model,
        args=arguments,
        train_dataset=dataset,
        rates=config,
        postings=Postings(lexical, device) if lexical is not None and on_gpu else None,
        recorder=Recorder(device, most=256) if on_gpu and config.accumulation == 1 and alone else None,
    )
    resume = last_checkpoint(out)
    if resume is not None:
        log.info("%-10s going on at step %s of %d", "train", resume.name.split("-")[1], steps)
    trainer.add_callback(Curve(trainer, out, config, steps, dev, resumed=resume))
    with quiet():
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    trainer.recorder, trainer.gradients = None, []  # their memory is wanted, and trainer and callback hold each other
    if trainer.is_world_process_zero():
        if not (out / "best").exists():
            _keep_best(model, out, step=steps, metrics={})
        (out / "TRAINED").write_text(json.dumps({"steps": steps}))
    if world > 1:
        torch.distributed.barrier()
    _restore_best(model, out)


def plan_arguments(
    rates: TrainConfig, out: Path, steps: int, device: str, *, tensorboard: bool = False
) -> TrainingArguments:
    """Arguments of a Trainer whose items are whole batches."""
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=1,  # one item of the plan is one batch
        gradient_accumulation_steps=rates.accumulation,
        lr_scheduler_type=_SCHEDULES[rates.schedule],
        warmup_steps=round(rates.warmup * steps),
        learning_rate=rates.decoder_lr,
        weight_decay=rates.weight_decay,
        max_grad_norm=rates.max_grad_norm,
        bf16=uses_bf16(rates.precision, device),
        use_cpu=device == "cpu",
        seed=rates.seed,
        logging_steps=max(1, steps // 50),
        logging_nan_inf_filter=False,  # it would wait for the device in every step
        save_strategy="no",
        save_total_limit=2,
        remove_unused_columns=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=device.startswith("cuda"),
        accelerator_config={"non_blocking": device.startswith("cuda")},
        disable_tqdm=True,  # its own bar prints raw logs; Curve draws ours
        report_to=["tensorboard"] if tensorboard else [],
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        average_tokens_across_devices=False,
    )
    # several GPUs in one process would each want an item of the plan; torchrun gives them one each
    arguments._n_gpu = 1
    return arguments


def last_checkpoint(out: Path) -> Path | None:
    """The newest checkpoint whose marker was written; what is left of a torn one is removed."""
    found = sorted(out.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    complete = [path for path in found if (path / "COMPLETE").exists()]
    if int(os.environ.get("RANK", "0")) == 0:
        for path in found:
            if path not in complete:
                shutil.rmtree(path)
    return complete[-1] if complete else None


def _only(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    (item,) = items
    return item


class PlanTrainer(Trainer):  # type: ignore[misc]
    """Reads the plan in order and gives the encoder its own learning rate.

    Args:
        postings: Adds up the lexical scores of a batch on the device, where the items name words only.
        recorder: Runs a step as one CUDA graph per shape: it has more than a thousand kernels, and each takes the host longer
            to begin than a GPU to run. For one process that does not accumulate.
    """

    def __init__(
        self,
        *args: Any,
        rates: TrainConfig,
        postings: Postings | None = None,
        recorder: Recorder | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, data_collator=_only, **kwargs)
        self.rates, self.postings, self.recorder = rates, postings, recorder
        self.gradients: list[tuple[nn.Parameter, Tensor]] = []
        self.model_accepts_loss_kwargs = False  # each batch counts as one, whatever its number of pairs
        self.remove_callback(PrinterCallback)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return self.with_scores(super()._prepare_inputs(inputs))

    def with_scores(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with its lexical scores in place of its words."""
        if self.postings is not None:
            words, counts, total = (batch.pop(name) for name in ("words", "word_counts", "postings"))
            own = batch.pop("own_lexical", None)
            batch["lexical"] = self.postings.add(words, counts, total, own=own, documents=batch["documents"])
        return batch

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *more: Any, **options: Any) -> Tensor:
        """Forward and backward; with a recorder into gradients that stay where they are, as a recording must."""
        if self.recorder is None:
            return cast(Tensor, super().training_step(model, inputs, *more, **options))
        model.train()
        if not self.gradients:
            self.gradients = [(each, torch.zeros_like(each)) for each in model.parameters() if each.requires_grad]
        for parameter, gradient in self.gradients:
            parameter.grad = gradient  # the Trainer takes it away after every step
        batch = self._prepare_inputs(inputs)
        tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        fixed = {name: value for name, value in batch.items() if name not in tensors}

        def step(*values: Tensor) -> tuple[Tensor]:
            torch._foreach_zero_([gradient for _, gradient in self.gradients])
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, {**fixed, **dict(zip(tensors, values, strict=True))})
            loss.backward()
            return (loss.detach(),)

        shapes = tuple((name, value.shape, value.dtype) for name, value in tensors.items())
        (loss,) = self.recorder.run((shapes, *fixed.items()), step, *tensors.values())
        return loss.clone()

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
