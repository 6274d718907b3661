"""The stages in order: what is done, what is not done again, and every kind of corpus and model end to end."""

from __future__ import annotations

import csv
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import POSITION, make_beir, make_documents, make_encoder, make_queries, python, tiny_config, write_lines

from nci import making, pipeline, store
from nci.assembly import Assembly, load_embedder
from nci.config import Config
from nci.errors import ConfigError, DataError, NciError
from nci.index import Index
from nci.pipeline import build
from nci.plots import learning_curve
from nci.records import Document
from nci.trie import Trie

STAGES = ("documents", "embed", "tree", "lexical", "pairs", "train", "publish")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, encoder: Path, beir: Path) -> Path:
    """An index that tests copy and never change."""
    out = tmp_path_factory.mktemp("finished") / "my.index"
    build(beir, out, tiny_config(encoder))
    return out


@pytest.fixture
def index(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "my.index"))


@pytest.fixture(autouse=True)
def pictures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, Path]]:
    """What would have been drawn: a picture takes as long as the rest of a tiny build."""
    asked: list[tuple[Path, Path]] = []
    monkeypatch.setattr(pipeline, "learning_curve", lambda *paths: asked.append(paths))
    return asked


Spy = Callable[[], dict[str, str]]


@pytest.fixture
def done(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Spy:
    """What was logged of each stage since the last call."""
    logger = logging.getLogger("nci")
    caplog.set_level(logging.INFO, logger="nci")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)

    def read() -> dict[str, str]:
        lines = [record.getMessage() for record in caplog.records if record.name == "nci"]
        caplog.clear()
        return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines if line.split()[0] in (*STAGES, "tune")}

    return read


def worked(log: dict[str, str]) -> set[str]:
    return {stage for stage, line in log.items() if "already there" not in line}


def untrained(encoder: Path, **changes: Any) -> Config:
    return tiny_config(encoder, **{**changes, "train": {"epochs": 0, **changes.get("train", {})}})


def report(generation: Path) -> dict[str, Any]:
    found: dict[str, Any] = store.read_manifest(generation)["report"]
    return found


# The whole way


def test_a_beir_folder_becomes_an_index(
    encoder: Path, beir: Path, tmp_path: Path, done: Spy, pictures: list[tuple[Path, Path]]
) -> None:
    out = tmp_path / "my.index"
    generation = build(beir, out, tiny_config(encoder))
    assert generation == store.resolve(out) == out / "generation-000001"
    assert worked(done()) == set(STAGES)
    assert store.verify_checksums(generation) == []
    index = Index(out)
    assert index.verify(2) == []
    assert sorted(index.doc_ids) == sorted(document.doc_id for document in make_documents())
    assert set(report(generation)["dev"]) >= {"R@1", "R@10"}
    assert report(generation)["pairs"]["real"] == 60
    assert store.read_manifest(generation)["counts"]["documents"] == 60
    assert not list((out / "build").glob("train-*")), "checkpoints go after publishing"
    with (out / "reports" / "curve.csv").open(newline="") as stream:
        assert {"step", "loss", "R@1"} <= set(next(csv.DictReader(stream)))
    assert pictures == [(out / "reports" / "curve.csv", out / "reports" / "curve.png")]
    pytest.importorskip("matplotlib")
    assert learning_curve(*pictures[0])
    assert pictures[0][1].read_bytes().startswith(b"\x89PNG")


def test_the_index_finds_a_document_by_its_name(finished: Path) -> None:
    assert Index(finished).search("item0 apple", k=1)[0].doc_id == "d0"


def test_vectors_documents_and_ids_are_in_leaf_order(finished: Path) -> None:
    generation = store.resolve(finished)
    index = Index(finished)
    built = {name: next((finished / "build").glob(f"{name}-*")) for name in ("documents", "embed")}
    corpus_ids = json.loads((built["documents"] / "doc_ids.json").read_text())
    vectors = np.load(built["embed"] / "vectors.npy")
    stored = np.load(generation / "vectors.npy")
    row = {doc_id: number for number, doc_id in enumerate(corpus_ids)}
    texts = {document.doc_id: document.text for document in make_documents()}
    for number, doc_id in enumerate(index.doc_ids):
        assert (stored[number] == vectors[row[doc_id]].astype(np.float16)).all()
        assert index.document(number)["text"] == texts[doc_id]
    ids = [index.trie.semantic_id(number) for number in range(len(index))]
    assert ids == sorted(set(ids))


