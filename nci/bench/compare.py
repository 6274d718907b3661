"""Systems in, measured rows out: every system on the same tree, the same texts and the same clock.

One row per system, beam and batch size. Knows the systems by name and builds only those that were asked for.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nci.bench import Row, System
from nci.bench.cost import Cost, encoder_sizes
from nci.bench.hf_generate import HfGenerate
from nci.bench.others import Bm25, Dense, Encode, EncoderAlone
from nci.bench.ours import IndexNci, RandomNci, random_backend, random_config
from nci.bench.paper_search import PaperSearch
from nci.bench.roofline import Peaks, fraction, measure_peaks
from nci.bench.shapes import HashTokenizer, Shape
from nci.bench.timing import best_batch, measure
from nci.errors import ConfigError
from nci.index import Index
from nci.model_config import NCIConfig
from nci.runtime import one_thread_each
from nci.trie import Trie

SYSTEMS = ("nci", "paper-search", "hf-generate", "encoder", "dense", "dense-hnsw", "bm25")
SLOW = ("paper-search", "hf-generate")  # some calls of these take longer than the whole time of the others
log = logging.getLogger(__name__)

CountCost = Callable[[int], Cost]


@dataclass(frozen=True)
class Settings:
    """What to measure and how long.

    Args:
        systems: Names out of `SYSTEMS`.
        beams: Prefixes kept per level.
        batches: Queries per call, tried in turn until throughput falls.
        slow_batches: The same for the two references, which are slow and need much memory.
        seconds: Of each measurement.
        k: Results per query.
    """

    systems: Sequence[str] = SYSTEMS
    beams: Sequence[int] = (10, 100)
    batches: Sequence[int] = (1, 4, 16, 64)
    slow_batches: Sequence[int] = (1, 4, 16)
    seconds: float = 2.0
    k: int = 10

    def __post_init__(self) -> None:
        unknown = [name for name in self.systems if name not in SYSTEMS]
        if unknown:
            raise ConfigError(f"--systems are out of {', '.join(SYSTEMS)}; not {unknown[0]!r}")
        for name in ("beams", "batches", "slow_batches"):
            numbers = getattr(self, name)
            if not numbers or min(numbers) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} are at least 1, not {','.join(map(str, numbers))}")
        if not self.seconds > 0:
            raise ConfigError(f"--seconds is positive, not {self.seconds}")
        if self.k < 1:
            raise ConfigError(f"-k is at least 1, not {self.k}")


@dataclass
class Bench:
    """Measures systems and collects the rows."""

    settings: Settings
    model: str
    documents: int
    texts: Sequence[str]
    device: str
    peaks: Peaks | None = None
    rows: list[Row] = field(default_factory=list)

    def add(self, system: System, beam: int | None, cost: CountCost | None = None) -> None:
        """Measure one system at all batch sizes."""
        slow = system.name in SLOW
        log.info("%-12s %s, %s documents, beam %s", system.name, self.model, f"{self.documents:,}", beam or "-")
        k, settings = self.settings.k, self.settings

        def search(texts: list[str]) -> Any:
            if self.device != "cpu" or slow:
                return system.search(texts, k)
            return one_thread_each(lambda part: system.search(part, k), _parts(texts))

        timings = best_batch(
            search,
            self.texts,
            settings.slow_batches if slow else settings.batches,
            seconds=settings.seconds,
            warmup=1 if slow else 3,
            at_least=2 if slow else 5,
        )
        for batch, timing in timings.items():
            roofline = None
            if cost is not None and self.peaks is not None:
                counted = cost(batch)
                roofline = fraction(counted.flops, counted.bytes, batch / timing.qps, self.peaks)
            self.rows.append(
                Row(
                    system.name,
                    self.model,
                    self.documents,
                    beam,
                    batch,
                    timing.p50_ms,
                    timing.p99_ms,
                    timing.qps,
                    roofline,
                )
            )
        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()


def _parts(texts: list[str]) -> list[list[str]]:
    """A batch for one thread each."""
    workers = max(1, min(torch.get_num_threads(), len(texts) // 4))
    size = -(-len(texts) // workers)
    return [texts[start : start + size] for start in range(0, len(texts), size)]


def compare_shapes(
    trie: Trie,
    shape: Shape,
    texts: Sequence[str],
    settings: Settings,
    *,
    device: str,
    length: int = 32,
    corpus: Sequence[str] | None = None,
    seed: int = 0,
) -> list[Row]:
    """All systems with random weights of one shape on one tree; `corpus` is what BM25 searches."""
    wanted = settings.systems
    bench = Bench(settings, shape.name, trie.documents, texts, device)
    if {"nci", "encoder", "dense", "dense-hnsw"} & set(wanted):
        backend = random_backend(trie, shape, device=device, seed=seed)
        config, tokenizer = random_config(trie, shape), HashTokenizer(length=length)
        if "nci" in wanted or "encoder" in wanted:
            bench.peaks = measure_peaks(device, backend.precision)
        ours = RandomNci(backend, tokenizer, settings.beams[0])
        for beam in settings.beams if "nci" in wanted else ():
            system = RandomNci(backend, tokenizer, beam)
            bench.add(system, beam, _cost(system, config, settings.k, texts))
        if "encoder" in wanted:
            bench.add(EncoderAlone(ours.encode), None, lambda batch: ours.encoder_cost(config, batch))
        if "dense" in wanted or "dense-hnsw" in wanted:
            vectors = np.random.default_rng(seed).standard_normal((trie.documents, shape.width), dtype=np.float32)
            _add_dense(bench, ours.encode, vectors)
        del backend, ours
    _add_references(bench, trie, shape, length)
    if "bm25" in wanted and corpus is not None:
        bench.add(Bm25.from_texts(corpus), None)
    return bench.rows


def compare_index(index: Index, texts: Sequence[str], settings: Settings) -> list[Row]:
    """All systems on the tree, the texts and the vectors of a real index; the references have random weights."""
    engine = index.engine
    if engine.backend is None:
        raise ConfigError("nci bench measures the folded search, and the model of this index cannot be folded")
    config, name = engine.model.config, index.folder.resolve().name
    bench = Bench(settings, name, len(index), texts, engine.device)
    bench.peaks = measure_peaks(engine.device, engine.backend.precision)
    length = int(np.median([len(tokens) for tokens in engine.tokenise(list(texts))]))
    sizes = encoder_sizes(config)
    shape = Shape(
        name,
        sizes.layers,
        config.decoder_layers,
        config.d_model,
        config.heads,
        config.d_ff,
        max(1, config.adapter_layers),  # the paper's search has one, whatever the index has
        sizes.heads,
    )
    tokenizer = HashTokenizer(int(config.encoder["vocab_size"]), length)
    ours = IndexNci(engine, settings.beams[0])
    for beam in settings.beams if "nci" in settings.systems else ():
        probe = RandomNci(engine.backend, tokenizer, beam)
        bench.add(IndexNci(engine, beam), beam, _cost(probe, config, settings.k, texts))
    if "encoder" in settings.systems:
        probe = RandomNci(engine.backend, tokenizer, 1)
        bench.add(EncoderAlone(ours.encode), None, lambda batch: probe.encoder_cost(config, batch))
    _add_dense(bench, ours.encode, index.vectors())
    _add_references(bench, index.trie, shape, length)
    if "bm25" in settings.systems:
        documents = (index.document(number) for number in range(len(index)))
        bench.add(Bm25.from_texts([f"{d['title']} {d['text']}" for d in documents]), None)
    return bench.rows


def default_queries(index: Index, count: int = 500) -> list[str]:
    """Titles of documents, or their first words, evenly spread over the tree."""
    numbers = np.linspace(0, len(index) - 1, min(count, len(index))).astype(int)
    documents = [index.document(int(number)) for number in numbers]
    texts = [document["title"].strip() or " ".join(document["text"].split()[:10]) for document in documents]
    return [text for text in texts if text] or ["what is there"]


def content_ms(index: Index, texts: Sequence[str], calls: int = 50) -> float | None:
    """Median time of the content score of one query; None where the index has none."""
    backend = index.engine.backend
    if backend is None or backend.content is None:
        return None
    content = backend.content
    vectors = IndexNci(index.engine, 1).encode([texts[0]])

    def alone(batch: list[str]) -> Any:
        return one_thread_each(lambda asked: content.anchors(vectors, content.words(asked))[0, 0].item(), [batch])

    return measure(alone, texts, batch=1, seconds=1.0, at_least=calls).p50_ms


def _cost(system: RandomNci, config: NCIConfig, k: int, texts: Sequence[str]) -> CountCost:
    """Counts a call; on a CPU with the rows that were left on average."""
    rows = None if system.backend.on_gpu else float(np.mean([system.rows([text], k) for text in texts[:20]]))
    return lambda batch: system.cost(config, k, batch, rows)


def _add_dense(bench: Bench, encode: Encode, vectors: NDArray[np.float32]) -> None:
    if "dense" in bench.settings.systems:
        bench.add(Dense.flat(encode, vectors), None)
    if "dense-hnsw" in bench.settings.systems:
        hnsw = Dense.hnsw(encode, vectors)
        if hnsw is not None:
            bench.add(hnsw, None)


def _add_references(bench: Bench, trie: Trie, shape: Shape, length: int) -> None:
    for system in _references(bench, trie, shape, length):
        bench.add(system, system.beam)


def _references(bench: Bench, trie: Trie, shape: Shape, length: int) -> Iterator[Any]:
    for beam in bench.settings.beams:
        if "hf-generate" in bench.settings.systems and beam == 1:
            log.warning("hf-generate is left out at beam 1, which is no beam search")
        elif "hf-generate" in bench.settings.systems:
            yield HfGenerate(trie, shape, beam=beam, device=bench.device, length=length)
        if "paper-search" in bench.settings.systems:
            yield PaperSearch(trie, shape, beam=beam, device=bench.device, length=length)
