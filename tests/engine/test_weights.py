"""What is served are the weights of the files, all of them; else the load fails and names them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, MixtralConfig, PretrainedConfig

from draft_worker.eagle.loading import load_embedding
from splitspec.engine.weights import weights_hash
from splitspec.errors import ConfigError
from tests.engine import tiny

Tensors = dict[str, torch.Tensor]
LLAMA = tiny.CONFIGS["llama"]
QUERY = "model.layers.1.self_attn.q_proj"
EIGHT_BITS = torch.float8_e4m3fn


def made(directory: Path, config: PretrainedConfig = LLAMA) -> Path:
    return tiny.checkpoint(directory / "model", config)


def change(directory: Path, how: Callable[[Tensors], object] = lambda tensors: None, **config: Any) -> Path:
    """Write the weights anew as `how` changes them, and the config with other values."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    how(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    fields = json.loads((directory / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def refused(directory: Path, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        tiny.load(directory, **settings)
    assert caught.value.field == "model"
    return str(caught.value)


def served(directory: Path) -> torch.Tensor:
    model = tiny.load(directory)
    return model.forward(model.new_kv(), tiny.text(12), 12)


@torch.inference_mode()
def of_library(directory: Path) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    logits: torch.Tensor = model(torch.tensor([tiny.text(12)]), use_cache=False).logits[0]
    return logits