def test_a_second_call_does_nothing(index: Path, encoder: Path, beir: Path, done: Spy) -> None:
    before = {path: path.stat().st_mtime_ns for path in index.rglob("*") if path.is_file() and path.name != "LOCK"}
    assert build(beir, index, tiny_config(encoder)) == index / "generation-000001"
    assert worked(done()) == set()
    after = {path: path.stat().st_mtime_ns for path in index.rglob("*") if path.is_file() and path.name != "LOCK"}
    assert after == before


def test_an_index_that_would_now_search_in_another_way_is_published_again(
    index: Path, encoder: Path, beir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nci.pipeline.INDEX_VERSION", 0)
    assert build(beir, index, tiny_config(encoder)) == index / "generation-000002"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train": {"seed": 1}}, {"train", "publish"}),
        ({"train": {"decoder_lr": 1e-3}}, {"train", "publish"}),
        ({"model": {"head_rank": 2}}, {"train", "publish"}),
        ({"train": {"epochs": 2}}, {"pairs", "train", "publish"}),
        ({"pairs": {"spans": 3}}, {"pairs", "train", "publish"}),
        ({"tree": {"seed": 1}}, {"tree", "train", "publish"}),
        ({"embed": {"max_length": 20}}, {"embed", "tree", "pairs", "train", "publish"}),
        ({"train": {"epochs": 0}}, {"publish"}),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_a_changed_setting_redoes_what_depends_on_it_and_no_more(
    index: Path, encoder: Path, beir: Path, done: Spy, changes: dict[str, Any], expected: set[str]
) -> None:
    generation = build(beir, index, tiny_config(encoder, **changes))
    assert worked(done()) == expected
    assert generation == store.resolve(index) == index / "generation-000002"
    assert Index(index).verify(2) == []


def test_a_changed_document_is_noticed(index: Path, encoder: Path, done: Spy, tmp_path: Path) -> None:
    documents = make_documents()
    documents[0] = Document("d0", "wave ship harbour", "sea item0")
    build(make_beir(tmp_path / "other", documents), index, tiny_config(encoder))
    assert worked(done()) == set(STAGES)
    assert Index(index).document("d0")["text"] == "wave ship harbour"


def test_changed_training_queries_are_noticed(index: Path, encoder: Path, beir: Path, done: Spy) -> None:
    build(beir, index, tiny_config(encoder), queries=[("apple", "d0")])
    assert worked(done()) == {"lexical", "pairs", "train", "publish"}


@pytest.mark.slow
def test_a_changed_query_encoder_of_the_same_name_is_noticed(
    encoder: Path, beir: Path, tmp_path: Path, done: Spy
) -> None:
    other = make_encoder(tmp_path / "other", seed=1)
    config = tiny_config(encoder, model={"encoder": str(other), "query_vector": "stored"})
    build(beir, tmp_path / "my.index", config)
    done()
    make_encoder(other, seed=2)
    build(beir, tmp_path / "my.index", config)
    assert {"train", "publish"} <= worked(done())


# Killed in the middle


class Killed(BaseException):
    """Ends the build as a kill would: nothing catches it."""


def die(*_: Any, **__: Any) -> Any:
    raise Killed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "before"),
    [
        ("write_documents", set()),
        ("embed_documents", {"documents"}),
        ("build_tree", {"documents", "embed"}),
        ("write_plan", {"documents", "embed", "tree", "lexical"}),
        ("train", {"documents", "embed", "tree", "lexical", "pairs"}),
        ("write_generation", {"documents", "embed", "tree", "lexical", "pairs"}),
    ],
)
def test_a_killed_build_goes_on_where_it_was(
    encoder: Path,
    beir: Path,
    finished: Path,
    tmp_path: Path,
    done: Spy,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    before: set[str],
) -> None:
    out = tmp_path / "my.index"
    with monkeypatch.context() as patch:
        patch.setattr(pipeline if hasattr(pipeline, where) else making, where, die)
        with pytest.raises(Killed):
            build(beir, out, tiny_config(encoder))
    assert not (out / "CURRENT").exists()
    done()
    build(beir, out, tiny_config(encoder))
    assert worked(done()) == set(STAGES) - before
    ours, whole = store.read_manifest(store.resolve(out)), store.read_manifest(store.resolve(finished))
    hashes = [{name: entry["sha256"] for name, entry in found["files"].items()} for found in (ours, whole)]
    assert hashes[0] == hashes[1], "what was interrupted ends with the same bytes"


