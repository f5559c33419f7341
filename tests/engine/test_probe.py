"""What a model asks of attention is given, or the model is refused by name: nothing is ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BloomConfig, GptOssConfig, Llama4TextConfig, OpenAIGPTConfig, TrOCRConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM

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
        (OpenAIGPTConfig(vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=4), "can't be replaced"),
        (
            TrOCRConfig(vocab_size=97, d_model=32, decoder_layers=2, decoder_attention_heads=4),
            "a model that can leave out logits",
        ),
        (BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4), "max_position_embeddings"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_models_that_need_more_are_refused(tmp_path: Path, config: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        tiny.load(tiny.checkpoint(tmp_path, config))
    assert caught.value.field == "model"


def test_a_model_needs_no_cache_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny.checkpoint(tmp_path, tiny.CONFIGS["llama"])
    served = tiny.load(directory)
    expected = served.forward(served.new_kv(), tiny.text(20), 20)
    forward = LlamaForCausalLM.forward

    def without(self: Any, input_ids: Any, position_ids: Any, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        assert "cache" not in kwargs
        return forward(self, input_ids, position_ids=position_ids, logits_to_keep=logits_to_keep, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", without)
    bare = tiny.load(directory)
    assert torch.equal(bare.forward(bare.new_kv(), tiny.text(20), 20), expected)


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
