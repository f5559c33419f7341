"""A row's logits have the same bits whatever else is in the pass, and wherever its blocks are."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from splitspec.engine.causal_lm import CausalLM
from splitspec.engine.feed import Feed
from splitspec.engine.kv import KV
from tests.engine import tiny

LENGTH = 40


@pytest.fixture(
    scope="module",
    params=[(name, dtype) for name in sorted(tiny.CONFIGS) for dtype in ("float32", "bfloat16")],
    ids="-".join,
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    name, dtype = request.param
    return tiny.load(
        tiny.checkpoint(tmp_path_factory.mktemp(name), tiny.CONFIGS[name]),
        dtype=dtype,
        block_size=tiny.BLOCK_SIZE,
    )


def alone(model: CausalLM, token_ids: list[int]) -> torch.Tensor:
    """[tokens, vocabulary]: each token fed in a pass of its own."""
    kv = model.new_kv()
    rows = [model.forward(kv, [token], 1) for token in token_ids]
    kv.free()
    return torch.cat(rows)


def test_the_self_test_agrees(model: CausalLM) -> None:
    assert model.info.deterministic


@pytest.mark.parametrize(
    ("dtype", "tiled", "asked", "promised"),
    [
        ("bfloat16", True, True, True),
        ("bfloat16", True, False, False),
        ("bfloat16", False, False, True),
        ("float32", True, False, True),
    ],
)
def test_without_slabs_nothing_is_promised_where_the_number_of_rows_counts(
    dtype: str,
    tiled: bool,
    asked: bool,
    promised: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("splitspec.engine.causal_lm.has_tile_registers", lambda: tiled)
    directory = tiny.checkpoint(tmp_path, tiny.CONFIGS["llama"])
    loaded = tiny.load(directory, dtype=dtype, deterministic=asked)
    assert loaded.info.deterministic is promised


def test_mixed_batches_equal_single_tokens_bit_by_bit(model: CausalLM) -> None:
    """Prompts in chunks, single tokens and blocks of several, all in one pass, with shuffled blocks."""
    chance = random.Random(0)
    texts = [tiny.text(LENGTH, seed) for seed in range(5)]
    expected = [alone(model, text) for text in texts]
    _shuffle_unused(model, chance)
    for _ in range(4):
        kvs = [model.new_kv() for _ in texts]
        while any(kv.length < LENGTH for kv in kvs):
            feeds, wanted = [], []
            for kv, text, rows in zip(kvs, texts, expected, strict=True):
                count = chance.choice([0, 1, 1, 2, 3, 5, 9, 17, 32])
                chunk = text[kv.length : kv.length + count]
                if chunk:
                    num_rows = chance.randint(0, len(chunk))
                    feeds.append(Feed(kv, chunk, num_rows))
                    end = kv.length + len(chunk)
                    wanted.append(rows[end - num_rows : end])
            actual = model.forward_batch(feeds)
            assert len(actual) == len(wanted)
            for a, b in zip(actual, wanted, strict=True):
                assert torch.equal(a, b)
        for kv in kvs:
            kv.free()


def _shuffle_unused(model: CausalLM, chance: random.Random) -> None:
    """Hand out blocks in no order from now on."""
    unused = model.pool._unused
    take = unused.take
    unused.take = lambda last: take(chance.choice(list(unused._ids)) - 1)  # type: ignore[method-assign]


def test_rejection_at_each_index_then_going_on(model: CausalLM) -> None:
    num_draft_tokens = 6
    prompt, right = tiny.text(9), tiny.text(LENGTH, seed=1)[: num_draft_tokens + 4]
    expected = alone(model, prompt + right)[len(prompt) :]
    for num_accepted in range(num_draft_tokens + 1):
        kv = model.new_kv()
        model.forward(kv, prompt, 0)
        wrong = [(token + 1) % tiny.VOCABULARY for token in right[num_accepted:]]
        fed = (right[:num_accepted] + wrong)[:num_draft_tokens]
        rows = model.forward(kv, fed, len(fed))
        assert torch.equal(rows[:num_accepted], expected[:num_accepted])
        kv.truncate(len(prompt) + num_accepted)
        rest = right[num_accepted:]
        assert torch.equal(model.forward(kv, rest, len(rest)), expected[num_accepted:])
        kv.free()


def test_results_do_not_depend_on_threads(model: CausalLM) -> None:
    token_ids = tiny.text(LENGTH)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = alone(model, token_ids)
        torch.set_num_threads(2)
        kv = model.new_kv()
        assert torch.equal(model.forward(kv, token_ids[:32], 32), one[:32])
    finally:
        torch.set_num_threads(before)


def test_a_pass_of_nothing(model: CausalLM) -> None:
    assert model.forward_batch([]) == []


def test_wrong_feeds_leave_every_kv_as_it_was(llama: CausalLM) -> None:
    good, bad = llama.new_kv(), llama.new_kv()
    llama.forward(bad, tiny.text(3), 0)
    used = llama.pool.num_used

    def refused(feed: Feed, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            llama.forward_batch([Feed(good, [1, 2], 1), feed])
        assert (good.length, bad.length, llama.pool.num_used) == (0, 3, used)

    refused(Feed(bad, [97], 1), "token id 97 is outside")
    refused(Feed(bad, [], 0), "no tokens")
    refused(Feed(good, [1], 1), "fed twice")
    refused(Feed(bad, [1, 2], 1, parents=(1,)), r"parents\[0\] is 1")
    refused(Feed(bad, [1, 2, 3], 1, parents=(0,)), "1 parents")
    bad.free()
    used = llama.pool.num_used
    with pytest.raises(ValueError, match="the KV is freed"):
        llama.forward(bad, [1], 1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return tiny.load(tiny.checkpoint(tmp_path_factory.mktemp("llama"), tiny.CONFIGS["llama"]))


def test_blocks_come_back(llama: CausalLM) -> None:
    before = llama.pool.num_used
    kvs = [llama.new_kv() for _ in range(3)]
    llama.forward_batch([Feed(kv, tiny.text(40 + index), 1) for index, kv in enumerate(kvs)])
    assert llama.pool.num_used == before + 9
    kvs[0].truncate(4)
    assert llama.pool.num_used == before + 7
    kvs[0].free()
    kvs[0].free()
    assert llama.pool.num_used == before + 6
    del kvs
    assert llama.pool.num_used == before


def test_a_stale_infinity_stays_in_its_block(llama: CausalLM) -> None:
    """What an overflow left in a block must not reach the next holder, which masks it by a weight of 0."""
    expected = alone(llama, tiny.text(3))
    kv: KV = llama.new_kv()
    llama.forward(kv, tiny.text(4), 0)
    for held in (*llama.pool.keys, *llama.pool.values):
        held[kv.table] = torch.inf
    kv.free()
    assert torch.equal(alone(llama, tiny.text(3)), expected)