def test_a_build_killed_within_the_embedding_keeps_the_finished_shards(
    encoder: Path, beir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nci.encoders import TextEncoder

    texts: list[int] = []
    original = TextEncoder.encode

    def encode(self: Any, given: Any, **options: Any) -> Any:
        if options.get("role") == "document":
            texts.append(len(given))
            if len(texts) == 2:
                raise Killed
        return original(self, given, **options)

    monkeypatch.setattr(TextEncoder, "encode", encode)
    with pytest.raises(Killed):
        build(beir, tmp_path / "my.index", untrained(encoder))
    build(beir, tmp_path / "my.index", untrained(encoder))
    assert texts == [25, 25, 25, 10]


def test_a_failed_rebuild_leaves_the_old_index_live(
    index: Path, encoder: Path, beir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Index(index).search("apple", k=5)
    monkeypatch.setattr(pipeline, "write_generation", die)
    with pytest.raises(Killed):
        build(beir, index, untrained(encoder))
    assert store.resolve(index).name == "generation-000001"
    assert Index(index).search("apple", k=5) == before
    assert not list(index.glob("staging-*"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["manifest.json", "trie.safetensors", "CURRENT"])
def test_building_again_mends_a_damaged_index(index: Path, encoder: Path, beir: Path, name: str) -> None:
    """The message about a damaged index says that this command rebuilds it."""
    path = index / name if name == "CURRENT" else store.resolve(index) / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    build(beir, index, tiny_config(encoder))
    assert Index(index, paranoid=True).verify(2) == []


# Corpora


def as_csv(folder: Path) -> Path:
    with (folder / "docs.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["id", "title", "text"])
        writer.writerows((d.doc_id, d.title, d.text) for d in make_documents(20))
    return folder / "docs.csv"


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda _: make_documents(20),
        lambda _: iter(make_documents(20)),
        lambda _: [{"id": d.doc_id, "title": d.title, "text": d.text} for d in make_documents(20)],
        as_csv,
        lambda folder: str(as_csv(folder)),
        lambda folder: write_lines(
            folder / "docs.jsonl", ({"_id": d.doc_id, "title": d.title, "text": d.text} for d in make_documents(20))
        ),
    ],
    ids=["documents", "iterator", "dicts", "csv", "path as str", "jsonl"],
)
def test_every_kind_of_corpus_gives_the_same_index(encoder: Path, tmp_path: Path, make: Callable[[Path], Any]) -> None:
    out = tmp_path / "my.index"
    build(make(tmp_path), out, untrained(encoder))
    index = Index(out)
    assert sorted(index.doc_ids) == sorted(f"d{number}" for number in range(20))
    expected = {document.doc_id: document for document in make_documents(20)}
    for doc_id in index.doc_ids:
        stored = index.document(doc_id)
        assert (stored["title"], stored["text"]) == (expected[doc_id].title, expected[doc_id].text)
    assert index.search("item7 wave", k=1)[0].doc_id == "d7"


def test_a_list_of_strings_is_numbered(encoder: Path, tmp_path: Path, done: Spy) -> None:
    texts = [document.text for document in make_documents(8)]
    build(texts, tmp_path / "my.index", untrained(encoder))
    index = Index(tmp_path / "my.index")
    assert sorted(index.doc_ids) == [str(number) for number in range(8)]
    assert index.document("3")["text"] == texts[3]
    done()
    build(iter(texts), tmp_path / "my.index", untrained(encoder))
    assert worked(done()) == set(), "the same texts from an iterator are the same corpus"
    build([*texts[:-1], "another text"], tmp_path / "my.index", untrained(encoder))
    assert "publish" in worked(done())


def test_queries_given_in_python_are_trained_on(encoder: Path, tmp_path: Path) -> None:
    documents = make_documents()
    queries = make_queries(documents, seed=9)
    generation = build(documents, tmp_path / "my.index", tiny_config(encoder), queries=queries)
    assert report(generation)["pairs"]["real"] == len(queries)
    assert "dev" not in report(generation)
    with pytest.raises(DataError, match='"nobody"'):
        build(documents, tmp_path / "other", tiny_config(encoder), queries=[("a query", "nobody")])


def test_queries_in_python_stand_in_for_those_of_the_folder(encoder: Path, beir: Path, tmp_path: Path) -> None:
    generation = build(beir, tmp_path / "my.index", tiny_config(encoder), queries=[("apple", "d0"), ("wave", "d1")])
    assert report(generation)["pairs"]["real"] == 2
    assert "R@1" in report(generation)["dev"]


def with_judgements(beir: Path, folder: Path, split: str, lines: str) -> Path:
    copy = Path(shutil.copytree(beir, folder))
    with (copy / "qrels" / f"{split}.tsv").open("a") as stream:
        stream.write(lines)
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "dev"])
def test_a_judged_document_that_is_not_in_the_corpus(encoder: Path, beir: Path, tmp_path: Path, split: str) -> None:
    data = with_judgements(beir, tmp_path / "data", split, f"{split}0\tnobody\t1\n")
    with pytest.raises(DataError, match=rf'qrels/{split}.tsv names the document "nobody".*--on-error skip'):
        build(data, tmp_path / "my.index", tiny_config(encoder))
    generation = build(data, tmp_path / "my.index", tiny_config(encoder, corpus={"on_error": "skip"}))
    assert report(generation)["pairs"]["real"] == 60
    assert Index(tmp_path / "my.index").verify(2) == []


