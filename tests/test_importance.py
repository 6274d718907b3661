"""What the pieces of a query count: learned from where it is known, in an index, and without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_config
from torch import Tensor

import nci
from nci.config import TrainConfig
from nci.errors import ConfigError, DataError
from nci.importance import Compared, learn
from nci.index import Index
from nci.pieces import UNIFORM, PieceVectors, shares
from nci.records import Document
from nci.search import Engine
from nci.search.late import Asked, LateScores
from nci.structure import check_structure

WIDTH = 6
SPECIAL = torch.tensor([0])
TELLING, COMMON = torch.eye(WIDTH)[0], torch.eye(WIDTH)[1]


def compared(count: int, seed: int) -> Compared:
    """Queries of one piece that only their own document says, and three that any may say."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.stack([TELLING, COMMON, COMMON, COMMON])
    states = (kinds + 0.1 * torch.randn(count, 4, WIDTH, generator=generator)) * 7
    cosines = torch.rand(count, 9, 4, generator=generator)
    cosines[:, 0, 0] = 1.0
    cosines[:, 1:, 0] *= 0.9
    ids, mask = torch.full((count, 4), 5), torch.ones(count, 4, dtype=torch.bool)
    return Compared(Asked(states, ids, mask), cosines.half(), torch.zeros(count, 9, dtype=torch.bool))


def counts_of(importance: Tensor, part: Compared) -> Tensor:
    asked = part.asked
    return shares(asked.ids, asked.mask, SPECIAL, asked.states, importance)


def test_pieces_that_tell_documents_apart_come_to_count_more() -> None:
    read = [compared(250, seed) for seed in range(30)]
    learned = torch.from_numpy(learn(read, SPECIAL, np.random.default_rng(0)))
    fresh = compared(200, 99)
    counts = counts_of(learned, fresh)
    torch.testing.assert_close(counts.sum(1), torch.ones(200))
    assert counts[:, 0].mean() > 0.4
    alike = torch.tensor([0.0] * WIDTH + [UNIFORM])
    found = [
        torch.einsum("qdt,qt->qd", fresh.cosines.float(), counts_of(weights, fresh)).argmax(1).eq(0).float().mean()
        for weights in (alike, learned)
    ]
    assert found[1] > found[0] + 0.1
    again = learn(read, SPECIAL, np.random.default_rng(0))
    np.testing.assert_array_equal(again, learned.numpy())


def test_small_parts_are_steps_of_many_queries_together() -> None:
    read = [compared(9, seed) for seed in range(60)]
    together = Compared(
        Asked(*(torch.cat(each) for each in zip(*(part.asked for part in read), strict=True))),
        torch.cat([part.cosines for part in read]),
        torch.cat([part.missing for part in read]),
    )
    few, many = (learn(parts, SPECIAL, np.random.default_rng(0)) for parts in (read, [together]))
    np.testing.assert_allclose(few[:-1], many[:-1], atol=1e-4)


def test_candidates_that_are_missing_say_nothing() -> None:
    read = [compared(250, seed) for seed in range(8)]
    wrong = [Compared(part.asked, part.cosines.clone(), part.missing.clone()) for part in read]
    for part in wrong:
        part.cosines[:, 5:] = torch.rand_like(part.cosines[:, 5:])
        part.missing[:, 5:] = True
    fewer = [Compared(part.asked, part.cosines[:, :5], part.missing[:, :5]) for part in read]
    found = (learn(parts, SPECIAL, np.random.default_rng(0)) for parts in (wrong, fewer))
    np.testing.assert_allclose(*found, atol=1e-5)


def test_where_nothing_was_learned_all_count_the_same() -> None:
    part = compared(3, 0)
    ids = part.asked.ids.clone()
    ids[0, 1] = 0  # special
    asked = part.asked._replace(ids=ids)
    plain = shares(asked.ids, asked.mask, SPECIAL)
    alike = shares(asked.ids, asked.mask, SPECIAL, asked.states, torch.tensor([0.0] * WIDTH + [UNIFORM]))
    torch.testing.assert_close(plain, alike)
    assert plain[0].tolist() == pytest.approx([1 / 3, 0.0, 1 / 3, 1 / 3])


