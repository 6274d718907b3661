"""Transformer blocks: equal to plain numpy, causal, masked, and the same in one pass as level by level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nci.layers import Stack, StackCache
from nci.model import NCIModel
from nci.records import SemanticId

D, HEADS, TOKENS = 16, 2, 5


def stack(*, cross: bool, layers: int = 2, dropout: float = 0.0) -> Stack:
    made = Stack(layers, D, HEADS, 24, dropout, cross)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return made.eval()


def seen(*lengths: int) -> Tensor:
    """(batch, 1, 1, tokens), true for the first tokens of each row."""
    return (torch.arange(TOKENS) < torch.tensor(lengths)[:, None])[:, None, None, :]


def test_a_mask_of_earlier_positions_is_the_same_as_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = stack(cross=True), torch.randn(3, 6, D)
    memories, mask = made.memories(torch.randn(3, TOKENS, D)), seen(5, 2, 4)
    usual = made(x, memories, mask)
    asked = []
    monkeypatch.setattr("nci.layers._by_mask", lambda rows: asked.append(len(rows)) or True)
    torch.testing.assert_close(made(x, memories, mask), usual, rtol=1e-5, atol=1e-6)
    assert asked == [3, 3], "once in each layer"


@pytest.mark.parametrize("layers", [1, 3])
def test_forward_equals_numpy(
    make_model: Callable[..., NCIModel], naive: Callable[..., Any], paths: list[SemanticId], layers: int
) -> None:
    model = make_model(decoder_layers=layers, adapter_layers=layers)
    reference = naive(model, paths)
    x, states = torch.randn(2, 4, D), torch.randn(2, TOKENS, D)
    with torch.no_grad():
        with_memory = model.decoder(x, model.decoder.memories(states), seen(3, 5))
        assert model.adapter is not None
        alone = model.adapter(x)
    for row, length in enumerate((3, 5)):
        wanted = reference.stack("decoder", layers, x[row].double().numpy(), states[row, :length].double().numpy())
        np.testing.assert_allclose(with_memory[row].numpy(), wanted, atol=1e-4)
        np.testing.assert_allclose(
            alone[row].numpy(), reference.stack("adapter", layers, x[row].double().numpy()), atol=1e-4
        )


@pytest.mark.parametrize("cross", [False, True])
def test_later_positions_do_not_change_earlier_ones(cross: bool) -> None:
    model = stack(cross=cross)
    memories, mask = (model.memories(torch.randn(2, TOKENS, D)), seen(5, 2)) if cross else (None, None)
    x = torch.randn(2, 4, D)
    whole = model(x, memories, mask)
    for position in range(3):
        other = x.clone()
        other[:, position + 1 :] += 1 + torch.rand_like(other[:, position + 1 :])
        changed = model(other, memories, mask)
        torch.testing.assert_close(changed[:, : position + 1], whole[:, : position + 1])
        assert ((changed - whole)[:, position + 1 :].abs().amax(-1) > 1e-3).all()


def test_masked_tokens_are_not_seen_and_the_others_are() -> None:
    model = stack(cross=True)
    x, states = torch.randn(2, 3, D), torch.randn(2, TOKENS, D)
    mask = seen(2, 4)
    out = model(x, model.memories(states), mask)
    hidden = torch.where(mask[:, 0, 0, :, None], states, torch.randn_like(states) * 100)
    torch.testing.assert_close(model(x, model.memories(hidden), mask), out)
    for token in (0, 1):
        other = states.clone()
        other[:, token] += 1
        assert ((model(x, model.memories(other), mask) - out).abs().amax(-1) > 1e-4).all()


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_steps_over_levels_equal_one_pass_over_each_path(cross: bool, layers: int) -> None:
    """Rows of a level choose any rows of the level above as parents, each query its own."""
    model, batch, sizes = stack(cross=cross, layers=layers), 3, (1, 3, 5, 2)
    memories, mask = (model.memories(torch.randn(batch, TOKENS, D)), seen(5, 1, 3)) if cross else (None, None)
    cache = StackCache()
    inputs = [torch.randn(batch, size, D) for size in sizes]
    places = torch.zeros(batch, 1, 1, dtype=torch.long)
    paths = inputs[0].unsqueeze(2)  # (batch, rows, level + 1, d): the inputs along each row's path
    cached = 0
    for level, (size, x) in enumerate(zip(sizes, inputs, strict=True)):
        if level:
            parent = torch.randint(sizes[level - 1], (batch, size))
            rows = torch.arange(batch)[:, None]
            own = cached + torch.arange(size).expand(batch, -1)
            places = torch.cat([places[rows, parent], own.unsqueeze(-1)], dim=-1)
            paths = torch.cat([paths[rows, parent], x.unsqueeze(2)], dim=2)
        out = model.step(x, places, cache, memories, mask)
        cached += size
        for row in range(size):
            wanted = model(paths[:, row], memories, mask)[:, -1]
            torch.testing.assert_close(out[:, row], wanted, atol=1e-5, rtol=1e-5)
    assert len(cache.keys) == len(cache.values) == layers
    assert cache.keys[0].shape == (batch, HEADS, sum(sizes), D // HEADS)


def test_ancestors_matter() -> None:
    """Rows with the same input below different parents come out different."""
    model, cache = stack(cross=False), StackCache()
    model.step(torch.randn(1, 1, D), torch.zeros(1, 1, 1, dtype=torch.long), cache)
    model.step(torch.randn(1, 2, D), torch.tensor([[[0, 1], [0, 2]]]), cache)
    twins = torch.randn(1, 1, D).expand(1, 2, D)
    out = model.step(twins, torch.tensor([[[0, 1, 3], [0, 2, 4]]]), cache)
    assert (out[0, 0] - out[0, 1]).abs().max() > 1e-3


def test_nothing_has_a_bias_and_dropout_acts_in_training_only() -> None:
    model = stack(cross=True, dropout=0.5)
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]
    x, memories = torch.randn(1, 3, D), model.memories(torch.randn(1, TOKENS, D))
    assert torch.equal(model(x, memories), model(x, memories))
    model.train()
    assert not torch.equal(model(x, memories), model(x, memories))
    assert sum(isinstance(module, nn.Dropout) for module in model.modules()) == 3
