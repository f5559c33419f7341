"""Attention of all sessions of a pass in one kernel, for GPUs: the library's flex_attention over the pool.

Keys and values are all blocks of the pool, in place. A session's rows fill query blocks of their own, whose
lists of KV blocks are its table, in its order: so a row's sums have one order whatever else is in the pass.
Which token a place in the pool holds for a session the mask looks up. On a CPU the same code runs without a
kernel, over all blocks of the pool, for tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from splitspec.engine.blocks import BlockPool
from splitspec.engine.plan import Span, to_device

#: Rows of a query block, the fewest that a GPU's matrix units take. Of long feeds each has several.
_ROWS = 16


class FlexPlan:
    """Which rows of a pass see which tokens of the pool, for all layers of a kind.

    window: how many positions back a row sees, its own included; None for all.
    """

    def __init__(self, spans: Sequence[Span], pool: BlockPool, window: int | None) -> None:
        def tensor(array: npt.NDArray[Any]) -> torch.Tensor:
            return to_device(array, pool.device)

        counts = np.array([span.num_rows for span in spans])
        query_blocks = -(-counts // _ROWS)
        session = np.repeat(np.arange(len(spans)), query_blocks)  # of each query block
        padded = query_blocks * _ROWS
        begins = np.cumsum(padded) - padded
        # A session's last row again where it leaves room in a query block.
        own = [np.minimum(np.arange(size), count - 1) for size, count in zip(padded, counts, strict=True)]
        #: [padded rows] of the pass, and [rows] where each is among them.
        self.rows = tensor(np.concatenate([span.start + rows for span, rows in zip(spans, own, strict=True)]))
        self.places = tensor(
            np.concatenate([begin + np.arange(count) for begin, count in zip(begins, counts, strict=True)])
        )

        firsts = np.array([span.first_block(pool.block_size, window) for span in spans])
        tables = [
            np.asarray(span.table[first : span.num_blocks(pool.block_size)])
            for span, first in zip(spans, firsts, strict=True)
        ]
        lengths = np.array([len(table) for table in tables])
        # Shorter tables repeat their last block, which isn't counted.
        listed = np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)
        table = np.stack([table[places] for table, places in zip(tables, listed, strict=True)])
        blocks = tensor(table)
        logical = torch.full((len(spans), pool.num_blocks), -1, dtype=torch.int64, device=pool.device)
        logical.scatter_(1, blocks, tensor(firsts[:, None] + listed))

        # As wide as the pool, of which a session's are the first ones: the kernel asks for that.
        lists = torch.zeros(len(session), pool.num_blocks, dtype=torch.int32, device=pool.device)
        lists[:, : table.shape[1]] = blocks[tensor(session)]

        sees = np.zeros((padded.sum(), counts.max()), dtype=bool)
        depths = np.zeros(padded.sum(), dtype=np.int64)
        for span, begin, rows in zip(spans, begins, own, strict=True):
            sees[begin : begin + len(rows), : span.num_rows] = span.sees[rows]
            depths[begin : begin + len(rows)] = span.depths[rows]
        self.mask = BlockMask.from_kv_blocks(
            kv_num_blocks=tensor(lengths[session].astype(np.int32))[None, None],
            kv_indices=lists[None, None],
            BLOCK_SIZE=(_ROWS, pool.block_size),
            mask_mod=_mask(
                tensor(session),
                logical,
                tensor(np.array([span.base for span in spans])),
                tensor(begins),
                tensor(sees),
                tensor(depths),
                pool.block_size,
                window,
            ),
            seq_lengths=(int(padded.sum()), pool.num_blocks * pool.block_size),
            compute_q_blocks=False,
        )


def _mask(
    session: torch.Tensor,
    logical: torch.Tensor,
    bases: torch.Tensor,
    begins: torch.Tensor,
    sees: torch.Tensor,
    depths: torch.Tensor,
    block_size: int,
    window: int | None,
) -> Callable[..., torch.Tensor]:
    """Whether a row sees a place of the pool.

    session: of a query block. logical: [sessions, blocks of the pool] the place in a session's table, or -1.
    bases, begins: [sessions] tokens before a session's rows, and its first row. sees: [rows, most rows of a
    session]. depths: [rows].
    """
    most = sees.shape[1] - 1

    def visible(_b: torch.Tensor, _h: torch.Tensor, row: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        owner = session[row // _ROWS]
        block = logical[owner, place // block_size]
        key = block * block_size + place % block_size
        base = bases[owner]
        fed = torch.clamp(key - base, 0, most)
        found = (block >= 0) & ((key < base) | ((key - base <= most) & sees[row, fed]))
        if window is not None:
            position = torch.where(key < base, key, base + depths[begins[owner] + fed])
            found = found & (position > base + depths[row] - window)
        return found

    return visible


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: FlexPlan,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """query [1, heads, rows, key size], keys and values [blocks, tokens, KV heads, size] of a layer, sinks
    [heads]; returns [heads, rows of the plan, value size]."""
    attended, found = _kernel(query.device.type)(
        query.index_select(2, plan.rows),
        *(held.flatten(0, 1).transpose(0, 1)[None] for held in (keys, values)),
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=plan.mask,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[2],
        return_aux=AuxRequest(lse=sinks is not None),
    )
    result: torch.Tensor = attended[0].index_select(1, plan.places)
    if sinks is not None:
        # The share of its attention that a row has for keys, beside its head's sink.
        logarithm = found.lse[0].index_select(1, plan.places)
        result *= torch.sigmoid(logarithm.float() - sinks.float()[:, None])[..., None]
    return result


@functools.cache
def _kernel(device: str) -> Callable[..., Any]:
    """Compiled once for all numbers of rows and sessions, with the first pass, which is the load's."""
    if device == "cpu":
        return flex_attention
    # Other kernels would share a long table between several programs and add what they find.
    options = {"BLOCK_M": _ROWS, "FORCE_USE_FLEX_ATTENTION": True}
    return functools.partial(torch.compile(flex_attention, dynamic=True), kernel_options=options)


@functools.cache
def _capped(softcap: float) -> Callable[..., torch.Tensor]:
    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped
