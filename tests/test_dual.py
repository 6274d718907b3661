from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import make_documents, make_encoder, make_queries

from nci import contrastive
from nci.baselines import Searcher
from nci.baselines.dual import DualEncoder
from nci.baselines.dual_data import DualSettings, cut_passages
from nci.contrastive import Mined, contrastive_loss, embed, mine, weights_digest
from nci.contrastive_data import Batch, Pairs, Tokens, draw
from nci.encoders import ForeignEncoder, TextEncoder
from nci.errors import ConfigError, DataError, IndexCorruptError, IndexNotFoundError
from nci.records import Document

DOCUMENTS = make_documents(24)
PAIRS = make_queries(DOCUMENTS, seed=2, each=2)
QUERIES = [text for text, _ in make_queries(DOCUMENTS, seed=5)]


def tiny(encoder: Path, **changes: Any) -> DualSettings:
    given: dict[str, Any] = {
        "encoder": str(encoder),
        "epochs": 1,
        "batch_size": 8,
        "lr": 2e-3,
        "negatives": 2,
        "depth": 5,
        "max_length": 32,
        "precision": "fp32",
    }
    return DualSettings(**(given | changes))


def load(encoder: Path | str, **options: Any) -> TextEncoder:
    return TextEncoder.load(encoder, normalise=True, **options)


def naive_vectors(encoder: TextEncoder, rows: Any) -> Any:
    """One text at a time, without padding, in float64 after the model."""
    out = []
    with torch.no_grad():
        for row in rows:
            hidden = encoder.model(input_ids=torch.tensor([list(row)])).last_hidden_state[0]
            mean = hidden.double().mean(dim=0).numpy()
            out.append(mean / np.linalg.norm(mean))
    return np.stack(out)


# ---- the loss


def batch_of(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.nn.functional.normalize(torch.randn(17, 6, generator=generator), dim=-1)
    return vectors[:5], vectors[5:]


def test_the_loss_equals_its_formula() -> None:
    queries, passages = batch_of(0)
    targets = torch.tensor([3, 0, 3, 11, 7])
    forbidden = torch.zeros(5, 12, dtype=torch.bool)
    forbidden[0, [1, 2]] = forbidden[3, 4] = True
    total = 0.0
    for row in range(5):
        cosines = [float(queries[row] @ passages[column]) for column in range(12)]
        allowed = [math.exp(cosines[column] / 0.1) for column in range(12) if not forbidden[row, column]]
        total += math.log(sum(allowed)) - cosines[int(targets[row])] / 0.1
    loss = contrastive_loss(queries, passages, targets, forbidden, temperature=0.1)
    assert float(loss) == pytest.approx(total / 5, rel=1e-5)


def test_the_loss_is_the_one_of_sentence_transformers() -> None:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    queries, passages = batch_of(1)
    positives, negatives = passages[:5], passages[5:10]
    theirs: Any = MultipleNegativesRankingLoss(model=None, scale=1 / 0.05)
    expected = theirs.compute_loss_from_embeddings([queries, positives, negatives], None)
    nothing = torch.zeros(5, 10, dtype=torch.bool)
    loss = contrastive_loss(queries, passages[:10], torch.arange(5), nothing, temperature=0.05)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


# ---- batches


@settings(deadline=None)
@given(st.data())
def test_no_relevant_document_is_a_negative(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 3), min_size=4, max_size=6))
    owners = np.repeat(np.arange(len(counts)), counts)
    starts = np.concatenate([[0], np.cumsum(counts)])
    some_documents = st.sets(st.integers(0, len(counts) - 1), min_size=1, max_size=3)
    relevant = [frozenset(each) for each in data.draw(st.lists(some_documents, min_size=1, max_size=5))]
    positives = np.array([starts[data.draw(st.sampled_from(sorted(each)))] for each in relevant])
    anything = st.lists(st.integers(0, len(owners) - 1), max_size=3)
    negatives = [np.array(data.draw(anything), np.int64) for _ in relevant]
    batch = Batch.make(positives, negatives, relevant, owners)
    assert batch.passages.tolist() == sorted({*positives.tolist(), *np.concatenate(negatives).tolist()})
    for row, documents in enumerate(relevant):
        assert batch.passages[batch.targets[row]] == positives[row]
        for column, passage in enumerate(batch.passages):
            own = passage == positives[row]
            assert batch.forbidden[row, column] == (owners[passage] in documents and not own)


