"""The benchmark of training: a whole run at a tiny size, operations counted beside a formula, mistakes in one line."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.profiler import ProfilerActivity, profile

from nci.bench import roofline
from nci.bench.shapes import SHAPES
from nci.config import TrainConfig
from nci.pairs import SOURCES
from nci.train import PlanTrainer

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "training.py"
TINY = {"encoder_layers": 2, "decoder_layers": 1, "width": 32, "heads": 2, "d_ff": 64, "encoder_heads": 2}


@pytest.fixture(scope="module")
def training() -> Any:
    spec = importlib.util.spec_from_file_location("bench_training", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tiny(training: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Both kinds of encoder, small, and a small measurement of the peak."""
    for name in ("minilm", "base"):
        monkeypatch.setitem(SHAPES, name, replace(SHAPES[name], **TINY))  # type: ignore[arg-type]
    monkeypatch.setattr(roofline, "CPU_SIZES", (384,))
    monkeypatch.setattr(roofline, "CPU_COPY", 2**22)
    return training


@pytest.mark.slow
def test_a_run_writes_sane_numbers(tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    options = ["--shapes", "minilm,base", "--documents", "40,90", "--steps", "10", "--batch", "4", "--device", "cpu"]
    tiny.main([*options, "--json", str(out)])
    written = json.loads(out.read_text())
    assert (written["batch"], written["steps"]) == (4, 10)
    assert [(row["shape"], row["documents"]) for row in written["rows"]] == [
        ("minilm", 40), ("base", 40), ("minilm", 90), ("base", 90),
    ]  # fmt: skip
    for row in written["rows"]:
        assert 0 < row["roofline"] < 1
        assert (row["mode"], row["recordings"], row["late"], row["outside"]) == ("eager", 0, 0, None)
        assert row["pairs_per_second"] == pytest.approx(4 * row["steps_per_second"])
        assert row["tflops"] == pytest.approx(row["tflop_per_step"] * row["steps_per_second"])
        assert row["roofline"] >= row["tflops"] / row["peak_tflops"] * 0.999
    last = capsys.readouterr().out.split("\n\n")[-1].splitlines()
    assert [line.split()[0] for line in last[2:6]] == ["minilm", "base", "minilm", "base"]
    assert "padding included" in last[6]
    assert list(tmp_path.iterdir()) == [out]


def test_pairs_are_like_queries_and_pieces(training: Any, tmp_path: Path) -> None:
    data = training.random_data(tmp_path, 50, pairs=20 * 32, batch=32)
    plan, lengths = data.plan, np.asarray(data.plan.lengths)
    pieces = np.asarray(plan.sources) == SOURCES.index("span")
    assert plan.batches.shape == (20, 32)
    assert sorted(np.asarray(plan.batches).ravel().tolist()) == list(range(640))  # each pair once
    assert set(lengths[pieces]) == {64}
    assert 0.1 < pieces.mean() < 0.3
    assert set(lengths[~pieces]) == set(range(8, 25))
    assert np.asarray(plan.tokens).min() >= 2  # none is padding
    batch = training.PlanDataset(
        plan, np.arange(50), pad=0, depths=data.trie.depth[data.trie.leaves], lexical=data.lexical
    )[0]
    assert batch["lexical"].shape == (32, 50)
    assert (batch["lexical"].amax(1) == 1).all()  # words of queries occur in documents


def test_operations_are_those_of_every_shape(tiny: Any, tmp_path: Path) -> None:
    """What a longer row costs more, to the last operation."""
    data = tiny.random_data(tmp_path, 40, pairs=40, batch=4)
    model, clock = tiny.random_model(data, SHAPES["minilm"]), tiny.Clock([10], "cpu")
    config = TrainConfig(batch_size=4, epochs=1)
    trainer = tiny.train_watched(model, data, config, tmp_path / "out", clock, device="cpu", eager=False)
    assert type(trainer) is PlanTrainer
    assert list(clock.times) == [10]
    longest = np.array([int(data.plan.lengths[data.plan.rows(batch)].max()) for batch in range(10)])
    short, long = int(longest.argmin()), int(longest.argmax())
    assert longest[short] < 20 < longest[long]
    counted = [tiny.mean_flops(trainer, [batch]) for batch in (short, long)]
    linear = [module for module in model.encoder.encoder.modules() if isinstance(module, torch.nn.Linear)]
    cross = 2 * 32 * 32  # keys and values of the decoder's one layer
    tokens = longest[long] - longest[short]
    products = tokens * (sum(module.weight.numel() for module in linear) + cross)
    attended = TINY["encoder_layers"] * (longest[long] ** 2 - longest[short] ** 2) + data.trie.positions * tokens
    # forward and two products backward, two operations per multiply-add, four rows; attention is two products
    assert counted[1] - counted[0] == 3 * 2 * 4 * (products + 2 * 32 * attended)
    both = tiny.mean_flops(trainer, [short, long, long])
    assert both == pytest.approx((counted[0] + 2 * counted[1]) / 3)


@pytest.mark.slow
def test_a_profile_trains_again(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last steps only. Here of the CPU: no kernel is found, so that all of a step counts as spent outside the device."""
    profiler = profile(activities=[ProfilerActivity.CPU])
    monkeypatch.setattr(tiny, "profile", lambda activities: profiler)
    data = tiny.random_data(tmp_path, 40, pairs=40, batch=4)
    config, peaks = TrainConfig(batch_size=4, epochs=1), roofline.Peaks(1e12, 1e12)
    row = tiny.measure(data, SHAPES["minilm"], config, peaks, tmp_path / "out", device="cpu", profiled=True)
    assert {path.parent.name for path in tmp_path.glob("out/*/TRAINED")} == {"timed", "profiled"}
    assert (row.host_share, row.kernels) == (1.0, ())
    assert row.outside > 0
    assert [e.count for e in profiler.key_averages() if e.key.startswith("Optimizer.step")] == [6]


def test_kernels_are_added_up_by_name(training: Any) -> None:
    def event(name: str, microseconds: float, kind: Any = DeviceType.CUDA, **more: Any) -> Any:
        place: dict[str, Any] = {"thread": 0, "start_us": 0, "stack": [], "use_device": "cuda"}
        return make(0, name, end_us=microseconds, device_type=kind, **place, **more)

    make: Any = FunctionEvent
    ran = [event("gemm", 100.0), event("copy", 500.0), event("gemm", 700.0)]
    others = [event("step", 9000.0, is_user_annotation=True), event("launch", 9000.0, DeviceType.CPU)]
    events: Any = EventList([*ran, *others], use_device="cuda")  # type: ignore[no-untyped-call]
    events._build_tree()
    found = training.kernel_seconds(events.key_averages(), steps=2)
    assert found == [("gemm", pytest.approx(4e-4)), ("copy", pytest.approx(2.5e-4))]


def test_the_table_shows_what_was_recorded_late(training: Any) -> None:
    row = training.Row("base", 2000, "recorded", 51200.0, 100.0, 1.5, 150.0, 600.0, 0.25, 10, 9, 0, 0.002, 0.2)
    assert "recorded while" not in training.table([row])
    text = training.table([row, replace(row, shape="large", late=3)])
    assert "3 on large with 2,000 documents" in text
    assert text.splitlines()[2].split() == [
        "base", "recorded", "2,000", "51,200", "100", "1.5", "150", "600", "25.0", "%", "2.00", "(20", "%)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shapes", "minilm,huge"], "no shape 'huge', but minilm, small, base, large"),
        (["--documents", "10,x"], "--documents is a list of whole numbers"),
        (["--documents", "0"], "--documents is a list of whole numbers"),
        (["--steps", "3"], "--steps is at least 10, not 3"),
        (["--batch", "0"], "--batch is at least 1, not 0"),
        (["--profile"], "--profile adds up the kernels of a GPU"),
        (["--json", "nowhere/out.json"], "there is no folder nowhere"),
    ],
)
def test_a_mistake_is_one_line(training: Any, options: list[str], words: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        training.main([*options, "--device", "cpu"])
    assert words in str(stopped.value)
    assert len(str(stopped.value).splitlines()) == 1
