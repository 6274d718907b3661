"""The index as users hold it: search, other systems, verify, load, merge, push."""

from __future__ import annotations

import io
import json
import math
import os
import pickletools
import shutil
import socket
import zipfile
from collections.abc import Callable
from copy import copy as copy_object
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import POSITION, make_documents, make_encoder, tiny_config, write_lines

import nci
from nci import fuse, store
from nci.baselines.dense import Dense
from nci.corpus import Dataset
from nci.encoders import TextEncoder
from nci.errors import ConfigError, DataError, IndexCorruptError, IndexNotFoundError, IndexVersionError, NciError
from nci.index import Hits, Index, load, search_many, snippet
from nci.pairs import BatchPlan
from nci.records import Document, Hit
from nci.search.content import DocumentVectors

QUERY = "apple pear item0"


Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, encoder: Path, beir: Path) -> Make:
    """Builds an index of the BEIR folder once for each set of settings."""
    known: dict[str, Path] = {}

    def build(**changes: Any) -> Path:
        key = json.dumps(changes, sort_keys=True)
        if key not in known:
            known[key] = tmp_path_factory.mktemp("index") / "my.index"
            nci.build(beir, known[key], tiny_config(encoder, **changes))
        return known[key]

    return build


@pytest.fixture(scope="module")
def folder(make: Make) -> Path:
    return make()


@pytest.fixture(scope="module")
def index(folder: Path) -> Index:
    return Index(folder)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "my.index"))


# Search


def test_one_query_gives_hits_and_several_give_a_list(index: Index) -> None:
    one = index.search(QUERY, k=3)
    assert isinstance(one, Hits)
    assert all(isinstance(hit, Hit) for hit in one)
    several = index.search([QUERY, "wave ship"], k=3)
    assert type(several) is list
    assert all(isinstance(hits, Hits) for hits in several)
    assert index.search([], k=3) == []
    assert len(index.search(("wave",), k=2)) == 1
    assert [hit.doc_id for hit in several[0]] == [hit.doc_id for hit in one]


def test_hits_are_ranked_unique_and_carry_their_document(index: Index) -> None:
    documents = {document.doc_id: document for document in make_documents()}
    for hits in index.search([QUERY, "the wave of item13", "unknown words only", "law"], k=25):
        assert len({hit.doc_id for hit in hits}) == len(hits) == 25
        assert [hit.rank for hit in hits] == list(range(1, 26))
        scores = [hit.score for hit in hits]
        assert scores == sorted(scores, reverse=True)
        assert all(math.isfinite(score) and score <= 1e-6 for score in scores)
        for hit in hits:
            document = documents[hit.doc_id]
            assert (hit.title, hit.text, hit.source) == (document.title, document.text, "nci")
            number = index.doc_ids.index(hit.doc_id)
            assert hit.semantic_id == index.trie.semantic_id(number)


def test_it_finds_what_it_was_made_for(index: Index, beir: Path) -> None:
    queries, qrels = Dataset(beir).split("test")
    run = index.run(queries, k=10)
    assert run.keys() == qrels.keys()
    found = sum(bool(set(run[query]) & set(qrels[query])) for query in qrels)
    assert found >= 10


def test_more_hits_than_documents_gives_them_all(index: Index) -> None:
    hits = index.search(QUERY, k=10_000)
    assert len(hits) == len(index) == 60
    assert float(np.exp([hit.score for hit in hits]).sum()) == pytest.approx(1, abs=1e-3)


def test_a_given_beam_is_kept_and_the_index_s_own_is_raised_to_k(index: Index) -> None:
    assert len(index.search(QUERY, k=30, beam=1)) == 1
    narrow = replace(index.config, search=replace(index.config.search, beam=2))
    other = copy_object(index)
    other.config = narrow
    assert len(other.search(QUERY, k=30)) == 30


