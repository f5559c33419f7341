"""What becomes of branches when their session ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from draft_worker.ahead import Ahead, Branch
from protos.v1 import common_pb2, draft_pb2
from splitspec.tokens import TokenLog
from splitspec.types import Mode, Sampling
from splitspec.wire import Draft
from tests.drawings import drawing_of
from tests.waiting import all_ready


async def test_a_turn_that_is_cut_off_leaves_no_branch() -> None:
    """The session ends while the branch that may hold is being drafted: else its blocks would stay held."""
    drafted = asyncio.Event()

    async def run(*job: Any) -> Draft:
        await drafted.wait()
        return Draft.certain((7, 8))

    async def send(proposal: Any) -> None:
        """To nobody."""

    drafter: Any = SimpleNamespace(info=draft_pb2.DrafterInfo(name="any"), propose=lambda *of: None)
    ahead = Ahead(drafter, drawing_of(Sampling(temperature=0.0)), run)  # type: ignore[arg-type]
    tokens = TokenLog([1, 2, 3])
    stamp = common_pb2.Stamp(round=1, base_length=3, prefix_hash=tokens.prefix_hash())
    root = Branch(stamp, [1, 2, 3], None, 2, more_follows=False, draft=Draft.certain((4, 5)))
    ahead.go_on(root, Mode.PIPELINED, 1, send)
    await all_ready()
    (child,) = root.children
    tokens.extend([4, 5, 7])
    turning = asyncio.create_task(ahead.turn(2, tokens))
    await all_ready()
    assert not turning.done()
    turning.cancel()
    await asyncio.wait({turning})
    ahead.drop()
    drafted.set()
    await all_ready()
    assert child.dropped
    assert child.drafting is None
    assert root.children == []
