"""Two ranks, two processes, say what one process says: this one leads, tests/engine/follower.py follows."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import HashStore  # type: ignore[attr-defined]
from transformers import GPT2Config, Phi3Config, PretrainedConfig, Qwen3Config

from splitspec.engine import parallel, shards
from splitspec.engine.causal_lm import CausalLM
from splitspec.engine.feed import Feed
from splitspec.engine.parallel import Ranks
from splitspec.errors import ConfigError
from tests.engine import tiny

#: Without tied embeddings and with them, biases, norms of heads, an embedding that scales, joined weights
#: (of Phi-3, whose heads can't be split); 97 words are no multiple of two.
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": tiny.CONFIGS["llama"],
    "qwen2": tiny.CONFIGS["qwen2"],
    "qwen3": Qwen3Config(**tiny._GROUPED, head_dim=8, tie_word_embeddings=True),
    "gemma3-window": tiny.CONFIGS["gemma3-window"],
    "gpt_neox": tiny.CONFIGS["gpt_neox"],
    "phi3": Phi3Config(**tiny._GROUPED),
}
SIZE = tiny.BLOCK_SIZE
PROMPT = tiny.text(4 * SIZE + 2)
NUM_BLOCKS = 10
TREE = tiny.text(8, seed=3)
PARENTS = (0, 0, 1, 2, 2, 4, 5)


@pytest.fixture(scope="module")
def follow() -> Iterator[Callable[..., Ranks]]:
    """Has the other rank load a model with the given settings and follow; returns this rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    with pytest.MonkeyPatch.context() as environment:
        for name, value in (common | {"RANK": "1", "LOCAL_RANK": "1"}).items():
            environment.setenv(name, value)
        command = [sys.executable, "-m", "tests.engine.follower"]
        other = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        environment.setenv("RANK", "0")
        environment.setenv("LOCAL_RANK", "0")
        ranks = Ranks.join(torch.device("cpu"))
        assert other.stdin is not None
        told = other.stdin

        def follow(**settings: Any) -> Ranks:
            print(json.dumps(settings), file=told, flush=True)
            return ranks

        yield follow
        told.close()
        ranks.leave()
        assert other.wait(timeout=60) == 0


@pytest.fixture(scope="module", params=CONFIGS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, follow: Callable[..., Ranks]
) -> Iterator[tuple[CausalLM, CausalLM]]:
    """The model in this process alone, and on two ranks, with as many blocks of KV."""
    directory = tiny.checkpoint(tmp_path_factory.mktemp(request.param), CONFIGS[request.param])
    draw_biases(directory / "model.safetensors")
    settings: dict[str, Any] = {"feature_layers": [1, 3]}
    pool = tiny.load(directory, **settings).pool
    alone = tiny.load(directory, kv_memory_bytes=NUM_BLOCKS * pool.block_bytes, **settings)
    keys_and_values = sum(shape.elements_per_token for shape in pool.shapes) * SIZE * 4
    saved = 0 if request.param == "phi3" else keys_and_values // 2
    settings["kv_memory_bytes"] = 2 * NUM_BLOCKS * (pool.block_bytes - saved)
    ranks = follow(directory=str(directory), **settings)
    yield alone, tiny.load(directory, ranks=ranks, **settings)
    ranks.end()


def draw_biases(weights: Path) -> None:
    """New models have none but zeros."""
    generator = torch.Generator().manual_seed(1)
    drawn = {
        name: torch.randn(tensor.shape, generator=generator) if name.endswith("bias") else tensor
        for name, tensor in load_file(weights).items()
    }
    save_file(drawn, weights, metadata={"format": "pt"})


def session(model: CausalLM) -> list[torch.Tensor]:
    """Logits of passes with all that happens to KV in between: what ranks must do alike."""
    seen: list[torch.Tensor] = []
    first, second = model.new_kv("tenant"), model.new_kv()
    seen += model.forward_batch([Feed(first, PROMPT, 3), Feed(second, PROMPT[:5], 5)])
    first.truncate(4 * SIZE - 1)  # a rejection
    seen += model.forward_batch([Feed(second, tiny.text(1, seed=1), 1), Feed(first, tiny.text(6, seed=2), 6)])
    length = first.length
    seen += model.forward_batch([Feed(first, TREE, len(TREE), PARENTS), Feed(second, [4], 1)])
    first.keep_path(length, [1, 4, 5])
    seen.append(model.forward(first, [7, 8], 2))
    first.finalise(4 * SIZE)
    other = model.new_kv("tenant", [*PROMPT[: 4 * SIZE - 1], *tiny.text(6, seed=2)])
    assert other.length == 4 * SIZE
    other.truncate(4 * SIZE - 2)  # in the middle of a block that others hold, which is copied
    seen.append(model.forward(other, [9, 10, 11], 3))
    seen.append(model.features(other, 0, other.length))
    seen.append(model.features(first, 0, first.length))
    second.free()
    first.rest()
    filling = model.new_kv()
    seen.append(model.forward(filling, tiny.text(4 * SIZE + 4, seed=4), 4))
    assert (first.length, other.length) == (0, 4 * SIZE + 1)  # `first` had to give way
    seen.append(model.forward(other, [12], 1))
    for kv in (first, other, filling):
        kv.free()
    return seen


def test_a_session_on_two_ranks_is_that_of_one_process(pair: tuple[CausalLM, CausalLM]) -> None:
    alone, together = pair
    assert together.pool.num_blocks == alone.pool.num_blocks == NUM_BLOCKS
    for actual, expected in zip(session(together), session(alone), strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


def test_a_rank_holds_its_share(pair: tuple[CausalLM, CausalLM], request: pytest.FixtureRequest) -> None:
    alone, together = pair
    heads = [[shape.num_kv_heads for shape in model.pool.shapes] for model in pair]
    whole_heads = request.node.callspec.params["pair"] == "phi3"
    assert heads[1] == (heads[0] if whole_heads else [count // 2 for count in heads[0]])
    assert together.info.fingerprint == alone.info.fingerprint
    assert together.info.deterministic


def test_a_number_of_ranks_that_does_not_divide_the_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match="come to 3 ranks, expected a divisor of the 2 KV heads of 'tiny'"):
        shards.loading_options(CONFIGS["llama"], "tiny", 3)
    assert shards.loading_options(CONFIGS["phi3"], "tiny", 3)


def test_a_model_that_can_not_be_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="the library has no plan for gpt2") as caught:
        shards.loading_options(GPT2Config(), "tiny", 2)
    assert caught.value.field == "model"


def test_ranks_that_start_again_do_not_meet_in_the_place_of_those_before() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=10))
    with ThreadPoolExecutor() as threads:
        first = threads.submit(parallel._meeting_place, store, 1, 2)
        parallel._meeting_place(store, 0, 2).set("mine", "first")
        assert first.result().get("mine") == b"first"
        # Now the other rank comes first, and finds all that the first start has left.
        answer_there = f"{store.get('place').decode()}/1"
        left = store.get(answer_there)
        second = threads.submit(parallel._meeting_place, store, 1, 2)
        while store.get(answer_there) == left:
            time.sleep(0.01)
        parallel._meeting_place(store, 0, 2).set("mine", "second")
        assert second.result().get("mine") == b"second"