def test_a_wide_beam_equals_scoring_every_document(index: Index) -> None:
    for penalty in (0.0, 0.8):
        one = index.search(QUERY, k=60, beam=60, length_penalty=penalty)
        two = index.search(QUERY, k=60, length_penalty=penalty, mode="exhaustive")
        assert [hit.doc_id for hit in one[:10]] == [hit.doc_id for hit in two[:10]]
        assert np.allclose([hit.score for hit in one], [hit.score for hit in two], atol=1e-3)


def test_the_length_penalty_divides_log_p(index: Index) -> None:
    plain = {hit.doc_id: hit for hit in index.search(QUERY, k=60, beam=60)}
    for hit in index.search(QUERY, k=60, beam=60, length_penalty=1.0):
        assert hit.score == pytest.approx(plain[hit.doc_id].score / (len(hit.semantic_id) + 1), abs=1e-4)


@pytest.mark.slow
def test_how_many_documents_were_scored(make: Make, index: Index) -> None:
    assert index.search(QUERY, k=1).documents_scored == 60, "an exact anchor looks at every document"
    for anchor in ("none", "mean"):
        other = Index(make(model={"anchor": anchor}))
        narrow = other.search(QUERY, k=1, beam=1).documents_scored
        wide = other.search(QUERY, k=60, beam=60).documents_scored
        pruned = other.search(QUERY, k=1, beam=60).documents_scored
        assert 1 <= narrow < wide == 60
        assert 1 <= pruned <= wide, "what cannot be the best any more is not looked at"


def test_searching_twice_gives_the_same_and_company_does_not_matter(index: Index) -> None:
    queries = [QUERY, "wave", "court judge verdict item5 " * 10, "moon star"]
    first, second = index.search(queries, k=10), index.search(queries, k=10)
    assert first == second
    for query, hits in zip(queries, first, strict=True):
        alone = index.search(query, k=10)
        assert [hit.doc_id for hit in alone[:3]] == [hit.doc_id for hit in hits[:3]]
        assert np.allclose([hit.score for hit in alone], [hit.score for hit in hits], atol=1e-4)


@pytest.mark.parametrize(
    "query",
    [
        "a\x00b",
        "😀 🍎",
        "apple " * 1700,
        "x" * 10_000,
        "y" * 100_000,
        "שלום עולם",
        "\u202eapple",
        "?",
        "\t apple \n",
        "検索",
    ],
    ids=["NUL", "emoji", "words", "10000", "100000", "rtl", "override", "mark", "blanks", "cjk"],
)
def test_odd_queries_are_answered(index: Index, query: str) -> None:
    hits = index.search(query, k=5)
    assert len(hits) == 5
    assert all(math.isfinite(hit.score) for hit in hits)


@pytest.mark.parametrize("query", ["", "   \n", "\x00", "\ud800", "apple \udfff pear"], ids=ascii)
def test_what_is_no_query_is_refused(index: Index, query: str) -> None:
    with pytest.raises(DataError):
        index.search(query)
    with pytest.raises(DataError):
        index.search(["apple", query])


def test_wrong_options_name_the_flag(index: Index) -> None:
    with pytest.raises(ConfigError, match="-k"):
        index.search(QUERY, k=0)
    with pytest.raises(ConfigError, match="--beam"):
        index.search(QUERY, beam=0)
    with pytest.raises(ConfigError, match="--unconstrained"):
        index.search(QUERY, mode="unconstrained")
    with pytest.raises(DataError):
        index.search([1])  # type: ignore[list-item]


def test_a_mode_that_does_not_exist_is_refused(index: Index) -> None:
    with pytest.raises(NciError):
        index.search(QUERY, mode="bogus")  # type: ignore[call-overload]


def test_search_without_the_tree(make: Make) -> None:
    other = Index(make(model=POSITION))
    free = other.search(QUERY, k=10, beam=200, mode="unconstrained")
    bound = {hit.doc_id: hit.score for hit in other.search(QUERY, k=60, beam=60)}
    assert free
    for hit in free:
        assert hit.score == pytest.approx(bound[hit.doc_id], abs=1e-3)


