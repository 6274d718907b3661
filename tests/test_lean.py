from __future__ import annotations

import copy

import pytest
import torch
from transformers import T5Config, T5EncoderModel

from nci.lean import make_lean


@pytest.mark.parametrize("feed_forward", ["relu", "gated-gelu"])
def test_a_lean_t5_has_the_same_weights_and_gives_the_same_states_and_gradients(feed_forward: str) -> None:
    torch.manual_seed(0)
    shape = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 2, "vocab_size": 50}
    plain = T5EncoderModel(T5Config(**shape, feed_forward_proj=feed_forward)).eval()
    with torch.no_grad():
        for name, weight in plain.named_parameters():  # norms that are not all ones
            weight.add_(torch.randn_like(weight) * 0.1 * ("layer_norm" in name))
    lean = copy.deepcopy(plain)
    make_lean(lean)
    assert lean.state_dict().keys() == plain.state_dict().keys()
    assert not any(type(module).__name__ == "T5LayerNorm" for module in lean.modules())
    ids = torch.randint(0, 50, (3, 7))
    for model in (plain, lean):
        model(input_ids=ids).last_hidden_state.square().sum().backward()
    torch.testing.assert_close(lean(input_ids=ids).last_hidden_state, plain(input_ids=ids).last_hidden_state)
    for (name, a), (_, b) in zip(lean.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name, atol=1e-4, rtol=1e-3)


def test_mixed_precision_is_read_and_written_without_detours() -> None:
    lean = T5EncoderModel(T5Config(d_model=32, d_ff=64, d_kv=8, num_heads=4, num_layers=1, vocab_size=50)).eval()
    ids = torch.randint(0, 50, (2, 5))
    exact = lean(input_ids=ids).last_hidden_state
    make_lean(lean)
    seen: list[torch.dtype] = []
    layer = lean.encoder.block[0].layer[1].DenseReluDense
    layer.wo.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = lean(input_ids=ids).last_hidden_state
    assert seen == [torch.bfloat16]
    torch.testing.assert_close(mixed.float(), exact, atol=0.1, rtol=0.1)