def test_dev_queries_without_a_document_left_are_no_dev_queries(encoder: Path, beir: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(beir, tmp_path / "data"))
    (data / "qrels" / "dev.tsv").write_text("query-id\tcorpus-id\tscore\ndev0\tnobody\t1\n")
    generation = build(data, tmp_path / "my.index", tiny_config(encoder, corpus={"on_error": "skip"}))
    dev = report(generation).get("dev", {})
    assert all(np.isfinite(value) for value in dev.values())
    assert Index(tmp_path / "my.index").search("apple", k=1)


def test_judgements_of_0_are_no_training_pairs(encoder: Path, beir: Path, tmp_path: Path) -> None:
    data = with_judgements(beir, tmp_path / "data", "train", "train0\td59\t0\n")
    assert report(build(data, tmp_path / "my.index", tiny_config(encoder)))["pairs"]["real"] == 60


def test_bad_lines_are_an_error_or_listed_in_the_reports(encoder: Path, beir: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(beir, tmp_path / "data"))
    with (data / "corpus.jsonl").open("a") as stream:
        stream.write('{"_id": "broken", \n{"_id": "d0", "text": "twice"}\n')
    out = tmp_path / "my.index"
    with pytest.raises(DataError, match=r"corpus\.jsonl, line 61"):
        build(data, out, untrained(encoder))
    build(data, out, untrained(encoder, corpus={"on_error": "skip"}))
    rows = [json.loads(line) for line in (out / "reports" / "rejects.jsonl").read_text().splitlines()]
    assert [row["line"] for row in rows] == [61, 62]
    assert len(Index(out)) == 60
    assert not list(store.resolve(out).rglob("rejects*"))


def test_no_rejects_file_where_nothing_was_rejected(encoder: Path, beir: Path, tmp_path: Path) -> None:
    build(beir, tmp_path / "my.index", untrained(encoder, corpus={"on_error": "skip"}))
    rejects = tmp_path / "my.index" / "reports" / "rejects.jsonl"
    assert not rejects.exists() or rejects.read_text() == ""


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("epochs", [0, 1])
def test_very_few_documents(encoder: Path, tmp_path: Path, count: int, epochs: int) -> None:
    generation = build(make_documents(count), tmp_path / "my.index", tiny_config(encoder, train={"epochs": epochs}))
    index = Index(tmp_path / "my.index")
    assert index.verify(2) == []
    hits = index.search("apple item0")
    assert sorted(hit.doc_id for hit in hits) == [f"d{number}" for number in range(count)]
    total = float(np.exp([hit.score for hit in hits]).sum())
    assert total == pytest.approx(1, abs=1e-3), "p(d | q) over all documents sums to 1"
    assert ("pairs" in report(generation)) == (epochs > 0)