def test_queries_are_cut_to_what_the_encoder_can_read(tmp_path: Path) -> None:
    """Also where `pairs.max_length` and `embed.max_length` are above that."""
    encoder = make_encoder(tmp_path / "short", positions=20)
    config = tiny_config(encoder, embed={"max_length": 30}, pairs={"max_length": 64}, train={"epochs": 0})
    index = nci.build(make_documents(10), tmp_path / "my.index", config)
    assert len(index.search("apple pear plum " * 30, k=5)) == 5


def test_search_reads_more_of_a_long_query_than_training_does(tmp_path: Path, encoder: Path) -> None:
    """With `pairs.max_length` 4, two words between the marks of both ends, these queries are one and the same to training."""
    settings: dict[str, Any] = {"pairs": {"max_length": 4}, "model": {"score": "dense"}, "train": {"epochs": 0}}
    index = nci.build(make_documents(), tmp_path / "my.index", tiny_config(encoder, **settings))
    found = index.search(["of the apple pear", "of the violin song"], k=60)
    first, second = ({hit.doc_id: hit.score for hit in hits} for hits in found)
    assert max(abs(first[doc_id] - second[doc_id]) for doc_id in first) > 0.1
    again = nci.load(tmp_path / "my.index").search("of the apple pear", k=60)
    assert {hit.doc_id: hit.score for hit in again} == pytest.approx(first, abs=1e-3)


def test_training_reads_less_of_a_long_query(make: Make) -> None:
    folder = make(pairs={"max_length": 4})
    (plan,) = (folder / "build").glob("pairs-*/plan")
    assert BatchPlan(plan).lengths.max() == 4
    assert Index(folder).engine.max_length == Index(folder).config.embed.max_length > 4


def test_without_an_anchor_search_reads_as_much_as_training(make: Make) -> None:
    assert Index(make(model=POSITION, pairs={"max_length": 4})).engine.max_length == 4


def test_an_index_of_before_goes_on_as_it_was(make: Make) -> None:
    """Its manifest says how much of a query it reads, and all of its systems do."""
    index = Index(make())
    index.manifest["query_length"] = 5
    index.engine = index._engine("cpu")
    assert {index.system(name).engine.max_length for name in ("trained", "zeroed", "untrained")} == {5}


# Explain and documents


def test_the_explained_digits_add_up_to_the_score(index: Index) -> None:
    hits = index.search(QUERY, k=5, beam=60)
    lines = index.explain(QUERY, [hit.doc_id for hit in hits]).splitlines()
    assert len(lines) == 5
    for hit, line in zip(hits, lines, strict=True):
        doc_id, rest = line.split(": log p ")
        assert doc_id == hit.doc_id
        total, steps = rest.split("  content score")[0].split(" = ")
        assert float(total) == pytest.approx(hit.score, abs=2e-3)
        parts = [step.split(":") for step in steps.split()]
        assert tuple(int(digit) for digit, _ in parts) == hit.semantic_id
        assert sum(float(value) for _, value in parts) == pytest.approx(hit.score, abs=0.05)


def test_explaining_nothing_says_nothing(index: Index) -> None:
    assert index.explain(QUERY, ["nobody"]) == ""
    assert index.explain(QUERY, []) == ""


def test_explain_works_with_an_end_token(make: Make) -> None:
    other = Index(make(model=POSITION))
    hit = other.search(QUERY, k=1)[0]
    line = other.explain(QUERY, [hit.doc_id])
    assert line.split(": log p ")[0] == hit.doc_id
    assert float(line.split(": log p ")[1].split()[0]) == pytest.approx(hit.score, abs=2e-3)
    assert "content" not in line


def test_a_document_comes_with_all_its_fields(tmp_path: Path, encoder: Path) -> None:
    rows: list[dict[str, object]] = [
        {"_id": "a/b", "text": "apple", "year": 1999, "tags": ["x"]},
        {"_id": "ü", "text": "wave", "title": "T"},
    ]
    corpus = write_lines(tmp_path / "docs.jsonl", rows)
    index = nci.build(corpus, tmp_path / "my.index", tiny_config(encoder, train={"epochs": 0}))
    assert index.document("a/b")["fields"] == {"year": 1999, "tags": ["x"]}
    assert index.document("ü")["title"] == "T"
    assert len(index) == 2
    with pytest.raises((NciError, KeyError)):
        index.document("nobody")


