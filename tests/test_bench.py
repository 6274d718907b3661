"""The comparison: the tree, the clock and the table are right, and each system finds what an independent version finds."""

from __future__ import annotations

import gzip
import importlib.util
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nci.bench import Row, System, others, roofline, table, timing, write_json
from nci.bench.hf_generate import FIRST, START, HfGenerate
from nci.bench.paper_search import PaperSearch
from nci.bench.shapes import SHAPES, HashTokenizer, Shape, id_values, nested_dicts, read_ids, read_questions
from nci.bench.shapes import synthetic_trie as make_trie
from nci.errors import ConfigError, DataError
from nci.records import SemanticId
from nci.trie import Trie

TINY = Shape("tiny", 2, 2, 16, 2, 24, adapter_layers=2)
# Leaves at depths 1, 2 and 3, gaps between digits, a node with a single child.
PATHS = [(0, 0, 1), (0, 0, 3), (0, 1), (0, 3, 0), (0, 3, 1), (1,), (2, 1), (3, 0, 2), (3, 2, 0), (3, 2, 1)]
TEXTS = ["red cat", "the dog sleeps under a tree", "moon"]
ROW = Row("nci", "base", 1000, 10, 1, p50_ms=2.0, p99_ms=3.0, qps=500.0, roofline=0.1)


def trie_of(ids: Sequence[SemanticId]) -> Trie:
    rows = np.full((len(ids), max(map(len, ids))), -1, np.int32)
    for row, path in zip(rows, ids, strict=True):
        row[: len(path)] = path
    return Trie.from_paths(rows)[0]


# ---- the table and the file


def test_table_has_one_line_per_system_and_beam() -> None:
    rows = [
        ROW,
        replace(ROW, batch=64, p50_ms=20.0, qps=4000.0, roofline=0.4),
        replace(ROW, batch=128, p50_ms=99.0, qps=3000.0, roofline=0.3),
        replace(ROW, beam=100, p50_ms=5.5, qps=1000.0),
        replace(ROW, system="paper-search", beam=100, p50_ms=250.0, qps=4.0, roofline=None),
        replace(ROW, system="bm25", beam=None, batch=8, qps=2000.0, roofline=None),
        replace(ROW, system="hf-generate", model="large", qps=7.0),
    ]
    head, rule, *lines = table(rows).splitlines()[:7]
    assert set(rule) == {"-", " "}
    cells = [line.split() for line in lines]
    assert cells[0] == ["nci", "base", "1,000", "10", "2.00", "3.00", "4,000", "64", "40.0", "%", "1.00"]
    assert cells[1][4:] == ["5.50", "3.00", "1,000", "1", "10.0", "%", "1.00"]
    assert cells[2] == ["paper-search", "base", "1,000", "100", "250", "3.00", "4.00", "1", "-", "250"]
    assert cells[3] == ["bm25", "base", "1,000", "-", "-", "-", "2,000", "8", "-", "2.00"], "beside nci at beam 10"
    assert cells[4][-1] == "-", "no nci of that model was measured"
    assert {len(line) for line in [head, rule, *lines]} == {len(head)}, "not aligned"


def test_json_has_the_schema_and_no_nan(tmp_path: Path) -> None:
    rows = [ROW, replace(ROW, beam=None, roofline=None, p99_ms=math.nan, qps=math.inf)]
    write_json(tmp_path / "out.json", "NVIDIA H200", rows)
    value = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)
    assert list(value) == ["device", "rows"]
    assert value["device"] == "NVIDIA H200"
    names = ["system", "model", "documents", "beam", "batch", "p50_ms", "p99_ms", "qps", "roofline"]
    assert list(value["rows"][0].items()) == list(
        zip(names, ["nci", "base", 1000, 10, 1, 2.0, 3.0, 500.0, 0.1], strict=True)
    )
    assert [value["rows"][1][name] for name in ("beam", "p99_ms", "qps", "roofline")] == [None] * 4


# ---- the clock


