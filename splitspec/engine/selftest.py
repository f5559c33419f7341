"""Whether a row's logits have the same bits alone, in a block and beside other sessions, on this device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from splitspec.engine import attention
from splitspec.engine.blocks import BlockPool, LayerShape
from splitspec.engine.feed import Feed
from splitspec.engine.probe import unsupported

if TYPE_CHECKING:
    from splitspec.engine.causal_lm import CausalLM

_LENGTH = 23
#: Tokens of the tested session and of one beside it (0: alone), pass by pass.
_PIECES = ((1, 0), (1, 5), (5, 1), (6, 30), (8, 0), (2, 40))
#: Up to so many keys it is tried whether masked ones behind those that a row sees change its sums, with so
#: many rows of so many random heads.
_MOST_KEYS = 512
_ROWS = 32
_SAMPLES = 8


def rows_are_independent(model: CausalLM) -> bool:
    """Feed one text in one pass and in pieces with another session beside it, and compare all logits.

    On a CPU also whether attention to a longer text depends on keys that a row doesn't see.

    Raises ConfigError when they differ by more than rounding: the model doesn't go by the positions and
    the keys that it is given.
    """
    room = min(model.info.max_context, model.pool.num_blocks // 3 * model.pool.block_size)
    other_text = [index * 7919 % model.info.vocabulary_size for index in range(room)]
    text = other_text[:_LENGTH]
    if not text:
        return False
    whole, pieces, beside = (model.new_kv() for _ in range(3))
    (expected,) = model.forward_batch([Feed(whole, text, len(text))])
    rows = []
    for count, others in _PIECES:
        chunk = text[pieces.length : pieces.length + count]
        if not chunk:
            break
        feeds = [Feed(pieces, chunk, len(chunk))]
        other = other_text[beside.length : beside.length + others]
        if other:
            feeds.insert(0, Feed(beside, other, 1))
        rows.append(model.forward_batch(feeds)[-1])
    for kv in (whole, pieces, beside):
        kv.free()
    actual = torch.cat(rows)
    if torch.equal(actual, expected):
        return model.pool.device.type != "cpu" or all(
            _sums_have_one_order(model.pool, shape) for shape in set(model.pool.shapes)
        )
    scale = expected.abs().max()
    if not bool((actual - expected).abs().max() <= 0.05 * scale):
        raise unsupported(model.info.name, "logits that depend on how a text is cut into passes")
    return False


def _sums_have_one_order(pool: BlockPool, shape: LayerShape) -> bool:
    """Whether rows get the same bits from attention to n keys, and to more of which they see the first n.

    In half precision few sums show their order, so that many are looked at: it takes about 0.1 s.
    """
    chance = torch.Generator().manual_seed(0)

    def some(count: int, size: int) -> torch.Tensor:
        return torch.randn((_SAMPLES, count, size), generator=chance).to(pool.dtype)

    query = some(_ROWS, shape.key_size)
    keys, values = some(_MOST_KEYS, shape.key_size), some(_MOST_KEYS, shape.value_size)

    def attended(num_keys: int, num_seen: int) -> torch.Tensor:
        bias = torch.zeros((_ROWS, num_keys), dtype=pool.dtype)
        bias[:, num_seen:] = -torch.inf
        scale = shape.key_size**-0.5
        return attention.product(query.clone(), keys[:, :num_keys], values[:, :num_keys], bias, scale, None)

    return all(
        torch.equal(attended(seen, seen), attended(_MOST_KEYS, seen)) for seen in range(64, _MOST_KEYS, 64)
    )
