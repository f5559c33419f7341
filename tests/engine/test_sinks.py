"""Attention sinks: logits as the library's eager attention has them, with experts and unequal sizes, too.

`tiny.CONFIGS` has a model with sinks, so that batches, trees and the kernel for all sessions are compared in
the tests of those; here are the models that people run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as flex_module
from transformers import AutoModelForCausalLM, GptOssConfig, MiMoV2FlashConfig

from tests.engine import tiny

LENGTH = 24
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
COMMON: dict[str, Any] = tiny._WINDOWED | {"initializer_range": 0.1}
LAYERS = ["sliding_attention", "full_attention"] * 2
CONFIGS = {
    "gpt_oss": GptOssConfig(
        **COMMON, head_dim=8, num_local_experts=4, num_experts_per_tok=2, rope_parameters=ROPE
    ),
    "mimo_v2": MiMoV2FlashConfig(
        **COMMON,
        head_dim=12,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        layer_types=LAYERS,
        mlp_layer_types=["dense", "sparse"] * 2,
        rope_parameters={kind: ROPE | {"partial_rotary_factor": 0.5} for kind in LAYERS},
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sinks so large that leaving one out shows."""
    directory = tiny.checkpoint(tmp_path_factory.mktemp(request.param), CONFIGS[request.param])
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        sinks = [value for name, value in model.named_parameters() if name.endswith("sinks")]
        for layer, value in enumerate(sinks):
            value.copy_(torch.linspace(-1, 3, len(value)) + layer / 2)
    assert sinks
    model.save_pretrained(directory)
    return directory


@torch.inference_mode()
def library_logits(directory: Path, dtype: torch.dtype) -> torch.Tensor:
    """[tokens, vocabulary]: one pass of the library's own attention."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    logits: torch.Tensor = model(torch.tensor([tiny.text(LENGTH)]), use_cache=False).logits[0]
    return logits.float()


def served_logits(directory: Path, **settings: Any) -> torch.Tensor:
    """The same of the engine, in pieces."""
    model = tiny.load(directory, **settings)
    kv, text = model.new_kv(), tiny.text(LENGTH)
    pieces = (text[:9], text[9:10], text[10:])
    return torch.cat([model.forward(kv, piece, len(piece)) for piece in pieces])


def test_one_session_after_the_other(directory: Path) -> None:
    expected = library_logits(directory, torch.float32)
    torch.testing.assert_close(served_logits(directory), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_all_sessions_in_one_kernel(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    served = served_logits(directory, attention="flex", kv_memory_bytes=2**20)
    expected = library_logits(directory, torch.float32)
    torch.testing.assert_close(served, expected, atol=1e-4, rtol=1e-4)


def test_in_half_precision(directory: Path) -> None:
    """No further from float32 than the library's own bfloat16, but for chance."""
    exact = library_logits(directory, torch.float32)
    theirs = (library_logits(directory, torch.bfloat16) - exact).abs().mean()
    ours = (served_logits(directory, dtype="bfloat16") - exact).abs().mean()
    assert ours < 1.5 * theirs