class TestRefusals:
    def test_a_bias_that_is_missing(self, tmp_path: Path) -> None:
        directory = made(tmp_path, tiny.CONFIGS["qwen2"])
        change(directory, lambda tensors: tensors.pop(f"{QUERY}.bias"))
        assert f"(missing: {QUERY}.bias)" in refused(directory)

    def test_a_bias_that_the_model_has_not(self, tmp_path: Path) -> None:
        directory = change(made(tmp_path), lambda tensors: tensors.update({f"{QUERY}.bias": torch.ones(32)}))
        assert f"(not used: {QUERY}.bias)" in refused(directory)

    def test_a_head_that_the_config_does_not_tie(self, tmp_path: Path) -> None:
        directory = made(tmp_path)
        change(directory, lambda tensors: tensors.pop("lm_head.weight"))
        assert "(missing: lm_head.weight)" in refused(directory)
        change(directory, tie_word_embeddings=True)
        torch.testing.assert_close(served(directory), of_library(directory), atol=2e-4, rtol=1e-4)

    def test_layers_that_the_config_has_not(self, tmp_path: Path) -> None:
        text = refused(change(made(tmp_path), num_hidden_layers=3))
        assert "of the 3 layers" in text
        assert "model.layers.3.input_layernorm.weight, model.layers.3.mlp.down_proj.weight" in text
        assert "and 6 more" in text

    def test_layers_that_the_library_passes_over_by_their_number(self, tmp_path: Path) -> None:
        """GLM-4.5-Air's 46th predicts a token further on, and isn't run; another 46th is one left out."""
        experts: dict[str, Any] = {
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
        }
        config = CONFIG_MAPPING["glm4_moe"](**tiny._GROUPED | experts | {"head_dim": 8})
        directory = made(tmp_path, config)
        norm = "model.layers.46.input_layernorm.weight"
        change(directory, lambda tensors: tensors.update({norm: torch.ones(32)}))
        assert norm in refused(directory)
        ahead = "model.layers.46.eh_proj.weight"
        change(directory, lambda tensors: tensors.update({ahead: torch.ones(32, 64)}))
        torch.testing.assert_close(served(directory), of_library(directory), atol=2e-4, rtol=1e-4)

    def test_another_shape(self, tmp_path: Path) -> None:
        text = refused(change(made(tmp_path), intermediate_size=64))
        assert "of another shape: model.layers.0.mlp.down_proj.weight [32, 48] for [32, 64], " in text
        assert "and 9 more" in text

    @pytest.mark.parametrize("experts", [2, 4])
    def test_fewer_and_more_experts(self, tmp_path: Path, experts: int) -> None:
        directory = made(tmp_path, MixtralConfig(**tiny._GROUPED, num_local_experts=3))
        text = refused(change(directory, num_local_experts=experts))
        assert "of another shape: model.layers.0.mlp.experts.down_proj" in text

    def test_an_expert_that_is_missing(self, tmp_path: Path) -> None:
        directory = made(tmp_path, MixtralConfig(**tiny._GROUPED, num_local_experts=3))
        gone = "model.layers.1.block_sparse_moe.experts.1.w3.weight"
        text = refused(change(directory, lambda tensors: tensors.pop(gone)))
        assert "(not so: model.layers.1.mlp.experts.gate_up_proj)" in text

    def test_scales_that_nothing_applies(self, tmp_path: Path) -> None:
        directory = change(made(tmp_path), quantize("weight_scale"))
        assert "not used: model.layers.0.mlp.down_proj.weight_scale, " in refused(directory)
        for quantization in ({"quant_method": "modelopt", "quant_algo": "FP8"}, {"bits": 8}, "int8"):
            text = refused(change(directory, quantization_config=quantization))
            assert "model is 'tiny', expected" in text
        change(directory, quantization_config={"quant_method": "modelopt"})
        assert "no quantization, or one that the library knows (its config.json says 'modelopt')" in refused(
            directory
        )

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_weights_that_are_no_numbers(self, tmp_path: Path, value: float) -> None:
        directory = change(made(tmp_path), lambda tensors: tensors[f"{QUERY}.weight"][3, 5:6].fill_(value))
        text = refused(directory)
        assert f"weights that are finite in torch.float32 (not so: {QUERY}.weight)" in text

    def test_weights_that_the_element_type_has_no_room_for(self, tmp_path: Path) -> None:
        directory = change(made(tmp_path), lambda tensors: tensors[f"{QUERY}.weight"][3, 5:6].fill_(1e5))
        assert f"finite in torch.float16 (not so: {QUERY}.weight)" in refused(directory, dtype="float16")
        assert tiny.load(directory, dtype="bfloat16")

    def test_a_file_that_ends_early(self, tmp_path: Path) -> None:
        path = made(tmp_path) / "model.safetensors"
        whole = path.read_bytes()
        for length in (0, 7, 100, len(whole) - 1):
            path.write_bytes(whole[:length])
            assert "safetensors weights" in refused(path.parent)

    def test_shards(self, tmp_path: Path) -> None:
        directory = made(tmp_path)
        whole = served(directory)
        tensors = load_file(directory / "model.safetensors")
        (directory / "model.safetensors").unlink()
        names = sorted(tensors)
        parts = {"a.safetensors": names[:15], "b.safetensors": names[15:]}
        index = {"metadata": {}, "weight_map": {name: part for part, own in parts.items() for name in own}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        for part, own in parts.items():
            save_file({name: tensors[name] for name in own}, directory / part, metadata={"format": "pt"})
        assert torch.equal(served(directory), whole)

        twice = {name: tensors[name] for name in names[14:]}
        save_file(twice, directory / "b.safetensors", metadata={"format": "pt"})
        assert f"each tensor in one file ({names[14]} are in several)" in refused(directory)
        (directory / "b.safetensors").unlink()
        assert "(it lacks b.safetensors)" in refused(directory)
        (directory / "model.safetensors.index.json").write_text("{}")
        assert "a readable model.safetensors.index.json" in refused(directory)


def quantize(scale: str) -> Callable[[Tensors], None]:
    """Eight bits and a scale for each of the layers' matrices, under that name."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if "_proj" in name]:
            factor = tensors[name].abs().max() / 448
            tensors[name] = (tensors[name] / factor).to(EIGHT_BITS)
            tensors[name.replace("weight", scale)] = factor

    return change


class TestWhatIsHarmless:
    def test_scales_that_the_library_applies(self, tmp_path: Path) -> None:
        directory = made(tmp_path)
        change(directory, quantize("weight_scale_inv"))
        quantization = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "dynamic"}
        change(directory, quantization_config=quantization)
        logits = served(directory)

        def multiply(tensors: Tensors) -> None:
            for name in [name for name in tensors if name.endswith("scale_inv")]:
                weight = name.removesuffix("_scale_inv")
                tensors[weight] = tensors[weight].float() * tensors.pop(name)

        change(directory, multiply, quantization_config=None)
        torch.testing.assert_close(logits, of_library(directory), atol=2e-4, rtol=1e-4)

    def test_rotary_frequencies_of_old_checkpoints(self, tmp_path: Path) -> None:
        directory = made(tmp_path)
        before = served(directory)
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        change(directory, lambda tensors: tensors.update({name: torch.ones(4)}))
        assert torch.equal(served(directory), before)

    def test_mixed_element_types(self, tmp_path: Path) -> None:
        def mix(tensors: Tensors) -> None:
            kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
            for place, name in enumerate(tensors):
                tensors[name] = tensors[name].to(kinds[place % len(kinds)])

        directory = change(made(tmp_path), mix)
        torch.testing.assert_close(served(directory), of_library(directory), atol=2e-4, rtol=1e-4)

    def test_files_that_are_not_the_models(self, tmp_path: Path) -> None:
        """Some publishers put the same weights beside it under other names."""
        directory = made(tmp_path)
        before = weights_hash(directory), served(directory), load_embedding(directory, "tiny")
        other = {"model.embed_tokens.weight": torch.zeros(97, 32)}
        save_file(other, directory / "consolidated.safetensors")
        assert weights_hash(directory) == before[0]
        assert torch.equal(served(directory), before[1])
        assert torch.equal(load_embedding(directory, "tiny"), before[2])


class TestEmbeddings:
    def test_another_shape(self, tmp_path: Path) -> None:
        directory = change(made(tmp_path), vocab_size=90)
        with pytest.raises(ConfigError, match=r"shape \[90, 32\] in .* \(its files have \[97, 32\]"):
            load_embedding(directory, "tiny")

    def test_eight_bits_without_their_scale(self, tmp_path: Path) -> None:
        name = "model.embed_tokens.weight"
        directory = made(tmp_path, LlamaConfig(**tiny._GROUPED))
        change(directory, lambda tensors: tensors.update({name: tensors[name].to(EIGHT_BITS)}))
        with pytest.raises(ConfigError, match=r"\[97, 32\] in torch.float8_e4m3fn"):
            load_embedding(directory, "tiny")