def test_two_queries_of_one_document_share_its_column() -> None:
    nothing = [np.array([], np.int64)] * 3
    relevant = [frozenset({1}), frozenset({1}), frozenset({0, 1})]
    batch = Batch.make(np.array([1, 1, 0]), nothing, relevant, np.arange(2))
    assert batch.passages.tolist() == [0, 1]
    assert batch.targets.tolist() == [1, 1, 0]
    assert batch.forbidden.tolist() == [[False, False], [False, False], [False, True]]


def test_negatives_are_drawn_evenly_and_never_twice() -> None:
    candidates = np.array([[4, 9, 2, 7], [5, -1, -1, -1], [-1, -1, -1, -1], [1, 3, -1, -1]])
    random = np.random.default_rng(0)
    seen: dict[int, int] = {}
    for _ in range(400):
        drawn = draw(candidates, 2, random)
        assert [len(set(row.tolist())) for row in drawn] == [len(row) for row in drawn] == [2, 1, 0, 2]
        assert drawn[1].tolist() == [5]
        assert set(drawn[3].tolist()) == {1, 3}
        for passage in drawn[0].tolist():
            seen[passage] = seen.get(passage, 0) + 1
    assert set(seen) == {2, 4, 7, 9}
    assert all(140 < count < 260 for count in seen.values())


# ---- passages and queries


def test_firstp_reads_title_separator_and_text(encoder: Path) -> None:
    model = load(encoder)
    model.tokenizer.add_special_tokens({"sep_token": "[SEP]"})
    documents = [Document("a", "ripe pear juice peel", "fruit"), Document("b", "ship")]
    passages = cut_passages(documents, model, tiny(encoder, max_length=7))
    words = [model.tokenizer.convert_ids_to_tokens(row) for row in passages.tokens]
    assert words == [["[CLS]", "fruit", "[SEP]", "ripe", "pear", "juice", "[SEP]"], ["[CLS]", "ship", "[SEP]"]]
    assert passages.starts.tolist() == [0, 1, 2]


def test_maxp_cuts_the_text_without_gap_or_overlap(encoder: Path) -> None:
    model = load(encoder)
    model.settings = dataclasses.replace(model.settings, prompts={"document": "the ", "query": "of "})
    text = "ripe pear juice peel ship wave tide storm drum"
    documents = [Document("a", text, "fruit"), Document("b", "", "sea"), Document("c", "song tune")]
    changes = tiny(encoder, passage="maxp", max_length=7)  # [CLS] the ... [SEP]: room for four
    passages = cut_passages(documents, model, changes)
    words = [model.tokenizer.convert_ids_to_tokens(row) for row in passages.tokens]
    assert all(each[:2] == ["[CLS]", "the"] and each[-1] == "[SEP]" for each in words)
    inner = [" ".join(each[2:-1]) for each in words]
    assert inner == ["ripe pear juice peel", "ship wave tide storm", "drum", "sea", "song tune"]
    assert passages.starts.tolist() == [0, 3, 4, 5]
    assert passages.owners.tolist() == [0, 0, 0, 1, 2]
    fewer = cut_passages(documents, model, dataclasses.replace(changes, max_passages=2))
    assert fewer.starts.tolist() == [0, 2, 3, 4]
    pairs = Pairs.read([("wave", "b")], documents, model, changes)
    assert model.tokenizer.convert_ids_to_tokens(pairs.tokens[0]) == ["[CLS]", "of", "wave", "[SEP]"]
    with pytest.raises(ConfigError, match="max_length 3"):
        cut_passages(documents, model, dataclasses.replace(changes, max_length=3))


def test_vectors_are_those_of_the_encoder(encoder: Path) -> None:
    model = load(encoder)
    rows = Tokens.of(model.tokenize(QUERIES[:5]))
    expected = model.encode(QUERIES[:5])
    np.testing.assert_allclose(embed(model, rows, np.arange(5), at_once=2).detach().numpy(), expected, atol=1e-6)
    changes = tiny(encoder, batch_size=2)
    np.testing.assert_allclose(contrastive.embed_all(model, rows, changes).numpy(), expected, atol=1e-6)


# ---- mining