def test_no_training_queries_at_all(encoder: Path, tmp_path: Path, done: Spy) -> None:
    generation = build(make_documents(), tmp_path / "my.index", tiny_config(encoder))
    pairs = report(generation)["pairs"]
    assert (pairs["real"], pairs["generated"]) == (0, 0)
    assert pairs["span"] >= 60


def test_nothing_to_train_on(encoder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, done: Spy) -> None:
    generation = build(make_documents(), tmp_path / "my.index", tiny_config(encoder, pairs={"span_share": 0.0}))
    assert any("no training queries" in record.getMessage() for record in caplog.records)
    assert "pairs" not in report(generation)
    assert Index(tmp_path / "my.index").search("apple item0", k=1)[0].doc_id == "d0"


def test_nothing_to_train_on_and_no_anchor_would_rank_by_chance(encoder: Path, tmp_path: Path) -> None:
    config = tiny_config(encoder, pairs={"span_share": 0.0}, model={"anchor": "none"})
    with pytest.raises(ConfigError):
        build(make_documents(), tmp_path / "my.index", config)


def test_generated_queries_are_trained_on(encoder: Path, tmp_path: Path) -> None:
    documents = make_documents()
    generated = make_queries(documents, seed=11, each=3)
    config = tiny_config(encoder, pairs={"generated_queries": 2, "span_share": 0.0})
    generation = build(documents, tmp_path / "my.index", config, generated=generated)
    assert report(generation)["pairs"] == {"real": 0, "span": 0, "generated": 120}
    with pytest.raises(DataError, match='"nobody"'):
        build(documents, tmp_path / "other", config, generated=[("a query", "nobody")])


