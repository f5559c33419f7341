"""Two questions at once, streamed.  Usage: python async_generate.py HOST:PORT"""

from __future__ import annotations

import asyncio
import sys

from splitspec.client import AsyncClient, Message


async def ask(client: AsyncClient, question: str) -> None:
    generation = client.generate([Message("user", question)], temperature=0, max_tokens=48)
    async for chunk in generation:
        print(f"{question[:24]:24} | {chunk.text!r}")
    print(f"{question[:24]:24} | {generation.finished.usage.completion_tokens} tokens")


async def main(address: str) -> None:
    async with AsyncClient(address) as client:
        await asyncio.gather(
            ask(client, "What is the capital of France?"), ask(client, "Name three colours of the rainbow.")
        )


asyncio.run(main(sys.argv[1]))
