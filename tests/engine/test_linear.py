"""Packed and joined layers give what plain ones give, and a row's bits are the same among any others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from splitspec.engine.feed import LONGEST_SHORT_FEED
from splitspec.engine.linear import JoinedLinear, PackedLinear, Slabs
from tests.engine import tiny


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_siblings_are_joined_and_nothing_else_is_left_unpacked(
    tmp_path: Path, dtype: str, bias: bool
) -> None:
    config = LlamaConfig(**tiny._GROUPED, attention_bias=bias)
    model = tiny.load(tiny.checkpoint(tmp_path, config), dtype=dtype)
    layer: Any = model._model.model.layers[0]
    for joined in (layer.self_attn.q_proj, layer.self_attn.v_proj, layer.mlp.gate_proj, layer.mlp.up_proj):
        assert isinstance(joined, JoinedLinear)
    for single in (layer.self_attn.o_proj, layer.mlp.down_proj, model._model.lm_head):
        assert isinstance(single, PackedLinear)
    assert not any(isinstance(module, nn.Linear) for module in model._model.modules())


@pytest.mark.parametrize("rows", [0, 1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_layers_equal_plain_ones(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    plain = nn.Linear(24, 40).to(dtype)
    given = torch.randn(1, rows, 24, dtype=dtype)
    with torch.inference_mode():
        expected = plain(given)
        actual = PackedLinear(plain.weight, plain.bias, Slabs(needed=True))(given)
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-5)


@pytest.mark.parametrize("sizes", [(1536, 576), (576, 96), (32, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_among_any_others(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    """Each output is a sum that cancels out, so that the order of adding shows in its first digits."""
    in_features, out_features = sizes
    torch.manual_seed(0)
    half = torch.randn(out_features, in_features // 2)
    rows = torch.randn(3 * LONGEST_SHORT_FEED, in_features // 2)
    slabs = Slabs(needed=True)
    layer = PackedLinear(torch.cat([half, half], dim=1).to(dtype), None, slabs)
    given = torch.cat([rows, -rows], dim=1).to(dtype)
    slabs.begin([1] * len(given))
    together = layer(given)
    for start in range(0, len(given), 5):
        for count in (1, 2, 5, 17):
            some = given[start : start + count]
            slabs.begin([len(some)])
            assert torch.equal(layer(some), together[start : start + count])


def test_long_feeds_are_products_of_their_own() -> None:
    slabs = Slabs(needed=True)
    slabs.begin([1, 5, 100, 30, 3, 40])
    assert slabs.of(179) == [6, 100, 32, 1, 40]
    assert slabs.of(70) == [32, 32, 6]  # rows of the head
    assert slabs.of(0) == []
    assert Slabs(needed=False).of(179) == [179]