def test_an_empty_corpus_is_an_error(encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        build([], tmp_path / "my.index", untrained(encoder))
    with pytest.raises(DataError, match="missing"):
        build(tmp_path / "missing.jsonl", tmp_path / "my.index", untrained(encoder))
    assert not (tmp_path / "my.index" / "CURRENT").exists()


def test_equal_documents_and_odd_texts(encoder: Path, tmp_path: Path) -> None:
    texts = ["apple pear"] * 30 + ["\u202eright to left", "é" * 5000, "検索" * 100, "a\x00b", "😀"]
    build(texts, tmp_path / "my.index", tiny_config(encoder))
    index = Index(tmp_path / "my.index")
    assert index.verify(2) == []
    assert len({hit.doc_id for hit in index.search("apple", k=35)}) == 35


# Kinds of tree and model


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"tree": {"source": "queries"}},
        {"tree": {"ids": "random"}},
        {"tree": {"ids": "atomic"}, "model": {"head": "tied", "adapter_layers": 0}},
        {"model": {"head": "tied", "adapter_layers": 0}},
        {"model": {"head": "product"}},
        {"model": {"adapter_start": "query"}},
        {"model": {"anchor": "none"}},
        {"model": {"anchor": "mean"}},
        {"model": {"score": "dense"}},
        {"model": {"query_vector": "stored"}},
        {"model": {"query_vector": "auto"}},
        {"model": {"content": False, "edge_bias": False}},
        {"model": {"d_model": 16}},
        {"model": POSITION},
        {"model": {**POSITION, "normalise": "vocabulary"}},
        {"train": {"freeze_encoder": True}},
        {"train": {"spare_unseen": False}},
        {"train": {"epochs": 0}},
        {"train": {"epochs": 0.5}},
        {"pairs": {"sampling": "document"}},
    ],
    ids=str,
)
def test_every_kind_of_index_is_whole_and_finds(
    encoder: Path, beir: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    out = tmp_path / "my.index"
    generation = build(beir, out, tiny_config(encoder, **changes))
    index = Index(out)
    assert index.verify(2) == []
    hits = index.search("apple pear item0", k=60, beam=100)
    assert len({hit.doc_id for hit in hits}) == len(hits) == 60
    exhaustive = index.search("apple pear item0", k=60, mode="exhaustive")
    # The edge table is stored as bf16.
    assert np.allclose([hit.score for hit in hits], [hit.score for hit in exhaustive], atol=2e-2)
    total = float(np.exp([hit.score for hit in hits]).sum())
    if changes.get("model", {}).get("normalise") in ("position", "vocabulary"):
        assert total <= 1 + 1e-3  # the rest went to strings that are no ids
    else:
        assert total == pytest.approx(1, abs=1e-3)
    assert (generation / "lexical").exists() == (
        index.config.model.anchor == "exact" and index.config.model.score == "dense+bm25"
    )
    assert (generation / "edges.safetensors").exists() == index.engine.model.config.foldable


def test_random_ids_permute_the_documents_over_the_same_tree(encoder: Path, beir: Path, tmp_path: Path) -> None:
    indexes = []
    for ids in ("semantic", "random"):
        build(beir, tmp_path / ids, untrained(encoder, tree={"ids": ids}))
        indexes.append(Index(tmp_path / ids))
    one, two = indexes
    assert (one.trie.paths == two.trie.paths).all()
    assert one.doc_ids != two.doc_ids
    assert sorted(one.doc_ids) == sorted(two.doc_ids)


def test_atomic_ids_have_one_digit(encoder: Path, beir: Path, tmp_path: Path) -> None:
    config = untrained(encoder, tree={"ids": "atomic"}, model={"head": "tied", "adapter_layers": 0})
    build(beir, tmp_path / "my.index", config)
    trie = Index(tmp_path / "my.index").trie
    assert (trie.positions, trie.fanout) == (1, 60)


def test_a_tree_of_queries_differs_where_there_are_queries(encoder: Path, beir: Path, tmp_path: Path) -> None:
    paths = []
    for source in ("documents", "queries"):
        build(beir, tmp_path / source, untrained(encoder, tree={"source": source}))
        index = Index(tmp_path / source)
        paths.append({doc_id: index.trie.semantic_id(number) for number, doc_id in enumerate(index.doc_ids)})
    assert paths[0] != paths[1]
    build(make_documents(), tmp_path / "none", untrained(encoder, tree={"source": "queries"}))
    index = Index(tmp_path / "none")
    assert paths[0] == {doc_id: index.trie.semantic_id(number) for number, doc_id in enumerate(index.doc_ids)}


@pytest.mark.slow
def test_auto_takes_the_query_vector_that_dev_prefers(
    encoder: Path, beir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Assembly.search_dev
    for preferred in ("trained", "stored"):

        def metrics(self: Any, model: Any, dev: Any, preferred: str = preferred) -> dict[str, float]:
            return {**original(self, model, dev), "R@1": float(model.config.query_vector == preferred)}

        monkeypatch.setattr(Assembly, "search_dev", metrics)
        out = tmp_path / preferred
        generation = build(beir, out, tiny_config(encoder, model={"query_vector": "auto"}))
        assert set(report(generation)["query_vector"]) == {"trained", "stored"}
        index = Index(out)
        assert index.engine.model.config.query_vector == preferred
        assert (index.engine.embedder is not None) == (preferred == "stored")
        assert index.search("apple item0", k=1)


def test_auto_without_dev_stays_with_the_trained_encoder(encoder: Path, tmp_path: Path) -> None:
    build(make_documents(), tmp_path / "my.index", tiny_config(encoder, model={"query_vector": "auto"}))
    assert Index(tmp_path / "my.index").engine.model.config.query_vector == "trained"


def test_another_query_encoder_with_stored_vectors(encoder: Path, beir: Path, tmp_path: Path) -> None:
    other = make_encoder(tmp_path / "t5", kind="t5", seed=5)
    config = tiny_config(encoder, model={"encoder": str(other), "query_vector": "stored"})
    build(beir, tmp_path / "my.index", config)
    index = Index(tmp_path / "my.index")
    assert index.verify(2) == []
    assert index.engine.model.config.encoder["model_type"] == "t5"
    assert index.search("apple item0", k=1)[0].doc_id == "d0"


def test_an_encoder_with_layers_of_its_own_is_not_tuned(
    encoder: Path,
    beir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    done: Spy,
) -> None:
    """A preset that tunes takes any encoder; how one with other layers is run is tested in test_encoders.py."""
    monkeypatch.setattr(making, "read_settings", lambda _: SimpleNamespace(plain=False))
    build(beir, tmp_path / "my.index", tiny_config(encoder, tune={"epochs": 1}, train={"epochs": 0}))
    assert "it is not tuned" in caplog.text
    assert "tune" not in done()


def test_fewer_encoder_layers_than_there_are(encoder: Path, beir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model\.encoder_layers 9: the encoder has 1"):
        build(beir, tmp_path / "my.index", untrained(encoder, model={"encoder_layers": 9}))


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"model": {"d_model": 30, "heads": 4}}, "--model.heads"),
        ({"embed": {"normalise": False}}, "--embed.normalise"),
        ({"tree": {"max_depth": 2}}, "--tree.max_depth"),
        ({"train": {"metric": "bogus"}}, "bogus"),
        ({"train": {"metric": "R@ten"}}, "R@ten"),
    ],
)
def test_settings_that_do_not_fit_the_corpus_or_the_encoder(
    encoder: Path, beir: Path, tmp_path: Path, changes: dict[str, Any], flag: str
) -> None:
    with pytest.raises(ConfigError, match=flag):
        build(beir, tmp_path / "my.index", tiny_config(encoder, **changes))


