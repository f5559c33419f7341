"""Blocks of final tokens are shared by content within a tenant, never written, evicted in order of use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from splitspec.engine.causal_lm import CausalLM
from splitspec.engine.feed import Feed
from splitspec.errors import ConfigError, OverloadedError
from tests.engine import tiny

SIZE = tiny.BLOCK_SIZE


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("llama"), tiny.CONFIGS["llama"])


def small(directory: Path, num_blocks: int) -> CausalLM:
    """A model whose pool has so many blocks."""
    one = tiny.load(directory).pool.block_bytes
    return tiny.load(directory, kv_memory_bytes=num_blocks * one)


@pytest.fixture
def model(directory: Path) -> CausalLM:
    return small(directory, 40)


def clean_rows(model: CausalLM, token_ids: list[int]) -> torch.Tensor:
    kv = model.new_kv("nobody")
    rows = model.forward(kv, token_ids, len(token_ids))
    kv.free()
    return rows


def test_a_prefix_is_shared_and_texts_diverge(model: CausalLM) -> None:
    prompt = tiny.text(2 * SIZE + 3)
    ends = [tiny.text(6, seed) for seed in (1, 2, 3)]
    expected = [clean_rows(model, prompt + end) for end in ends]
    first = model.new_kv("a", prompt)
    assert first.length == 0
    model.forward(first, prompt, 0)
    first.finalise(len(prompt))
    others = [model.new_kv("a", prompt + end) for end in ends[1:]]
    assert [kv.length for kv in others] == [2 * SIZE, 2 * SIZE]
    assert [kv.table for kv in others] == [first.table[:2]] * 2
    assert (model.pool.num_used, model.pool.num_shared, model.pool.num_cached) == (3, 2, 0)
    feeds = [Feed(kv, (prompt + end)[kv.length :], 6) for kv, end in zip([first, *others], ends, strict=True)]
    for actual, rows in zip(model.forward_batch(feeds), expected, strict=True):
        assert torch.equal(actual, rows[-6:])


def test_only_final_tokens_of_the_tenant_are_found(model: CausalLM) -> None:
    prompt = tiny.text(4 * SIZE)
    kv = model.new_kv("a")
    model.forward(kv, prompt, 0)
    assert model.new_kv("a", prompt).length == 0
    kv.finalise(3 * SIZE - 1)
    assert model.new_kv("a", prompt).length == 2 * SIZE
    assert model.new_kv("a", prompt[: 2 * SIZE - 1]).length == SIZE
    assert model.new_kv("a", [*prompt[:SIZE], 0, *prompt[SIZE:]]).length == SIZE
    assert model.new_kv("b", prompt).length == 0
    # The same block behind another text isn't the same.
    assert model.new_kv("a", prompt[SIZE:]).length == 0
    with pytest.raises(ValueError, match="can't finalise 65 of 64"):
        kv.finalise(65)


def test_blocks_outlive_their_session(model: CausalLM) -> None:
    prompt = tiny.text(2 * SIZE + 1)
    expected = clean_rows(model, prompt)
    kv = model.new_kv("a")
    model.forward(kv, prompt, 0)
    kv.finalise(len(prompt))
    kv.free()
    assert (model.pool.num_used, model.pool.num_cached, model.pool.num_free) == (0, 2, 38)
    again = model.new_kv("a", prompt)
    assert (again.length, model.pool.num_used, model.pool.num_cached) == (2 * SIZE, 2, 0)
    assert torch.equal(model.forward(again, prompt[-1:], 1), expected[-1:])


@pytest.mark.parametrize("holders", [1, 2])
def test_writing_into_a_shared_block_copies_it(model: CausalLM, holders: int) -> None:
    prompt, other = tiny.text(2 * SIZE), tiny.text(5, seed=1)
    cut = SIZE + 1
    expected = clean_rows(model, prompt[:cut] + other)
    kv = model.new_kv("a")
    model.forward(kv, prompt, 0)
    kv.finalise(len(prompt))
    keeper = model.new_kv("a", prompt) if holders == 2 else None
    kv.truncate(cut)
    assert torch.equal(model.forward(kv, other, 5), expected[cut:])
    found = model.new_kv("a", prompt)
    assert found.length == 2 * SIZE
    assert kv.table[0] == found.table[0]
    assert kv.table[1] != found.table[1]
    after = model.forward(found, [7], 1)
    assert torch.equal(after, clean_rows(model, [*prompt, 7])[-1:])
    for held in (kv, keeper, found):
        if held is not None:
            held.free()
    assert model.pool.num_used == 0
    assert model.pool.num_free + model.pool.num_cached == model.pool.num_blocks


@pytest.mark.parametrize("cut", [0, 1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE - 1])
def test_a_rewound_text_is_hashed_anew(model: CausalLM, cut: int) -> None:
    """Also one that is cut in the midst of a block, which is another block then."""
    prompt, other = tiny.text(2 * SIZE), tiny.text(2 * SIZE, seed=1)
    changed = prompt[:cut] + other[cut:]
    expected = clean_rows(model, [*changed, 7])[-1:], clean_rows(model, [*prompt, 7])[-1:]
    kv = model.new_kv("a")
    model.forward(kv, prompt, 0)
    kv.finalise(2 * SIZE)
    kv.truncate(cut)
    model.forward(kv, other[cut:], 0)
    kv.finalise(2 * SIZE)
    as_changed, as_before = model.new_kv("a", changed), model.new_kv("a", prompt)
    assert as_changed.table == kv.table
    assert as_before.length == 2 * SIZE
    assert as_before.table[cut // SIZE :] != kv.table[cut // SIZE :]
    for found, rows in zip((as_changed, as_before), expected, strict=True):
        assert torch.equal(model.forward(found, [7], 1), rows)


@pytest.mark.parametrize("length", [SIZE - 1, SIZE, SIZE + 3])
def test_forks_write_into_blocks_of_their_own(model: CausalLM, length: int) -> None:
    """Whichever of them goes on first, also with a tree of which a path is kept."""
    prompt, ends = tiny.text(length), [tiny.text(5, seed) for seed in (1, 2, 3)]
    expected = [clean_rows(model, prompt + end)[-5:] for end in ends]
    first = model.new_kv()
    model.forward(first, prompt, 0)
    second, third = first.fork(), first.fork()
    rows = [model.forward(kv, end[:2], 2) for kv, end in zip((second, first), ends, strict=False)]
    tree = model.forward_batch([Feed(third, [ends[2][0], 9, ends[2][1]], 3, parents=[0, 0])])[0]
    third.keep_path(length, [1])
    rows.append(tree[[0, 2]])
    for kv, end, before, clean in zip((second, first, third), ends, rows, expected, strict=True):
        after = model.forward(kv, end[2:], 3)
        torch.testing.assert_close(torch.cat([before, after]), clean, atol=2e-4, rtol=1e-4)
    whole = length // SIZE
    assert first.table[:whole] == second.table[:whole] == third.table[:whole]
    assert len({kv.table[-1] for kv in (first, second, third)}) == 3


def test_what_a_fork_finishes_is_its_tenant_s(model: CausalLM) -> None:
    text = tiny.text(3 * SIZE)
    first = model.new_kv("a")
    model.forward(first, text[: SIZE + 1], 0)
    first.finalise(SIZE + 1)
    second = first.fork()
    model.forward(second, text[SIZE + 1 :], 0)
    second.finalise(3 * SIZE)
    assert [model.new_kv(tenant, text).length for tenant in ("a", "", "b")] == [3 * SIZE, 0, 0]


def test_the_least_recently_used_is_evicted_last_blocks_first(directory: Path) -> None:
    model = small(directory, 6)
    texts = [tiny.text(2 * SIZE, seed) for seed in range(3)]
    for text in texts:
        kv = model.new_kv("a")
        model.forward(kv, text, 0)
        kv.finalise(len(text))
        kv.free()
    model.new_kv("a", texts[0]).free()  # used again: now the second is the oldest
    assert model.pool.num_cached == 6
    kv = model.new_kv("a")
    model.forward(kv, tiny.text(1), 0)
    assert [model.new_kv("a", text).length for text in texts] == [2 * SIZE, SIZE, 2 * SIZE]


def test_a_full_pool_leaves_everything_as_it_was(directory: Path) -> None:
    model = small(directory, 6)
    prompt = tiny.text(2 * SIZE)
    a, b = model.new_kv("a"), model.new_kv("a")
    model.forward(a, prompt, 0)
    a.finalise(len(prompt))
    a.truncate(SIZE + 1)
    model.forward(b, tiny.text(SIZE, seed=1), 0)
    before = [(list(kv.table), kv.length) for kv in (a, b)]
    counts = (model.pool.num_used, model.pool.num_cached, model.pool.num_free)
    with pytest.raises(OverloadedError, match="blocks of KV are needed") as caught:
        model.forward_batch([Feed(a, [5], 1), Feed(b, tiny.text(3 * SIZE + 1), 1)])
    assert caught.value.retry_after_s > 0
    assert [(list(kv.table), kv.length) for kv in (a, b)] == before
    assert (model.pool.num_used, model.pool.num_cached, model.pool.num_free) == counts
    rows = model.forward_batch([Feed(a, [5], 1), Feed(b, tiny.text(2 * SIZE), 1)])
    assert torch.equal(rows[0], clean_rows(small(directory, 6), [*prompt[: SIZE + 1], 5])[-1:])
    b.free()
    model.forward(a, tiny.text(2 * SIZE), 0)


def test_a_failed_pass_gives_its_blocks_back(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = model.new_kv()
    model.forward(kv, tiny.text(5), 0)
    table, used = list(kv.table), model.pool.num_used
    with monkeypatch.context() as patch:
        patch.setattr(model._model.model.layers[2], "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.forward(kv, tiny.text(9), 9)
    assert (kv.table, kv.length, model.pool.num_used) == (table, 5, used)


def test_too_little_memory_for_one_block(directory: Path) -> None:
    with pytest.raises(ConfigError, match="kv_memory_bytes is 100, expected at least") as caught:
        tiny.load(directory, kv_memory_bytes=100)
    assert caught.value.field == "kv_memory_bytes"


def test_a_session_that_rests_gives_way_and_is_fed_again(directory: Path) -> None:
    """The one that rested longest first; one that woke, or never rested, keeps its blocks."""
    model = small(directory, 6)
    texts = [tiny.text(SIZE + 1, seed) for seed in range(3)]
    kvs = [model.new_kv(str(seed)) for seed in range(3)]
    for kv, text in zip(kvs, texts, strict=True):
        model.forward(kv, text, 0)
    kvs[0].rest()
    kvs[1].rest()
    kvs[0].wake()
    kvs[0].rest()
    assert [kv.length for kv in kvs] == [SIZE + 1] * 3
    other = model.new_kv("other")
    model.forward(other, tiny.text(SIZE), 0)
    assert [kv.length for kv in kvs] == [SIZE + 1, 0, SIZE + 1]
    kvs[0].wake()
    with pytest.raises(OverloadedError):
        model.forward(model.new_kv("more"), tiny.text(2 * SIZE), 0)
    other.free()
    expected = clean_rows(small(directory, 6), texts[1])
    assert torch.equal(model.forward(kvs[1], texts[1], SIZE + 1), expected)


def test_blocks_are_adopted_up_to_a_multiple(model: CausalLM) -> None:
    text = tiny.text(3 * SIZE + 1)
    kv = model.new_kv("a")
    model.forward(kv, text, 0)
    kv.finalise(len(text))
    other = model.new_kv("a")
    other.adopt(text, 2 * SIZE)
    assert other.length == 2 * SIZE
