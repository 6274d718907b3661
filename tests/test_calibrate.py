"""Calibration: what is withheld, what the decoder says of every edge, the fitted weights, and an index that has them."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import Workshop, make_workshop, tiny_config

from nci import pipeline, store
from nci.anchors import TreeSum
from nci.calibrate import (
    Calibration,
    Evidence,
    _likeliest,
    compared,
    fewer_unseen,
    fit,
    found_first,
    gather,
    kept_back,
    withheld,
)
from nci.config import CalibrateConfig, SearchConfig
from nci.corpus import open_dataset
from nci.hubs import find_hubs, read_content
from nci.index import Index
from nci.pipeline import build
from nci.rocchio import query_means
from nci.search import Engine
from nci.search.content import DocumentVectors
from nci.search.exhaustive import score_all
from nci.training_data import split_pairs


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, encoder: Path) -> Workshop:
    """A model whose decoder says something."""
    ready = make_workshop(tmp_path_factory.mktemp("shop"), encoder)
    torch.manual_seed(3)
    with torch.no_grad():
        ready.model.head.out.weight.normal_(std=0.3)
        assert ready.model.head.bias is not None
        ready.model.head.bias.normal_(std=0.5)
    ready.model.eval()
    return ready


@pytest.fixture(scope="module")
def engine(shop: Workshop, encoder: Path) -> Engine:
    return engine_of(shop, encoder)


def engine_of(shop: Workshop, encoder: Path, bias: Any = None) -> Engine:
    from nci.encoders import TextEncoder

    model = shop.model
    assert model.tables.vectors is not None
    return Engine.for_model(
        model,
        TextEncoder.load(encoder).tokenizer,
        model.tables.trie,
        vectors=DocumentVectors(model.tables.vectors.cpu().numpy(), bias=bias),
        precision="fp32",
        lexical=shop.lexical,
        max_length=24,
    )


TEXTS = ["apple item0", "red pear", "a long way to the banana item7", "item3", "cherry"]


def start_of(engine: Engine) -> torch.Tensor:
    assert engine.model.anchor_weights is not None
    return torch.cat([engine.model.anchor_weights.detach(), torch.tensor([0.0, 1.0, 0.0])])


def all_log_probs(engine: Engine, weights: torch.Tensor, counts: Any) -> torch.Tensor:
    """log p of every document, (texts, documents), one target after the other."""
    found = []
    for leaf in range(engine.trie.documents):
        evidence = gather(engine, TEXTS, np.full(len(TEXTS), leaf), counts)
        found.append(evidence.log_probs(weights, TreeSum(engine.trie)))
    return torch.stack(found, dim=1)


def test_the_evidence_gives_the_probabilities_of_the_model(engine: Engine) -> None:
    found = all_log_probs(engine, start_of(engine), np.ones(engine.trie.documents, int))
    torch.testing.assert_close(found, score_all(engine.reference, engine.encode(TEXTS)), atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(found.exp().sum(1), torch.ones(len(TEXTS)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("few", ["nci.calibrate._AT_ONCE", "nci.hubs._CHARACTERS"])
def test_few_queries_at_a_time_change_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch, few: str) -> None:
    arguments = (engine, TEXTS, np.arange(len(TEXTS)), np.ones(engine.trie.documents, int))
    whole = gather(*arguments)
    monkeypatch.setattr(few, 1)
    for one, two in zip(vars(whole).values(), vars(gather(*arguments)).values(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


def test_the_constant_raises_documents_without_queries(engine: Engine) -> None:
    """Half of the queries ask for documents without queries, which nothing else tells apart: the constant does."""
    documents = engine.trie.documents
    seen = np.arange(documents) % 4 != 0
    rng = np.random.default_rng(0)
    new, old = rng.choice(np.flatnonzero(~seen), 40), rng.choice(np.flatnonzero(seen), 40)
    texts = [f"item{number}" for number in rng.integers(0, 9, 80)]
    counts = np.where(seen, 1, 0)
    found, _ = fit(engine, texts, np.concatenate([new, old]), counts)
    lead = found.popular * np.log(2)
    assert found.unseen - lead > 0.3
    assert found.bias(counts).tolist() == [pytest.approx(lead if each else found.unseen) for each in seen]


def test_unseen_documents_that_count_as_fewer_need_a_higher_constant(engine: Engine) -> None:
    """Beside half as many of them, each is twice as likely to be the one that is asked for."""
    documents = engine.trie.documents
    counts = np.where(np.arange(documents) % 2 == 0, 1, 0)
    rng = np.random.default_rng(0)
    texts = [f"item{number}" for number in rng.integers(0, 9, 400)]
    targets = rng.integers(0, documents, 400)
    all_of_them, half = (fit(engine, texts, targets, counts, fewer=fewer)[0] for fewer in (1.0, 0.5))
    leads = [found.unseen - found.popular * np.log(2) for found in (all_of_them, half)]
    assert leads[1] - leads[0] == pytest.approx(np.log(2), abs=0.1)


def test_the_target_itself_counts_whole(engine: Engine) -> None:
    """Without a decoder, log p is that of a softmax in which the other unseen documents have less weight."""
    counts = (np.arange(engine.trie.documents) % 2).astype(int)
    weights, targets = torch.tensor([3.0, 2.0, 0.5, 0.0, 0.2]), np.arange(len(TEXTS))
    evidence = gather(engine, TEXTS, targets, counts)
    scores = evidence.scores(weights)
    mass = torch.where(torch.as_tensor(counts == 0), 0.3, 1.0).repeat(len(TEXTS), 1)
    mass[torch.arange(len(TEXTS)), torch.as_tensor(targets)] = 1.0
    wanted = scores.diagonal() - (scores + mass.log()).logsumexp(1)
    torch.testing.assert_close(evidence.log_probs(weights, TreeSum(engine.trie), 0.3), wanted, atol=1e-4, rtol=1e-4)


def test_as_many_unseen_documents_as_the_index_will_have() -> None:
    assert fewer_unseen(1000, 720, 800) == pytest.approx((200 / 800) / (280 / 720))
    assert fewer_unseen(1000, 500, 500) == 1
    assert fewer_unseen(1000, 900, 1000) == 0.5, "others may be added"
    assert fewer_unseen(1000, 0, 10) == fewer_unseen(10, 10, 10) == 1, "nothing to compare"


def test_hubs_by_hand(engine: Engine) -> None:
    """What the documents that a query asks for would take is not counted, neither for them nor against others."""
    weights, known = (4.0, 2.0, 0.0), [(TEXTS[0], 3), (TEXTS[0], 5), (TEXTS[1], 3), (TEXTS[2], 0)]
    scores = read_content(engine, TEXTS[:3])[1].scores(*weights)
    for row, leaf in ((0, 3), (0, 5), (1, 3), (2, 0)):
        scores[row, leaf] = -torch.inf
    wanted = scores.log_softmax(1).clamp(min=-20).mean(0)
    torch.testing.assert_close(torch.tensor(find_hubs(engine, known, weights)), wanted - wanted.mean())
    everything = [(TEXTS[0], leaf) for leaf in range(engine.trie.documents)]
    for pairs in ([], everything):  # nothing is drawn from others
        assert find_hubs(engine, pairs, weights).tolist() == [0.0] * engine.trie.documents


def test_only_the_queries_that_a_document_draws_most_make_it_a_hub(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, known = (4.0, 2.0, 0.0), [(text, 0) for text in TEXTS]
    log_probs = read_content(engine, TEXTS)[1].scores(*weights)
    log_probs[:, 0] = -torch.inf
    wanted = log_probs.log_softmax(1).clamp(min=-20).topk(2, 0).values.mean(0)
    for at_once in (2**26, 2 * engine.trie.documents):  # all together, two by two
        monkeypatch.setattr("nci.hubs.DRAWN", 2)
        monkeypatch.setattr("nci.hubs._AT_ONCE", at_once)
        found = torch.tensor(find_hubs(engine, known, weights))
        torch.testing.assert_close(found, wanted - wanted.mean(), atol=1e-4, rtol=1e-4)


def test_hubs_are_held_back(engine: Engine) -> None:
    """All queries ask for documents that draw few others, which nothing else tells apart."""
    documents, rng = engine.trie.documents, np.random.default_rng(0)
    hubs = rng.normal(size=documents).astype(np.float32)
    texts = [f"item{number}" for number in rng.integers(0, 9, 80)]
    evidence = gather(engine, texts, rng.choice(np.flatnonzero(hubs < 0), 80), np.ones(documents, int))
    evidence = dataclasses.replace(evidence, hubs=torch.tensor(hubs))
    start = torch.cat([start_of(engine), torch.zeros(3)])
    found = _likeliest(evidence, start, TreeSum(engine.trie), 1.0)
    assert found.hubs < -0.3
    counts = np.arange(documents) % 2
    np.testing.assert_allclose(found.bias(counts, hubs) - found.bias(counts), found.hubs * hubs, atol=1e-6)


def test_hubs_are_found_by_the_weights_that_were_best_without(engine: Engine) -> None:
    counts, targets = np.ones(engine.trie.documents, int), np.arange(len(TEXTS))
    known = [(f"item{number}", number) for number in range(9)]
    without, nothing = fit(engine, TEXTS, targets, counts)
    found, hubs = fit(engine, TEXTS, targets, counts, known=known)
    assert not nothing.any()
    assert found.drawn_by == without.drawn_by == (without.kappa, without.lexical, without.late, 0.0, 0.0)
    np.testing.assert_allclose(hubs, find_hubs(engine, known, found.drawn_by))


def test_documents_that_are_asked_for_often_get_ahead(engine: Engine) -> None:
    """All queries ask for documents with many training queries, which nothing else tells apart."""
    counts = np.where(np.arange(engine.trie.documents) % 4 == 0, 30, 1)
    rng = np.random.default_rng(0)
    texts = [f"item{number}" for number in rng.integers(0, 9, 60)]
    found, _ = fit(engine, texts, rng.choice(np.flatnonzero(counts > 1), 60), counts)
    assert found.popular > 0.2
    assert found.bias(np.array([0, 1, 30])).tolist() == pytest.approx(
        [found.unseen, found.popular * np.log(2), found.popular * np.log(31)]
    )


def test_a_decoder_that_only_disturbs_is_turned_down(engine: Engine) -> None:
    """Queries that the content score answers, and a random decoder: what it says should not count."""
    documents = engine.trie.documents
    seen = np.arange(documents) % 2 == 0
    evidence = gather(engine, TEXTS, np.zeros(len(TEXTS), int), seen.astype(int))
    content = evidence.scores(torch.tensor([3.0, 2.0, 0.0, 0.0, 0.0])).argmax(1).numpy()
    found, _ = fit(engine, TEXTS * 40, np.tile(content, 40), seen.astype(int))
    start = float(engine.model.anchor_weights.detach().exp()[0])  # type: ignore[union-attr]
    assert found.residual / found.kappa < 0.5 * 1 / start, "against the content score"


def test_a_handful_of_queries_cannot_carry_the_weights_away(engine: Engine) -> None:
    """Queries that the lexical part alone answers: nothing but the prior would hold its weight."""
    seen = (np.arange(engine.trie.documents) % 2 == 0).astype(int)
    texts = ["apple item0", "item3"]
    evidence = gather(engine, texts, np.zeros(2, int), seen)
    assert evidence.lexical is not None
    found, _ = fit(engine, texts, evidence.lexical.argmax(1).numpy(), seen)
    start = float(engine.model.anchor_weights.detach().exp()[1])  # type: ignore[union-attr]
    assert found.lexical < 1.5 * start


def test_one_query_of_a_kind_says_less_of_it_than_many(engine: Engine) -> None:
    """Three quarters of the documents are unseen, both kinds are asked for as often, nothing else tells them apart."""
    seen = np.arange(engine.trie.documents) % 4 == 0
    rng = np.random.default_rng(0)
    unseen = rng.choice(np.flatnonzero(~seen), 60)
    behind = []
    for count in (60, 1):
        targets = np.concatenate([unseen, rng.choice(np.flatnonzero(seen), count)])
        texts = [f"item{number}" for number in rng.integers(0, 9, len(targets))]
        found, _ = fit(engine, texts, targets, seen.astype(int))
        behind.append(found.popular * np.log(2) - found.unseen)
    assert 0 < behind[1] < 0.8 * behind[0]


def test_an_applied_calibration_searches_as_it_was_fitted(
    tmp_path: Path, encoder: Path, shop: Workshop, engine: Engine
) -> None:
    import copy

    counts = np.arange(engine.trie.documents) % 3
    calibration = Calibration(kappa=7.0, lexical=2.5, unseen=1.5, residual=0.4, popular=0.7)
    wanted = all_log_probs(engine, torch.tensor([np.log(7.0), np.log(2.5), 1.5, 0.4, 0.7]).float(), counts)
    changed = dataclasses.replace(shop, model=copy.deepcopy(shop.model))
    calibration.apply(changed.model)
    other = engine_of(changed, encoder, bias=calibration.bias(counts))
    for ranking, row in zip(other.search(TEXTS, k=engine.trie.documents, beam=1000), wanted, strict=True):
        np.testing.assert_allclose(ranking.scores, row[ranking.documents].numpy(), atol=1e-3)


def test_what_is_withheld_depends_on_ids_and_seed_alone() -> None:
    names = [f"d{number}" for number in range(200)]
    chosen = withheld(names, CalibrateConfig(share=0.1))
    assert len(chosen) == 20
    assert withheld([*reversed(names), *names], CalibrateConfig(share=0.1)) == chosen
    assert withheld(names, CalibrateConfig(share=0.1, seed=1)) != chosen
    assert withheld(names, CalibrateConfig(share=0.2)) > chosen
    assert withheld(names, CalibrateConfig()) == set()


def test_without_dev_one_query_each_of_some_documents_that_have_others_is_kept_back() -> None:
    settings = CalibrateConfig(share=0.1, least=5)
    pairs = [(f"q{number} {which}", f"d{number}") for number in range(100) for which in range(1 + number % 2 * 2)]
    back = kept_back(pairs, [], settings)
    owners = dict(pairs)
    assert len(back) == len({owners[text] for text in back}) == 20
    assert all(int(owners[text][1:]) % 2 for text in back), "a document would have no query left"
    assert kept_back(list(reversed(pairs)), [], settings) == back
    assert kept_back(pairs, [("asked", "d1")] * 4 + [("asked", "new")] * 9, settings) == back, (
        "too few of them are seen"
    )
    assert kept_back(pairs, [("asked", "d1")] * 5, settings) == frozenset()
    assert kept_back([pair for pair in pairs if pair[0].endswith(" 0")], [], settings) == frozenset()


def test_queries_of_one_kind_do_not_move_the_other(engine: Engine) -> None:
    """Documents without training queries would get ahead of all others where nobody asks for those."""
    counts, texts = np.arange(engine.trie.documents) % 2, [f"item{number % 9}" for number in range(40)]
    new, seen = (np.resize(np.flatnonzero(counts == kind), 40) for kind in (0, 1))
    found, _ = fit(engine, texts, new, counts)
    assert (found.unseen, found.popular) == (0, 0)
    assert found.kappa != pytest.approx(engine.model.anchor_weights.exp().tolist()[0])  # type: ignore[union-attr]
    found, _ = fit(engine, texts, seen, counts)
    assert found.unseen == 0 != found.popular
    found, _ = fit(engine, texts, np.where(np.arange(40) % 4 == 0, new, seen), counts)
    assert found.unseen != 0 != found.popular


def test_evidence_without_a_lexical_part() -> None:
    none = torch.zeros(1, 1, 2)
    evidence = Evidence(
        torch.ones(1, 2), None, None, none.long(), none, none[0].long(), none[0, 0].long(), torch.tensor([1.0, 0.0])
    )
    assert evidence.scores(torch.tensor([0.0, 9.0, 2.0, 1.0, 0.0])).tolist() == [[1.0, 3.0]]


# ---- in the pipeline


@pytest.fixture
def config(encoder: Path) -> Any:
    return tiny_config(encoder, calibrate={"share": 0.4, "least": 4})


@pytest.mark.slow
def test_an_index_is_calibrated_on_what_a_first_build_has_not_seen(
    beir: Path, tmp_path: Path, config: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def far(*args: Any, **kwargs: Any) -> Any:  # on so few queries chance says how far documents move
        calibration, hubs = fit(*args, **kwargs)
        return dataclasses.replace(calibration, moves=0.4), hubs

    monkeypatch.setattr(pipeline, "fit", far)
    caplog.set_level("INFO", "nci")
    out = tmp_path / "my.index"
    generation = build(beir, out, config)
    found = store.read_manifest(generation)["report"]["calibration"]
    assert found["found"]["queries"]["unseen"] >= 4
    index = Index(out)
    assert index.engine.model.anchor_weights is not None
    kappa, lexical = index.engine.model.anchor_weights.exp().tolist()
    assert (kappa, lexical) == (pytest.approx(found["kappa"], rel=1e-4), pytest.approx(found["lexical"], rel=1e-4))
    bias = np.load(generation / "bias.npy")
    leaf_of = {doc_id: leaf for leaf, doc_id in enumerate(index.doc_ids)}
    known = [(text, leaf_of[doc_id]) for text, doc_id in split_pairs(open_dataset(beir), "train")]
    means = query_means(index.engine, known)
    assert index.engine.vectors is not None
    assert index.engine.vectors.moves is not None
    np.testing.assert_allclose(index.engine.vectors.moves.values, 0.4 * means, atol=2e-3)
    assert np.linalg.norm(means, axis=1).max() > 0.4
    hubs = find_hubs(index.engine, known, found["drawn_by"], means)
    assert np.ptp(hubs) > 0.1
    for doc_id, value, hub in zip(index.doc_ids, bias, hubs, strict=True):
        times = _asked(beir, doc_id)
        prior = found["popular"] * np.log1p(times) if times else found["unseen"]
        assert value == pytest.approx(prior + found["hubs"] * hub, abs=1e-3)
    assert index.verify(2) == []
    assert index.system("zeroed").search("apple item0", k=3)
    before = index.system("untrained")
    assert before.engine.model.anchor_weights is not None
    assert before.engine.model.anchor_weights.exp().tolist() == pytest.approx([kappa, lexical])
    assert before.engine.vectors is not None
    assert np.array_equal(before.engine.vectors.bias, bias)  # type: ignore[arg-type]
    assert before.engine.vectors.moves is not None
    assert len(set(bias.tolist())) > 1
    for one in (index, before):
        beam, exact = (one.search("red pear", k=60, beam=60, mode=mode) for mode in ("beam", "exhaustive"))  # type: ignore[arg-type]
        assert [hit.doc_id for hit in beam] == [hit.doc_id for hit in exact]
        assert [hit.score for hit in beam] == pytest.approx([hit.score for hit in exact], abs=1e-3)
    assert before.engine.model.anchor_weights is not index.engine.model.anchor_weights
    assert not (out / "build" / "calibrate").exists()
    assert sum("embed" in record.getMessage() for record in caplog.records if "in " in record.getMessage()) == 1
    caplog.clear()
    build(beir, out, config)
    assert any("up to date" in record.getMessage() for record in caplog.records)


@pytest.mark.slow
def test_an_index_without_dev_is_calibrated_on_both_kinds(tmp_path: Path, config: Any) -> None:
    queries = [(f"apple {colour} item{number}", f"d{number}") for number in range(40) for colour in ("red", "green")]
    documents = [{"id": f"d{number}", "text": f"apple item{number}"} for number in range(50)]
    generation = build(documents, tmp_path / "my.index", config, queries=queries)
    manifest = store.read_manifest(generation)["report"]
    assert manifest["calibration"]["found"]["queries"] == {"seen": 19, "unseen": 32}
    assert manifest["pairs"]["real"] == 80, "the index itself learns from all queries"
    once = [(text, doc_id) for text, doc_id in queries if "red" in text]
    found = store.read_manifest(build(documents, tmp_path / "once.index", config, queries=once))["report"][
        "calibration"
    ]
    assert found["found"]["queries"] == {"seen": 0, "unseen": 16}
    assert (found["unseen"], found["popular"]) == (0, 0)


def _asked(beir: Path, doc_id: str) -> int:
    rows = (beir / "qrels" / "train.tsv").read_text().splitlines()[1:]
    return sum(row.split("\t")[1] == doc_id for row in rows)


def test_blank_queries_are_not_searched_for(tmp_path: Path, config: Any) -> None:
    queries = [(f"apple item{number}", f"d{number}") for number in range(40)] + [("  ", f"d{n}") for n in range(40)]
    documents = [{"id": f"d{number}", "text": f"apple item{number}"} for number in range(40)]
    generation = build(documents, tmp_path / "my.index", config, queries=queries)
    found = store.read_manifest(generation)["report"]["calibration"]["found"]["queries"]
    assert 0 < found["seen"] + found["unseen"] <= 40


@pytest.mark.slow
def test_a_killed_calibration_goes_on(beir: Path, tmp_path: Path, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def die(*_: Any, **__: Any) -> Any:
        raise Killed

    whole = build(beir, tmp_path / "whole.index", config)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "fit", die)
        with pytest.raises(Killed):
            build(beir, tmp_path / "my.index", config)
    generation = build(beir, tmp_path / "my.index", config)
    files = [store.read_manifest(folder)["files"] for folder in (whole, generation)]
    assert {name: entry["sha256"] for name, entry in files[0].items()} == {
        name: entry["sha256"] for name, entry in files[1].items()
    }
    assert build(beir, tmp_path / "my.index", config) == generation
    monkeypatch.setattr(pipeline, "CALIBRATION_VERSION", 99)
    assert build(beir, tmp_path / "my.index", config) != generation, "weights of another way to fit are not kept"


@pytest.mark.slow
def test_indexes_that_share_their_stages_are_those_built_alone(
    beir: Path, tmp_path: Path, encoder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "nci")
    configs = [tiny_config(encoder, calibrate={"share": 0.4, "least": 4}, tree={"seed": seed}) for seed in (0, 1)]
    shared = [build(beir, tmp_path / f"{i}.index", each, shared=tmp_path / "stages") for i, each in enumerate(configs)]
    assert sum(record.getMessage().startswith("embed      6") for record in caplog.records) == 1
    assert not list((tmp_path / "stages").glob("train-*"))
    alone = [build(beir, tmp_path / f"alone{i}.index", each) for i, each in enumerate(configs)]
    for one, other in zip(shared, alone, strict=True):
        files = [store.read_manifest(folder)["files"] for folder in (one, other)]
        assert {name: entry["sha256"] for name, entry in files[0].items()} == {
            name: entry["sha256"] for name, entry in files[1].items()
        }


@pytest.mark.slow
def test_held_out_queries_replace_the_generated_ones_in_the_first_build(
    beir: Path, tmp_path: Path, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nci.making import Making

    seen: list[list[tuple[str, int]]] = []
    original = Making.make

    def make(self: Any, stages: Any, data: Any, *more: Any) -> Any:
        seen.append(data.generated)
        return original(self, stages, data, *more)

    monkeypatch.setattr(Making, "make", make)
    build(beir, tmp_path / "a", config, generated=[("by all", "d0")], held_out=[("by some", "d1"), ("x", "unknown")])
    assert [[text for text, _ in queries] for queries in seen] == [["by some"], ["by all"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"calibrate": {"share": 0.4, "least": 10_000}}, "could be withheld"),
        ({"calibrate": {"share": 0.4}, "model": {"anchor": "none", "content": False}}, "needs --model.anchor exact"),
    ],
)
def test_without_enough_nothing_is_fitted(
    beir: Path, tmp_path: Path, encoder: Path, changes: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="nci")
    generation = build(beir, tmp_path / "my.index", tiny_config(encoder, **changes))
    assert "calibration" not in store.read_manifest(generation)["report"]
    assert not (generation / "bias.npy").exists()
    assert any(said in record.getMessage() for record in caplog.records)


def test_what_is_found_first_before_and_after(engine: Engine) -> None:
    best = np.array([ranking.documents[0] for ranking in engine.search(TEXTS, k=1, beam=50)])
    asked = best.copy()
    asked[1] += 1
    before = found_first(engine, TEXTS, asked, SearchConfig(beam=50))
    assert before.tolist() == [True, False, True, True, True]
    made = compared(Calibration(1, 1, 0, 1), before, ~before, np.array([True, True, False, False, False]))
    assert made.found == {
        "queries": {"seen": 3, "unseen": 2},
        "before": {"seen": 1.0, "unseen": 0.5},
        "after": {"seen": 0.0, "unseen": 0.5},
    }
    nothing = compared(Calibration(1, 1, 0, 1), before, before, np.zeros(5, bool)).found
    assert nothing["after"]["unseen"] == 0.0


def test_what_was_found_reads_as_a_line() -> None:
    found = {
        "queries": {"seen": 419, "unseen": 784},
        "before": {"seen": 0.8544, "unseen": 0.7219},
        "after": {"seen": 0.8282, "unseen": 0.8903},
    }
    said = str(Calibration(13.394, 10.002, 0.072, 0.4477, -1.688, hubs=-0.521, moves=0.417, found=found))
    assert said == (
        "dense 13.39, BM25 10.00, decoder 0.45, unseen +0.07, often asked -1.69, hubs -0.52, moved 0.42; "
        "R@1 seen 85.4 -> 82.8 (419), unseen 72.2 -> 89.0 (784)"
    )
