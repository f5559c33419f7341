"""What a model asks of attention is given, or the model is refused by name: nothing is ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BloomConfig, GptOssConfig, Llama4TextConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from splitspec.engine.linear import JoinedLinear, PackedLinear, Slabs
from splitspec.errors import ConfigError
from tests.engine import tiny

SMALL = tiny._GROUPED | {"head_dim": 8}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1), "attention with s_aux"),
        (
            Llama4TextConfig(**SMALL, num_local_experts=2, attention_chunk_size=8, intermediate_size_mlp=48),
            "a mask that isn't causal",
        ),
        (BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4), "max_position_embeddings"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_models_that_need_more_are_refused(tmp_path: Path, config: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        tiny.load(tiny.checkpoint(tmp_path, config))
    assert caught.value.field == "model"


def test_unknown_attention_arguments_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaAttention.forward
    monkeypatch.setattr(
        LlamaAttention,
        "forward",
        lambda self, *args, **kwargs: forward(self, *args, **kwargs, position_bias=torch.zeros(1)),
    )
    with pytest.raises(ConfigError, match="attention with position_bias"):
        tiny.load(tiny.checkpoint(tmp_path, tiny.CONFIGS["llama"]))


def test_a_model_that_ignores_positions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits would depend on how a text is cut into passes."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    forward = LlamaRotaryEmbedding.forward

    def counting(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return forward(self, x, torch.arange(position_ids.shape[1])[None])

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", counting)
    with pytest.raises(ConfigError, match="depend on how a text is cut"):
        tiny.load(tiny.checkpoint(tmp_path, tiny.CONFIGS["llama"]))


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