class Clock:
    """Time passes only inside `search`: fixed seconds per call and per text."""

    def __init__(self, per_call: float, per_text: float = 0.0) -> None:
        self.now, self.per_call, self.per_text = 0.0, per_call, per_text
        self.asked: list[list[str]] = []

    def search(self, texts: list[str]) -> None:
        self.asked.append(texts)
        self.now += self.per_call + self.per_text * len(texts)

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(0.1)
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_batches_wrap_around_and_every_text_is_asked(clock: Clock) -> None:
    result = timing.measure(clock.search, ["a", "b", "c", "d", "e"], batch=2, warmup=1, at_least=2)
    assert clock.asked == [["a", "b"], ["a", "b"], ["c", "d"], ["e", "a"]]
    assert result.calls == 3
    assert result.qps == pytest.approx(6 / 0.3)
    assert result.p50_ms == pytest.approx(100)


def test_stops_after_the_seconds_but_not_before_at_least(clock: Clock) -> None:
    assert timing.measure(clock.search, ["a"] * 1000, batch=1, seconds=0.95, warmup=0).calls == 10
    assert timing.measure(clock.search, ["a"] * 1000, batch=1, seconds=0.05, warmup=0, at_least=7).calls == 7
    assert timing.measure(clock.search, ["a"], batch=4, warmup=0, at_least=6).calls == 6
    clock.asked.clear()
    timing.measure(clock.search, ["a"], batch=1, seconds=0.05, warmup=50, at_least=1)
    assert len(clock.asked) == 2, "a slow system is not warmed up for longer than it is measured"


def test_percentiles(clock: Clock) -> None:
    lengths = iter([0.001] * 98 + [0.5, 0.5])

    def search(_: list[str]) -> None:
        clock.now += next(lengths)

    result = timing.measure(search, ["a"] * 100, batch=1, warmup=0, seconds=9)
    assert result.p50_ms == pytest.approx(1)
    assert result.p99_ms == pytest.approx(500)
    assert result.qps == pytest.approx(100 / 1.098)


def test_best_batch_stops_when_throughput_fell_twice(clock: Clock) -> None:
    costs = {1: 1.0, 2: 1.0, 4: 4.0, 8: 1.0, 16: 4.0, 32: 16.0, 64: 1.0}  # seconds per call

    def search(texts: list[str]) -> None:
        clock.now += costs[len(texts)]

    timings = timing.best_batch(search, ["a"] * 64, list(costs), warmup=0)
    assert list(timings) == [1, 2, 4, 8, 16, 32], "one fall is noise, the second in a row is the end"
    assert max(timings, key=lambda batch: timings[batch].qps) == 8


def test_best_batch_stops_when_memory_is_full(clock: Clock) -> None:
    def search(texts: list[str]) -> None:
        if len(texts) > 4:
            raise torch.OutOfMemoryError("full")
        clock.search(texts)

    assert list(timing.best_batch(search, ["a"] * 64, [1, 4, 16, 2], warmup=0)) == [1, 4]


def test_measures_real_time() -> None:
    result = timing.measure(lambda _: time.sleep(0.02), ["a"], batch=3, warmup=0)
    assert 19 < result.p50_ms <= result.p99_ms
    assert result.qps == pytest.approx(3 / 0.02, rel=0.5)


