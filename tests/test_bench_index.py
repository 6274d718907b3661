"""`nci bench` on a whole index: the file it writes, what it counts, that what it measures are real searches, mistakes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import POSITION, make_documents, make_queries, tiny_config, write_lines
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import nci
import nci.search.plan
from nci.bench import compare, roofline
from nci.bench.cost import encoder_cost, encoder_sizes, search_cost
from nci.bench.ours import IndexNci, RandomNci, random_config, random_parts
from nci.bench.shapes import HashTokenizer, Shape, synthetic_trie
from nci.errors import ConfigError
from nci.index import Index
from nci.model_config import NCIConfig
from nci.records import SemanticId
from nci.search import Engine, make_plan, score_all
from nci.search.backend import Backend
from nci.search.plan import Plan
from nci.trie import Trie

MakeTrie = Callable[[Sequence[SemanticId]], Trie]
Nci = Callable[..., tuple[int, str, str]]

SYSTEMS = {"nci", "paper-search", "hf-generate", "encoder", "dense", "dense-hnsw", "bm25"}
KEYS = ["system", "model", "documents", "beam", "batch", "p50_ms", "p99_ms", "qps", "roofline"]
QUICK = ["--seconds", "0.01", "--batches", "1", "--slow-batches", "1"]
TEXTS = [text for text, _ in make_queries(make_documents(), seed=5)]
# Three levels with widths that no other number of the network has.
SMALL = Shape("small", 2, 3, 32, 2, 48, adapter_layers=1, encoder_heads=4)
BERT = replace(SMALL, name="minilm")


@pytest.fixture(autouse=True)
def _quick_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks are measured in no time."""
    monkeypatch.setattr(roofline, "CPU_SIZES", (64,))
    monkeypatch.setattr(roofline, "CPU_COPY", 2**16)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory, encoder: Path, beir: Path) -> Callable[..., Path]:
    def make(**changes: Any) -> Path:
        out = tmp_path_factory.mktemp("index") / "my.index"
        nci.build(beir, out, tiny_config(encoder, train={"epochs": 0}, **changes), device="cpu")
        return out

    return make


@pytest.fixture(scope="module")
def folder(build: Callable[..., Path]) -> Path:
    return build(model={"decoder_layers": 2, "heads": 2, "d_ff": 64, "head_rank": 4})


@pytest.fixture(scope="module")
def index(folder: Path) -> Index:
    return nci.load(folder)


# ---- from the index to the file


def check_rows(found: dict[str, Any], wanted: set[tuple[str, int | None, int]], documents: int) -> None:
    assert list(found) == ["device", "rows"]
    assert isinstance(found["device"], str)
    assert found["device"]
    assert {(row["system"], row["beam"], row["batch"]) for row in found["rows"]} == wanted
    assert len(found["rows"]) == len(wanted)
    for row in found["rows"]:
        assert list(row) == KEYS
        assert (row["model"], row["documents"]) == ("my.index", documents)
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert row["qps"] > 0
        if row["system"] in ("nci", "encoder"):
            assert row["roofline"] > 0
        else:
            assert row["roofline"] is None


