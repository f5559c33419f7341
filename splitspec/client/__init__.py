"""The client of a splitspec service, async and sync.

    async with AsyncClient("127.0.0.1:50051") as client:
        async for chunk in client.generate("The capital of France is", max_tokens=32):
            print(chunk.text, end="")

`Client` is the same without `async`. Results are frozen values; errors are those of splitspec.errors.
"""

from splitspec.client.asynchronous import AsyncClient
from splitspec.client.generation import AsyncGeneration
from splitspec.client.request import GenerateOptions, Prompt, UnknownOptionError
from splitspec.client.synchronous import Client, Generation
from splitspec.client.values import (
    AcceptanceStats,
    Chunk,
    Description,
    Finished,
    Logprobs,
    Message,
    ModelInfo,
    RequestLimits,
    Result,
    Started,
    Timings,
    Token,
    TokenLogprob,
    Usage,
)
from splitspec.types import FinishReason, Mode, Origin, Rule

__all__ = [
    "AcceptanceStats",
    "AsyncClient",
    "AsyncGeneration",
    "Chunk",
    "Client",
    "Description",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "Generation",
    "Logprobs",
    "Message",
    "Mode",
    "ModelInfo",
    "Origin",
    "Prompt",
    "RequestLimits",
    "Result",
    "Rule",
    "Started",
    "Timings",
    "Token",
    "TokenLogprob",
    "UnknownOptionError",
    "Usage",
]