def test_device_name(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    assert timing.device_name("cpu").endswith("1 core" if threads == 1 else f"{threads} cores")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    assert timing.device_name() == "GPU cuda"


# ---- the limits of the hardware


def test_fraction_is_of_the_binding_resource() -> None:
    peaks = roofline.Peaks(flops=100.0, bytes_per_second=10.0)
    assert roofline.fraction(50.0, 1.0, 2.0, peaks) == pytest.approx(0.25)
    assert roofline.fraction(50.0, 8.0, 2.0, peaks) == pytest.approx(0.40)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_peaks_agree_with_a_product_of_our_own(precision: roofline.Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "CPU_SIZES", (128, 384))
    monkeypatch.setattr(roofline, "CPU_COPY", 2**22)
    engine = torch.backends.quantized.engine
    peaks = roofline.measure_peaks("cpu", precision)
    a, b = torch.randn(2, 384, 384).unbind()
    a @ b
    started = time.perf_counter()
    for _ in range(10):
        a @ b
    fp32 = 2 * 384**3 * 10 / (time.perf_counter() - started)
    assert fp32 / 20 < peaks.flops < fp32 * 50  # a factor of two in the count is below the noise of a busy machine
    assert 1e8 < peaks.bytes_per_second < 1e13
    assert torch.backends.quantized.engine == engine


def test_peaks_count_operations_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "CPU_SIZES", (16, 32))
    monkeypatch.setattr(roofline, "CPU_COPY", 4096)
    monkeypatch.setattr(roofline, "_seconds", lambda work, device: (work(), 0.5)[1])
    assert roofline.measure_peaks("cpu", "fp32") == roofline.Peaks(2 * 32**3 / 0.5, 2 * 4096 / 0.5)


def test_int8_product_is_a_product() -> None:
    torch.manual_seed(0)
    work = roofline._product(64, "cpu", "int8")
    torch.manual_seed(0)
    left, right = torch.randn(2, 64, 64).unbind()
    assert torch.corrcoef(torch.stack([work().flatten(), (left @ right.T).flatten()]))[0, 1] > 0.999


def test_int8_peak_is_for_the_cpu() -> None:
    with pytest.raises(ConfigError, match="int8"):
        roofline.measure_peaks("cuda", "int8")


# ---- shapes, trees and texts


def even_split(members: list[int], k: int, c: int) -> list[SemanticId]:
    """Ids of hierarchical k-means on even data, by recursion, in the order of the members."""
    if len(members) <= c:
        return [(i,) for i in range(len(members))]
    parts = np.array_split(members, min(k, len(members)))
    return [
        (digit, *rest)
        for digit, part in enumerate(parts)
        for rest in (even_split(part.tolist(), k, c) if len(part) > 1 else [()])
    ]


