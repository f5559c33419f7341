"""Passes in pieces and rewound equal the library's own single pass, on every kind of attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3nTextConfig,
    JambaConfig,
    LlamaConfig,
    Phi3Config,
    RwkvConfig,
    T5Config,
)

from splitspec.errors import ConfigError
from tests.engine import tiny
from tests.engine.tiny import load

LENGTH = 24


@pytest.fixture(scope="module", params=sorted(tiny.CONFIGS))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name: str = request.param
    return tiny.checkpoint(tmp_path_factory.mktemp(name), tiny.CONFIGS[name])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("llama"), tiny.CONFIGS["llama"])


@torch.inference_mode()
def library_logits(directory: Path, token_ids: list[int]) -> torch.Tensor:
    """[tokens, vocabulary]: one pass of the library's model without any cache."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    logits: torch.Tensor = model.eval()(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("piece", [1, 2, 5, 7, LENGTH])
def test_pieces_equal_one_pass_of_the_library(directory: Path, piece: int) -> None:
    token_ids = tiny.text(LENGTH)
    model = load(directory)
    kv = model.new_kv()
    rows = []
    for start in range(0, LENGTH, piece):
        chunk = token_ids[start : start + piece]
        rows.append(model.forward(kv, chunk, len(chunk)))
        assert kv.length == start + len(chunk)
    assert_same(torch.cat(rows), library_logits(directory, token_ids))


def test_going_on_after_truncation_equals_a_clean_run(directory: Path) -> None:
    model = load(directory)
    for length in range(LENGTH + 1):
        kv = model.new_kv()
        model.forward(kv, tiny.text(LENGTH), 0)
        kv.truncate(length)
        assert kv.length == length
        other = tiny.text(LENGTH - length + 3, seed=1)
        rows = model.forward(kv, other, len(other))
        clean = model.forward(model.new_kv(), tiny.text(LENGTH)[:length] + other, len(other))
        assert_same(rows, clean)


def test_kept_layers_equal_a_library_model_built_with_them(directory: Path, tmp_path: Path) -> None:
    keep = [0, 2, 3]
    full = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = type(full.config)(**full.config.to_dict() | _kept_config(full.config, keep))
    shallow: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    weights = full.state_dict()
    renamed = {_renumbered(name, keep): tensor for name, tensor in weights.items() if _renumbered(name, keep)}
    shallow.load_state_dict(renamed)
    with torch.inference_mode():
        expected = shallow.eval()(torch.tensor([tiny.text(LENGTH)]), use_cache=False).logits[0]

    model = load(directory, keep_layers=keep)
    kv = model.new_kv()
    first = model.forward(kv, tiny.text(LENGTH)[:10], 10)
    rest = model.forward(kv, tiny.text(LENGTH)[10:], LENGTH - 10)
    assert_same(torch.cat([first, rest]), expected)
    kv.truncate(10)
    assert_same(model.forward(kv, tiny.text(LENGTH)[10:], LENGTH - 10), rest)


def _kept_config(config: Any, keep: list[int]) -> dict[str, Any]:
    changed: dict[str, Any] = {"num_hidden_layers": len(keep)}
    if getattr(config, "layer_types", None):
        changed["layer_types"] = [config.layer_types[i] for i in keep]
    return changed


def _renumbered(name: str, keep: list[int]) -> str:
    """The parameter's name in the shallow model; empty when its layer is left out."""
    parts = name.split(".")
    at = parts.index("layers") + 1 if "layers" in parts else 0
    if at == 0:
        return name
    if int(parts[at]) not in keep:
        return ""
    parts[at] = str(keep.index(int(parts[at])))
    return ".".join(parts)


def test_kept_layers_change_the_fingerprint(llama: Path) -> None:
    whole, part = load(llama), load(llama, keep_layers=[0, 1])
    assert whole.info.fingerprint != part.info.fingerprint
    assert part.new_kv().num_bytes == 0
    kvs = [(model, model.new_kv()) for model in (whole, part)]
    for model, kv in kvs:
        model.forward(kv, tiny.text(3), 0)
    assert kvs[0][1].num_bytes == 2 * kvs[1][1].num_bytes


@pytest.mark.parametrize("num_rows", [0, 1, 4, 6])
def test_num_rows_are_the_last_ones(llama: Path, num_rows: int) -> None:
    model = load(llama)
    everything = model.forward(model.new_kv(), tiny.text(6), 6)
    rows = model.forward(model.new_kv(), tiny.text(6), num_rows)
    assert rows.shape == (num_rows, tiny.VOCABULARY)
    assert rows.dtype == torch.float32
    assert_same(rows, everything[6 - num_rows :])


def test_lengths_around_the_context_limit(llama: Path) -> None:
    model = load(llama)
    longest = model.info.max_context
    assert longest == tiny.CONTEXT
    num_draft_tokens = 4
    for length in range(longest - num_draft_tokens - 1, longest + 1):
        kv = model.new_kv()
        model.forward(kv, tiny.text(length), 0)
        room = longest - length
        if room:
            assert model.forward(kv, tiny.text(room, seed=1), 1).isfinite().all()
            kv.truncate(length)
        with pytest.raises(ValueError, match=f"on top of {length} don't fit the context of {longest}"):
            model.forward(kv, tiny.text(room + 1, seed=1), 1)
        assert kv.length == length


def test_wrong_arguments(llama: Path) -> None:
    model = load(llama)
    kv = model.new_kv()
    with pytest.raises(ValueError, match="token id 97 is outside the vocabulary of 97"):
        model.forward(kv, [1, 97], 1)
    with pytest.raises(ValueError, match="token id -1"):
        model.forward(kv, [-1], 1)
    with pytest.raises(ValueError, match="no tokens"):
        model.forward(kv, [], 0)
    with pytest.raises(ValueError, match="num_rows is 3"):
        model.forward(kv, [1, 2], 3)
    with pytest.raises(ValueError, match="can't truncate the KV of 0 tokens to 1"):
        kv.truncate(1)


def test_a_pass_that_fails_half_way_leaves_the_kv_as_it_was(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(llama)
    kv = model.new_kv()
    model.forward(kv, tiny.text(5), 0)
    layers = model._model.model.layers
    with monkeypatch.context() as patch:
        patch.setattr(layers[2], "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.forward(kv, tiny.text(3, seed=1), 3)
    rows = model.forward(kv, tiny.text(3, seed=2), 3)
    assert_same(rows, model.forward(model.new_kv(), tiny.text(5) + tiny.text(3, seed=2), 3))


def test_a_padded_head_is_cut_to_the_table(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path, tiny.CONFIGS["llama"], vocabulary=90)
    model = load(tmp_path)
    rows = model.forward(model.new_kv(), [1, 2, 3], 3)
    assert model.info.vocabulary_size == 90
    assert_same(rows, library_logits(tmp_path, [1, 2, 3])[:, :90])
    with pytest.raises(ValueError, match="outside the vocabulary of 90"):
        model.forward(model.new_kv(), [90], 1)


def test_a_table_longer_than_the_embeddings_is_cut_to_them(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path, tiny.CONFIGS["llama"], vocabulary=99)
    assert load(tmp_path).info.vocabulary_size == tiny.VOCABULARY


def test_the_tokenizer_s_own_end_counts_beside_the_config_s(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path, tiny.CONFIGS["llama"])
    for named, expected in {"w2": [2], "w7": [2, 7], "no such word": [2]}.items():
        (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": named}))
        assert list(load(tmp_path).info.eos_token_ids) == expected


def test_info(llama: Path, tmp_path: Path) -> None:
    info = load(llama).info
    assert (info.name, info.dtype, info.device) == ("tiny", "float32", "cpu")
    assert list(info.eos_token_ids) == [2]
    assert info.fingerprint == load(llama).info.fingerprint
    assert load(llama, dtype="bfloat16").info.fingerprint != info.fingerprint
    other = tiny.checkpoint(tmp_path, tiny.CONFIGS["llama"], seed=1)
    assert load(other).info.fingerprint != info.fingerprint
    assert load(other).info.vocabulary_hash == info.vocabulary_hash


def test_longrope_is_served_up_to_where_it_changes_all_positions(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "rope_theta": 10000.0,
    }
    config = Phi3Config(**tiny._GROUPED, original_max_position_embeddings=16, rope_parameters=rope)
    tiny.checkpoint(tmp_path, config)
    model = load(tmp_path)
    assert model.info.max_context == 16
    kv = model.new_kv()
    rows = torch.cat([model.forward(kv, tiny.text(16)[:9], 9), model.forward(kv, tiny.text(16)[9:], 7)])
    assert_same(rows, library_logits(tmp_path, tiny.text(16)))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (JambaConfig(**tiny._GROUPED, num_experts=2, use_mamba_kernels=False), "KV can be rewound"),
        (
            RwkvConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, context_length=64),
            "rwkv has other state",
        ),
        (Gemma3nTextConfig(num_hidden_layers=4, num_kv_shared_layers=2), "KV can be rewound"),
        (T5Config(), "KV can be rewound"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_models_that_cannot_be_rewound_are_refused(tmp_path: Path, config: Any, expected: str) -> None:
    if config.model_type in ("jamba", "rwkv"):
        tiny.checkpoint(tmp_path, config)
    else:
        tiny.checkpoint(tmp_path, tiny.CONFIGS["llama"])
        config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=expected) as caught:
        load(tmp_path)
    assert caught.value.field == "model"


@pytest.mark.parametrize(
    ("setting", "value"), [("dtype", "int8"), ("device", "tpu"), ("device", "cuda:99"), ("device", "mps")]
)
def test_wrong_settings_are_named(llama: Path, setting: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting} is '{value}', expected") as caught:
        load(llama, **{setting: value})
    assert caught.value.field == setting


def test_broken_checkpoints_are_refused(tmp_path: Path) -> None:
    tiny.checkpoint(tmp_path, tiny.CONFIGS["llama"])
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()

    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="safetensors weights") as caught:
        load(tmp_path)
    assert caught.value.field == "model"

    weights.unlink()
    with pytest.raises(ConfigError, match="safetensors weights"):
        load(tmp_path)

    weights.write_bytes(whole)
    LlamaConfig(**tiny._GROUPED | {"num_hidden_layers": 5}).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"missing: model\.layers\.4\.input_layernorm\.weight, "):
        load(tmp_path)

    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    with pytest.raises(ConfigError, match=r"readable config\.json"):
        load(tmp_path)


def test_wrong_kept_layers_are_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"to have the layers \[0, 4\] \(it has 4"):
        load(llama, keep_layers=[0, 4])
