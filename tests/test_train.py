"""Training: who learns at which rate, what is kept, and that a killed run ends with the same bits."""

from __future__ import annotations

import copy
import csv
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Hashable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import Workshop, environment, make_encoder, make_workshop, python
from torch.utils.data import SequentialSampler
from transformers import TrainingArguments

from nci import train as train_module
from nci.batches import EncoderStates
from nci.config import PairsConfig, TrainConfig
from nci.errors import NciError
from nci.pairs import Pair, write_plan
from nci.postings import Postings
from nci.train import PlanTrainer, last_checkpoint, train

CALM = {"alpha": 0.0, "max_grad_norm": 1e9, "weight_decay": 0.0}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory, encoder: Path) -> Workshop:
    return make_workshop(tmp_path_factory.mktemp("ready"), encoder)


@pytest.fixture
def workshop(ready: Workshop) -> Workshop:
    """A fresh copy of the untrained model, with the plan of all."""
    return Workshop(copy.deepcopy(ready.model), ready.plan, ready.leaf_of_document, ready.lexical, ready.config)


def run(workshop: Workshop, out: Path, dev: Any = None, **changes: Any) -> None:
    values = {"batch_size": 16, "decoder_lr": 2e-3, "precision": "fp32", **changes}
    train(
        workshop.model,
        workshop.plan,
        TrainConfig(**values),
        out,
        leaf_of_document=workshop.leaf_of_document,
        lexical=workshop.lexical,
        dev=dev,
    )


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def curve(out: Path) -> list[dict[str, str]]:
    with (out / "curve.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def loss_of(workshop: Workshop) -> float:
    workshop.model.eval()
    with torch.no_grad():
        losses = [float(workshop.model(**workshop.batch(number)).loss) for number in range(len(workshop.plan))]
    return float(np.mean(losses))


# Rates


def test_each_parameter_gets_its_own_rate_and_decay(workshop: Workshop, tmp_path: Path) -> None:
    rates = TrainConfig(encoder_lr=1e-5, decoder_lr=1e-3, weight_decay=0.1)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    trainer = PlanTrainer(model=workshop.model, args=arguments, rates=rates)
    names = {id(parameter): name for name, parameter in workshop.model.named_parameters()}
    seen = {}
    for group in trainer.create_optimizer().param_groups:
        for parameter in group["params"]:
            assert id(parameter) not in seen, "a parameter must be in one group only"
            seen[id(parameter)] = (group["lr"], group["weight_decay"], parameter.ndim)
    assert seen.keys() == names.keys()
    for key, (rate, decay, dimensions) in seen.items():
        assert rate == (1e-5 if names[key].startswith("encoder.") else 1e-3), names[key]
        assert decay == (0.1 if dimensions > 1 else 0.0), names[key]
    assert {rate for rate, _, _ in seen.values()} == {1e-5, 1e-3}


@pytest.mark.parametrize("still", ["encoder", "decoder"])
def test_a_rate_of_0_holds_one_half_still_and_the_other_learns(workshop: Workshop, tmp_path: Path, still: str) -> None:
    before = weights(workshop.model)
    rates = {"encoder_lr": 1e-3, "decoder_lr": 1e-3, f"{still}_lr": 0.0}
    run(workshop, tmp_path, **rates)
    moved = {name for name, value in workshop.model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved
    assert all(name.startswith("encoder.") == (still == "decoder") for name in moved)


def test_the_curve_shows_warmup_and_decay_of_the_decoder_s_rate(workshop: Workshop, tmp_path: Path) -> None:
    run(workshop, tmp_path, warmup=0.4, schedule="linear")
    rates = [float(row["learning_rate"]) for row in curve(tmp_path) if row["learning_rate"]]
    peak = int(np.argmax(rates))
    assert 0 < peak < len(rates) - 1
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert max(rates) <= 2e-3
    assert max(rates) > 1.5e-3


# Learning


def test_the_loss_falls(tmp_path: Path, encoder: Path) -> None:
    workshop = make_workshop(tmp_path, encoder, train={"epochs": 3}, model={"anchor": "none"})
    before = loss_of(workshop)
    run(workshop, tmp_path / "out", alpha=0.0)
    losses = [float(row["loss"]) for row in curve(tmp_path / "out") if row["loss"]]
    assert loss_of(workshop) < 0.8 * before
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    assert not workshop.model.training


def test_documents_without_a_query_are_no_negatives_of_real_queries(workshop: Workshop) -> None:
    """p(d | q) of a real query sums to 1 over the seen documents, of any other over all."""
    model, documents = workshop.model.eval(), len(workshop.leaf_of_document)
    seen = workshop.leaf_of_document[::2]  # those that `make_workshop` gives queries
    one = {name: value[:1] for name, value in workshop.batch(0).items() if name != "positions"}
    for closed in (True, False):
        rows = {name: value.expand(documents, *value.shape[1:]) for name, value in one.items()}
        rows |= {"documents": torch.arange(documents), "closed": torch.full((documents,), closed)}
        with torch.no_grad():
            chances = model(**rows).log_probs.exp()
        assert float(chances.sum() if not closed else chances[seen].sum()) == pytest.approx(1, abs=1e-4)
        assert (float(chances[seen].sum()) < 0.999) == (not closed)


class Repeated:
    """A recorder without a GPU: it runs what it is given, twice where a shape comes again, as recording one does."""

    def __init__(self) -> None:
        self.seen: Counter[Hashable] = Counter()

    def run(self, key: Hashable, function: Any, *inputs: torch.Tensor) -> Any:
        self.seen[key] += 1
        if self.seen[key] == 2:
            state = torch.get_rng_state()
            function(*inputs)
            torch.set_rng_state(state)
        return function(*inputs)


@pytest.mark.slow
def test_steps_that_can_be_recorded_train_the_same_weights(
    ready: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, recorded, recorder = copy.deepcopy(ready), copy.deepcopy(ready), Repeated()
    run(plain, tmp_path / "plain")
    monkeypatch.setattr(train_module, "PlanTrainer", lambda **given: PlanTrainer(**{**given, "recorder": recorder}))
    run(recorded, tmp_path / "recorded")
    assert sum(recorder.seen.values()) == len(plain.plan)
    assert max(recorder.seen.values()) > 1
    for name, value in weights(plain.model).items():
        assert torch.equal(value, recorded.model.state_dict()[name])


def test_a_batch_filled_up_to_a_multiple_says_the_same(workshop: Workshop) -> None:
    """A multiple of four tokens, but never more than the longest text has: that may be all that an encoder reads."""
    dataset, model, longest = workshop.dataset(multiple=4), workshop.model.eval(), int(workshop.plan.lengths.max())
    widths = {dataset[number]["input_ids"].shape[1] for number in range(len(dataset))}
    assert max(widths) == longest
    assert all(width % 4 == 0 or width == longest for width in widths)
    for number in range(3):
        batch = dataset[number]
        with torch.no_grad():
            losses = [float(model(**each).loss) for each in (batch, workshop.batch(number))]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_scores_added_up_on_the_device_are_those_of_the_items(workshop: Workshop) -> None:
    assert workshop.lexical is not None
    postings, dataset = Postings(workshop.lexical, "cpu"), workshop.dataset(words_only=True)
    for number in range(len(workshop.plan)):
        trainer, wanted = SimpleNamespace(postings=postings), workshop.batch(number)
        batch = PlanTrainer.with_scores(trainer, dataset[number])  # type: ignore[arg-type]
        assert set(batch) == set(wanted)
        torch.testing.assert_close(batch["lexical"], wanted["lexical"], atol=1e-6, rtol=1e-5)


def test_a_real_query_does_not_find_its_document_by_having_been_appended_to_it(workshop: Workshop) -> None:
    """Only the score of the own document changes; pieces of documents keep all of theirs."""
    plan, lexical = workshop.plan, workshop.lexical
    assert lexical is not None
    assert plan.own_lexical is not None
    for number in range(len(plan)):
        batch, pairs = workshop.batch(number), plan.rows(number)
        scores = lexical.score_columns([plan.pair_words(pair) for pair in pairs])
        rows, leaves = np.arange(len(pairs)), batch["documents"].numpy()
        real, before = plan.sources[pairs] == 0, scores[rows, leaves]
        scores[rows, leaves] = np.where(real, plan.own_lexical[pairs], before)
        assert (scores[rows, leaves] < before).tolist() == real.tolist()
        wanted = scores / scores.max(1, keepdims=True).clip(1e-12)
        np.testing.assert_allclose(batch["lexical"].numpy(), wanted, atol=1e-6)


def test_an_item_knows_how_long_its_ids_are(workshop: Workshop) -> None:
    """Ids longer than `positions` would lose digits, and shorter ones only cost time: it is exact."""
    for number in range(len(workshop.plan)):
        batch = workshop.batch(number)
        paths = workshop.model.tables.path_nodes[batch["documents"]]
        assert batch["positions"] == int((paths > 0).sum(1).max())
        with torch.no_grad():
            told, found = (
                workshop.model.eval()(**batch).log_probs,
                workshop.model(**{**batch, "positions": None}).log_probs,
            )
        assert torch.equal(told, found)


def test_which_pairs_are_real_reaches_the_model(workshop: Workshop) -> None:
    for number in range(len(workshop.plan)):
        real = workshop.plan.sources[workshop.plan.rows(number)] == 0
        assert workshop.batch(number)["closed"].tolist() == real.tolist()


@pytest.mark.slow
def test_the_same_seed_gives_the_same_weights_and_another_gives_others(ready: Workshop, tmp_path: Path) -> None:
    ends = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        shop = Workshop(copy.deepcopy(ready.model), ready.plan, ready.leaf_of_document, ready.lexical, ready.config)
        run(shop, tmp_path / name, seed=seed)
        ends.append(weights(shop.model))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert not all(torch.equal(ends[0][name], ends[2][name]) for name in ends[0])


def test_accumulated_batches_make_one_step(workshop: Workshop, tmp_path: Path) -> None:
    run(workshop, tmp_path, accumulation=4)
    assert max(int(row["step"]) for row in curve(tmp_path)) == len(workshop.plan) // 4


def test_more_accumulation_than_batches_is_still_one_step(workshop: Workshop, tmp_path: Path) -> None:
    before = weights(workshop.model)
    run(workshop, tmp_path, accumulation=1000, warmup=0.0)
    assert any(not torch.equal(value, before[name]) for name, value in workshop.model.state_dict().items())


def test_a_plan_without_batches_is_a_clear_error_or_changes_nothing(workshop: Workshop, tmp_path: Path) -> None:
    empty = write_plan(
        tmp_path / "plan",
        [Pair("apple", 0, 0)],
        lambda texts: [[2, 5, 3] for _ in texts],
        PairsConfig(real=1e-9, span_share=0),
        batch_size=4,
        epochs=1,
        words=lambda texts: [np.zeros(1, np.int32) for _ in texts],
    )
    assert len(empty) == 0
    before = weights(workshop.model)
    shop = Workshop(workshop.model, empty, workshop.leaf_of_document, workshop.lexical, workshop.config)
    try:
        run(shop, tmp_path / "out")
    except NciError:
        return
    assert all(torch.equal(value, before[name]) for name, value in workshop.model.state_dict().items())


# A frozen encoder


def test_a_frozen_encoder_stays_as_it_is_to_the_bit(workshop: Workshop, tmp_path: Path) -> None:
    before = weights(workshop.model)
    run(workshop, tmp_path, freeze_encoder=True)
    assert not any(parameter.requires_grad for parameter in workshop.model.encoder.parameters())
    after = workshop.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before if name.startswith("encoder."))
    assert any(not torch.equal(after[name], before[name]) for name in before if not name.startswith("encoder."))


def test_stored_states_are_those_of_the_encoder(workshop: Workshop, tmp_path: Path) -> None:
    workshop.model.eval()
    states = EncoderStates.build(workshop.model, workshop.plan, tmp_path / "states", tokens_per_batch=64)
    cached, plain = workshop.dataset(states=states), workshop.dataset()
    for number in range(len(workshop.plan)):
        with torch.no_grad():
            one, two = workshop.model(**cached[number]), workshop.model(**plain[number])
        assert torch.allclose(one.log_probs, two.log_probs, atol=2e-3)


@pytest.mark.slow
def test_training_on_stored_states_equals_training_on_a_still_encoder(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, encoder: Path
) -> None:
    ready = make_workshop(tmp_path_factory.mktemp("calm"), encoder, model={"dropout": 0.0})
    before = weights(ready.model)
    ends = []
    for name, changes in (("stored", {"freeze_encoder": True}), ("still", {"encoder_lr": 0.0})):
        shop = Workshop(copy.deepcopy(ready.model), ready.plan, ready.leaf_of_document, ready.lexical, ready.config)
        run(shop, tmp_path / name, decoder_lr=1e-3, **CALM, **changes)
        ends.append(weights(shop.model))
    for name, first in before.items():
        way = float((ends[1][name] - first).norm())
        apart = float((ends[0][name] - ends[1][name]).norm())
        assert apart <= 0.05 * way + 1e-6, f"{name}: moved by {way:.4f}, the two runs are {apart:.4f} apart"


def test_stored_states_are_made_once(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    EncoderStates.build(workshop.model, workshop.plan, tmp_path / "states")
    monkeypatch.setattr(workshop.model, "encode", lambda *_: pytest.fail("encoded again"))
    again = EncoderStates.build(workshop.model, workshop.plan, tmp_path / "states")
    assert again.states.shape == (int(workshop.plan.starts[-1]), 32)
    (tmp_path / "states" / "COMPLETE").unlink()  # torn: must be made again
    with pytest.raises(pytest.fail.Exception):
        EncoderStates.build(workshop.model, workshop.plan, tmp_path / "states")


def test_a_frozen_t5_encoder_trains_too(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "t5", kind="t5")
    shop = make_workshop(tmp_path, folder)
    run(shop, tmp_path / "out", freeze_encoder=True)
    assert (tmp_path / "out" / "TRAINED").exists()


# Selection on dev


class Scripted:
    """A search of dev with made-up results that remembers the weights it was asked with."""

    def __init__(self, *values: float) -> None:
        self.values, self.seen = list(values), list[dict[str, torch.Tensor]]()

    def __call__(self, model: Any) -> dict[str, float]:
        assert not model.training
        self.seen.append(weights(model))
        return {"R@1": self.values[len(self.seen) - 1], "R@10": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "best"),
    [((0.1, 0.7, 0.3, 0.2), 1), ((0.9, 0.1, 0.1, 0.1), 0), ((0.1, 0.2, 0.3, 0.4), 3), ((0.0, 0.0, 0.0, 0.0), 0)],
)
def test_the_state_that_searched_dev_best_is_kept(
    workshop: Workshop, tmp_path: Path, script: tuple[float, ...], best: int
) -> None:
    dev = Scripted(*script)
    run(workshop, tmp_path, dev, evaluations=4)
    assert len(dev.seen) == 4
    after = workshop.model.state_dict()
    assert all(torch.equal(after[name], dev.seen[best][name]) for name in after)
    if best != 3:
        assert not all(torch.equal(after[name], dev.seen[3][name]) for name in after), "the last state was taken"
    rows = [row for row in curve(tmp_path) if row["R@1"]]
    assert [float(row["R@1"]) for row in rows] == list(script)
    assert int(rows[-1]["step"]) == len(workshop.plan), "the last evaluation is of the last step"


def test_another_metric_decides_when_asked(workshop: Workshop, tmp_path: Path) -> None:
    seen: list[dict[str, torch.Tensor]] = []

    def dev(model: Any) -> dict[str, float]:
        seen.append(weights(model))
        return {"R@1": len(seen) / 10, "RR@100": 1 / len(seen)}

    run(workshop, tmp_path, dev, evaluations=3, metric="RR@100")
    assert all(torch.equal(value, seen[0][name]) for name, value in workshop.model.state_dict().items())


def test_without_dev_the_last_state_is_kept(workshop: Workshop, tmp_path: Path) -> None:
    run(workshop, tmp_path)
    kept = load_file(tmp_path / "best" / "model.safetensors")
    assert all(torch.equal(value, kept[name]) for name, value in workshop.model.state_dict().items() if name in kept)
    assert "R@1" not in curve(tmp_path)[0]


@pytest.mark.slow
def test_searching_dev_does_not_change_what_is_learned(ready: Workshop, tmp_path: Path) -> None:
    ends = []
    for name, dev in (("without", None), ("with", Scripted(0.1, 0.2, 0.3))):
        shop = Workshop(copy.deepcopy(ready.model), ready.plan, ready.leaf_of_document, ready.lexical, ready.config)
        run(shop, tmp_path / name, dev, evaluations=3)
        ends.append(weights(shop.model))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_finished_training_is_not_done_again(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = copy.deepcopy(workshop.model)
    run(workshop, tmp_path)
    monkeypatch.setattr(train_module, "PlanTrainer", lambda **_: pytest.fail("trained again"))
    other = Workshop(fresh, workshop.plan, workshop.leaf_of_document, workshop.lexical, workshop.config)
    run(other, tmp_path)
    after = workshop.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in fresh.state_dict().items())
    assert not fresh.training


# Resume within a process


class Killed(Exception):
    """Stands for a process that ends in the middle of a step."""


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Training ends with `Killed` at the step in this list, before the step is taken."""
    at: list[int] = []
    original = PlanTrainer.training_step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if at and self.state.global_step == at[0]:
            raise Killed
        return original(self, *args, **kwargs)

    monkeypatch.setattr(PlanTrainer, "training_step", step)
    return at


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def end_of(out: Path) -> str:
    assert (out / "TRAINED").exists()
    return sha256(out / "best" / "model.safetensors")


def fresh(ready: Workshop) -> Workshop:
    return Workshop(copy.deepcopy(ready.model), ready.plan, ready.leaf_of_document, ready.lexical, ready.config)


@pytest.fixture(scope="module")
def whole(ready: Workshop, tmp_path_factory: pytest.TempPathFactory) -> str:
    """How a training ends that nobody interrupts."""
    out = tmp_path_factory.mktemp("whole")
    run(fresh(ready), out)
    return end_of(out)


def interrupted(ready: Workshop, out: Path, killer: list[int], *stops: int, dev: Any = None, **changes: Any) -> None:
    for stop in stops:
        killer[:] = [stop]
        with pytest.raises(Killed):
            run(fresh(ready), out, dev, checkpoint_minutes=0, **changes)
        killer.clear()


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"accumulation": 2}, {"freeze_encoder": True}], ids=str)
def test_resumed_training_ends_with_the_same_bits(
    ready: Workshop, tmp_path: Path, killer: list[int], changes: dict[str, Any]
) -> None:
    run(fresh(ready), tmp_path / "whole", **changes)
    interrupted(ready, tmp_path / "broken", killer, 2, 5, **changes)
    run(fresh(ready), tmp_path / "broken", **changes)
    assert end_of(tmp_path / "broken") == end_of(tmp_path / "whole")


@pytest.mark.slow
def test_a_resume_at_the_wrong_batch_ends_with_other_bits(
    ready: Workshop, whole: str, tmp_path: Path, killer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison of the tests around this one would notice a plan that goes on one item too late."""

    class Late(SequentialSampler):
        def __iter__(self) -> Iterator[int]:
            return iter([*range(1, len(self.data_source)), 0])

    interrupted(ready, tmp_path / "broken", killer, 5)
    monkeypatch.setattr(PlanTrainer, "_get_train_sampler", lambda self, *_: Late(self.train_dataset))
    run(fresh(ready), tmp_path / "broken")
    assert end_of(tmp_path / "broken") != whole


@pytest.mark.slow
def test_a_resume_without_the_optimiser_s_state_ends_with_other_bits(
    ready: Workshop, whole: str, tmp_path: Path, killer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(ready, tmp_path / "broken", killer, 5)
    monkeypatch.setattr(PlanTrainer, "_load_optimizer_and_scheduler", lambda *_: None)
    run(fresh(ready), tmp_path / "broken")
    assert end_of(tmp_path / "broken") != whole


@pytest.mark.slow
def test_a_checkpoint_without_its_marker_is_ignored_and_removed(
    ready: Workshop, whole: str, tmp_path: Path, killer: list[int]
) -> None:
    out = tmp_path / "broken"
    interrupted(ready, out, killer, 5)
    assert last_checkpoint(out) == out / "checkpoint-5"
    torn = out / "checkpoint-9"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half")
    (out / "checkpoint-5" / "COMPLETE").unlink()
    assert last_checkpoint(out) == out / "checkpoint-4"
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-4"]
    run(fresh(ready), out)
    assert end_of(out) == whole


def test_no_complete_checkpoint_means_a_new_start(ready: Workshop, whole: str, tmp_path: Path) -> None:
    out = tmp_path / "broken"
    (out / "checkpoint-3").mkdir(parents=True)
    assert last_checkpoint(out) is None
    assert not (out / "checkpoint-3").exists()
    run(fresh(ready), out)
    assert end_of(out) == whole


def test_checkpoints_are_ordered_by_number_and_few(ready: Workshop, tmp_path: Path, killer: list[int]) -> None:
    interrupted(ready, tmp_path, killer, 11)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-11"]
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-11"


@pytest.mark.slow
def test_a_resumed_curve_has_each_step_once_and_dev_s_choice_is_the_same(
    ready: Workshop, tmp_path: Path, killer: list[int]
) -> None:
    def dev(model: Any) -> dict[str, float]:
        total = float(sum(value.double().sum() for name, value in model.state_dict().items()))
        return {"R@1": abs(total * 1e3) % 1, "R@10": 1.0}  # any function of the weights

    run(fresh(ready), tmp_path / "whole", dev, evaluations=5)
    interrupted(ready, tmp_path / "broken", killer, 4, 7, dev=dev, evaluations=5)
    kept = shutil.copytree(tmp_path / "broken" / "checkpoint-7", tmp_path / "kept")
    interrupted(ready, tmp_path / "broken", killer, 13, dev=dev, evaluations=5)
    for path in (tmp_path / "broken").glob("checkpoint-*"):  # so that much of the curve is done again
        shutil.rmtree(path)
    shutil.copytree(kept, tmp_path / "broken" / "checkpoint-7")
    run(fresh(ready), tmp_path / "broken", dev, evaluations=5)
    whole, broken = curve(tmp_path / "whole"), curve(tmp_path / "broken")
    steps = [int(row["step"]) for row in broken]
    assert steps == sorted(set(steps)) == [int(row["step"]) for row in whole]
    for one, two in zip(whole, broken, strict=True):
        assert one.keys() == two.keys()
        for name in one.keys() - {"seconds", "loss"}:
            assert one[name] == two[name], f"step {one['step']}: {name}"
        if one["loss"]:
            assert float(one["loss"]) == pytest.approx(float(two["loss"]), abs=1e-3)
    assert end_of(tmp_path / "broken") == end_of(tmp_path / "whole")


def test_time_does_not_run_backwards_in_a_resumed_curve(
    ready: Workshop, tmp_path: Path, killer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter(range(10**6))
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)), sleep=time.sleep)
    monkeypatch.setattr(train_module, "time", clock)
    interrupted(ready, tmp_path, killer, 8)
    run(fresh(ready), tmp_path)
    seconds = [float(row["seconds"]) for row in curve(tmp_path)]
    assert seconds == sorted(seconds)


def test_the_curve_is_well_formed(workshop: Workshop, tmp_path: Path) -> None:
    run(workshop, tmp_path, Scripted(0.5, 0.6), evaluations=2)
    rows = curve(tmp_path)
    assert list(rows[0]) == ["step", "seconds", "loss", "learning_rate", "R@1", "R@10"]
    steps = [int(row["step"]) for row in rows]
    assert steps == sorted(set(steps))
    assert steps[-1] == len(workshop.plan)
    assert all(float(row["loss"]) > 0 for row in rows if row["loss"])
    assert sum(bool(row["R@1"]) for row in rows) == 2
    assert not list(tmp_path.glob("*.tmp"))


# Resume of killed processes

SCRIPT = """
import os, sys
from pathlib import Path
import torch
from tiny import make_workshop
from nci.config import TrainConfig
from nci.train import train

torch.set_num_threads(1)
encoder, out, plan_folder = map(Path, sys.argv[1:])
# Under torchrun every process makes the same plan; they must not write into one folder at the same time.
plan_folder = plan_folder / os.environ.get("RANK", "0")
shop = make_workshop(plan_folder, encoder)

def dev(model):
    total = float(sum(value.double().sum() for value in model.state_dict().values()))
    return {"R@1": abs(total * 1e3) % 1}

config = TrainConfig(batch_size=16, decoder_lr=2e-3, precision="fp32", checkpoint_minutes=0, evaluations=3)
train(shop.model, shop.plan, config, out, leaf_of_document=shop.leaf_of_document, lexical=shop.lexical, dev=dev)
"""
SLOWED = """
import time
from nci.batches import EncoderStates
from nci.postings import Postings
from nci.train import PlanTrainer
step = PlanTrainer.training_step

def slow(self, *args, **kwargs):
    time.sleep(0.15)  # time enough for the test to see a checkpoint and to kill
    return step(self, *args, **kwargs)

PlanTrainer.training_step = slow
"""


def command(folder: Path, out: str, encoder: Path, *, slow: bool, processes: int) -> list[str]:
    script = folder / ("slow.py" if slow else "plain.py")
    script.write_text(SLOWED + SCRIPT if slow else SCRIPT)
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    arguments = [str(script), str(encoder), str(folder / out), str(folder / f"plan-{out}")]
    return [*(several if processes > 1 else []), *arguments]


def killed_and_resumed(folder: Path, encoder: Path, processes: int) -> None:
    whole = python(*command(folder, "whole", encoder, slow=False, processes=processes))
    assert whole.returncode == 0, whole.stderr[-2000:]
    out = folder / "broken"
    arguments = command(folder, "broken", encoder, slow=True, processes=processes)
    child = subprocess.Popen(
        [sys.executable, *arguments], env=environment(), start_new_session=True, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 120
        while not list(out.glob("checkpoint-*/COMPLETE")):
            assert child.poll() is None, "the training ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.killpg(child.pid, signal.SIGKILL)  # its own session: nobody else's
        child.wait()
    assert not (out / "TRAINED").exists(), "killed too late"
    left = [path for path in out.glob("checkpoint-*") if (path / "COMPLETE").exists()]
    assert left
    resumed = python(*command(folder, "broken", encoder, slow=False, processes=processes))
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    assert end_of(out) == end_of(folder / "whole")
    assert (out / "best" / "best.json").read_text() == (folder / "whole" / "best" / "best.json").read_text()
    steps = [int(row["step"]) for row in curve(out)]
    assert steps == sorted(set(steps)) == [int(row["step"]) for row in curve(folder / "whole")]


@pytest.mark.slow
def test_a_killed_process_goes_on_and_ends_with_the_same_bits(tmp_path: Path, encoder: Path) -> None:
    killed_and_resumed(tmp_path, encoder, 1)


@pytest.mark.slow
def test_two_killed_processes_go_on_and_end_with_the_same_bits(tmp_path: Path, encoder: Path) -> None:
    killed_and_resumed(tmp_path, encoder, 2)
