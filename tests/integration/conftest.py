"""The whole service as real processes with a real Redis, once for all tests that leave it whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest_asyncio

from protos.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from splitspec.cli.stack import Stack
from tests.waiting import until

#: Layers of the demo model that the cheap layer_skip of these tests leaves out.
SKIPPED = "+".join(str(layer) for layer in range(4, 27))


def drafters(model: Path) -> list[str]:
    """One drafter of each kind; `model` is the target itself, so that it is nearly always right."""
    cheap = f"layer_skip={model},skip={SKIPPED}"
    trained = "eagle=demo"  # which fits the demo model alone
    matching = ["lookup", "suffix,past_answers=20000", f"hybrid,drafter={cheap}"]
    return [*matching, cheap, f"model={model}", trained]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(demo_model: Path) -> AsyncIterator[Stack]:
    """Three processes in float32 with all drafters, which are always waited for."""
    async with Stack(
        model=str(demo_model),
        drafters=drafters(demo_model),
        dtype="float32",
        coordinator_args=["--draft-patience", "100", "--draft-timeout-s", "30"],
    ) as running:
        yield running


PATIENT = [
    *("--draft-patience", "1000", "--draft-timeout-s", "60", "--draft-retry-s", "0.2"),
    *("--overlap", "sequential", "--num-draft-tokens", "4"),
]


def tiny_stack(
    model: Path,
    *,
    target: tuple[str, ...] = (),
    draft: tuple[str, ...] = (),
    coordinator: tuple[str, ...] = (),
) -> Stack:
    """A stack on the tiny model, whose default draft is the target itself."""
    return Stack(
        model=model,
        drafters=["lookup", f"model={model}"],
        target_args=target,
        draft_args=draft,
        coordinator_args=[*PATIENT, "--drafter", "model", *coordinator],
    )


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tiny(tiny_model: Path) -> AsyncIterator[Stack]:
    """A tiny stack that its tests leave whole."""
    async with tiny_stack(tiny_model) as stack:
        yield stack


async def target_load(stack: Stack) -> common_pb2.WorkerLoad:
    async with grpc.aio.insecure_channel(stack.target.address) as channel:
        stub = target_pb2_grpc.TargetWorkerServiceStub(channel)
        return (await stub.Describe(target_pb2.TargetWorkerServiceDescribeRequest())).load


async def draft_load(stack: Stack) -> common_pb2.WorkerLoad:
    async with grpc.aio.insecure_channel(stack.draft.address) as channel:
        stub = draft_pb2_grpc.DraftWorkerServiceStub(channel)
        return (await stub.Describe(draft_pb2.DraftWorkerServiceDescribeRequest())).load


async def loads(stack: Stack) -> list[common_pb2.WorkerLoad]:
    return [await target_load(stack), await draft_load(stack)]


async def settle_empty(stack: Stack) -> None:
    """Until no worker holds a handle: the end of a stream reaches them beside the client's last event."""

    async def empty() -> bool:
        return all(load.handles == 0 for load in await loads(stack))

    await until(empty)