# ---- an index that has it


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, encoder: Path, beir: Path) -> Callable[..., Path]:
    def build(importance: int = 100, **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("index") / "my.index"
        train = {"importance": importance, **changes}
        nci.build(beir, folder, tiny_config(encoder, embed={"pieces": 8}, train=train))
        return folder

    return build


@pytest.fixture(scope="module")
def folder(make: Callable[..., Path]) -> Path:
    return make()


def importance_of(folder: Path) -> Any:
    pieces = Index(folder).engine.pieces
    assert pieces is not None
    return pieces.importance


def test_an_index_has_learned_it_from_its_training_queries(folder: Path) -> None:
    index = Index(folder)
    learned = importance_of(folder)
    assert learned.shape == (index.engine.model.config.encoder["hidden_size"] + 1,)
    assert np.abs(learned[:-1]).max() > 1e-4
    assert index.engine.late is not None
    np.testing.assert_array_equal(index.engine.late.importance, learned)


def test_a_query_is_compared_with_its_own_document_and_the_best_others(
    monkeypatch: pytest.MonkeyPatch, encoder: Path, tmp_path: Path
) -> None:
    """Its own comes first and only there; other relevant documents are not held against it."""
    words = ["apple", "river", "stone", "cloud", "horse", "paper"]
    documents = [
        Document(f"d{i}", words[i % 6], f"{words[i % 6]} {words[(i * 5 + 1) % 6]} number {i}") for i in range(12)
    ]
    queries = [(f"{words[i % 6]} of {i}", f"d{i}") for i in range(12)] + [("all of it", "d3"), ("all of it", "d7")]
    seen: list[tuple[list[str], list[list[int]]]] = []
    cosines, candidates_of = LateScores.cosines, Engine.candidates_of
    texts: list[str] = []

    def asked(self: Engine, given: Any) -> Any:
        texts[:] = given
        return candidates_of(self, given)

    def spied(self: LateScores, asked: Asked, chosen: Tensor) -> Tensor:
        if texts:
            seen.append(([*texts], chosen.tolist()))
            texts.clear()
        return cosines(self, asked, chosen)

    monkeypatch.setattr(Engine, "candidates_of", asked)
    monkeypatch.setattr(LateScores, "cosines", spied)
    config = tiny_config(encoder, embed={"pieces": 8}, train={"epochs": 0, "importance": 100})
    index = nci.build(documents, tmp_path / "my.index", config, queries=queries)
    ((found, chosen),) = seen
    pairs = [(text, [index.doc_ids[leaf] for leaf in row]) for text, row in zip(found, chosen, strict=True)]
    assert sorted((text, row[0]) for text, row in pairs) == sorted(queries)
    for text, row in pairs:
        own = {doc_id for each, doc_id in queries if each == text}
        assert set(row[1:]) >= {f"d{i}" for i in range(12)} - own
        assert row[0] not in row[1 : 13 - len(own)]


def test_queries_that_cannot_be_searched_teach_nothing(encoder: Path, tmp_path: Path) -> None:
    documents = [Document(f"d{i}", "", f"text {i}") for i in range(4)]
    config = tiny_config(encoder, embed={"pieces": 8}, train={"epochs": 0, "importance": 100})
    nci.build(documents, tmp_path / "my.index", config, queries=[("  ", "d0"), ("", "d1")])
    assert importance_of(tmp_path / "my.index") is None


@pytest.mark.slow
def test_values_that_are_not_finite_are_found(
    monkeypatch: pytest.MonkeyPatch, folder: Path, encoder: Path, beir: Path, tmp_path: Path
) -> None:
    index = Index(folder)
    pieces = index.engine.pieces
    assert pieces is not None
    index.engine = dataclasses.replace(
        index.engine, pieces=dataclasses.replace(pieces, importance=pieces.importance * np.nan)
    )
    assert any("importance.npy" in problem for problem in check_structure(index))
    monkeypatch.setattr("nci.making.learn_importance", lambda *given, **options: np.full(9, np.nan, np.float32))
    nci.build(
        beir, tmp_path / "my.index", tiny_config(encoder, embed={"pieces": 8}, train={"epochs": 0, "importance": 100})
    )
    assert importance_of(tmp_path / "my.index") is None


def test_the_untrained_system_has_none(folder: Path) -> None:
    pieces = Index(folder).system("untrained").engine.pieces
    assert pieces is not None
    assert pieces.importance is None


@pytest.mark.slow
def test_without_queries_to_learn_from_there_is_none(make: Callable[..., Path]) -> None:
    assert importance_of(make(importance=0)) is None


@pytest.mark.slow
def test_an_untrained_index_learns_it_too(make: Callable[..., Path]) -> None:
    assert importance_of(make(epochs=0)) is not None


def test_a_file_of_another_width_is_one_line(tmp_path: Path) -> None:
    lengths = np.array([2, 1])
    codes, projection = np.ones((3, 4), np.int8), np.ones((6, 4), np.float32)
    whole = PieceVectors(codes, np.cumsum(lengths) - lengths, lengths, projection, np.zeros(7, np.float32))
    whole.save(tmp_path)
    read = PieceVectors.load(tmp_path).importance
    assert read is not None
    assert read.tolist() == [0.0] * 7
    np.save(tmp_path / "importance.npy", np.zeros(6, np.float32))
    with pytest.raises(DataError, match="do not fit"):
        PieceVectors.load(tmp_path)


def test_fewer_than_no_queries_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--train\.importance"):
        TrainConfig(importance=-1)
