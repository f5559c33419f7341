"""What a model asks of attention is given, or the model is refused by name: nothing is ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BloomConfig,
    DogeConfig,
    Llama4TextConfig,
    NemotronConfig,
    OpenAIGPTConfig,
    TrOCRConfig,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM

from splitspec.errors import ConfigError, UnavailableError
from tests.engine import tiny

SMALL = tiny._GROUPED | {"head_dim": 8}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            Llama4TextConfig(**SMALL, num_local_experts=2, attention_chunk_size=8, intermediate_size_mlp=48),
            "a mask that isn't causal",
        ),
        (OpenAIGPTConfig(vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=4), "can't be replaced"),
        (
            TrOCRConfig(vocab_size=97, d_model=32, decoder_layers=2, decoder_attention_heads=4),
            "a model that can leave out logits",
        ),
        (NemotronConfig(**SMALL), "tried, it fails with TypeError: its attention isn't passed"),
        (DogeConfig(**SMALL), "tried, it fails with AttributeError: 'function' object has no attribute"),
        (BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4), "max_position_embeddings"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_models_that_need_more_are_refused(tmp_path: Path, config: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        tiny.load(tiny.checkpoint(tmp_path, config))
    assert caught.value.field == "model"


MOE: dict[str, Any] = SMALL | {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
PARTICULAR = {
    "jetmoe": SMALL | {"kv_channels": 8, "num_local_experts": 4},
    "afmoe": MOE | {"num_experts": 4},
    "hunyuan_v1_moe": SMALL | {"num_experts": 4, "moe_topk": 2},
    "longcat_flash": {key: value for key, value in tiny._COMMON.items() if key != "num_hidden_layers"}
    | LATENT
    | {"num_layers": 2, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2, "head_dim": 8}
    | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
    | {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "num_key_value_heads": 4},
}


@pytest.mark.parametrize("kind", PARTICULAR)
def test_what_models_ask_of_their_attention_and_layers_is_kept(tmp_path: Path, kind: str) -> None:
    """JetMoE and AFMoE view the attention's result in another shape; HunYuan and LongCat read the weights of
    layers that they hold.
    """
    directory = tiny.checkpoint(tmp_path, CONFIG_MAPPING[kind](**PARTICULAR[kind]))
    model = tiny.load(directory)
    kv, text = model.new_kv(), tiny.text(20)
    logits = torch.cat([model.forward(kv, piece, len(piece)) for piece in (text[:9], text[9:10], text[10:])])
    library: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        expected = library(torch.tensor([text]), use_cache=False).logits[0]
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


def test_a_model_that_fails_in_its_first_pass_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = LlamaDecoderLayer.forward

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "ragged" in kwargs:
            raise IndexError("no such place")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", failing)
    with pytest.raises(ConfigError, match=r"model is 'tiny', .* IndexError: no such place"):
        tiny.load(tiny.checkpoint(tmp_path, tiny.CONFIGS["llama"]))


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError(), UnavailableError("no rank")])
def test_what_is_not_the_models_fault_is_raised_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(LlamaDecoderLayer, "forward", failing)
    with pytest.raises(type(error)):
        tiny.load(tiny.checkpoint(tmp_path, tiny.CONFIGS["llama"]))


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