def test_a_wrong_metric_is_noticed_before_any_training(
    encoder: Path, beir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "train", lambda *_, **__: pytest.fail("trained before the metric was checked"))
    with pytest.raises(ConfigError, match="bogus"):
        build(beir, tmp_path / "my.index", tiny_config(encoder, train={"metric": "bogus"}))


@pytest.mark.parametrize("device", ["bogus"] if torch.cuda.is_available() else ["bogus", "cuda"])
def test_a_device_that_is_not_there_is_an_error_of_the_user(
    encoder: Path, beir: Path, tmp_path: Path, device: str
) -> None:
    with pytest.raises(NciError):
        build(beir, tmp_path / "my.index", untrained(encoder), device=device)


def test_an_unknown_engine_is_an_error(encoder: Path, beir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--engine"):
        build(beir, tmp_path / "my.index", untrained(encoder), engine="bogus")


def test_a_place_that_cannot_be_written_is_an_error_of_the_user(encoder: Path, beir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(NciError):
        build(beir, tmp_path / "file" / "my.index", untrained(encoder))


def test_two_builds_of_one_folder_do_not_mix(encoder: Path, beir: Path, tmp_path: Path) -> None:
    with store.writer_lock(tmp_path / "my.index"), pytest.raises(NciError, match="being written"):
        _in_another_thread(lambda: build(beir, tmp_path / "my.index", untrained(encoder)))


def _in_another_thread(work: Callable[[], Any]) -> Any:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.slow
def test_seeds_decide_the_bytes(encoder: Path, tmp_path: Path) -> None:
    documents = make_documents(20)

    def hashes(name: str, **changes: Any) -> Iterator[tuple[str, str]]:
        generation = build(documents, tmp_path / name, tiny_config(encoder, **changes))
        files = store.read_manifest(generation)["files"]
        return ((file, files[file]["sha256"]) for file in ("model.safetensors", "trie.safetensors", "vectors.npy"))

    one, two, three = dict(hashes("a")), dict(hashes("b")), dict(hashes("c", train={"seed": 7}))
    assert one == two
    assert one["model.safetensors"] != three["model.safetensors"]
    assert Trie.load(store.resolve(tmp_path / "a") / "trie.safetensors").documents == 20


@pytest.mark.slow
def test_two_processes_build_one_index(encoder: Path, beir: Path, tmp_path: Path) -> None:
    """torchrun: the first process does the stages, both train, one publishes, and both can open what was published."""
    script = tmp_path / "both.py"
    script.write_text(
        "import os, pathlib, sys, nci\n"
        "from tiny import tiny_config\n"
        "index = nci.build(sys.argv[2], sys.argv[3], tiny_config(sys.argv[1]), device='cpu')\n"
        "seen = f'{len(index)} {index.search(\"apple item0\", k=1)[0].doc_id}'\n"
        "pathlib.Path(sys.argv[4], os.environ['RANK']).write_text(seen)\n"  # lines of both would mix in one stdout
    )
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    result = python(*launch, str(script), str(encoder), str(beir), str(tmp_path / "my.index"), str(tmp_path))
    assert result.returncode == 0, result.stderr[-2000:]
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text() == "60 d0"
    assert Index(tmp_path / "my.index").verify(2) == []


# The encoder is tuned first


def test_a_tuned_encoder_embeds_documents_and_reads_queries(
    encoder: Path, beir: Path, tmp_path: Path, done: Spy
) -> None:
    config = tiny_config(encoder, tune={"epochs": 1, "batch_size": 8, "lr": 1e-3}, train={"epochs": 0})
    out = tmp_path / "my.index"
    generation = build(beir, out, config)
    assert "tune" in worked(done())
    index = Index(out)
    tuned, shipped = (load_file(folder / "model.safetensors") for folder in (generation / "embedder", encoder))
    assert any(not torch.equal(tuned[name], shipped[name]) for name in tuned)
    embedder = load_embedder(index.config, generation / "embedder")
    texts = [index.document(number)["text"] for number in range(len(index))]
    titles = [index.document(number).get("title", "") for number in range(len(index))]
    contents = [Document("x", text, title).content for text, title in zip(texts, titles, strict=True)]
    np.testing.assert_allclose(embedder.encode(contents), index.vectors(), atol=2e-3)
    weights = index.engine.model.encoder.state_dict()
    assert all(torch.equal(weights[name], tuned[name]) for name in weights if name in tuned)
    build(beir, out, config)
    assert worked(done()) == set()
    build(beir, out, config, queries=[("apple", "d0"), ("pear", "d1")])
    assert {"tune", "embed", "tree"} <= worked(done())


def test_without_pairs_nothing_is_tuned(encoder: Path, tmp_path: Path, done: Spy) -> None:
    config = tiny_config(encoder, tune={"epochs": 1}, train={"epochs": 0})
    build(make_documents(6), tmp_path / "my.index", config)
    assert "tune" not in worked(done())


def test_a_folder_with_other_files_gets_no_index(encoder: Path, beir: Path) -> None:
    before = sorted(beir.rglob("*"))
    with pytest.raises(ConfigError, match=r"holds other files.*corpus\.jsonl"):
        build(beir, beir, tiny_config(encoder))
    assert sorted(beir.rglob("*")) == before


def test_an_empty_folder_and_one_with_hidden_files_do(encoder: Path, beir: Path, tmp_path: Path) -> None:
    (tmp_path / ".gitkeep").touch()
    assert build(beir, tmp_path, tiny_config(encoder)).parent == tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_mpnet_from_tuning_to_search(beir: Path, tmp_path: Path, ok: Callable[..., str], precision: str) -> None:
    """Another encoder through all stages, trained in two of them; words that only one document has find it."""
    config = tiny_config(
        make_encoder(tmp_path / "mpnet", kind="mpnet"),
        tune={"epochs": 1, "refreshes": 1, "batch_size": 8, "lr": 1e-3},
        calibrate={"share": 0.4, "least": 4},
        search={"precision": precision},
    )
    generation = build(beir, tmp_path / "my.index", config)
    assert "calibration" in report(generation)
    assert ok("verify", tmp_path / "my.index")
    index = Index(tmp_path / "my.index")
    assert index.verify(2) == []
    assert index.engine.model.config.encoder["model_type"] == "mpnet"
    queries = [document.title for document in make_documents()]
    hits = index.search(queries, k=3)
    assert np.mean([found[0].doc_id == f"d{number}" for number, found in enumerate(hits)]) > 0.9
    again = Index(tmp_path / "my.index").search(queries, k=3)
    assert [[(hit.doc_id, hit.score) for hit in found] for found in again] == [
        [(hit.doc_id, hit.score) for hit in found] for found in hits
    ]
