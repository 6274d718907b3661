"""What the pieces of a query count: learned from where it is known, in an index, and without it."""

from __future__ import annotations

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
from nci.search.late import Asked

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
    return Compared(Asked(states, ids, mask), cosines.half())


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
    def build(**changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("index") / "my.index"
        nci.build(beir, folder, tiny_config(encoder, embed={"pieces": 8}, **changes))
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


def test_without_queries_to_learn_from_there_is_none(make: Callable[..., Path]) -> None:
    assert importance_of(make(train={"importance": 0})) is None


def test_an_untrained_index_learns_it_too(make: Callable[..., Path]) -> None:
    assert importance_of(make(train={"epochs": 0})) is not None


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
