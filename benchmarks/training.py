"""Speed of training as a part of the hardware's roofline: what `nci index` does in its training stage, on random weights.

    python benchmarks/training.py --shapes minilm,base --documents 2000,100000 --device cuda --json out.json
    python benchmarks/training.py --shapes minilm --device cuda --eager --profile

The tree is even, document vectors are random, and BM25 reads short texts of random words. Four pairs in five are queries of
8 to 24 tokens, the fifth is a piece of a document of 64. They are written as a batch plan and trained by `nci.train`
itself. Weights are random: they cost the same time as trained ones. The clock runs over the last 60 % of the steps,
since a GPU records a shape of batch when it comes for the second time; like any run, this one writes its curve 50 times.

Operations are counted by PyTorch's FlopCounterMode over forward and backward of one batch of every shape that was timed,
run eagerly: two per multiply-add of products and attention, of rows as they are run, so padding counts; nothing that is
computed a second time to save memory, nothing elementwise, no optimiser. The peak is that of the precision of training,
though the content score is a product in fp32. The roofline's bytes are what AdamW moves, 28 per trained weight.

`--profile` (a GPU only) trains again, with the same batches, and adds up the time of the last steps' kernels; what is left
of these steps in the first run, without a profiler, was spent outside the device.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import nci.train
from nci.batches import PlanDataset
from nci.bench.ours import random_config
from nci.bench.roofline import Peaks, Precision, fraction, measure_peaks
from nci.bench.shapes import SHAPES, WORD_PIECES, Shape, synthetic_trie
from nci.bench.timing import device_name
from nci.config import ModelConfig, PairsConfig, TrainConfig
from nci.console import check_arguments, writing
from nci.errors import ConfigError, NciError, check_least
from nci.lexical import LexicalScores
from nci.model import NCIModel
from nci.pairs import SOURCES, BatchPlan, Pair, write_plan
from nci.runtime import check_device, uses_bf16
from nci.train import PlanTrainer, train
from nci.trie import Trie

WARMUP = 0.4  # share of the steps before the clock starts
PROFILED = 20  # steps, at most
KERNELS = 12  # printed
QUERY, PIECE = (8, 24), 64  # tokens
PIECES = 0.2  # share of the pairs
WORDS = (10, 30_000)  # ranks; with them and short texts a word is in 5 % of the documents, as in real ones
DOCUMENT_WORDS = 32
ADAMW_BYTES = 28  # per weight: itself, its gradient and two moments are read, all but the gradient written, in fp32
_FIRST_PIECE = 2  # behind padding and end of text


@dataclass(frozen=True)
class Row:
    """One measurement.

    Args:
        mode: recorded, where steps were CUDA graphs, else eager.
        tflop_per_step: Forward and backward, mean of the timed steps.
        roofline: Part of the hardware's limit that was reached, at most 1.
        recordings: Shapes of batches that were recorded, `late` of them while the clock ran.
        outside: Seconds of a step in which no kernel ran, `host_share` the same as a share; none without a profile.
        kernels: Name and seconds per step of the longest.
    """

    shape: str
    documents: int
    mode: str
    pairs_per_second: float
    steps_per_second: float
    tflop_per_step: float
    tflops: float
    peak_tflops: float
    roofline: float
    trained_weights: int
    recordings: int
    late: int
    outside: float | None = None
    host_share: float | None = None
    kernels: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Data:
    """What is trained on; documents are in leaf order."""

    trie: Trie
    lexical: LexicalScores
    plan: BatchPlan


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="minilm", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--documents", default="2000", help="sizes of the tree")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=512, help="pairs per step")
    parser.add_argument("--eager", action="store_true", help="on a GPU: no recordings")
    parser.add_argument("--profile", action="store_true", help="on a GPU: time outside the device, longest kernels")
    parser.add_argument("--device", default=None)
    parser.add_argument("--json", type=Path, default=None)
    try:
        run(parser.parse_args(argv))
    except NciError as error:
        sys.exit(f"training.py: {error}")


def run(args: argparse.Namespace) -> None:
    """Measure every shape on every size, and print and write what is there after each."""
    check_arguments(args)  # type: ignore[arg-type]
    check_least(args, {"steps": 10, "batch": 1}, "--")
    shapes, sizes = _shapes(args.shapes), _sizes(args.documents)
    device = check_device(args.device)
    if args.profile and device == "cpu":
        raise ConfigError("--profile adds up the kernels of a GPU: use --device cuda, or leave it out")
    config = TrainConfig(batch_size=args.batch, epochs=1, checkpoint_minutes=1e9)
    precision: Precision = "bf16" if uses_bf16(config.precision, device) else "fp32"
    peaks = measure_peaks(device, precision)
    print(f"{device_name(device)}, {precision}, load {os.getloadavg()}", flush=True)
    head = {"device": device_name(device), "precision": precision, "batch": args.batch, "steps": args.steps}
    rows: list[Row] = []
    for documents in sizes:
        with TemporaryDirectory() as folder:
            data = random_data(Path(folder), documents, pairs=args.steps * args.batch, batch=args.batch)
            for shape in shapes:
                out = Path(folder) / shape.name
                row = measure(data, shape, config, peaks, out, device=device, eager=args.eager, profiled=args.profile)
                rows.append(row)
                print(f"\n{table(rows)}", flush=True)
                for name, seconds in row.kernels:
                    print(f"{seconds * 1e3:9.3f} ms a step  {name[:100]}")
                if args.json:
                    write_json(args.json, head | {"peak_bytes_per_second": peaks.bytes_per_second}, rows)


def random_data(folder: Path, documents: int, *, pairs: int, batch: int) -> Data:
    """An even tree, BM25 over random texts, and the plan of one epoch over random pairs."""
    random = np.random.default_rng(0)
    trie = synthetic_trie(documents)
    texts = list(random_texts(random, np.full(documents, DOCUMENT_WORDS)))
    lexical = LexicalScores.build(texts, stemmer=None, stopwords=None)
    plan = write_plan(
        folder / "plan",
        random_pairs(random, pairs, documents),
        tokenize,
        PairsConfig(real=1, span_share=1),  # every pair once
        batch_size=batch,
        epochs=1,
        words=lambda block: [
            columns[::2] for columns in lexical.columns(block)
        ],  # the rest is stop words and word ends
        total=pairs,
    )
    return Data(trie, lexical, plan)


def random_pairs(random: np.random.Generator, count: int, documents: int) -> Iterator[Pair]:
    """Queries and pieces of documents, a word for a token."""
    pieces = random.random(count) < PIECES
    lengths = np.where(pieces, PIECE, random.integers(QUERY[0], QUERY[1] + 1, count))
    wanted = random.integers(0, documents, count).tolist()
    sources = np.where(pieces, SOURCES.index("span"), SOURCES.index("real")).tolist()
    for text, document, source in zip(random_texts(random, lengths), wanted, sources, strict=True):
        yield Pair(text, document, source)


def random_texts(random: np.random.Generator, lengths: NDArray[np.integer]) -> Iterator[str]:
    """Texts of so many words, a word as frequent as one over its rank."""
    low, high = np.log(WORDS)
    for length in lengths.tolist():
        yield " ".join(f"w{rank}" for rank in np.exp(random.uniform(low, high, length)).astype(int).tolist())


def tokenize(texts: list[str]) -> list[list[int]]:
    """A token per word, without a vocabulary file."""
    size = WORD_PIECES - _FIRST_PIECE
    return [[_FIRST_PIECE + zlib.crc32(word.encode()) % size for word in text.split()] for text in texts]


def random_model(data: Data, shape: Shape) -> NCIModel:
    """A network of this shape with everything that training moves, bound to the tree."""
    settings, config = ModelConfig(), random_config(data.trie, shape)
    config.adapter_layers, config.d_content, config.nodes = shape.adapter_layers, shape.width, data.trie.nodes
    for name in ("head", "head_rank", "anchor", "score", "kappa", "lexical", "content", "edge_bias", "dropout"):
        setattr(config, name, getattr(settings, name))
    torch.manual_seed(0)
    model = NCIModel(config)
    vectors = np.random.default_rng(0).standard_normal((data.trie.documents, shape.width), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    real = data.plan.documents[np.asarray(data.plan.sources) == SOURCES.index("real")]
    model.bind(data.trie, vectors, np.isin(np.arange(data.trie.documents), real))
    return model


class Clock(TrainerCallback):  # type: ignore[misc]
    """When some steps were finished on the device, and how many shapes were recorded by then."""

    def __init__(self, steps: Iterable[int], device: str, profiler: Any = None) -> None:
        self.steps, self.device, self.profiler = sorted(set(steps)), device, profiler
        self.times: dict[int, float] = {}
        self.recordings: dict[int, int] = {}
        self.trainer: PlanTrainer | None = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step not in self.steps:
            return
        if self.device != "cpu":
            torch.cuda.synchronize()
        self.times[state.global_step] = time.perf_counter()
        recorder = self.trainer.recorder if self.trainer else None
        known = recorder.recordings.values() if recorder else ()
        self.recordings[state.global_step] = sum(recording is not None for recording in known)
        if self.profiler is not None:
            (self.profiler.stop if state.global_step == self.steps[-1] else self.profiler.start)()


def train_watched(
    model: NCIModel, data: Data, config: TrainConfig, out: Path, clock: Clock, *, device: str, eager: bool
) -> PlanTrainer:
    """`nci.train.train` as it is, but for a clock, and without a recorder where asked for; the trainer it made."""

    def make(**arguments: Any) -> PlanTrainer:
        clock.trainer = PlanTrainer(**arguments | ({"recorder": None} if eager else {}))
        clock.trainer.add_callback(clock)
        return clock.trainer

    leaves = np.arange(data.trie.documents)
    with patch.object(nci.train, "PlanTrainer", make):
        train(model, data.plan, config, out, leaf_of_document=leaves, lexical=data.lexical, device=device)
    assert clock.trainer is not None
    return clock.trainer


def measure(
    data: Data,
    shape: Shape,
    config: TrainConfig,
    peaks: Peaks,
    out: Path,
    *,
    device: str,
    eager: bool = False,
    profiled: bool = False,
) -> Row:
    """Train over the whole plan, once more for a profile, and count the operations of the steps that were timed."""
    model = random_model(data, shape)
    steps = len(data.plan)
    warm = round(WARMUP * steps)
    last = steps - min(PROFILED, steps - warm)
    clock = Clock([warm, *([last] if profiled else []), steps], device)
    trainer = train_watched(model, data, config, out / "timed", clock, device=device, eager=eager)
    seconds = (clock.times[steps] - clock.times[warm]) / (steps - warm)
    mode = "recorded" if clock.recordings[steps] else "eager"
    flops = mean_flops(trainer, range(warm, steps))
    del trainer
    clock.trainer = None
    weights = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    outside, share, kernels = None, None, []
    if profiled:
        _free(device)
        profiler = profile(activities=[ProfilerActivity.CUDA])
        again = Clock([last, steps], device, profiler)
        train_watched(model, data, config, out / "profiled", again, device=device, eager=eager)
        again.trainer = None
        wall = (clock.times[steps] - clock.times[last]) / (steps - last)
        kernels = kernel_seconds(profiler.key_averages(), steps - last)
        outside = max(0.0, wall - sum(each for _, each in kernels))
        share = outside / wall
    del model
    _free(device)
    return Row(
        shape=shape.name,
        documents=data.trie.documents,
        mode=mode,
        pairs_per_second=config.batch_size / seconds,
        steps_per_second=1 / seconds,
        tflop_per_step=flops / 1e12,
        tflops=flops / seconds / 1e12,
        peak_tflops=peaks.flops / 1e12,
        roofline=fraction(flops, ADAMW_BYTES * weights, seconds, peaks),
        trained_weights=weights,
        recordings=clock.recordings[steps],
        late=clock.recordings[steps] - clock.recordings[warm],
        outside=outside,
        host_share=share,
        kernels=tuple(kernels[:KERNELS]),
    )


def mean_flops(trainer: PlanTrainer, batches: Iterable[int]) -> float:
    """Operations of a step, mean of some batches of the plan; batches of one shape are counted once.

    On a CPU a step shares the work of equal prefixes, so that batches of one shape differ a little.
    """
    trainer.recorder, trainer.gradients = None, []
    dataset: PlanDataset = trainer.train_dataset
    plan = dataset.plan
    counted: dict[tuple[int, int, int], int] = {}
    times: Counter[tuple[int, int, int]] = Counter()
    for number in batches:
        pairs = plan.rows(number)
        depth = dataset.depths[dataset.leaf_of_document[plan.documents[pairs]]].max()
        key = (len(pairs), -(-int(plan.lengths[pairs].max()) // dataset.multiple), int(depth))
        times[key] += 1
        if key not in counted:
            # Plain attention: fused kernels are counted on some devices only, and with what they compute again.
            with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
                trainer.training_step(trainer.model, dataset[number])
            trainer.model.zero_grad()
            counted[key] = counter.get_total_flops()
    return sum(counted[key] * count for key, count in times.items()) / times.total()


def kernel_seconds(events: Iterable[Any], steps: int) -> list[tuple[str, float]]:
    """Name and seconds per step of what ran on the device, the longest first."""
    ran = [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
    found = [(str(event.key), float(event.self_device_time_total) / 1e6 / steps) for event in ran]
    return sorted(found, key=lambda kernel: -kernel[1])


def table(rows: Sequence[Row]) -> str:
    """One line per measurement."""
    names = "shape,mode,documents,pairs/s,steps/s,TFLOP/step,TFLOP/s,peak,roofline,outside ms"
    lines = [tuple(names.split(","))]
    for row in rows:
        figures = (row.steps_per_second, row.tflop_per_step, row.tflops, row.peak_tflops)
        host = "-" if row.outside is None else f"{row.outside * 1e3:.2f} ({100 * (row.host_share or 0):.0f} %)"
        start = (row.shape, row.mode, f"{row.documents:,}", f"{row.pairs_per_second:,.0f}")
        lines.append((*start, *(f"{figure:.3g}" for figure in figures), f"{100 * row.roofline:.1f} %", host))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    ]
    text.insert(1, "  ".join("-" * width for width in widths))
    text.append("TFLOP: forward and backward, products and attention of rows as they are run, padding included.")
    late = [f"{row.late} on {row.shape} with {row.documents:,} documents" for row in rows if row.late]
    if late:
        text.append(f"Shapes recorded while the clock ran: {', '.join(late)}. With more --steps they weigh less.")
    return "\n".join(text)


def write_json(path: Path, head: dict[str, Any], rows: Sequence[Row]) -> None:
    """Every measurement, in one piece or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    text = json.dumps({**head, "rows": [asdict(row) for row in rows]}, allow_nan=False, indent=2)
    with writing("--json", str(path)):
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, path)


def _shapes(names: str) -> list[Shape]:
    unknown = next((name for name in names.split(",") if name not in SHAPES), None)
    if unknown is not None:
        raise ConfigError(f"--shapes {names}: there is no shape {unknown!r}, but {', '.join(SHAPES)}")
    return [SHAPES[name] for name in names.split(",")]


def _sizes(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--documents is a list of whole numbers of at least 1, as in 2000,100000, not {text!r}")
    return [int(part) for part in parts]


def _free(device: str) -> None:
    """Give back what the last training held on a GPU, recordings included."""
    if device != "cpu":
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
