"""Query generation as a stage: seeds, shards, resuming, the generators of Hugging Face, extracts, the round trip."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny import TOPICS, make_documents, make_queries, make_t5, python

from nci.baselines import Baseline
from nci.baselines.bm25 import BM25
from nci.baselines.dense import Dense
from nci.errors import ConfigError, DataError, MissingModelError
from nci.generator import Generator, GeneratorConfig
from nci.querygen import (
    QueryGenConfig,
    document_seed,
    extracts,
    generate_queries,
    load_generator,
    read_generated,
    round_trip_filter,
    source_pairs,
    write_generated,
)
from nci.records import Document, Hit, Hits
from nci.seq2seq import FineTuneConfig, HuggingFaceGenerator, Sampling

models: Any = transformers  # its own types are incomplete
CONFIG = QueryGenConfig(per_document=4, max_source=48, max_target=8, shard_size=5, batch_size=3)


@pytest.fixture(scope="module")
def own(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    documents = make_documents(12)
    out = tmp_path_factory.mktemp("own")
    pairs = source_pairs(documents, make_queries(documents, seed=1))
    settings = GeneratorConfig(decoder_layers=1, max_source=48, max_target=8, epochs=3, batch_size=8, precision="fp32")
    Generator.train(pairs, encoder=encoder, out=out, settings=settings)
    return out


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_t5(tmp_path_factory.mktemp("t5"))


@pytest.fixture(params=["own", "t5"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def queries_of(path: Path) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for query, doc_id in read_generated(path):
        out.setdefault(doc_id, []).append(query)
    return out


# ---- the stage


def test_every_document_gets_its_queries_in_order(folder: Path, tmp_path: Path) -> None:
    documents = make_documents(12)
    path = generate_queries(iter(documents), generator=folder, out=tmp_path, settings=CONFIG)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(set(row) == {"doc_id", "query"} for row in rows)
    found = queries_of(path)
    assert list(found) == [document.doc_id for document in documents]
    assert all(1 <= len(queries) <= 4 and all(queries) for queries in found.values())
    assert len({tuple(queries) for queries in found.values()}) > 6
    assert not [query for queries in found.values() for query in queries if "[" in query]  # no special tokens
    assert read_generated(tmp_path) == read_generated(path)


@pytest.mark.slow
def test_batches_shards_order_and_threads_change_nothing(folder: Path, tmp_path: Path) -> None:
    documents = make_documents(16)
    expected = queries_of(generate_queries(documents, generator=folder, out=tmp_path / "a", settings=CONFIG))
    shuffled = random.Random(0).sample(documents, len(documents))
    threads = torch.get_num_threads()
    try:
        for number, (batch_size, shard_size, used) in enumerate([(1, 16, 1), (8, 7, 2), (16, 100, 3)]):
            torch.set_num_threads(used)
            changed = dataclasses.replace(CONFIG, batch_size=batch_size, shard_size=shard_size)
            path = generate_queries(shuffled, generator=folder, out=tmp_path / str(number), settings=changed)
            assert queries_of(path) == expected
    finally:
        torch.set_num_threads(threads)


def test_a_loaded_generator_writes_what_its_folder_writes(folder: Path, tmp_path: Path) -> None:
    documents = make_documents(6)
    by_name = generate_queries(documents, generator=str(folder), out=tmp_path / "a", settings=CONFIG)
    loaded = generate_queries(documents, generator=load_generator(folder), out=tmp_path / "b", settings=CONFIG)
    assert by_name.read_bytes() == loaded.read_bytes()


@pytest.mark.slow
def test_seeds_and_settings_are_heard(folder: Path, tmp_path: Path) -> None:
    documents = make_documents(6)

    def run(**changes: Any) -> dict[str, list[str]]:
        config = dataclasses.replace(CONFIG, **changes)
        return queries_of(generate_queries(documents, generator=folder, out=tmp_path, settings=config))

    first = run()
    assert run(seed=1) != first
    assert run(temperature=0.2) != first
    greedy = run(top_k=1)
    assert all(len(set(queries)) == 1 for queries in greedy.values())
    assert run(top_p=1e-6) == greedy
    assert max(len(query.split()) for queries in run(max_target=2).values() for query in queries) == 2
    assert max(len(query.split()) for queries in first.values() for query in queries) > 2
    assert {len(queries) for queries in run(per_document=7).values()} >= {7}


class Spy:
    """A generator that says its seed, and remembers how it was asked."""

    fingerprint = "spy"

    def __init__(self, device: str) -> None:
        self.device = device
        self.batches: list[list[int]] = []

    def tokenize(self, texts: Any, max_length: int | None = None) -> list[list[int]]:
        return [list(range(min(len(text), max_length or 99))) for text in texts]

    def sample(self, rows: Any, seeds: Any, sampling: Sampling) -> list[list[list[int]]]:
        self.batches.append([len(row) for row in rows])
        return [[[seed % 1000]] for seed in seeds]

    def decode(self, rows: Any) -> list[str]:
        return [str(row[0]) for row in rows]


@pytest.mark.parametrize(("device", "sizes"), [("cpu", [1] * 7), ("cuda:0", [3, 3, 1])])
def test_a_gpu_takes_batches_and_a_cpu_one_document_at_a_time(tmp_path: Path, device: str, sizes: list[int]) -> None:
    """Alone, no bit of a document's numbers depends on its neighbours."""
    documents = [Document(f"d{n}", "x" * n) for n in (5, 90, 20, 1, 33, 8, 70)]
    spy = Spy(device)
    config = dataclasses.replace(CONFIG, shard_size=7)
    found = queries_of(generate_queries(documents, generator=spy, out=tmp_path, settings=config))
    assert found == {document.doc_id: [str(document_seed(document.doc_id, 0) % 1000)] for document in documents}
    assert [len(batch) for batch in spy.batches] == sizes
    lengths = [length for batch in spy.batches for length in batch]
    assert sorted(lengths) == [1, 5, 8, 20, 33, 48, 48]  # max_source is heard
    assert device == "cpu" or lengths == sorted(lengths, reverse=True)


