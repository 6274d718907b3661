from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    ModernBertConfig,
    ModernBertModel,
    MPNetConfig,
    MPNetModel,
    PreTrainedModel,
    T5Config,
    T5EncoderModel,
)

from nci.encoders import token_states
from nci.lean import make_lean

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 50}


def some_encoder(kind: str) -> PreTrainedModel:
    """An encoder with weights and norms that are not all ones."""
    torch.manual_seed(0)
    if kind == "bert":
        model: PreTrainedModel = BertModel(BertConfig(**SMALL), add_pooling_layer=False)
    elif kind == "modernbert":  # its norms have no biases
        model = ModernBertModel(ModernBertConfig(**SMALL, pad_token_id=0, attn_implementation="sdpa"))
    elif kind == "mpnet":
        model = MPNetModel(MPNetConfig(**SMALL), add_pooling_layer=False)
    else:
        shape = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 2, "vocab_size": 50}
        model = T5EncoderModel(T5Config(**shape, feed_forward_proj=kind))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1 * (weight.dim() == 1))
    return model.eval()


KINDS = ["bert", "modernbert", "mpnet", "relu", "gated-gelu"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_lean_encoder_has_the_same_weights_and_gives_the_same_states_and_gradients(kind: str) -> None:
    plain = some_encoder(kind)
    lean = copy.deepcopy(plain)
    make_lean(lean)
    assert lean.state_dict().keys() == plain.state_dict().keys()
    assert not any(type(module) is nn.LayerNorm or "T5LayerNorm" in repr(module) for module in lean.modules())
    ids, mask = torch.randint(2, 50, (3, 7)), torch.ones(3, 7, dtype=torch.bool)
    mask[1, 4:] = False
    states = []
    for model in (plain, lean):
        states.append(token_states(model, ids, mask)[mask])
        states[-1].square().sum().backward()
    torch.testing.assert_close(states[1], states[0])
    for (name, a), (_, b) in zip(lean.named_parameters(), plain.named_parameters(), strict=True):
        if b.grad is not None and ".k.bias" not in name and ".key.bias" not in name:  # these are zero but for rounding
            torch.testing.assert_close(a.grad, b.grad, msg=name, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_precision_is_read_and_written_without_detours(kind: str) -> None:
    lean = some_encoder(kind)
    ids, mask = torch.randint(2, 50, (2, 5)), torch.ones(2, 5, dtype=torch.bool)
    exact = token_states(lean, ids, mask)
    make_lean(lean)
    seen: list[torch.dtype] = []
    for module in lean.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = token_states(lean, ids, mask)
    assert mixed.dtype == torch.bfloat16
    assert set(seen) == {torch.bfloat16}
    torch.testing.assert_close(mixed.float(), exact, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("kind", ["mpnet", "relu"])
def test_attention_is_dropped_out_in_training_only(kind: str) -> None:
    lean = some_encoder(kind)
    make_lean(lean)
    ids, mask = torch.randint(2, 50, (2, 5)), torch.ones(2, 5, dtype=torch.bool)
    for name, module in lean.named_modules():
        if isinstance(module, nn.Dropout) and not name.endswith("attn.dropout"):
            module.p = 0.0
    same = [token_states(lean, ids, mask) for _ in range(2)]
    torch.testing.assert_close(same[0], same[1], rtol=0, atol=0)
    lean.train()
    other = [token_states(lean, ids, mask) for _ in range(2)]
    assert not torch.equal(other[0], other[1])


def test_a_t5_of_16_bits_may_have_layers_of_32() -> None:
    """As Hugging Face loads it in float16."""
    plain = some_encoder("relu").to(torch.bfloat16)
    for block in plain.encoder.block:
        block.layer[1].DenseReluDense.wo.float()
    lean = copy.deepcopy(plain)
    make_lean(lean)
    ids, mask = torch.randint(2, 50, (2, 5)), torch.ones(2, 5, dtype=torch.bool)
    found = token_states(lean, ids, mask)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), token_states(plain, ids, mask).float(), atol=0.1, rtol=0.1)
