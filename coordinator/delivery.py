"""Blocks of tokens on their way to the client: journaled first, sent beside the next round."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from coordinator.journal import Journal
from coordinator.rounds import Block
from coordinator.stats import Stats
from protos.v1 import coordinator_pb2
from splitspec.telemetry import names

Send = Callable[[coordinator_pb2.GenerateResponse], Awaitable[None]]


@dataclass
class Delivery:
    """One block at a time is under way. start: committed tokens before the output's first one.

    A chunk leaves only once the journal has its tokens, or openly without that promise (`durable` is
    false) while Redis is away.
    """

    send: Send
    journal: Journal
    stats: Stats
    start: int
    one_token_each: bool

    def __post_init__(self) -> None:
        self._under_way: asyncio.Task[None] | None = None

    async def put(self, block: Block) -> None:
        """Start on a block as soon as the one before has left. Raises what that one has met."""
        await self.flush()
        self._under_way = asyncio.create_task(self.deliver(block))

    async def flush(self) -> None:
        """Wait until everything has left. Raises what the last block has met, however often it is called."""
        if self._under_way is not None:
            await self._under_way

    def cancel(self) -> None:
        if self._under_way is not None:
            self._under_way.cancel()

    async def deliver(self, block: Block, offset: int = 0) -> None:
        """Send the block's tokens from index `offset` of the output on."""
        with block.span.child(names.DELIVER) as span:
            with span.child(names.JOURNAL):
                durable = await self.journal.acknowledged(self.start + block.offset + len(block.origins))
            span.set({names.NUM_TOKENS: len(block.origins), names.DURABLE: durable})
            if self.stats.first_token is None:
                self.stats.first_token = time.perf_counter()
            for chunk in chunks_of(block, durable=durable, one_token_each=self.one_token_each, offset=offset):
                await self.send(coordinator_pb2.GenerateResponse(chunk=chunk))


def chunks_of(
    block: Block, *, durable: bool, one_token_each: bool, offset: int = 0
) -> list[coordinator_pb2.Chunk]:
    """The block's tokens from index `offset` of the output on: as one chunk, or as one for each token."""
    begin = text_end = block.emission.text_end - len(block.emission.text)
    chunks = []
    for i, (token, origin) in enumerate(zip(block.emission.tokens, block.origins, strict=True), block.offset):
        text = block.emission.text[text_end - begin : token.text_end - begin]
        text_end = token.text_end
        if i >= offset:
            message = coordinator_pb2.Token(id=token.token_id, origin=origin, text_end=text_end)
            if block.logprobs:
                message.logprobs.CopyFrom(block.logprobs[i - block.offset])
            chunks.append(coordinator_pb2.Chunk(offset=i, tokens=[message], text=text, durable=durable))
    if one_token_each or len(chunks) < 2:
        return chunks
    whole = coordinator_pb2.Chunk(
        offset=chunks[0].offset,
        tokens=[chunk.tokens[0] for chunk in chunks],
        text="".join(chunk.text for chunk in chunks),
        durable=durable,
    )
    return [whole]
