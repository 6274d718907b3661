"""Documents that move towards the queries which ask for them: by how much, found by calibration, kept in an index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_calibrate import TEXTS, engine_of
from tiny import Workshop, make_workshop

from nci.calibrate import fit, gather
from nci.rocchio import query_means
from nci.search import Engine


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, encoder: Path) -> Workshop:
    return make_workshop(tmp_path_factory.mktemp("rocchio"), encoder)


@pytest.fixture(scope="module")
def engine(shop: Workshop, encoder: Path) -> Engine:
    return engine_of(shop, encoder)


def unit(vector: Any) -> Any:
    return vector / np.linalg.norm(vector)


def test_means_by_hand(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair that comes twice counts twice, a text may ask for two documents, one query moves a document half as far as many."""
    pairs = [(TEXTS[0], 3), (TEXTS[1], 3), (TEXTS[1], 3), (TEXTS[1], 5)]
    apple, pear = engine.query_vectors(TEXTS[:2]).cpu().numpy()
    for at_once in (128, 1):
        monkeypatch.setattr("nci.rocchio._AT_ONCE", at_once)
        found = query_means(engine, pairs)
        assert found.shape == (engine.trie.documents, len(apple))
        np.testing.assert_allclose(found[3], 3 / 4 * unit(apple + 2 * pear), atol=1e-5)
        np.testing.assert_allclose(found[5], 1 / 2 * unit(pear), atol=1e-5)
        assert not np.delete(found, [3, 5], axis=0).any()
    assert not query_means(engine, []).any()


def test_query_vectors_are_those_that_documents_are_compared_with(engine: Engine) -> None:
    tables, queries = engine.reference.tables, engine.encode(TEXTS)
    assert tables.vectors is not None
    assert queries.vectors is not None
    torch.testing.assert_close(engine.query_vectors(TEXTS), queries.vectors)
    evidence = gather(engine, TEXTS, np.zeros(len(TEXTS), int), np.ones(len(tables.vectors), int))
    torch.testing.assert_close(engine.query_vectors(TEXTS) @ tables.vectors.T, evidence.dense, atol=1e-5, rtol=1e-5)


def test_the_evidence_of_documents_that_move_is_that_of_a_model_whose_documents_have(
    shop: Workshop, encoder: Path
) -> None:
    engine, counts = engine_of(shop, encoder), np.ones(len(shop.model.tables.vectors), int)  # type: ignore[arg-type]
    moves = query_means(engine, [(text, leaf) for leaf, text in enumerate(TEXTS)])
    weights = torch.tensor([1.3, 0.4, 0.0, 0.0, 0.0, 0.0, 0.0, 0.6])
    wanted = gather(engine, TEXTS, np.zeros(len(TEXTS), int), counts, moves).scores(weights)
    values = shop.model.tables.vectors
    assert values is not None
    try:
        shop.model.tables.vectors = values + 0.6 * torch.as_tensor(moves)
        found = gather(engine, TEXTS, np.zeros(len(TEXTS), int), counts).scores(weights)
    finally:
        shop.model.tables.vectors = values
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_calibration_finds_how_far(engine: Engine) -> None:
    """New queries ask for what the same words asked for before; or others, those that asked for something else, do."""
    documents, rng = engine.trie.documents, np.random.default_rng(0)
    texts = [f"item{number} {word}" for number in range(9) for word in ("apple", "pear")]
    leaves = rng.permutation(documents)[: len(texts)]
    known = list(zip(texts, leaves.tolist(), strict=True))
    counts = np.ones(documents, int)
    found = {
        name: fit(engine, texts, targets, counts, known=known, moves=query_means(engine, known))[0].moves
        for name, targets in (("the same", leaves), ("others", np.roll(leaves, 1)))
    }
    assert found["the same"] > 1.0
    assert found["the same"] > 2 * found["others"]


def test_no_document_moves_away_from_its_queries(engine: Engine) -> None:
    """Where that would fit best the other numbers are those of documents that stay."""
    documents, rng = engine.trie.documents, np.random.default_rng(0)
    targets, counts = rng.integers(0, documents, len(TEXTS)), np.ones(documents, int)
    means = rng.normal(size=(documents, engine.reference.tables.vectors.shape[1]))  # type: ignore[union-attr]
    asked = engine.query_vectors(TEXTS).cpu().numpy()
    means[targets] = -asked  # the documents that are asked for lie the other way
    stay, _ = fit(engine, TEXTS * 20, np.tile(targets, 20), counts)
    found, _ = fit(engine, TEXTS * 20, np.tile(targets, 20), counts, moves=means.astype(np.float32))
    assert found == stay


def test_documents_stay_where_few_queries_would_have_them_move(engine: Engine) -> None:
    """The same queries again and again: the more of them there are, the less is it chance. Hubs need no second decision."""
    documents, rng = engine.trie.documents, np.random.default_rng(0)
    texts = [f"item{number} {word}" for number in range(9) for word in ("apple", "pear")]
    known = list(zip(texts, rng.permutation(documents)[: len(texts)].tolist(), strict=True))
    moves, counts = query_means(engine, known), np.ones(documents, int)
    found = []
    for times in (1, 2, 4, 8, 16):
        asked = known[:1] * times
        leaves = np.array([leaf for _, leaf in asked])
        found.append(fit(engine, [text for text, _ in asked], leaves, counts, moves=moves)[0])
    assert found[0].moves == 0.0
    assert found[-1].moves > 0.1
    assert [each.moves > 0 for each in found] == sorted(each.moves > 0 for each in found)
    (text, leaf), *_ = known
    assert found[0] == fit(engine, [text], np.array([leaf]), counts)[0], "as if they could not move"


def test_queries_of_unseen_documents_alone_do_not_say_how_far_seen_ones_should_move(engine: Engine) -> None:
    counts = np.where(np.arange(engine.trie.documents) < 5, 0, 2)
    known = [(text, 9) for text in TEXTS]
    found, _ = fit(engine, TEXTS, np.arange(5), counts, known=known, moves=query_means(engine, known))
    assert found.moves == 0.0
