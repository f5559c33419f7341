"""Tiny random checkpoints, as directories that the engine loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
)

from splitspec.engine.causal_lm import CausalLM

VOCABULARY = 97
CONTEXT = 128
WINDOW = 5
BLOCK_SIZE = 16

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    # Large enough that logits differ between tokens and depend on the whole text.
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = _COMMON | {"num_key_value_heads": 2}
_WINDOWED = _GROUPED | {"sliding_window": WINDOW}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_GROUPED),
    "qwen2": Qwen2Config(**_GROUPED),
    "mistral-window": MistralConfig(**_WINDOWED),
    "gemma2-window": Gemma2Config(**_WINDOWED, head_dim=8, query_pre_attn_scalar=8),
    "gemma3-window": Gemma3TextConfig(
        **_WINDOWED,
        head_dim=8,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gpt_neox": GPTNeoXConfig(**_COMMON),
    "granite-sinks": CONFIG_MAPPING["granite_swa"](
        **_WINDOWED | {"layer_types": ["sliding_attention", "full_attention"] * 2}
    ),
}


def checkpoint(
    directory: Path, config: PretrainedConfig, vocabulary: int = VOCABULARY, seed: int = 0
) -> Path:
    """Save random float32 weights of that architecture with a tokenizer of `vocabulary` words."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    words = models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def load(directory: Path, **kwargs: Any) -> CausalLM:
    """The model with small blocks, so that a short text spans many."""
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "block_size": BLOCK_SIZE} | kwargs
    return CausalLM.load(directory, name="tiny", **settings)


def text(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