@pytest.mark.parametrize("passage", ["firstp", "maxp"])
@pytest.mark.parametrize("depth", [3, 200])
def test_mining_equals_a_naive_ranking(
    monkeypatch: pytest.MonkeyPatch, encoder: Path, passage: str, depth: int
) -> None:
    monkeypatch.setattr(contrastive, "_SCORES_AT_ONCE", 400)  # several blocks
    model = load(encoder, max_length=12)
    shared = [("apple juice", "d0"), ("apple juice", "d6"), ("apple juice", "d12"), *PAIRS[:20]]
    changes = tiny(encoder, passage=passage, max_length=12, depth=depth, negatives=1)
    pairs = Pairs.read(shared, DOCUMENTS, model, changes)
    passages = cut_passages(DOCUMENTS, model, changes)
    assert (len(passages.tokens) > len(DOCUMENTS)) == (passage == "maxp")
    mined = mine(model, pairs, passages, changes, hard=True)
    scores = naive_vectors(model, pairs.tokens) @ naive_vectors(model, passages.tokens).T
    for pair, (text, doc_id) in enumerate(shared):
        relevant = {int(given[1:]) for other, given in shared if other == text}  # d7 is row 7
        assert pairs.relevant[pair] == relevant
        own = [p for p, owner in enumerate(passages.owners) if owner == int(doc_id[1:])]
        assert mined.positives[pair] == max(own, key=lambda p: scores[pair, p])
        others = [p for p, owner in enumerate(passages.owners) if owner not in relevant]
        best = sorted(others, key=lambda p: -scores[pair, p])[:depth]
        found = [p for p in mined.candidates[pair].tolist() if p >= 0]
        assert sorted(scores[pair, found], reverse=True) == pytest.approx(scores[pair, best], abs=1e-5)
        assert set(found) <= set(others)
        assert len(set(found)) == len(found) == min(depth, len(others))
    assert mined.candidates.shape == (len(shared), depth)


@pytest.mark.slow
def test_hard_negatives_come_from_the_newest_weights(
    monkeypatch: pytest.MonkeyPatch, encoder: Path, tmp_path: Path
) -> None:
    mined: list[Mined] = []

    def record(*arguments: Any, **options: Any) -> Mined:
        mined.append(mine(*arguments, **options))
        return mined[-1]

    monkeypatch.setattr(contrastive, "mine", record)
    ance = tiny(encoder, epochs=2, refreshes=2)
    DualEncoder.train(DOCUMENTS, PAIRS, out=tmp_path / "ance", settings=ance, device="cpu")
    assert [each.candidates.shape for each in mined] == [(len(PAIRS), 0), (len(PAIRS), 5), (len(PAIRS), 5)]
    seen = mined[1:]
    for refreshes, candidates in enumerate(each.candidates for each in seen):
        before = dataclasses.replace(ance, refreshes=refreshes)
        folder = tmp_path / str(refreshes)
        trained = DualEncoder.train(DOCUMENTS, PAIRS, out=folder, settings=before, device="cpu").encoder
        pairs, passages = Pairs.read(PAIRS, DOCUMENTS, trained, ance), cut_passages(DOCUMENTS, trained, ance)
        np.testing.assert_array_equal(candidates, mine(trained, pairs, passages, ance, hard=True).candidates)
        fresh = mine(load(encoder, max_length=32), pairs, passages, ance, hard=True)
        assert (candidates != fresh.candidates).any()
    assert (seen[0].candidates != seen[1].candidates).any()


# ---- training


def first_hits(searcher: Searcher, pairs: list[tuple[str, str]]) -> float:
    found = searcher.search([text for text, _ in pairs], k=1)
    return float(np.mean([hits[0].doc_id == doc_id for hits, (_, doc_id) in zip(found, pairs, strict=True)]))


@pytest.mark.slow
@pytest.mark.parametrize("refreshes", [0, 2])
def test_training_helps_with_queries_it_has_not_seen(encoder: Path, tmp_path: Path, refreshes: int) -> None:
    held_out = [pair for pair in make_queries(DOCUMENTS, seed=9, each=6) if "item" in pair[0]]
    raw = DualEncoder.train(DOCUMENTS, PAIRS, out=tmp_path / "raw", settings=tiny(encoder, epochs=0), device="cpu")
    pairs = make_queries(DOCUMENTS, seed=3, each=6)
    changes = tiny(encoder, epochs=4, refreshes=refreshes)
    trained = DualEncoder.train(DOCUMENTS, pairs, out=tmp_path / "trained", settings=changes, device="cpu")
    before, after = first_hits(raw, held_out), first_hits(trained, held_out)
    assert after > before + 0.2
    assert trained.search("apple")[0].source == ("ance" if refreshes else "dpr")


@pytest.mark.slow
def test_the_same_seed_gives_the_same_weights(encoder: Path, tmp_path: Path) -> None:
    def digest(name: str, **changes: Any) -> str:
        torch.manual_seed(len(name))  # the state of others must not matter, nor change
        before = torch.get_rng_state()
        chosen = tiny(encoder, refreshes=1, **changes)
        trained = DualEncoder.train(DOCUMENTS, PAIRS, out=tmp_path / name, settings=chosen, device="cpu")
        assert torch.equal(torch.get_rng_state(), before)
        return weights_digest(trained.encoder)

    assert digest("a") == digest("again")
    assert (tmp_path / "a" / "vectors.npy").read_bytes() == (tmp_path / "again" / "vectors.npy").read_bytes()
    assert len({digest("a"), digest("seed", seed=1), digest("lr", lr=1e-3), digest("more", negatives=3)}) == 4