@given(st.integers(1, 300), st.integers(2, 6), st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_synthetic_trie_equals_the_trie_of_its_ids(documents: int, k: int, c: int) -> None:
    ids = even_split(list(range(documents)), k, c)
    trie, expected = make_trie(documents, k, c), trie_of(ids)
    trie.check()
    for field in fields(Trie):
        made, wanted = getattr(trie, field.name), getattr(expected, field.name)
        assert made.dtype == wanted.dtype == np.int32
        assert made.tolist() == wanted.tolist(), field.name


def test_synthetic_trie_is_quick_at_scale() -> None:
    trie = make_trie(1_000_000)
    assert trie.level_start == [0, 1, 31, 931, 27_931, 837_931, 1_217_931]
    assert (trie.documents, trie.fanout, id_values(trie)) == (1_000_000, 30, 30)
    with pytest.raises(ConfigError, match="documents=0"):
        make_trie(0)


def test_shapes_are_those_of_t5() -> None:
    sizes = {n: (s.encoder_layers, s.decoder_layers, s.width, s.heads, s.d_ff) for n, s in SHAPES.items()}
    assert sizes["base"] == (12, 6, 768, 12, 3072)
    assert {name: shape.width // shape.heads for name, shape in SHAPES.items()} == dict.fromkeys(sizes, 64)
    config = SHAPES["minilm"].t5(100, num_heads=12)
    assert (config.num_layers, config.num_decoder_layers, config.num_heads, config.d_kv) == (6, 2, 12, 32)


def test_hash_tokenizer() -> None:
    input_ids, mask = HashTokenizer(50, 5)(["red cat", "a b c d e f g", "", "cat red"])
    assert input_ids.dtype == mask.dtype == torch.int64
    assert input_ids.shape == (4, 5)
    assert mask.all()
    assert set(input_ids.flatten().tolist()) <= set(range(2, 50))
    red, cat = input_ids[0, :2].tolist()
    assert red != cat
    assert input_ids[0].tolist() == [red, cat, red, cat, red]
    assert input_ids[3].tolist() == [cat, red, cat, red, cat]
    assert HashTokenizer()(["red"])[0].tolist() == [[18201] * 32], "the same in every process"
    assert HashTokenizer(50, 5)([])[0].shape == (0, 5)


@pytest.mark.parametrize("name", ["ids.tsv", "ids.tsv.gz"])
def test_reads_ids_and_questions(name: str, tmp_path: Path) -> None:
    text = "0\t3-14-2-0\n1\t16-5\n\n2\t7\n"
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    ids = read_ids(path)
    assert ids.dtype == np.int32
    assert ids.tolist() == [[3, 14, 2, 0], [16, 5, -1, -1], [7, -1, -1, -1]]
    path = tmp_path / "questions.tsv"
    path.write_text("who wrote it\t-450\t7\t1-2\nwhen was that\t12\t8\t3-4\n")
    assert read_questions(path) == ["who wrote it", "when was that"]


def test_bad_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "ids.tsv"
    path.write_text("0\t3-14\n1\t3-x\n")
    with pytest.raises(DataError, match=r"ids\.tsv:2: .*3-x"):
        read_ids(path)
    path.write_text("0 3-14\n")
    with pytest.raises(DataError, match=r"ids\.tsv:1"):
        read_ids(path)
    path.write_text("\n")
    with pytest.raises(DataError, match="no ids"):
        read_ids(path)
    with pytest.raises(DataError, match="no questions"):
        read_questions(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_questions(tmp_path / "none.tsv")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"0\t1-2\n" * 9)[:-9])
    with pytest.raises(DataError, match=r"cut\.gz cannot be read"):
        read_ids(tmp_path / "cut.gz")


def test_nested_dicts_hold_the_ids_and_nothing_else() -> None:
    def sequences(node: dict[int, Any]) -> list[tuple[int, ...]]:
        return [(token, *rest) for token, child in node.items() for rest in (sequences(child) if child else [()])]

    trie = trie_of(PATHS)
    found = sequences(nested_dicts(trie, values=4, first=2, end=1))
    assert sorted(found) == sorted((*(2 + 4 * i + v for i, v in enumerate(path)), 1) for path in PATHS)


# ---- the search of the paper's code


@pytest.fixture(scope="module")
def paper() -> PaperSearch:
    return PaperSearch(trie_of(PATHS), TINY, beam=30, length=6)


@torch.inference_mode()
def paper_scores(system: PaperSearch, text: str) -> dict[SemanticId, float]:
    """Score of every id, one path and one position at a time: the classifier as a bilinear form of two states."""
    model, values = system.model, system.values
    width, vocabulary = TINY.width, model.vocabulary
    forms = model.widen.weight.view(width, vocabulary, width).double()
    states = model.encoder(input_ids=system.tokenizer([text])[0]).last_hidden_state
    scores = {}
    for path in PATHS:
        tokens = [2 + i * values + v for i, v in enumerate(path)]
        total = 0.0
        for i, target in enumerate([*tokens, 1]):
            prefix = torch.tensor([[0, *tokens[:i]]])
            h = model.decode(prefix, states, torch.ones(1, 6))[0, -1].double()
            a = model.adapt(prefix)[0, -1].double()
            columns = [1, *(t for t in range(2 + i * values, 2 + (i + 1) * values) if t < vocabulary)]
            logits = torch.stack([model.table[t].double() @ h + h @ forms[:, t] @ a for t in columns])
            total += logits.log_softmax(0)[columns.index(target)].item()
        scores[path] = total / (len(path) + 1) ** 0.8
    return scores


@pytest.mark.parametrize("text", TEXTS)
def test_a_wide_paper_search_is_exhaustive(paper: PaperSearch, text: str) -> None:
    expected = paper_scores(paper, text)
    found = paper.search([text], k=50)[0]
    assert [path for path, _ in found] == sorted(PATHS, key=lambda path: -expected[path])
    assert dict(found) == pytest.approx(expected, abs=1e-4)
    assert paper.search([text], k=3)[0] == found[:3]


def test_paper_search_of_a_batch_is_that_of_each_query(paper: PaperSearch) -> None:
    together = paper.search(TEXTS, k=10)
    assert together[0] != together[1]
    for found, text in zip(together, TEXTS, strict=True):
        alone = paper.search([text], k=10)[0]
        assert [path for path, _ in found] == [path for path, _ in alone]
        assert dict(found) == pytest.approx(dict(alone), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("beam", [1, 2, 3])
def test_a_narrow_paper_search_gives_real_ids_with_their_scores(beam: int) -> None:
    system = PaperSearch(trie_of(PATHS), TINY, beam=beam, length=6)
    for text, found in zip(TEXTS, system.search(TEXTS, k=10), strict=True):
        expected = paper_scores(system, text)
        assert 1 <= len(found) <= beam
        assert len({path for path, _ in found}) == len(found)
        assert dict(found) == pytest.approx({path: expected[path] for path, _ in found}, abs=1e-4)
    with pytest.raises(ConfigError, match="beam"):
        PaperSearch(trie_of(PATHS), TINY, beam=0)


def test_the_networks_see_no_later_digit(paper: PaperSearch) -> None:
    tokens = torch.tensor([[0, 2, 6, 10], [0, 2, 7, 13]])
    states = torch.randn(1, 6, TINY.width).expand(2, -1, -1)
    with torch.inference_mode():
        for each in (paper.model.adapt(tokens), paper.model.decode(tokens, states, torch.ones(2, 6))):
            assert torch.allclose(each[0, :2], each[1, :2], atol=1e-6)
            assert not torch.allclose(each[0, 2], each[1, 2], atol=1e-3)


# ---- Hugging Face generate


@torch.inference_mode()
def hf_scores(system: HfGenerate, text: str, ids: Sequence[SemanticId]) -> dict[SemanticId, float]:
    """Mean log-probability of each id's tokens, end token included, with teacher forcing."""
    input_ids, mask = system.tokenizer([text])
    scores = {}
    for path in ids:
        target = [*(FIRST + i * system.values + v for i, v in enumerate(path)), START + 1]
        before = torch.tensor([[START, *target[:-1]]])
        logits = system.model(input_ids=input_ids, attention_mask=mask, decoder_input_ids=before).logits[0]
        scores[path] = logits.log_softmax(-1)[range(len(target)), target].mean().item()
    return scores


def test_hf_generate_finds_the_best_ids_of_an_even_tree() -> None:
    ids = [(a, b) for a in range(3) for b in range(a + 1)]
    system = HfGenerate(trie_of(ids), TINY, beam=12, length=6)
    for text, found in zip(TEXTS, system.search(TEXTS, k=6), strict=True):
        expected = hf_scores(system, text, ids)
        assert found == sorted(ids, key=lambda path: -expected[path])


@pytest.mark.parametrize(("beam", "k"), [(2, 10), (4, 3), (15, 15)])
def test_hf_generate_gives_real_ids_only(beam: int, k: int) -> None:
    system = HfGenerate(trie_of(PATHS), TINY, beam=beam, length=6)
    for found in system.search(TEXTS, k=k):
        assert 1 <= len(found) <= min(beam, k)
        assert len(set(found)) == len(found)
        assert set(found) <= set(PATHS)
    first, end = [START, FIRST, FIRST + 4], START + 1
    assert system._semantic_id([*first, FIRST + 9, end, 0]) == (0, 0, 1)
    assert system._semantic_id([*first, end]) is None, "a prefix"
    assert system._semantic_id([*first, FIRST + 8, end]) is None, "no path"
    with pytest.raises(ConfigError, match="beam"):
        HfGenerate(trie_of(PATHS), TINY, beam=1)


# ---- the encoder, dense search and BM25


RNG = np.random.default_rng(0)
VECTORS = RNG.standard_normal((200, 8), dtype=np.float32)
QUERIES = {text: torch.from_numpy(RNG.standard_normal(8, dtype=np.float32)) for text in [*TEXTS, "an example"]}


def encode(texts: list[str]) -> torch.Tensor:
    return torch.stack([QUERIES[text] for text in texts])


def on_torch(vectors: NDArray[np.float32]) -> others.Nearest:
    return others.torch_flat(torch.as_tensor(vectors))


def exact(k: int) -> tuple[list[list[int]], NDArray[np.float64]]:
    scores = np.stack([[float(vector @ QUERIES[text].numpy()) for vector in VECTORS] for text in TEXTS])
    rows = [[i for _, i in sorted((-score, i) for i, score in enumerate(each))[:k]] for each in scores]
    return rows, np.stack([each[chosen] for each, chosen in zip(scores, rows, strict=True)])


def test_encoder_alone_brings_vectors_to_the_host() -> None:
    found = others.EncoderAlone(lambda texts: encode(texts).bfloat16()).search(TEXTS, 10)
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.float32
    assert np.allclose(found, encode(TEXTS), rtol=0.01)


@pytest.mark.parametrize("make", [others.faiss_flat, others.numpy_flat, on_torch])
@pytest.mark.parametrize("k", [1, 10, 200])
def test_flat_search_is_exact(make: Callable[[Any], others.Nearest], k: int) -> None:
    rows, scores = make(VECTORS)(encode(TEXTS), k)
    expected_rows, expected_scores = exact(k)
    assert rows.tolist() == expected_rows
    assert np.allclose(scores, expected_scores, atol=1e-5)


@pytest.mark.parametrize("faiss", [True, False])
def test_dense_with_and_without_faiss(
    faiss: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not faiss:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(others, "faiss_flat", lambda vectors: pytest.fail("faiss is not installed"))
    dense = others.Dense.flat(encode, VECTORS)
    assert dense.name == "dense"
    assert dense.search(TEXTS, 5)[0].tolist() == exact(5)[0]
    assert dense.search(TEXTS, 999)[0].shape == (3, 200)
    with caplog.at_level(logging.WARNING):
        hnsw = others.Dense.hnsw(encode, VECTORS)
    if not faiss:
        assert hnsw is None
        assert len(caplog.records) == 1
        assert "faiss" in caplog.text
        return
    assert hnsw is not None
    assert hnsw.name == "dense-hnsw"
    rows, scores = hnsw.search(TEXTS, 5)
    assert rows.tolist() == exact(5)[0], "64 of 200 documents looked at finds the best five"
    assert np.allclose(scores, exact(5)[1], atol=1e-5)


def test_bm25_finds_stems_and_ranks() -> None:
    texts = ["the cat sat", "dogs and cats and cats", "a bird", "nothing of that kind here at all"]
    bm25 = others.Bm25.from_texts(texts)
    rows, scores = bm25.search(["cats", "birds", "the kind"], 2)
    assert rows[:, 0].tolist() == [1, 2, 3]
    assert rows[0].tolist() == [1, 0], "a stem matches, and twice is more than once"
    assert (scores[:, 0] > 0).all()
    assert scores[1, 1] == 0
    assert bm25.search(["cat"], 50)[0].shape == (1, 4)


def test_every_system_has_its_name() -> None:
    trie = trie_of(PATHS)
    hnsw = others.Dense.hnsw(encode, VECTORS)
    assert hnsw is not None
    systems: list[System] = [
        PaperSearch(trie, TINY, beam=2, length=6),
        HfGenerate(trie, TINY, beam=2, length=6),
        others.EncoderAlone(encode),
        others.Dense.flat(encode, VECTORS),
        hnsw,
        others.Bm25.from_texts(["red cat", "moon"]),
    ]
    assert [system.name for system in systems] == [
        "paper-search", "hf-generate", "encoder", "dense", "dense-hnsw", "bm25",
    ]  # fmt: skip
    for system in systems:
        assert len(system.search(TEXTS[:1], 1)) > 0