@pytest.mark.slow
def test_all_systems_in_one_file(run: Nci, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    code, out, err = run(
        "bench", folder, "--json", path, "--beams", "2,5", "--batches", "1,4", "--slow-batches", 1, "--seconds", 0.01
    )
    assert code == 0, err
    beams: dict[str, list[int | None]] = {name: [2, 5] for name in ("nci", "paper-search", "hf-generate")}
    batches = {name: [1] for name in ("paper-search", "hf-generate")}
    wanted = {
        (name, beam, batch)
        for name in SYSTEMS
        for beam in beams.get(name, [None])
        for batch in batches.get(name, [1, 4])
    }
    check_rows(json.loads(path.read_text(encoding="utf-8")), wanted, 60)
    lines = out.splitlines()
    assert lines[0].split()[:4] == ["system", "model", "documents", "beam"]
    printed = {(line.split()[0], line.split()[3]) for line in lines[2:12]}
    assert printed == {(name, "-" if beam is None else str(beam)) for name, beam, _ in wanted}
    assert lines[-1].startswith("the content score takes ")
    assert {line.split()[0] for line in err.splitlines()} == SYSTEMS


def test_json_alone_on_standard_output(run: Nci, folder: Path, tmp_path: Path) -> None:
    queries = write_lines(tmp_path / "queries.jsonl", ({"_id": str(n), "text": t} for n, t in enumerate(TEXTS[:5])))
    code, out, err = run(
        "bench", folder, "--json", "-", "--queries", queries, "--systems", "encoder, nci", "--beams", 3, "-k", 500,
        "--quiet", *QUICK,
    )  # fmt: skip
    assert (code, err) == (0, "")
    check_rows(json.loads(out), {("nci", 3, 1), ("encoder", None, 1)}, 60)


def test_an_index_is_named_by_its_folder(
    run: Nci, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    code, out, err = run("bench", ".", "--systems", "encoder", *QUICK, "--json", "-")
    assert code == 0, err
    check_rows(json.loads(out), {("encoder", None, 1)}, 60)


def test_an_index_without_an_adapter_and_with_an_odd_width(run: Nci, build: Callable[..., Path]) -> None:
    """The paper's search has an adapter of 8 heads, whatever the index has."""
    folder = build(
        tree={"ids": "atomic"}, model={"head": "tied", "adapter_layers": 0, "d_model": 20, "heads": 2, "d_ff": 24}
    )
    code, out, err = run("bench", folder, "--systems", "nci,paper-search", "--beams", 2, *QUICK, "--json", "-")
    assert code == 0, err
    check_rows(json.loads(out), {("nci", 2, 1), ("paper-search", 2, 1)}, 60)


def test_queries_are_titles_spread_over_the_tree(index: Index) -> None:
    titles = [index.document(number)["title"] for number in range(60)]
    assert compare.default_queries(index) == titles
    assert compare.default_queries(index, 3) == [titles[0], titles[29], titles[59]]


def test_hf_generate_says_that_it_has_no_beam_of_one(run: Nci, folder: Path) -> None:
    code, out, err = run("bench", folder, "--systems", "hf-generate,encoder", "--beams", 1, *QUICK, "--json", "-")
    assert code == 0
    assert "hf-generate is left out at beam 1" in err
    check_rows(json.loads(out), {("encoder", None, 1)}, 60)


# ---- what is counted


def naive_flops(config: NCIConfig, trie: Trie, plan: Plan, tokens: int) -> int:
    """Product by product, (m, k) x (k, n) = 2 m k n, as the network's formulas say; of one query."""

    def product(m: int, k: int, n: int) -> int:
        return 2 * m * k * n

    def attention(rows: int, keys: int, d: int) -> int:
        return product(rows, d, keys) + product(rows, keys, d)

    shape, d, wide = config.encoder, config.d_model, config.d_ff
    bert = shape["model_type"] == "bert"
    width, ff = (shape["hidden_size"], shape["intermediate_size"]) if bert else (shape["d_model"], shape["d_ff"])
    inner = width if bert else shape["num_heads"] * shape["d_kv"]
    gated = "gated" in str(shape.get("feed_forward_proj"))
    total = 0
    for _ in range(shape["num_hidden_layers"] if bert else shape["num_layers"]):
        total += 3 * product(tokens, width, inner) + product(tokens, inner, width) + attention(tokens, tokens, inner)
        total += (2 if gated else 1) * product(tokens, width, ff) + product(tokens, ff, width)
    total += config.decoder_layers * 2 * product(tokens, width, d)
    for depth, level in enumerate(plan.levels):
        for layer in range(config.decoder_layers):
            if layer:  # otherwise stored with the tree
                total += 4 * product(level.rows, d, d) + attention(level.rows, depth + 1, d)
                total += product(level.rows, d, d)
            total += attention(level.rows, tokens, d) + product(level.rows, d, d)
            total += product(level.rows, d, wide) + product(level.rows, wide, d)
        children = np.diff(trie.child_start)[trie.level_start[depth] : trie.level_start[depth + 1]]
        assert set(children.tolist()) == {level.fanout}, "an even tree"
        total += product(level.rows, d, level.fanout)
    return int(total)


def counted_flops(work: Callable[[], Any]) -> int:
    """What PyTorch's own counter sees; it does not know products in place and the attention of CPUs."""

    def in_place(_: Any, a: Any, b: Any, *rest: Any, **more: Any) -> int:
        return int(2 * a[0] * a[1] * b[1])

    def attention(q: Any, k: Any, *rest: Any, **more: Any) -> int:
        return int(4 * q[0] * q[1] * q[2] * k[2] * q[3])

    aten = torch.ops.aten
    known = {aten.addmm_: in_place, aten._scaled_dot_product_flash_attention_for_cpu: attention}
    counter = FlopCounterMode(display=False, custom_mapping=known)
    with counter:
        work()
    return int(counter.get_total_flops())


def even(shape: Shape, merged: int, beam: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Backend, NCIConfig, Plan]:
    """A search without dead rows and uneven nodes, where every count is exact."""
    monkeypatch.setattr(nci.search.plan, "MOST_FIRST_ROWS", merged)
    trie = synthetic_trie(27, k=3, c=3)
    model, table = random_parts(trie, shape, device="cpu")
    backend = Backend(model, trie, table, None, precision="fp32", device="cpu")
    return backend, random_config(trie, shape), make_plan(trie, beam=beam, k=2, fixed=True)


@pytest.mark.parametrize("merged", [0, 64])
@pytest.mark.parametrize("shape", [SMALL, BERT], ids=["t5", "bert"])
@pytest.mark.parametrize("batch", [1, 3])
def test_operations_are_those_of_the_formulas_and_of_a_real_search(
    shape: Shape, merged: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, config, plan = even(shape, merged, 2, monkeypatch)
    assert [level.rows for level in plan.levels] == [1, 3 if merged else 2, 2]
    tokens = 7
    cost = search_cost(config, backend.trie, plan, tokens=tokens, batch=batch, precision="fp32")
    assert cost.flops == pytest.approx(batch * naive_flops(config, backend.trie, plan, tokens))
    texts = [f"question {n}" for n in range(batch)]
    ids, mask = HashTokenizer(length=tokens)(texts)
    found = counted_flops(lambda: backend.search(ids, mask.sum(1), texts, plan))
    # The root sees its own line twice where it is decoded together with its children.
    twice = batch * (config.decoder_layers - 1) * 4 * config.d_model if merged else 0
    assert found - twice == cost.flops
    alone = encoder_cost(config, tokens=tokens, batch=batch, precision="fp32")
    assert counted_flops(lambda: backend.network.encode(ids, mask.sum(1))) == alone.flops


def test_a_cpu_counts_the_rows_that_were_left(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, config, plan = even(SMALL, 0, 2, monkeypatch)
    system = RandomNci(backend, HashTokenizer(length=7), 2)
    assert 0 < system.rows(TEXTS[:4], 2) <= plan.rows
    whole, half = (
        search_cost(config, backend.trie, plan, tokens=7, batch=1, precision="fp32", rows=rows)
        for rows in (None, plan.rows / 2)
    )
    none = search_cost(config, backend.trie, plan, tokens=7, batch=1, precision="fp32", rows=0)
    assert none.flops < half.flops < whole.flops
    assert half.flops == pytest.approx((whole.flops + none.flops) / 2)
    assert system.cost(config, 2, 1) == whole


@pytest.mark.parametrize(("precision", "size", "activation"), [("fp32", 4, 4), ("bf16", 2, 2), ("int8", 1, 4)])
def test_bytes_by_hand(precision: str, size: int, activation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights once for the encoder, once per pass for the decoder; per query edges in bf16, keys and values per pass."""
    backend, config, plan = even(SMALL, 64, 2, monkeypatch)
    d, wide, tokens = 32, 48, 7
    encoder = 2 * (4 * d * d + 2 * d * wide)
    decoder = (d * d + 2 * d * wide) + 2 * (6 * d * d + 2 * d * wide)
    memory = 3 * 2 * d * d
    passes = 2  # the root and its children are one
    edges = (1 + 3 + 2) * 3
    for batch in (1, 5):
        query = 2 * edges * d + passes * tokens * 3 * 2 * d * activation
        wanted = (encoder + memory + passes * decoder) * size + batch * query
        cost = search_cost(config, backend.trie, plan, tokens=tokens, batch=batch, precision=precision)
        assert cost.bytes == pytest.approx(wanted)
        assert encoder_cost(config, tokens=tokens, batch=batch, precision=precision).bytes == encoder * size


@pytest.mark.parametrize(
    ("encoder", "wanted"),
    [
        (
            {"model_type": "t5", "d_model": 12, "num_heads": 3, "d_kv": 8, "d_ff": 20, "num_layers": 2}
            | {"feed_forward_proj": "gated-gelu"},
            (2, 12, 24, 20, 2, 3),
        ),
        ({"model_type": "distilbert", "dim": 12, "n_heads": 3, "hidden_dim": 20, "n_layers": 2}, (2, 12, 12, 20, 1, 3)),
        (
            {"model_type": "bert", "hidden_size": 12, "num_attention_heads": 2, "intermediate_size": 20}
            | {"num_hidden_layers": 4},
            (4, 12, 12, 20, 1, 2),
        ),
    ],
    ids=["t5", "distilbert", "bert"],
)
def test_sizes_of_encoders(encoder: dict[str, Any], wanted: tuple[int, ...]) -> None:
    sizes = encoder_sizes(FakeConfig(encoder))  # type: ignore[arg-type]
    assert (sizes.layers, sizes.width, sizes.inner, sizes.wide, sizes.ups, sizes.heads) == wanted
    with pytest.raises(ConfigError, match="new encoder: no hidden_size"):
        encoder_sizes(FakeConfig({"model_type": "new"}))  # type: ignore[arg-type]


class FakeConfig:
    def __init__(self, encoder: dict[str, Any]) -> None:
        self.encoder = encoder


# ---- what is measured are searches


class Words:
    """`HashTokenizer` as an engine calls a tokenizer."""

    pad_token_id = 0

    def __init__(self, length: int) -> None:
        self.hashed = HashTokenizer(length=length)

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": self.hashed(texts)[0].tolist()}


IDS: list[SemanticId] = [(a, b) for a in range(4) for b in range(5)] + [(4, 0, c, e) for c in range(3) for e in (0, 1)]


@pytest.mark.parametrize("beam", [1, 3, 40])
@pytest.mark.parametrize("shape", [SMALL, BERT], ids=["t5", "bert"])
def test_a_random_network_is_searched_as_an_engine_does(shape: Shape, beam: int, make_trie: MakeTrie) -> None:
    trie = make_trie(IDS)
    model, table = random_parts(trie, shape, device="cpu")
    model.config.anchor = "none"
    backend = Backend(model, trie, table, None, precision="fp32", device="cpu")
    engine = Engine(model, Words(9), trie, edges=table, precision="fp32")
    system = RandomNci(backend, HashTokenizer(length=9), beam)
    found = system.search(TEXTS[:6], 5)
    wanted = engine.search(TEXTS[:6], k=5, beam=beam)
    leaves = set(trie.leaves.tolist())
    for nodes, ranking in zip(found, wanted, strict=True):
        real = [node for node in nodes if node >= 0]
        assert set(real) <= leaves
        assert len(set(real)) == len(real)
        assert {1: 1, 3: 3, 40: 5}[beam] <= len(real) <= 5  # leaves end at several levels, each with its own beam
        assert trie.first_document[real].tolist() == ranking.documents.tolist()
    vectors = system.encode(TEXTS[:6])
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(6))
    ids, lengths = system.ids(TEXTS[:6])
    assert lengths.tolist() == [9] * 6
    wanted_vectors = model.encode(ids, torch.ones_like(ids))[1]
    torch.testing.assert_close(vectors, torch.nn.functional.normalize(wanted_vectors, dim=1), atol=1e-5, rtol=0)


def test_what_was_too_narrow_is_searched_again(make_trie: MakeTrie) -> None:
    """As on a GPU, where the search ends above the few ids of four digits."""
    deep: list[SemanticId] = [(0, 0, 0, 0), (0, 0, 0, 1)]
    trie = make_trie([*deep, *((a, b) for a in range(3) for b in range(20) if a or b)])
    model, table = random_parts(trie, SMALL, device="cpu")
    table.bias[trie.parent[trie.parent[trie.leaves[0]]]] = 2.0
    backend = Backend(model, trie, table, None, precision="fp32", device="cpu")
    narrow, wide = (RandomNci(backend, HashTokenizer(length=9), 20) for _ in range(2))
    cut = make_plan(trie, beam=20, k=10, fixed=True, certain=False, least=0)
    assert cut.cut
    narrow.plans[10, 0, False] = cut
    ids, lengths = narrow.ids(TEXTS)
    short = backend.search(ids, lengths, TEXTS, cut).short
    assert short[:8].any()
    for text in TEXTS[:8]:
        assert narrow.search([text], 10) == wide.search([text], 10)


def test_a_real_index_is_searched_as_its_users_do(index: Index) -> None:
    system = IndexNci(index.engine, 7)
    hits = index.search(TEXTS[:5], 4, beam=7)
    for ranking, wanted in zip(system.search(TEXTS[:5], 4), hits, strict=True):
        assert [index.doc_ids[number] for number in ranking.documents] == [hit.doc_id for hit in wanted]
        np.testing.assert_allclose(ranking.scores, [hit.score for hit in wanted], atol=1e-5)
        assert ranking.scored == 60
    everything = IndexNci(index.engine, 60).search(TEXTS[:2], 60)
    scores = score_all(index.engine.reference, index.engine.encode(TEXTS[:2]))
    for row, ranking in enumerate(everything):
        assert sorted(ranking.documents.tolist()) == list(range(60))
        np.testing.assert_allclose(ranking.scores, scores[row][ranking.documents.tolist()], atol=1e-4)
    vectors = index.engine.encode(TEXTS[:5]).vectors
    assert vectors is not None
    torch.testing.assert_close(system.encode(TEXTS[:5]), vectors, atol=1e-5, rtol=0)


def test_many_threads_ask_one_index(index: Index) -> None:
    """Searches, explanations and batches at once give what each gives alone."""
    engine = index.engine
    texts = [" ".join(TEXTS[n : n + 1 + n % 3]) for n in range(24)]
    alone = [engine.search([text], k=5, beam=5)[0] for text in texts]

    def work(number: int) -> None:
        text, wanted = texts[number % 24], alone[number % 24]
        if number % 3 == 0:
            engine.encode([texts[0], text])
            engine.explain(text, [0, 1])
        found = engine.search([text], k=5, beam=5)[0]
        assert found.documents.tolist() == wanted.documents.tolist()
        np.testing.assert_allclose(found.scores, wanted.scores, atol=1e-5)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(72)))
    assert engine.tokenizer.backend_tokenizer.padding is None, "a tokenizer that pads does so for all threads"


class OneSlot:
    """A recorder as on a GPU: one place for the inputs of a key and one for its results, and others come in between."""

    def __init__(self) -> None:
        self.inputs: dict[Any, list[Tensor]] = {}
        self.outputs: dict[Any, Tensor] = {}

    def run(self, key: Any, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        places = self.inputs.setdefault(key, [torch.empty_like(given) for given in inputs])
        for place, given in zip(places, inputs, strict=True):
            place.copy_(given)
        time.sleep(0.002)
        (found,) = function(*places)
        out = self.outputs.setdefault(key, torch.empty_like(found))
        out.copy_(found)
        time.sleep(0.002)
        return (out,)


def test_a_recording_serves_one_search_at_a_time() -> None:
    trie = synthetic_trie(27, k=3, c=3)
    model, table = random_parts(trie, SMALL, device="cpu")
    backend = Backend(model, trie, table, None, precision="fp32", device="cpu")
    system = RandomNci(backend, HashTokenizer(length=7), 3)
    alone = [system.search([text], 3) for text in TEXTS[:12]]
    assert len({str(found) for found in alone}) > 1
    backend.recorder = OneSlot()  # type: ignore[assignment]
    found: list[Any] = [None] * 12
    threads = [
        threading.Thread(target=lambda n=n: found.__setitem__(n, system.search([TEXTS[n]], 3))) for n in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


# ---- mistakes


@pytest.fixture(scope="module")
def names(build: Callable[..., Path], folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    here = tmp_path_factory.mktemp("here")
    (here / "blank.jsonl").write_text('{"_id": "1", "text": " "}\n')
    (here / "empty.txt").write_text("")
    unfolded = build(model=POSITION)
    return {"INDEX": str(folder), "UNFOLDED": str(unfolded), "HERE": str(here)}


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("bench", 2, "index"),
        ("bench nowhere", 1, "nowhere is not an index"),
        ("bench HERE", 1, "no CURRENT file"),
        ("bench UNFOLDED", 1, "cannot be folded"),
        ("bench INDEX --beams 0", 1, "--beams are at least 1, not 0"),
        ("bench INDEX --beams 10,-3", 1, "--beams are at least 1, not 10,-3"),
        ("bench INDEX --beams x", 2, "--beams is a whole number"),
        ("bench INDEX --beams 10,", 2, "--beams is a whole number"),
        ("bench INDEX --systems foo", 1, "not 'foo'"),
        ("bench INDEX --systems nci,Dense", 1, "--systems are out of nci, "),
        ("bench INDEX --batches", 2, "--batches"),
        ("bench INDEX --batches 0", 1, "--batches are at least 1, not 0"),
        ("bench INDEX --batches many", 2, "--batches is a whole number"),
        ("bench INDEX --slow-batches 1,0", 1, "--slow-batches are at least 1, not 1,0"),
        ("bench INDEX --queries missing", 1, "missing does not exist"),
        ("bench INDEX --queries HERE/empty.txt", 1, "empty.txt is empty"),
        ("bench INDEX --queries HERE/blank.jsonl", 1, "blank.jsonl, line 1"),
        ("bench INDEX --seconds 0", 1, "--seconds is positive"),
        ("bench INDEX --seconds nan", 2, "seconds"),
        ("bench INDEX -k 0", 1, "-k is at least 1"),
        ("bench INDEX --device bogus", 1, "--device is cpu, cuda or cuda:N"),
        ("bench INDEX --device mps", 1, "--device is cpu, cuda or cuda:N"),
        ("bench INDEX --bogus", 2, "bogus"),
        ("search INDEX apple --stop-depth 0", 1, "--stop-depth is at least 1"),
        ("search INDEX apple --stop-depth x", 2, "stop_depth"),
        ("search INDEX apple --stop-depth 1 --unconstrained", 1, "--stop-depth needs"),
        ("search UNFOLDED apple --stop-depth 1", 1, "--stop-depth needs"),
        ("search INDEX apple --beam 0", 1, "--beam is at least 1, not 0"),
        ("search INDEX apple --beam 5,0", 1, "--beam is at least 1, not 5,0"),
        ("search INDEX apple --beam 1,", 2, "--beam is a whole number"),
        ("search INDEX apple --length-penalty 1e308", 1, "--length-penalty is from -10 to 10"),
        ("search INDEX apple --length-penalty nan", 2, "length_penalty"),
        ("search INDEX apple --device meta", 1, "--device is cpu, cuda or cuda:N"),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(
    run: Nci, names: dict[str, str], command: str, code: int, said: str
) -> None:
    argv = command.split()
    for name, path in names.items():
        argv = [word.replace(name, path) for word in argv]
    got, out, err = run(*argv)
    assert (got, out) == (code, ""), err
    assert said in err
    assert len(err.splitlines()) == 1, err
    assert err.startswith("nci ")


def test_a_file_that_cannot_be_written(run: Nci, folder: Path, tmp_path: Path) -> None:
    code, _, err = run(
        "bench", folder, "--systems", "encoder", *QUICK, "--quiet", "--json", tmp_path / "nowhere" / "x.json"
    )
    assert code == 1
    assert "--json" in err
    assert len(err.splitlines()) == 1


def test_options_of_a_search_that_are_wide_but_right(run: Nci, folder: Path) -> None:
    def hits(*options: object) -> list[dict[str, Any]]:
        code, out, err = run("search", folder, "apple pear item0", "--json", "-", *options)
        assert code == 0, err
        found: list[dict[str, Any]] = json.loads(out)["hits"]
        assert [hit["rank"] for hit in found] == list(range(1, len(found) + 1))
        return found

    best = hits("-k", 3)
    assert [hit["doc_id"] for hit in hits("-k", 3, "--stop-depth", 99)] == [hit["doc_id"] for hit in best]
    assert len({hit["doc_id"] for hit in hits("-k", 100000)}) == 60
    clusters = hits("-k", 3, "--beam", "5,20", "--stop-depth", 1)
    assert len(clusters) >= 3
    index = nci.load(folder)
    firsts = list(dict.fromkeys(hit["semantic_id"][0] for hit in clusters))
    members = [n for n in range(60) if index.trie.semantic_id(n)[0] in firsts]
    assert {hit["doc_id"] for hit in clusters} == {index.doc_ids[n] for n in members}, "whole clusters"
    smaller = sum(index.trie.semantic_id(n)[0] in firsts[:-1] for n in members)
    assert smaller < 3, "no more of them than hold k documents"
