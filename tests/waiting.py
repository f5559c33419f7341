"""Waiting for a state. How long that may take is for the test's own time limit to say: machines differ."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


async def until(ready: Callable[[], bool | Awaitable[bool]]) -> None:
    """Return once it is so."""
    while True:
        answer = ready()
        if answer if isinstance(answer, bool) else await answer:
            return
        await asyncio.sleep(0.01)


async def all_ready() -> None:
    """Let every task of this loop go as far as it gets without news from elsewhere."""
    for _ in range(100):
        await asyncio.sleep(0)