def test_another_generator_is_other_work(own: Path, t5: Path, tmp_path: Path) -> None:
    documents = make_documents(6)
    fresh = generate_queries(documents, generator=t5, out=tmp_path / "fresh", settings=CONFIG).read_bytes()
    generate_queries(documents, generator=own, out=tmp_path / "used", settings=CONFIG)
    assert generate_queries(documents, generator=t5, out=tmp_path / "used", settings=CONFIG).read_bytes() == fresh


def test_seeds_are_stable_and_differ() -> None:
    assert document_seed("d1", 0) == 5467502032523253681
    assert document_seed("d1", 0) != document_seed("d1", 1)
    assert len({document_seed(f"d{i}", seed) for i in range(1000) for seed in range(3)}) == 3000
    assert all(0 <= document_seed(str(i), 0) < 2**63 for i in range(100))  # what torch and numpy both take


KILLED = """
import os, sys
from pathlib import Path
import nci.shards as shards
import test_querygen as t
from tiny import make_documents

last, written = int(sys.argv[3]), 0
write = shards._write_shard
def stop(file, arrays, *, key):
    global written
    if written == last:
        file.write_bytes(b"torn")
        os._exit(9)
    write(file, arrays, key=key)
    written += 1
shards._write_shard = stop
t.generate_queries(make_documents(20), generator=sys.argv[1], out=Path(sys.argv[2]), settings=t.CONFIG)
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_at_its_shard(own: Path, tmp_path: Path) -> None:
    documents = make_documents(20)
    whole = generate_queries(documents, generator=own, out=tmp_path / "whole", settings=CONFIG)
    assert python("-c", KILLED, str(own), str(tmp_path / "killed"), "2").returncode == 9
    assert not (tmp_path / "killed" / "queries.jsonl").exists()
    resumed = generate_queries(documents, generator=own, out=tmp_path / "killed", settings=CONFIG)
    assert resumed.read_bytes() == whole.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("last", range(4))
def test_a_run_that_ends_at_any_shard_does_only_the_rest(own: Path, tmp_path: Path, last: int) -> None:
    documents = make_documents(20)
    whole = generate_queries(documents, generator=own, out=tmp_path / "whole", settings=CONFIG)
    asked: list[int] = []

    class Counted(Generator):
        def tokenize(self, texts: Any, max_length: int | None = None) -> Any:
            if len(asked) == last and not stopped:
                stopped.append(True)
                raise KeyboardInterrupt
            asked.append(len(texts))
            return super().tokenize(texts, max_length)

    stopped: list[bool] = []
    generator = Counted.load(own)
    with pytest.raises(KeyboardInterrupt):
        generate_queries(documents, generator=generator, out=tmp_path / "part", settings=CONFIG)
    assert asked == [5] * last
    resumed = generate_queries(documents, generator=generator, out=tmp_path / "part", settings=CONFIG)
    assert asked == [5] * 4  # no shard twice
    assert resumed.read_bytes() == whole.read_bytes()


def test_a_rerun_loads_no_model_and_a_changed_document_redoes_its_shard(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = make_documents(15)
    first = generate_queries(documents, generator=own, out=tmp_path, settings=CONFIG).read_bytes()
    loaded: list[Path] = []
    load = Generator.load

    def counted(folder: Path, *, device: str) -> Generator:
        loaded.append(folder)
        return load(folder, device=device)

    monkeypatch.setattr(Generator, "load", counted)
    assert generate_queries(documents, generator=own, out=tmp_path, settings=CONFIG).read_bytes() == first
    other_batches = dataclasses.replace(CONFIG, batch_size=1)
    assert generate_queries(documents, generator=own, out=tmp_path, settings=other_batches).read_bytes() == first
    assert not loaded
    documents[7] = dataclasses.replace(documents[7], text="moon comet")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "shards").glob("*.safetensors")}
    second = generate_queries(documents, generator=own, out=tmp_path, settings=CONFIG)
    assert second.read_bytes() != first
    assert len(loaded) == 1
    assert [p.stat().st_mtime_ns == t for p, t in sorted(before.items())] == [True, False, True]


def test_throughput_is_said(own: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="nci"):
        generate_queries(make_documents(5), generator=own, out=tmp_path, settings=CONFIG)
        generate_queries(make_documents(5), generator=own, out=tmp_path, settings=CONFIG)
    (message,) = [record.getMessage() for record in caplog.records if "a second" in record.getMessage()]
    assert "queries for 5 documents" in message


def test_odd_documents_are_no_trouble(folder: Path, tmp_path: Path) -> None:
    odd = [
        Document("empty", ""),
        Document("ünï/cödé \ud800", "\U0001f600 pear", "\u2028"),
        Document("long", "pear " * 3000),
    ]
    found = queries_of(generate_queries(odd, generator=folder, out=tmp_path, settings=CONFIG))
    assert list(found)[-1] == "long"
    assert "ünï/cödé \ud800" in found


# ---- Hugging Face


def next_scores(generator: HuggingFaceGenerator, row: list[int], prefix: list[int]) -> torch.Tensor:
    """Logits after a prefix, from the whole prefix; without what is suppressed, and without an end at once."""
    with torch.no_grad():
        logits: torch.Tensor = generator.model(
            input_ids=torch.tensor([row]), decoder_input_ids=torch.tensor([prefix])
        ).logits[0, -1]
    logits[: 4 if len(prefix) == 1 else 3] = -math.inf
    return logits


def test_samples_of_a_hugging_face_model_follow_its_probabilities(t5: Path) -> None:
    generator = HuggingFaceGenerator.load(t5)
    (row,) = generator.tokenize(["wave moon pear"])
    (found,) = generator.sample([row], [3], Sampling(3000, 1, 5, 1.0, 1.0))
    logits = next_scores(generator, row, [0])
    best = logits.topk(5)
    expected = torch.zeros_like(logits).scatter_(0, best.indices, best.values.softmax(0))
    shares = torch.bincount(torch.tensor([tokens[0] for tokens in found]), minlength=len(logits)) / 3000
    torch.testing.assert_close(shares, expected, atol=0.03, rtol=0)
    assert set(shares.nonzero().flatten().tolist()) <= set(best.indices.tolist())


def test_hugging_face_samples_are_what_their_own_draws_pick(t5: Path) -> None:
    """Every text again, the model asked for each prefix anew; two sources of different length in one batch."""
    generator = HuggingFaceGenerator.load(t5)
    rows = generator.tokenize(["wave moon pear", "the item3"])
    sampling = Sampling(6, 5, 20, 0.9, 1.2)
    found = generator.sample(rows, [0, 1], sampling)
    for row, seed, texts in zip(rows, [0, 1], found, strict=True):
        for text, draws in zip(texts, sampling.draws(seed), strict=True):
            prefix = [0]
            while len(prefix) < 6 and prefix[-1] != 3:
                scores = next_scores(generator, row, prefix)
                prefix.append(int(sampling.pick(scores[None], draws[None, len(prefix) - 1])))
            assert text[: len(prefix) - 1] == prefix[1:]
            assert set(text[len(prefix) - 1 :]) <= {0}


def test_hugging_face_samples_are_not_empty(t5: Path) -> None:
    generator = HuggingFaceGenerator.load(t5)
    with torch.no_grad():
        generator.model.lm_head.weight[3] = generator.model.lm_head.weight[4:].mean(0)  # an end likelier than most
        generator.model.lm_head.weight[4:].mul_(0.01)
    (found,) = generator.sample(generator.tokenize(["wave"]), [0], Sampling(400, 4, 0, 1.0, 1.0))
    assert all(text[0] not in (0, 3) for text in found)
    assert any(3 in text for text in found)


PAIRS = [(" ".join(TOPICS[topic][:4]), " ".join([topic, TOPICS[topic][6]])) for topic in TOPICS]
TUNE = FineTuneConfig(max_source=16, max_target=6, epochs=150, batch_size=6, learning_rate=1e-2, precision="fp32")


@pytest.mark.slow
def test_fine_tuning_learns_the_pairs(t5: Path, tmp_path: Path) -> None:
    tuned = HuggingFaceGenerator.fine_tune(t5, PAIRS, out=tmp_path, settings=TUNE)
    greedy = Sampling(1, 6, 1, 1.0, 1.0)
    found = tuned.sample(tuned.tokenize([source for source, _ in PAIRS]), list(range(len(PAIRS))), greedy)
    assert [tuned.decode(rows)[0] for rows in found] == [target for _, target in PAIRS]
    assert tuned.fingerprint != HuggingFaceGenerator.load(t5).fingerprint
    stamp = (tmp_path / "model.safetensors").stat().st_mtime_ns
    again = HuggingFaceGenerator.fine_tune(t5, PAIRS, out=tmp_path, settings=TUNE)
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == stamp
    assert again.fingerprint == tuned.fingerprint
    path = generate_queries([Document("d", PAIRS[0][0])], generator=tmp_path, out=tmp_path / "q", settings=CONFIG)
    assert PAIRS[0][1] in queries_of(path)["d"]


def test_models_that_cannot_be_used_are_named(tmp_path: Path, encoder: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(MissingModelError, match="pickle file only"):
        load_generator(tmp_path)
    with pytest.raises(MissingModelError, match="encoder-decoder"):
        load_generator(encoder)
    with pytest.raises(MissingModelError, match="no such folder"):
        load_generator(tmp_path / "nothing")
    with pytest.raises(DataError, match="nothing to train"):
        HuggingFaceGenerator.fine_tune(encoder, [], out=tmp_path)


# ---- without a generator


def test_extracts_are_title_sentences_and_spans() -> None:
    text = "First sentence here. Second one!\nA third line without an end\n... --- \nFourth? " + " ".join(
        f"w{i}" for i in range(60)
    )
    document = Document("d", text, "The  title")
    found = extracts(document, dataclasses.replace(CONFIG, per_document=12))
    assert found[0] == "The title"
    assert found[1:5] == ["First sentence here.", "Second one!", "A third line without an end", "Fourth?"]
    assert len(found) == len(set(found)) == 12
    flat = " ".join(document.content.split())
    assert all(query in flat for query in found)
    assert all(len(query.split()) == 16 for query in found[6:])
    few = extracts(document, dataclasses.replace(CONFIG, per_document=3))
    assert few[0] == "The title"
    assert len(few) == 3
    others = {tuple(extracts(document, dataclasses.replace(CONFIG, per_document=3, seed=seed))) for seed in range(20)}
    assert len(others) > 3
    assert extracts(Document("d", " \n"), CONFIG) == []
    assert extracts(Document("d", "Only this.", ""), CONFIG) == ["Only this."]


def test_without_a_generator_the_message_says_what_one_would_add(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    documents = make_documents(7)
    found = queries_of(generate_queries(documents, out=tmp_path, settings=CONFIG))
    assert found == {document.doc_id: extracts(document, CONFIG) for document in documents}
    assert "a generator asks in the words of users" in " ".join(caplog.text.split())


# ---- files and filter


def test_files_round_trip_and_bad_lines_are_named(tmp_path: Path) -> None:
    pairs = [('a "quoted" one', "d1"), ("ünï \u2028 line", "d2"), ("again", "d1")]
    assert read_generated(write_generated(tmp_path / "q.jsonl", pairs)) == pairs
    for bad in ("not json", '{"doc_id": "d"}', '["d", "q"]', '{"doc_id": 1, "query": "q"}'):
        (tmp_path / "q.jsonl").write_text(f'{{"doc_id": "d", "query": "q"}}\n{bad}\n')
        with pytest.raises(DataError, match=r"q\.jsonl:2"):
            read_generated(tmp_path / "q.jsonl")
    with pytest.raises(DataError, match="no such file"):
        read_generated(tmp_path / "missing.jsonl")


class Fixed(Baseline):
    """Finds what it was told to find."""

    def __init__(self, answers: dict[str, list[str]]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def _answer(self, texts: list[str], k: int) -> list[Hits]:
        self.asked += texts
        return [[Hit(i, d, -float(i)) for i, d in enumerate(self.answers.get(q, [])[:k], 1)] for q in texts]


def test_the_round_trip_keeps_what_finds_its_document() -> None:
    queries = [("a", "1"), ("b", "1"), ("c", "2"), ("a", "2"), ("b", "1"), ("d", "9")]
    dense = Fixed({"a": ["3", "1"], "b": ["2"], "c": ["1", "3", "2"], "d": []})
    lexical = Fixed({"a": ["2", "1"], "b": ["3", "1"], "c": ["2"]})
    assert round_trip_filter(queries, [dense, lexical], k=2) == [q for q in queries if q != ("d", "9")]
    assert round_trip_filter(queries, [dense, lexical], k=1) == [("c", "2"), ("a", "2")]
    assert round_trip_filter(queries, [dense, lexical], k=3, need="all") == [("a", "1"), ("c", "2")]
    assert round_trip_filter(queries, [dense], k=3) == [("a", "1"), ("c", "2")]
    assert round_trip_filter([], [dense]) == []
    dense.asked.clear()
    lexical.asked.clear()
    round_trip_filter(queries, [dense, lexical], k=2)
    assert sorted(dense.asked) == ["a", "a", "b", "c", "d"]  # each pair once
    assert sorted(lexical.asked) == ["a", "b", "c", "d"]  # ("a", "1") was found before


def test_the_round_trip_works_with_a_real_search() -> None:
    documents = make_documents()
    good = [(document.title, document.doc_id) for document in documents]
    wrong = [(document.title, "d0") for document in documents[1:]]
    kept = round_trip_filter([*good, *wrong], [BM25(documents)], k=1)
    assert kept == good


def test_whether_a_text_finds_its_document_is_what_its_hits_say() -> None:
    """Ties, words that nothing holds, unknown documents: for every k as in search."""
    documents = [Document(f"d{i}", text) for i, text in enumerate(["red cat", "red", "cat dog", "red", "", "cat"])]
    rng = np.random.default_rng(0)
    vectors = rng.integers(0, 2, (6, 2)).astype(np.float32)
    letters = {"red": [1, 0], "cat": [0, 1], "blue": [0, 0], "red cat": [1, 1]}

    class Letters:
        def encode(self, texts: list[str], /, *, batch_size: int) -> Any:
            return np.array([letters[text] for text in texts], np.float32)

    pairs = [(text, doc_id) for text in letters for doc_id in ["d0", "d1", "d2", "d3", "d4", "d5", "unknown"]]
    for searcher in (BM25(documents), Dense(documents, Letters(), vectors)):
        searcher.queries_at_once = 5
        for k in (1, 2, 3, 6, 9):
            hits = searcher.search([text for text, _ in pairs], k)
            wanted = [
                any(hit.doc_id == doc_id for hit in found) for found, (_, doc_id) in zip(hits, pairs, strict=True)
            ]
            assert searcher.finds(pairs, k).tolist() == wanted


def test_source_pairs_leave_unknown_documents_out() -> None:
    documents = [Document("a", "text", "title"), Document("b", "other")]
    assert source_pairs(documents, [("q1", "b"), ("q2", "x"), ("q3", "a")]) == [("other", "q1"), ("title\ntext", "q3")]


def test_mistakes_are_said(tmp_path: Path, own: Path) -> None:
    mistakes: dict[str, list[Any]] = {
        **{name: [0] for name in ("per_document", "max_source", "max_target", "batch_size", "shard_size")},
        "top_k": [-1],
        "top_p": [0.0, 1.1],
        "temperature": [0.0, math.nan],
    }
    for field, value in [(field, value) for field, values in mistakes.items() for value in values]:
        with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')} is"):
            QueryGenConfig(**{field: value})
    with pytest.raises(DataError, match="no documents"):
        generate_queries([], generator=own, out=tmp_path)
    with pytest.raises(ConfigError, match="something to search with"):
        round_trip_filter([("a", "1")], [])
