"""Speed of the search at true scale, beside the paper's own search, Hugging Face `generate`, dense search and BM25.

    python benchmarks/search.py --ids docid_to_semantic_id.tsv.gz --questions nq_dev_queries.tsv.gz --shapes base --json out.json
    python benchmarks/search.py --growth 10000,100000,1000000,10000000 --shapes minilm

The tree is that of the ids file (lines `number<TAB>3-14-2-0`), by default NCI_DATA/formats/nq320k_ids, else an even tree
of 100,000 documents. Weights are random: they cost the same time as trained ones. Queries are cut or repeated to
`--length` tokens, vectors are random, and BM25 searches texts of words drawn from the questions. `--growth` measures nci
and its encoder alone on even trees of several sizes, and the time per level of the tree. `--check` compares the
results of the GPU's kernels and recordings with those of plain PyTorch on the CPU.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from nci.bench import Row, table, write_json
from nci.bench.compare import SYSTEMS, Settings, compare_shapes
from nci.bench.ours import RandomNci, random_parts
from nci.bench.shapes import SHAPES, HashTokenizer, Shape, read_ids, read_questions, synthetic_trie
from nci.bench.timing import Timing, device_name, measure
from nci.model import NCIModel
from nci.runtime import check_device, one_thread_each
from nci.search.backend import Backend, choose_precision
from nci.search.content import Content, DocumentVectors
from nci.search.linear import Precision
from nci.trie import Trie

MOST_CONTENT = 1_000_000  # documents whose vectors are made for a measurement
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=Path, default=None)
    parser.add_argument("--questions", type=Path, default=None)
    parser.add_argument("--shapes", default="minilm", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--beams", default="10,100")
    parser.add_argument("--batches", default=None, help="queries per call, tried until throughput falls")
    parser.add_argument("--slow-batches", default="1,8,32", help="the same for paper-search and hf-generate")
    parser.add_argument("--length", type=int, default=32, help="tokens per query")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--growth", default="", help="sizes of even trees, instead of the comparison")
    parser.add_argument("--check", action="store_true", help="compare the results of the GPU with those of the CPU")
    parser.add_argument("--device", default=None)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("nci").setLevel(logging.INFO)
    device = check_device(args.device)
    if args.check:
        sys.exit(check(device))
    print(f"{device_name(device)}, load {os.getloadavg()}", flush=True)
    on_gpu = device != "cpu"
    batches = args.batches or ("1,16,64,256,512,1024" if on_gpu else "1,8,32")
    settings = Settings(
        systems=args.systems.split(","),
        beams=_numbers(args.beams),
        batches=_numbers(batches),
        slow_batches=_numbers(args.slow_batches),
        seconds=args.seconds,
    )
    texts = questions(args.questions)
    rows: list[Row] = []
    for name in args.shapes.split(","):
        shape = SHAPES[name]
        if args.growth:
            rows += growth(_numbers(args.growth), shape, texts, settings, device, args.length)
            continue
        trie = tree(args.ids)
        corpus = pseudo_texts(texts, trie.documents) if "bm25" in settings.systems else None
        rows += compare_shapes(trie, shape, texts, settings, device=device, length=args.length, corpus=corpus)
        print(f"\n{table(rows)}", flush=True)
        if args.json:
            write_json(args.json, device_name(device), rows)
    if args.json:
        write_json(args.json, device_name(device), rows)
    print(
        f"load {os.getloadavg()}, at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB of memory"
    )


def growth(sizes: list[int], shape: Shape, texts: list[str], settings: Settings, device: str, length: int) -> list[Row]:
    """One query at a time on even trees of several sizes: the search, the encoder alone, a level, the content score."""
    rows: list[Row] = []
    print(
        f"\n{shape.name}, one query at a time, ms: search = encoder + tree; the exact content score would come on top"
    )
    print(
        " documents      nodes levels beam   search encoder    tree per level content | set up s, memory GiB",
        flush=True,
    )
    for documents in sizes:
        started = time.monotonic()
        trie = synthetic_trie(documents)
        model, table = random_parts(trie, shape, device=device)
        backend = Backend(model, trie, table, None, precision=choose_precision("auto", device), device=device)
        ready, memory = time.monotonic() - started, _memory(device)
        content = content_ms(model, trie, backend, settings.seconds) if documents <= MOST_CONTENT else None
        for beam in settings.beams:
            system = RandomNci(backend, HashTokenizer(length=length), beam)
            encoder = _time(lambda t, s=system: s.encode(t).cpu(), texts, device, settings.seconds)  # type: ignore[misc]
            whole = _time(lambda t, s=system: s.search(t, settings.k), texts, device, settings.seconds)  # type: ignore[misc]
            tree_ms = whole.p50_ms - encoder.p50_ms
            print(
                f"{documents:>10,} {trie.nodes:>10,} {trie.positions:>6} {beam:>4} {whole.p50_ms:8.3f} {encoder.p50_ms:7.3f} "
                f"{tree_ms:7.3f} {tree_ms / trie.positions:9.3f} {content or float('nan'):7.3f} "
                f"| {ready:.1f} s, {memory:.2f} GiB",
                flush=True,
            )
            rows.append(Row("nci", shape.name, documents, beam, 1, whole.p50_ms, whole.p99_ms, whole.qps, None))
        del backend, model, table
    return rows


def content_ms(model: NCIModel, trie: Trie, backend: Backend, seconds: float) -> float:
    """The exact content score of one query: one product with all documents, log-sum-exp up the tree."""
    width = int(model.config.d_content)
    block = np.random.default_rng(0).standard_normal((min(trie.documents, 65536), width), dtype=np.float32)
    block /= np.linalg.norm(block, axis=1, keepdims=True)
    values = np.resize(block.astype(np.float16), (trie.documents, width))
    vectors = DocumentVectors(values)
    content = Content(model, trie, vectors, None, precision=backend.precision, device=backend.device)
    query = torch.as_tensor(block[:1]).to(backend.device)
    return _time(lambda _: content.anchors(query)[0, 0].item(), ["."] * 1000, backend.device, seconds).p50_ms


def _time(search: Callable[[list[str]], object], texts: list[str], device: str, seconds: float) -> Timing:
    """One query at a time; on a CPU by one thread, as the engine does it."""
    alone = search if device != "cpu" else lambda batch: one_thread_each(search, [batch])
    return measure(alone, texts, batch=1, seconds=seconds, warmup=10)


def _memory(device: str) -> float:
    if device != "cpu":
        return torch.cuda.memory_allocated() / 2**30
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**30


def check(device: str) -> int:
    """Searches by the device's own backend, eager and recorded, against plain PyTorch in float32 on the CPU."""
    worst = 0.0
    for documents, beam in ((3000, 3), (3000, 40), (20000, 100)):
        trie = synthetic_trie(documents, k=12, c=12)
        shape = replace(SHAPES["small"], encoder_layers=2, decoder_layers=3, width=128, heads=4, d_ff=256)
        for name in ("small", "minilm"):
            model, edges = random_parts(trie, replace(shape, name=name), device="cpu")
            plain = Backend(model, trie, edges, None, precision="fp32", device="cpu")
            for precision in PRECISIONS:
                other = Backend(model, trie, edges, None, precision=precision, device=device)
                texts = [f"question {n} about {n * 7919 % 97}" for n in range(6)]
                wanted = _scores(plain, texts, beam)
                for turn in ("eager", "recorded", "replayed"):
                    found = _scores(other, texts, beam)
                    real = np.isfinite(wanted)
                    error = float(np.abs(np.where(real, found, 0.0) - np.where(real, wanted, 0.0)).max())
                    print(
                        f"{documents} documents, beam {beam}, {name}, {precision}, {turn}: largest difference {error:.2e}"
                    )
                    worst = max(worst, error / (1e-3 if precision == "fp32" else 0.5))
    print(json.dumps({"within": worst <= 1.0}))
    return int(worst > 1.0)