def test_a_killed_training_goes_on_after_its_last_round(
    monkeypatch: pytest.MonkeyPatch, encoder: Path, tmp_path: Path
) -> None:
    changes = tiny(encoder, refreshes=2)
    whole = DualEncoder.train(DOCUMENTS, PAIRS, out=tmp_path / "whole", settings=changes, device="cpu")
    real, rounds = contrastive.train_round, []

    def dying(*arguments: Any, number: int) -> None:
        rounds.append(number)
        real(*arguments, number=number)
        if rounds == [0, 1, 2]:
            raise KeyboardInterrupt

    monkeypatch.setattr(contrastive, "train_round", dying)
    with pytest.raises(KeyboardInterrupt):
        DualEncoder.train(DOCUMENTS, PAIRS, out=tmp_path / "killed", settings=changes, device="cpu")
    with pytest.raises(IndexNotFoundError, match="train"):
        DualEncoder.load(tmp_path / "killed", DOCUMENTS, device="cpu")
    resumed = DualEncoder.train(DOCUMENTS, PAIRS, out=tmp_path / "killed", settings=changes, device="cpu")
    assert rounds == [0, 1, 2, 2]
    assert weights_digest(resumed.encoder) == weights_digest(whole.encoder)
    assert resumed.search(QUERIES) == whole.search(QUERIES)
    names = {"COMPLETE", "dual.json", "encoder", "starts.npy", "vectors.npy"}
    assert {path.name for path in (tmp_path / "killed").iterdir()} == names
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".bin", ".pt", ".pkl")]


def test_only_what_has_changed_is_trained_again(monkeypatch: pytest.MonkeyPatch, encoder: Path, tmp_path: Path) -> None:
    rounds = []
    monkeypatch.setattr(contrastive, "train_round", lambda *_, number: rounds.append(number))
    other = make_encoder(tmp_path / "other", seed=1)
    moving = make_encoder(tmp_path / "moving")
    changed = [dataclasses.replace(DOCUMENTS[0], text="ship"), *DOCUMENTS[1:]]
    for documents, pairs in ((DOCUMENTS, PAIRS), (DOCUMENTS, PAIRS[1:]), (changed, PAIRS[1:])):
        for _ in range(2):
            DualEncoder.train(documents, pairs, out=tmp_path / "out", settings=tiny(moving), device="cpu")
        assert rounds == [0]
        rounds.clear()
    (other / "model.safetensors").replace(moving / "model.safetensors")
    DualEncoder.train(changed, PAIRS[1:], out=tmp_path / "out", settings=tiny(moving), device="cpu")
    assert rounds == [0]


# ---- search


def test_search_reads_more_of_a_long_query_than_training_does(encoder: Path, tmp_path: Path) -> None:
    """Two words between the marks of both ends: to training these queries are one and the same."""
    settings = tiny(encoder, query_length=4, epochs=0)
    trained = DualEncoder.train(DOCUMENTS, PAIRS, out=tmp_path, settings=settings, device="cpu")
    first, second = trained.search(["of the apple pear", "of the violin song"], k=len(DOCUMENTS))
    assert {hit.doc_id: round(hit.score, 2) for hit in first} != {hit.doc_id: round(hit.score, 2) for hit in second}


@pytest.mark.parametrize("passage", ["firstp", "maxp"])
def test_search_counts_the_best_passage_and_loading_changes_nothing(
    encoder: Path, tmp_path: Path, passage: str
) -> None:
    changes = tiny(encoder, passage=passage, max_length=10)
    trained = DualEncoder.train(DOCUMENTS, PAIRS, out=tmp_path, settings=changes, device="cpu")
    loaded: Searcher = DualEncoder.load(tmp_path, DOCUMENTS, device="cpu")
    vectors, starts = np.load(tmp_path / "vectors.npy"), np.load(tmp_path / "starts.npy")
    assert vectors.dtype == np.float16
    model = load(tmp_path / "encoder", max_length=10)
    passages = cut_passages(DOCUMENTS, model, changes)
    np.testing.assert_allclose(vectors, naive_vectors(model, passages.tokens), atol=1e-3)
    queries = naive_vectors(model, model.tokenize(QUERIES))
    for query, hits in zip(queries, loaded.search(QUERIES, k=7), strict=True):
        scores = {
            each.doc_id: max(float(query @ vectors[p].astype(np.float64)) for p in range(starts[i], starts[i + 1]))
            for i, each in enumerate(DOCUMENTS)
        }
        assert [hit.score for hit in hits] == pytest.approx(sorted(scores.values(), reverse=True)[:7], abs=1e-5)
        assert all(hit.score == pytest.approx(scores[hit.doc_id], abs=1e-5) for hit in hits)
        assert [hit.rank for hit in hits] == list(range(1, 8))
    assert (len(vectors) > len(DOCUMENTS)) == (passage == "maxp")
    assert trained.search(QUERIES, k=7) == loaded.search(QUERIES, k=7)
    assert loaded.search(QUERIES[0]) == loaded.search(QUERIES[:1])[0]
    assert loaded.search([]) == []
    with pytest.raises(ConfigError, match="-k"):
        loaded.search("x", k=0)