def test_snippets_are_cut_between_words() -> None:
    assert snippet("a  b\nc") == "a b c"
    assert snippet("word " * 100, width=12) == "word word ..."
    assert len(snippet("x" * 1000, width=20)) <= 24


# Other systems


def test_untrained_ranks_as_dense_search_does(make: Make, beir: Path) -> None:
    """With an exact anchor and nothing learned, p(d | q) is a softmax over the similarities."""
    index = Index(make(model={"score": "dense"}))
    untrained = index.system("untrained")
    documents = [Document(d, index.document(d)["text"], index.document(d)["title"]) for d in index.doc_ids]
    vectors = np.load(index.generation / "vectors.npy").astype(np.float32)
    dense = Dense(documents, TextEncoder.load(index.generation / "embedder"), vectors)
    kappa = index.config.model.kappa
    for query in [q.text for q in Dataset(beir).split("test")[0]]:
        ours, theirs = untrained.search(query, k=60, beam=60), dense.search(query, k=60)
        scores = {hit.doc_id: hit.score for hit in theirs}
        expected = {d: kappa * s for d, s in scores.items()}
        norm = math.log(sum(math.exp(s) for s in expected.values()))
        for hit in ours:
            assert hit.score == pytest.approx(expected[hit.doc_id] - norm, abs=2e-3)
        for one, two in zip(ours, theirs, strict=True):  # equal but for documents that tie within rounding
            assert scores[one.doc_id] == pytest.approx(two.score, abs=2e-4)
    assert untrained.search(QUERY, k=5) != index.search(QUERY, k=5)
    assert index.system("trained") is index


def test_untrained_equals_an_index_of_0_epochs(make: Make, index: Index) -> None:
    never = Index(make(train={"epochs": 0}))
    one, two = index.system("untrained").search(QUERY, k=20), never.search(QUERY, k=20)
    assert [hit.doc_id for hit in one] == [hit.doc_id for hit in two]
    assert np.allclose([hit.score for hit in one], [hit.score for hit in two], atol=1e-3)


def test_zeroed_is_the_content_score_alone(index: Index) -> None:
    zeroed = index.system("zeroed")
    with torch.no_grad():
        queries = index.engine.encode([QUERY])
        lexical = index.engine.lexical
        assert lexical is not None
        words = torch.as_tensor(lexical.normalised([QUERY]))
        scores = index.engine.model.document_scores(queries.vectors, words)[0].log_softmax(0)  # type: ignore[arg-type]
    expected = {doc_id: float(scores[number]) for number, doc_id in enumerate(index.doc_ids)}
    hits = zeroed.search(QUERY, k=60, beam=60)
    assert {hit.doc_id: hit.score for hit in hits} == pytest.approx(expected, abs=1e-3)
    trained = {hit.doc_id: hit.score for hit in index.search(QUERY, k=60, beam=60)}
    assert trained != pytest.approx(expected, abs=1e-3)
    assert index.engine.edges is not None
    assert bool(index.engine.edges.vectors.any()), "the index itself must stay as it is"


def test_a_zeroed_system_is_zeroed_in_every_way_of_asking(index: Index) -> None:
    zeroed = index.system("zeroed")
    beam, exhaustive = zeroed.search(QUERY, k=5, beam=60), zeroed.search(QUERY, k=5, mode="exhaustive")
    assert np.allclose([hit.score for hit in beam], [hit.score for hit in exhaustive], atol=1e-3)
    total = float(zeroed.explain(QUERY, [beam[0].doc_id]).split("log p ")[1].split()[0])
    assert total == pytest.approx(beam[0].score, abs=2e-3)