def _scores(backend: Backend, texts: list[str], beam: int) -> NDArray[np.float32]:
    system = RandomNci(backend, HashTokenizer(length=16), beam)
    return backend.search(*system.ids(texts), texts, system.plan(10, 1, certain=True)).scores.numpy()


def tree(ids: Path | None) -> Trie:
    """The tree of the ids file, or an even one where there is none."""
    if ids is None and os.environ.get("NCI_DATA"):
        ids = Path(os.environ["NCI_DATA"]) / "formats" / "nq320k_ids" / "docid_to_semantic_id.tsv.gz"
    if ids is None or not ids.exists():
        print("no file of ids: an even tree of 100,000 documents takes its place")
        return synthetic_trie(100_000)
    return Trie.from_paths(read_ids(ids))[0]


def questions(path: Path | None) -> list[str]:
    if path is None and os.environ.get("NCI_DATA"):
        path = Path(os.environ["NCI_DATA"]) / "formats" / "nq320k_ids" / "nq_dev_queries.tsv.gz"
    if path is None or not path.exists():
        return [f"what is the answer to question {n} of about {n * 7919 % 4001}" for n in range(4000)]
    return read_questions(path)


def pseudo_texts(texts: list[str], count: int, words: int = 100) -> list[str]:
    """Texts of words as frequent as in the questions."""
    pool = np.array([word for text in texts for word in text.split()])
    chosen = np.random.default_rng(0).integers(0, len(pool), (count, words))
    return [" ".join(pool[row]) for row in chosen]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
