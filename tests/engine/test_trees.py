"""A tree gives each node the logits that a chain of its ancestors gives, and a path of it can be kept."""

from __future__ import annotations

import pytest
import torch

from splitspec.engine.causal_lm import CausalLM
from splitspec.engine.feed import Feed
from splitspec.engine.kv import KV
from tests.engine import tiny

PROMPT = tiny.text(10)
#: Root, then draft tokens with the index plus one of their parents; 0 is the root. One path is longer than
#: the window, and its nodes lie further behind the root than their depth.
TREE = tiny.text(12, seed=1)
PARENTS = (0, 0, 1, 1, 2, 3, 6, 4, 7, 9, 10)
PATHS: tuple[list[int], ...] = (
    [],
    [0],
    [1],
    [0, 2],
    [0, 3],
    [1, 4],
    [0, 2, 5],
    [0, 2, 5, 6],
    [0, 3, 7],
    [0, 2, 5, 6, 8, 9, 10],
)


@pytest.fixture(scope="module", params=sorted(tiny.CONFIGS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    name = request.param
    return tiny.load(tiny.checkpoint(tmp_path_factory.mktemp(name), tiny.CONFIGS[name]))


def fed(model: CausalLM) -> tuple[KV, torch.Tensor]:
    kv = model.new_kv()
    model.forward(kv, PROMPT, 0)
    beside = model.new_kv()
    rows, _ = model.forward_batch(
        [Feed(kv, TREE, len(TREE), parents=PARENTS), Feed(beside, tiny.text(3, seed=2), 1)]
    )
    return kv, rows


def chain(model: CausalLM, path: list[int], more: list[int]) -> torch.Tensor:
    """Logits of the last node of a path, or of what follows it."""
    kv = model.new_kv()
    token_ids = [*PROMPT, TREE[0], *(TREE[node + 1] for node in path), *more]
    return model.forward(kv, token_ids, max(1, len(more)))


def test_each_node_equals_its_path_as_a_chain(model: CausalLM) -> None:
    _, rows = fed(model)
    for path in PATHS:
        node = path[-1] + 1 if path else 0
        # Rows of a path in a tree stand further apart, so their sums over a block add in another order.
        torch.testing.assert_close(rows[node : node + 1], chain(model, path, []), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_going_on_from_a_kept_path(model: CausalLM, path: list[int]) -> None:
    kv, _ = fed(model)
    kv.keep_path(len(PROMPT), path)
    assert kv.length == len(PROMPT) + 1 + len(path)
    assert kv.token_ids == [*PROMPT, TREE[0], *(TREE[node + 1] for node in path)]
    assert len(kv.table) == -(-kv.length // tiny.BLOCK_SIZE)
    more = tiny.text(6, seed=3)
    rows = model.forward(kv, more, len(more))
    torch.testing.assert_close(rows, chain(model, path, more), atol=2e-4, rtol=1e-4)


def test_a_tree_that_is_a_chain_is_one_bit_by_bit(model: CausalLM) -> None:
    as_chain, as_tree = model.new_kv(), model.new_kv()
    rows = model.forward(as_chain, TREE, len(TREE))
    feed = Feed(as_tree, TREE, len(TREE), parents=range(len(TREE) - 1))
    assert torch.equal(model.forward_batch([feed])[0], rows)
    as_tree.keep_path(0, range(len(TREE) - 1))
    assert torch.equal(model.forward(as_tree, [5], 1), model.forward(as_chain, [5], 1))


def test_a_tree_must_be_cut_before_more_is_fed(model: CausalLM) -> None:
    kv, _ = fed(model)
    with pytest.raises(ValueError, match="the KV ends in a tree"):
        model.forward(kv, [1], 1)
    with pytest.raises(ValueError, match="in the middle of a tree"):
        kv.truncate(len(PROMPT) + 2)
    with pytest.raises(ValueError, match="no tree was fed on 3"):
        kv.keep_path(3, [])
    with pytest.raises(ValueError, match="expected a path of 11 nodes"):
        kv.keep_path(len(PROMPT), [11])
    with pytest.raises(ValueError, match="expected a path of 11 nodes"):
        kv.keep_path(len(PROMPT), [2, 0])
    with pytest.raises(ValueError, match="can't finalise"):
        kv.finalise(len(PROMPT) + 2)
    kv.truncate(len(PROMPT) + 1)
    assert torch.equal(
        model.forward(kv, [1], 1), model.forward_batch([_clean(model, [*PROMPT, TREE[0], 1])])[0]
    )


def _clean(model: CausalLM, token_ids: list[int]) -> Feed:
    return Feed(model.new_kv(), token_ids, 1)
