"""All sessions of a pass in one kernel: the logits of the other way, on every kind of attention.

On a CPU flex_attention has no kernel unless it is compiled: it goes by the mask, over all blocks of the pool.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as module

from splitspec.engine import flex
from splitspec.engine.attention import RaggedPass
from splitspec.engine.causal_lm import CausalLM
from splitspec.engine.feed import Feed
from splitspec.engine.kv import KV
from splitspec.engine.plan import Span
from splitspec.errors import ConfigError
from tests.engine import tiny
from tests.engine.test_trees import PARENTS, TREE

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

LENGTH = 40


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else even this way is traced anew for every shape."""
    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)


@pytest.fixture(scope="module", params=sorted(tiny.CONFIGS))
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[CausalLM]:
    return both(tmp_path_factory.mktemp(request.param), request.param)


def both(directory: Path, kind: str) -> list[CausalLM]:
    """With flex_attention, and without."""
    tiny.checkpoint(directory, tiny.CONFIGS[kind])
    return [
        tiny.load(directory, attention=attention, kv_memory_bytes=2**20) for attention in ("flex", "sdpa")
    ]


def compare(models: list[CausalLM], kvs: list[list[KV]], chunks: list[list[int]], tree: bool) -> None:
    """Feed both models the same: a chunk for each session that has one, the last one as a tree."""
    answers = []
    for model, held in zip(models, kvs, strict=True):
        feeds = [Feed(kv, chunk, len(chunk)) for kv, chunk in zip(held, chunks, strict=True) if chunk]
        if tree:
            feeds.append(Feed(model.new_kv(), TREE, len(TREE), parents=PARENTS))
        answers.append(model.forward_batch(feeds))
    for actual, expected in zip(*answers, strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


def test_mixed_batches(models: list[CausalLM]) -> None:
    """Prompts in pieces, single tokens, blocks of several and trees; sessions that share their beginning."""
    chance = random.Random(0)
    texts = [tiny.text(LENGTH, seed) for seed in range(4)]
    kvs = [[model.new_kv() for _ in texts] for model in models]
    while any(kv.length < LENGTH for kv in kvs[0]):
        counts = [chance.choice([0, 1, 2, 5, 17, 32]) for _ in texts]
        chunks = [text[kv.length : kv.length + n] for text, kv, n in zip(texts, kvs[0], counts, strict=True)]
        if any(chunks):
            compare(models, kvs, chunks, tree=chance.random() < 0.5)
    forks = [[held[0].fork(), *held] for held in kvs]
    compare(models, forks, [[5, 6, 7], [8], [], [], [9, 9]], tree=True)


def test_a_session_reads_its_own_blocks_alone(models: list[CausalLM]) -> None:
    """What other blocks hold is as good as not there."""
    model, _ = models
    kv, other = model.new_kv(), model.new_kv()
    model.forward_batch([Feed(kv, tiny.text(20), 0), Feed(other, tiny.text(30, seed=1), 0)])
    expected = model.forward(kv.fork(), [3, 4], 2)
    for held in (*model.pool.keys, *model.pool.values):
        held[other.table] = 7.0
    torch.testing.assert_close(model.forward(kv, [3, 4], 2), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU takes g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("kind", ["llama", "gemma2-window"])
def test_compiled(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads the blocks that are listed. Built for one shape: torch 2.13 can't for all, on CPUs."""
    models = both(tmp_path, kind)
    kvs = [[model.new_kv() for _ in range(2)] for model in models]
    compare(models, kvs, [tiny.text(20), tiny.text(70, seed=1)], tree=False)
    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
    compiled = torch.compile(module.flex_attention, dynamic=False)
    monkeypatch.setattr(flex, "_kernel", lambda device: compiled)
    compare(models, kvs, [[5], [6, 7, 8]], tree=True)


@pytest.mark.parametrize("window", [None, 5, 30])
def test_the_lists_of_blocks_are_those_that_the_mask_sees(models: list[CausalLM], window: int | None) -> None:
    """A kernel reads no others, in this order."""
    pool, chance = models[0].pool, random.Random(1)
    spans, start = [], 0
    for base, count in ((0, 33), (70, 1), (16, 16), (37, 5)):
        table = chance.sample(range(pool.num_blocks), -(-(base + count) // pool.block_size))
        sees = np.tri(count, dtype=bool)
        spans.append(Span(start, base, np.arange(count), sees, table))
        start += count
    mask = RaggedPass(pool, spans, flex=True).plan(window).mask
    rows, places = (torch.arange(size) for size in mask.seq_lengths)
    seen = mask.mask_mod(torch.tensor(0), torch.tensor(0), rows[:, None], places[None])
    blocks = seen.view(len(rows) // 16, 16, pool.num_blocks, pool.block_size).any(3).any(1)
    assert len(blocks) == 6
    assert mask.kv_indices is not None
    assert mask.kv_num_blocks is not None
    owners = [0, 0, 0, 1, 2, 3]
    for owner, found, count, listed in zip(
        owners, blocks, mask.kv_num_blocks[0, 0].tolist(), mask.kv_indices[0, 0].tolist(), strict=True
    ):
        used = listed[:count]
        assert set(found.nonzero().flatten().tolist()) <= set(used)
        assert used == list(spans[owner].table)[-count:]


def test_an_unknown_way_is_refused(tmp_path: Path) -> None:
    directory = tiny.checkpoint(tmp_path, tiny.CONFIGS["llama"])
    with pytest.raises(ConfigError, match="attention is 'fast', expected one of auto, flex, sdpa"):
        tiny.load(directory, attention="fast")
