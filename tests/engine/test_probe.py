"""What a model asks of attention is given, or the model is refused by name: nothing is ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BloomConfig, GptOssConfig, Llama4TextConfig
from transformers.models.llama.modeling_llama import LlamaAttention

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