def test_systems_that_do_not_exist_are_refused(make: Make, index: Index, encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--system"):
        index.system("bogus")
    with pytest.raises(ConfigError, match="--system zeroed"):
        Index(make(model={"anchor": "none"})).system("zeroed")


def test_untrained_needs_the_first_weights(make: Make, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = make_encoder(tmp_path_factory.mktemp("other"), seed=3)
    built = make(model={"encoder": str(other), "query_vector": "stored"}, train={"epochs": 0})
    with pytest.raises(ConfigError, match="--system untrained"):
        Index(built).system("untrained")


# Opening


def test_a_bare_generation_and_a_read_only_copy(copy: Path, index: Index, tmp_path: Path) -> None:
    expected = index.search(QUERY, k=5)
    bare = tmp_path / "snapshot"
    shutil.copytree(store.resolve(copy), bare)
    assert load(bare).search(QUERY, k=5) == expected
    shutil.rmtree(copy / "build")
    before = sorted(copy.rglob("*"))
    for path in before:
        path.chmod(0o555 if path.is_dir() else 0o444)
    copy.chmod(0o555)
    try:
        assert load(copy, paranoid=True).search(QUERY, k=5) == expected
        assert load(copy).verify(2) == []
        assert sorted(copy.rglob("*")) == before
    finally:
        copy.chmod(0o755)
        for path in before:
            path.chmod(0o755)


def test_loading_needs_no_network(folder: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    def blocked(*_: Any, **__: Any) -> Any:
        raise AssertionError("the network was asked")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, blocked)
    assert load(folder).search(QUERY, k=3) == index.search(QUERY, k=3)


def test_nothing_but_the_generation_is_needed(copy: Path, tmp_path: Path, index: Index) -> None:
    for name in ("build", "reports", "LOCK"):
        path = copy / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert load(copy.rename(tmp_path / "moved")).search(QUERY, k=3) == index.search(QUERY, k=3)


def test_no_file_of_a_generation_is_a_pickle(make: Make) -> None:
    for changes in ({}, {"model": POSITION}):
        generation = store.resolve(make(**changes))
        for path in generation.rglob("*"):
            if not path.is_file():
                continue
            data = path.read_bytes()
            assert path.suffix not in {".pkl", ".pickle", ".pt", ".pth", ".bin", ".joblib", ".npz", ".ckpt"}, path
            assert not zipfile.is_zipfile(io.BytesIO(data)), path
            if data[:1] == b"\x80":
                with pytest.raises(ValueError, match=r"."):
                    list(pickletools.genops(data))
            if path.suffix == ".npy":
                np.load(path, allow_pickle=False)


def test_what_is_in_a_generation(folder: Path) -> None:
    names = {path.relative_to(store.resolve(folder)).as_posix() for path in store.resolve(folder).rglob("*")}
    assert {
        *("manifest.json", "config.json", "model.safetensors", "tokenizer.json", "README.md", "trie.safetensors"),
        *(
            "edges.safetensors",
            "vectors.npy",
            "codes.npy",
            "scales.npy",
            "centroids.npy",
            "embedder/model.safetensors",
            "documents.jsonl",
        ),
        *("offsets.npy", "doc_ids.json"),
    } <= names
    card = (store.resolve(folder) / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: nci\n")
    assert "60 documents" in card


def test_what_is_no_index_is_said_so(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(IndexNotFoundError, match="nci index"):
            load(path)


def test_a_hub_name_is_fetched(folder: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot_download(name: str, **_: Any) -> str:
        asked.append(name)
        if name == "somebody/gone":
            raise OSError("404")
        return str(store.resolve(folder))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert load("somebody/index").search(QUERY, k=3) == index.search(QUERY, k=3)
    with pytest.raises(IndexNotFoundError, match="somebody/gone"):
        load("somebody/gone")
    for name in ("./a", "/a", "a", "a/b/c", "~/a"):
        with pytest.raises(IndexNotFoundError):
            load(name)
    assert asked == ["somebody/index", "somebody/gone"]


def test_push_uploads_the_generation_and_nothing_else(
    folder: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    class Api:
        def create_repo(self, name: str, **options: Any) -> None:
            calls.append(("create", {"name": name, **options}))

        def upload_folder(self, **options: Any) -> str:
            calls.append(("upload", options))
            return "https://hub/somebody/index/commit/1"

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    assert index.push_to_hub("somebody/index", private=True) == "https://hub/somebody/index/commit/1"
    assert calls[0] == ("create", {"name": "somebody/index", "exist_ok": True, "private": True})
    assert calls[1][1]["repo_id"] == "somebody/index"
    assert Path(calls[1][1]["folder_path"]) == store.resolve(folder)
    assert len(calls) == 2


# Verify


def test_a_whole_index_has_no_problems(index: Index) -> None:
    assert index.verify() == index.verify(1) == index.verify(2) == []


@pytest.mark.parametrize("level", [1, 2])
def test_any_flipped_byte_is_found(copy: Path, level: int) -> None:
    generation = store.resolve(copy)
    index = Index(copy)
    files = [path for path in sorted(generation.rglob("*")) if path.is_file() and path.name != "manifest.json"]
    assert len(files) > 15
    for path in files:
        data = path.read_bytes()
        for place in {0, len(data) // 2, len(data) - 1}:
            path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            problems = index.verify(level)
            assert len(problems) == 1
            assert path.name in problems[0]
        path.write_bytes(data)
    assert index.verify(1) == []


def test_missing_added_and_cut_files_are_found(copy: Path) -> None:
    generation, index = store.resolve(copy), Index(copy)
    (generation / "extra.txt").write_text("foreign")
    assert len(index.verify()) == 1
    (generation / "extra.txt").unlink()
    data = (generation / "vectors.npy").read_bytes()
    (generation / "vectors.npy").write_bytes(data[:-8])
    assert len(index.verify()) == 1
    (generation / "vectors.npy").unlink()
    assert len(index.verify()) == 1


def republish(index: Path, change: Callable[[Path], object], **entries: Any) -> Path:
    """A new generation, rightly signed, in which something is wrong."""
    old = store.resolve(index)
    kept = {
        name: value
        for name, value in store.read_manifest(old).items()
        if name in ("config", "seeds", "counts", "folded_through_seq", "prompt", "report")
    }

    def write(staging: Path) -> dict[str, object]:
        shutil.copytree(old, staging, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json"))
        change(staging)
        return {**kept, **entries}

    return store.publish(index, write)


def problems(index: Path) -> list[str]:
    """What `nci verify --level 2` says: the problems, or why the index does not open."""
    assert store.verify_checksums(store.resolve(index)) == [], "level 1 alone must not see it"
    try:
        return Index(index).verify(2)
    except NciError as error:
        return [str(error)]


def swap_ids(folder: Path) -> None:
    ids = json.loads((folder / "doc_ids.json").read_text())
    ids[0], ids[1] = ids[1], ids[0]
    (folder / "doc_ids.json").write_text(json.dumps(ids))


def repeat_id(folder: Path) -> None:
    ids = json.loads((folder / "doc_ids.json").read_text())
    (folder / "doc_ids.json").write_text(json.dumps([ids[1], *ids[1:]]))


def lose_id(folder: Path) -> None:
    (folder / "doc_ids.json").write_text(json.dumps(json.loads((folder / "doc_ids.json").read_text())[1:]))


def break_ids(folder: Path) -> None:
    (folder / "doc_ids.json").write_text("[not json")


def foreign_ids(folder: Path) -> None:
    (folder / "doc_ids.json").write_text('{"a": 1}')


def move_offsets(folder: Path) -> None:
    offsets = np.load(folder / "offsets.npy")
    offsets[3] += 1
    np.save(folder / "offsets.npy", offsets)


def cut_offsets(folder: Path) -> None:
    np.save(folder / "offsets.npy", np.load(folder / "offsets.npy")[:-1])


def no_offsets(folder: Path) -> None:
    (folder / "offsets.npy").write_bytes(b"no array")


def nan_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["decoder.norm.weight"][3] = math.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def nan_vector(folder: Path) -> None:
    vectors = np.load(folder / "vectors.npy")
    vectors[5, 2] = np.nan
    np.save(folder / "vectors.npy", vectors)


def nan_move(folder: Path) -> None:
    moves = np.zeros_like(np.load(folder / "vectors.npy"))
    (folder / "moves").mkdir()
    DocumentVectors(moves).save(folder / "moves")
    moves[5, 2] = np.nan
    np.save(folder / "moves" / "vectors.npy", moves)


def fewer_vectors(folder: Path) -> None:
    np.save(folder / "vectors.npy", np.load(folder / "vectors.npy")[:-1])


def other_codes(folder: Path) -> None:
    np.save(folder / "codes.npy", np.load(folder / "codes.npy")[::-1])


def fewer_codes(folder: Path) -> None:
    np.save(folder / "codes.npy", np.load(folder / "codes.npy")[:-1])


def fewer_centroids(folder: Path) -> None:
    np.save(folder / "centroids.npy", np.load(folder / "centroids.npy")[1:])


def other_weights(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["head.out.weight"] += 0.05 * torch.randn(tensors["head.out.weight"].shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def no_edges(folder: Path) -> None:
    (folder / "edges.safetensors").unlink()


def lost_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["head.out.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def lost_encoder_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["encoder.embeddings.word_embeddings.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def other_lexical(folder: Path) -> None:
    (folder / "lexical" / "indptr.npy").write_bytes((folder / "lexical" / "indices.npy").read_bytes())


def no_lexical(folder: Path) -> None:
    shutil.rmtree(folder / "lexical")


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def broken_document(folder: Path) -> None:
    data = (folder / "documents.jsonl").read_bytes()
    (folder / "documents.jsonl").write_bytes(b"!" + data[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "where"),
    [
        (swap_ids, "doc_ids"),
        (repeat_id, "doc_ids"),
        (lose_id, "ids"),
        (break_ids, ""),
        (foreign_ids, ""),
        (move_offsets, ""),
        (cut_offsets, "offsets"),
        (no_offsets, ""),
        (nan_weight, "decoder.norm.weight"),
        (nan_vector, "vectors.npy"),
        (nan_move, "moves"),
        (fewer_vectors, ""),
        (fewer_codes, "codes.npy"),
        (other_codes, "codes.npy"),
        (fewer_centroids, "centroids.npy"),
        (other_weights, "edges.safetensors"),
        (no_edges, ""),
        (lost_weight, ""),
        (lost_encoder_weight, ""),
        (other_lexical, "lexical"),
        (no_lexical, ""),
        (broken_config, ""),
        (no_tokenizer, ""),
        (broken_document, ""),
    ],
)
def test_a_signed_but_wrong_generation_is_found_at_level_2(
    copy: Path, change: Callable[[Path], object], where: str
) -> None:
    republish(copy, change)
    found = problems(copy)
    assert found
    assert where in "\n".join(found)


@pytest.mark.slow
def test_edges_and_trees_of_another_index_are_found(copy: Path, make: Make) -> None:
    other = store.resolve(make(train={"seed": 1}))
    republish(copy, lambda folder: shutil.copy(other / "edges.safetensors", folder))
    assert any("edges.safetensors" in problem for problem in problems(copy))
    tree = store.resolve(make(tree={"seed": 3}))
    republish(copy, lambda folder: [shutil.copy(tree / f"{name}.safetensors", folder) for name in ("trie", "edges")])
    assert problems(copy)


def test_a_republished_right_generation_has_no_problems(copy: Path) -> None:
    republish(copy, lambda _: None)
    assert store.resolve(copy).name == "generation-000002"
    assert problems(copy) == []


@pytest.mark.parametrize("config", [{"bogus": {}}, {"tree": {"bogus": 1}}, {"tree": {"k": "x"}}, None, []], ids=str)
def test_a_manifest_with_settings_that_cannot_be_read_is_no_crash(copy: Path, config: object) -> None:
    republish(copy, lambda _: None, config=config)
    with pytest.raises(NciError):
        Index(copy)


def test_damage_is_found_on_opening(copy: Path) -> None:
    path = store.resolve(copy) / "trie.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(IndexCorruptError, match=r"trie\.safetensors"):
        load(copy)


def test_paranoid_reads_files_that_are_too_large_for_a_look(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "ALWAYS_HASHED_BYTES", 100)
    path = store.resolve(copy) / "vectors.npy"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    load(copy)
    with pytest.raises(IndexCorruptError, match=r"vectors\.npy"):
        load(copy, paranoid=True)


@pytest.mark.parametrize("name", ["doc_ids.json", "documents.jsonl", "offsets.npy", "config.json", "tokenizer.json"])
def test_damage_in_a_large_file_is_never_a_raw_error(copy: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Large files are not hashed when an index is opened; what is wrong in them must still be an error of ours."""
    monkeypatch.setattr(store, "ALWAYS_HASHED_BYTES", 0)
    path = store.resolve(copy) / name
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(NciError):
        load(copy).search(QUERY, k=60)


def test_a_newer_format_says_upgrade(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(store, "FORMAT_VERSION", 99)
        republish(copy, lambda _: None)
    with pytest.raises(IndexVersionError, match=r"format 99.*upgrade"):
        load(copy)


def test_settings_of_another_version_are_named(copy: Path) -> None:
    config = load(copy).config.to_dict()
    config["train"]["importance"] = 8000
    republish(copy, lambda _: None, config=config)
    with pytest.raises(ConfigError, match=r"another version of nci: .*train\.importance.*build the index again"):
        load(copy)


# Ensembles


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rrf", "paper"])
def test_an_ensemble_merges_by_the_formula(make: Make, method: Any) -> None:
    indexes = [Index(make(tree={"seed": seed})) for seed in (0, 1)]
    assert (indexes[0].trie.paths.shape != indexes[1].trie.paths.shape) or (
        indexes[0].doc_ids != indexes[1].doc_ids or (indexes[0].trie.paths != indexes[1].trie.paths).any()
    )
    formula = fuse.reciprocal_rank if method == "rrf" else fuse.paper_rank
    texts = [QUERY, "wave ship item7"]
    merged = search_many(indexes, texts, 10, method=method)
    for text, hits in zip(texts, merged, strict=True):
        rankings = [[hit.doc_id for hit in index.search(text, k=100)] for index in indexes]
        expected = formula(rankings)[:10]
        assert [(hit.doc_id, hit.score) for hit in hits] == expected
        naive = {
            doc_id: sum(
                1 / (60 + ranking.index(doc_id) + 1) if method == "rrf" else 1 / (ranking.index(doc_id) / 5 + 1)
                for ranking in rankings
                if doc_id in ranking
            )
            for doc_id in rankings[0]
        }
        assert hits[0].score == pytest.approx(max(naive.values()))
        assert isinstance(hits, Hits)
        assert hits.documents_scored == 120
        assert [hit.rank for hit in hits] == list(range(1, 11))
        assert hits[0].title


def test_an_ensemble_of_one_is_the_index(index: Index) -> None:
    assert search_many([index], [QUERY], 5) == [index.search(QUERY, k=5)]
    with pytest.raises(ConfigError, match="--merge"):
        search_many([index], [QUERY], 5, method="bogus")  # type: ignore[arg-type]


# Python


def test_public_names() -> None:
    assert len(nci.__all__) <= 10
    for name in nci.__all__:
        assert getattr(nci, name) is not None
    with pytest.raises(AttributeError):
        nci.bogus  # noqa: B018


def test_build_takes_a_preset_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("nci.pipeline.build", lambda *args, **_: seen.append(args[2]))
    monkeypatch.setattr("nci.index.Index", lambda out, **_: out)
    nci.build(["a"], tmp_path, "fast")
    nci.build(["a"], tmp_path, device="cpu")
    assert seen[0] == seen[1] == nci.Config.preset("fast")
    with pytest.raises(ConfigError, match="no preset"):
        nci.build(["a"], tmp_path, "bogus")
    assert not os.listdir(tmp_path)
