"""What a running service does for its callers, measured from outside through its own processes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient
from splitspec.serving import channel


async def health_latencies_ms(
    model: Path, dtype: str, *, num_prompts: int = 3, prompt_tokens: int = 2000, pause_s: float = 0.01
) -> list[float]:
    """How long the target worker's health service takes to answer, asked over and over while prompts are fed.

    Prompts share no prefix, and come one after the other. pause_s: between an answer and the next question.
    """
    async with (
        Stack(model=str(model), drafters=[], dtype=dtype) as stack,
        AsyncClient(stack.address) as client,
        channel(stack.target.address) as opened,
    ):
        health = health_pb2_grpc.HealthStub(opened)
        question = health_pb2.HealthCheckRequest(service=stack.target.service)

        async def feed(seed: int) -> None:
            prompt = [100 + (seed * 7919 + place * 97) % 40000 for place in range(prompt_tokens)]
            await client.generate(prompt, max_tokens=1, speculate=False).result()

        await feed(0)  # not counted, nor is the channel's first answer
        await health.Check(question)
        latencies = []
        for seed in range(1, num_prompts + 1):
            feeding = asyncio.create_task(feed(seed))
            while not feeding.done():
                started = time.perf_counter()
                await health.Check(question)
                latencies.append((time.perf_counter() - started) * 1e3)
                await asyncio.sleep(pause_s)
            await feeding
    return latencies