def test_equal_scores_stand_in_the_order_of_doc_ids(encoder: Path, tmp_path: Path) -> None:
    documents = [Document(doc_id, "ship wave") for doc_id in ("b", "d", "a", "c")]
    searcher = DualEncoder.train(
        documents, [("tide", "a")], out=tmp_path, settings=tiny(encoder, epochs=0), device="cpu"
    )
    assert [hit.doc_id for hit in searcher.search("tide", k=3)] == ["a", "b", "c"]


# ---- mistakes


def drop_vectors(folder: Path) -> None:
    (folder / "vectors.npy").unlink()


def cut_vectors(folder: Path) -> None:
    whole = (folder / "vectors.npy").read_bytes()
    (folder / "vectors.npy").write_bytes(whole[: len(whole) // 2])


def fewer_vectors(folder: Path) -> None:
    np.save(folder / "vectors.npy", np.load(folder / "vectors.npy")[:-1])


def put_pickle(folder: Path) -> None:
    np.save(folder / "starts.npy", np.array([{}], object), allow_pickle=True)


def other_format(folder: Path) -> None:
    content = json.loads((folder / "dual.json").read_text())
    (folder / "dual.json").write_text(json.dumps(content | {"format": 99}))


def no_settings(folder: Path) -> None:
    (folder / "dual.json").write_text("[]")


@pytest.mark.parametrize("damage", [drop_vectors, cut_vectors, fewer_vectors, put_pickle, other_format, no_settings])
def test_damage_is_found_on_loading(encoder: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    DualEncoder.train(DOCUMENTS, PAIRS, out=tmp_path, settings=tiny(encoder, epochs=0), device="cpu")
    damage(tmp_path)
    with pytest.raises(IndexCorruptError, match="train it again"):
        DualEncoder.load(tmp_path, DOCUMENTS, device="cpu")


def test_other_documents_are_refused(encoder: Path, tmp_path: Path) -> None:
    DualEncoder.train(DOCUMENTS, PAIRS, out=tmp_path, settings=tiny(encoder, epochs=0), device="cpu")
    for documents in (DOCUMENTS[::-1], DOCUMENTS[:-1]):
        with pytest.raises(DataError, match="other documents"):
            DualEncoder.load(tmp_path, documents, device="cpu")


def test_wrong_pairs_and_encoders_are_refused(monkeypatch: pytest.MonkeyPatch, encoder: Path, tmp_path: Path) -> None:
    def train(documents: list[Document], pairs: list[tuple[str, str]]) -> None:
        DualEncoder.train(documents, pairs, out=tmp_path, settings=tiny(encoder), device="cpu")

    with pytest.raises(DataError, match="'gone'"):
        train(DOCUMENTS, [("apple", "d0"), ("pear", "gone")])
    with pytest.raises(DataError, match="there are none"):
        train(DOCUMENTS, [])
    with pytest.raises(DataError, match="'d0'"):
        train([*DOCUMENTS, DOCUMENTS[0]], PAIRS)
    monkeypatch.setattr(TextEncoder, "load", lambda *_, **__: object.__new__(ForeignEncoder))
    with pytest.raises(ConfigError, match="layers beyond"):
        train(DOCUMENTS, PAIRS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"passage": "lastp"}, "passage.*firstp, maxp"),
        ({"precision": "fp8"}, "precision"),
        ({"batch_size": 0}, "batch_size is at least 1"),
        ({"refreshes": -1}, "refreshes is at least 0"),
        ({"negatives": 9}, "depth"),
        ({"lr": 0.0}, "lr"),
        ({"warmup": float("nan")}, "warmup"),
        ({"temperature": 0.0}, "temperature"),
    ],
)
def test_impossible_settings_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DualSettings(**({"depth": 5} | changes))
