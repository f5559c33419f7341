"""Features of whatever tokens a KV holds are the hidden states that the library gives for the same text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from splitspec.engine.causal_lm import CausalLM
from splitspec.engine.features import parse_feature_layers
from splitspec.engine.feed import Feed
from splitspec.engine.kv import KV
from splitspec.errors import ConfigError
from tests.engine import tiny

SIZE = tiny.BLOCK_SIZE
#: Not in order, and not the last: the library tells that one after the final norm.
LAYERS = (2, 0)


@pytest.fixture(scope="module", params=sorted(tiny.CONFIGS))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp(request.param), tiny.CONFIGS[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("llama"), tiny.CONFIGS["llama"])


@pytest.fixture(scope="module")
def library(directory: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return loaded


@pytest.fixture(scope="module")
def model(directory: Path) -> CausalLM:
    return tiny.load(directory, feature_layers=LAYERS)


def small(directory: Path, num_blocks: int) -> CausalLM:
    """A model whose pool has so many blocks."""
    one = tiny.load(directory, feature_layers=LAYERS).pool.block_bytes
    return tiny.load(directory, feature_layers=LAYERS, kv_memory_bytes=num_blocks * one)


@torch.inference_mode()
def clean(library: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """[tokens, layers, hidden size]: of the whole text in one pass."""
    states = library(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return torch.stack([states[layer + 1][0] for layer in LAYERS], dim=1)


def check(model: CausalLM, library: PreTrainedModel, kv: KV) -> None:
    features = model.features(kv, 0, kv.length)
    torch.testing.assert_close(features, clean(library, kv.token_ids), atol=2e-4, rtol=1e-4)


def test_of_prompts_in_pieces_beside_others(model: CausalLM, library: PreTrainedModel) -> None:
    first, second = model.new_kv(), model.new_kv()
    texts = tiny.text(3 * SIZE + 1), tiny.text(2 * SIZE, seed=1)
    for cut in (slice(0, 7), slice(7, None)):
        model.forward_batch([Feed(kv, text[cut], 1) for kv, text in zip((first, second), texts, strict=True)])
    model.forward(first, [5], 1)
    check(model, library, first)
    check(model, library, second)
    some = model.features(first, 3, SIZE + 2)
    assert torch.equal(some, model.features(first, 0, first.length)[3 : SIZE + 2])
    assert model.features(first, 4, 4).shape == (0, len(LAYERS), 32)


def test_of_a_shared_prefix_and_a_copied_block(model: CausalLM, library: PreTrainedModel) -> None:
    prompt = tiny.text(2 * SIZE, seed=11)  # so that no block has held it before
    first = model.new_kv("a")
    model.forward(first, prompt, 0)
    first.finalise(2 * SIZE)
    second = model.new_kv("a", prompt)
    assert second.length == 2 * SIZE
    model.forward(second, [7, 8], 1)
    check(model, library, second)
    first.truncate(SIZE + 2)  # the shared block is copied, and its other half written
    model.forward(first, [9, 10], 1)
    check(model, library, first)
    check(model, library, second)


def test_after_rejection(model: CausalLM, library: PreTrainedModel) -> None:
    kv = model.new_kv()
    model.forward(kv, tiny.text(6), 0)
    for seed in range(4):
        model.forward(kv, tiny.text(5, seed), 5)
        kv.truncate(kv.length - 4 + seed)
    check(model, library, kv)


@pytest.mark.parametrize("path", [[], [1], [0, 2, 5], [1, 4]], ids=str)
def test_of_a_trees_path(model: CausalLM, library: PreTrainedModel, path: list[int]) -> None:
    prompt, tree = tiny.text(6), tiny.text(7, seed=1)
    kv = model.new_kv()
    model.forward(kv, prompt, 0)
    model.forward_batch([Feed(kv, tree, 7, parents=(0, 0, 1, 1, 2, 3))])
    assert torch.equal(model.features(kv, 6, 7), model.features(kv, 0, 7)[6:])  # the root
    with pytest.raises(ValueError, match="features of tokens 0 to 8, expected 0 to 7"):
        model.features(kv, 0, 8)
    kv.keep_path(6, path)
    model.forward(kv, [3], 1)
    assert kv.length == 8 + len(path)
    check(model, library, kv)


def test_after_eviction_and_return(directory: Path, library: PreTrainedModel) -> None:
    model = small(directory, 4)
    text = tiny.text(2 * SIZE)
    kv = model.new_kv("a")
    model.forward(kv, text, 0)
    kv.rest()
    other = model.new_kv("b")
    model.forward(other, tiny.text(3 * SIZE, seed=1), 0)
    assert kv.length == 0
    with pytest.raises(ValueError, match="features of tokens 0 to 1, expected 0 to 0"):
        model.features(kv, 0, 1)
    check(model, library, other)
    other.free()
    kv.wake()
    model.forward(kv, text, 0)
    check(model, library, kv)


def test_memory_counts_them(llama: Path) -> None:
    with_features, without = tiny.load(llama, feature_layers=LAYERS), tiny.load(llama)
    bytes_per_token = len(LAYERS) * 32 * 4
    assert with_features.pool.block_bytes == without.pool.block_bytes + SIZE * bytes_per_token
    assert without.pool.features.numel() == 0
    assert list(with_features.info.feature_layers) == list(LAYERS)
    assert list(without.info.feature_layers) == []
    kv = without.new_kv()
    without.forward(kv, [1, 2], 0)
    assert without.features(kv, 0, 2).shape == (2, 0, 32)


def test_logits_are_the_same_with_and_without(llama: Path) -> None:
    rows = [
        (loaded := tiny.load(llama, feature_layers=layers)).forward(loaded.new_kv(), tiny.text(9), 9)
        for layers in ((), LAYERS)
    ]
    assert torch.equal(*rows)


@pytest.mark.parametrize("layers", [(4,), (-1,), (1, 2, 1)], ids=str)
def test_layers_that_the_model_lacks(llama: Path, layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny.load(llama, feature_layers=layers)
    shown = "+".join(map(str, layers))
    expected = f"feature_layers is '{shown}', expected different layers of this model's, 0 to 3"
    assert (caught.value.message, caught.value.field) == (expected, "feature_layers")


@pytest.mark.parametrize(
    ("text", "count", "layers"),
    [
        ("auto", 30, (2, 15, 27)),
        ("auto", 32, (2, 16, 29)),
        ("auto", 4, (1, 2)),
        ("auto", 2, (1,)),
        ("auto", 1, (0,)),
        ("none", 30, ()),
        ("29", 30, (29,)),
        ("15+2", 30, (15, 2)),
    ],
)
def test_the_setting(text: str, count: int, layers: tuple[int, ...]) -> None:
    assert parse_feature_layers(text, count) == layers


@pytest.mark.parametrize("text", ["", "all", "2,15", "2+", "-1", "1.5"])
def test_a_wrong_setting(text: str) -> None:
    with pytest.raises(ConfigError, match=r"feature_layers is .*, expected auto, none, or layers such as"):
        parse_feature_layers(text, 30)
