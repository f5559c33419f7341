"""Whether a row's logits have the same bits alone, in a block and beside other sessions, on this device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from splitspec.engine.feed import Feed
from splitspec.engine.probe import unsupported

if TYPE_CHECKING:
    from splitspec.engine.causal_lm import CausalLM

_LENGTH = 23
#: Tokens of the tested session and of one beside it (0: alone), pass by pass.
_PIECES = ((1, 0), (1, 5), (5, 1), (6, 30), (8, 0), (2, 40))


def rows_are_independent(model: CausalLM) -> bool:
    """Feed one text in one pass and in pieces with another session beside it, and compare all logits.

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
        return True
    scale = expected.abs().max()
    if not bool((actual - expected).abs().max() <= 0.05 * scale):
        raise unsupported(model.info.name, "logits that depend on how a text is cut into passes")
    return False
