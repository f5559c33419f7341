"""Bad requests: one clear sentence each, the right status, and only the request itself ends."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from protos.v1 import common_pb2, coordinator_pb2, coordinator_pb2_grpc, target_pb2, target_pb2_grpc
from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient
from splitspec.errors import (
    HandshakeError,
    InvalidRequestError,
    NotFoundError,
    SplitspecError,
    from_rpc_error,
)
from splitspec.vocabulary import Vocabulary
from tests.integration.conftest import settle_empty

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session")]

Request = coordinator_pb2.GenerateRequest
Sampling = common_pb2.SamplingParams
Speculation = coordinator_pb2.SpeculationOptions


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stub(stack: Stack) -> AsyncIterator[coordinator_pb2_grpc.CoordinatorServiceAsyncStub]:
    async with grpc.aio.insecure_channel(stack.address) as channel:
        yield coordinator_pb2_grpc.CoordinatorServiceStub(channel)


CASES: dict[str, tuple[Request, type[SplitspecError], str, str]] = {
    "temperature": (
        Request(text="hi", sampling=Sampling(temperature=-1)),
        InvalidRequestError,
        "sampling.temperature",
        r"sampling.temperature is -1.0, expected a finite number, at least 0",
    ),
    "top_p": (
        Request(text="hi", sampling=Sampling(top_p=0)),
        InvalidRequestError,
        "sampling.top_p",
        r"sampling.top_p is 0.0, expected a number above 0 and at most 1",
    ),
    "max_tokens": (
        Request(text="hi", stop=coordinator_pb2.StopConditions(max_tokens=0)),
        InvalidRequestError,
        "stop.max_tokens",
        r"stop.max_tokens is 0, expected at least 1",
    ),
    "stop string": (
        Request(text="hi", stop=coordinator_pb2.StopConditions(stop_strings=[""])),
        InvalidRequestError,
        "stop.stop_strings",
        r"stop.stop_strings is \[''\], expected no empty string",
    ),
    "stop strings": (
        Request(text="hi", stop=coordinator_pb2.StopConditions(stop_strings=["ab"] * 30_000)),
        InvalidRequestError,
        "stop.stop_strings",
        r"stop.stop_strings has 30000 entries, expected at most 128",
    ),
    "no prompt": (
        Request(),
        InvalidRequestError,
        "prompt",
        r"prompt is None, expected one of text, chat, token_ids",
    ),
    "empty text": (
        Request(text=""),
        InvalidRequestError,
        "text",
        r"text is '', expected a prompt of at least one",
    ),
    "empty ids": (
        Request(token_ids=coordinator_pb2.TokenPrompt()),
        InvalidRequestError,
        "token_ids",
        r"token_ids is '', expected a prompt of at least one",
    ),
    "empty chat": (
        Request(chat=coordinator_pb2.ChatPrompt()),
        InvalidRequestError,
        "chat.messages",
        r"chat.messages is \[\], expected at least one message",
    ),
    "id outside": (
        Request(token_ids=coordinator_pb2.TokenPrompt(ids=[5, 49152])),
        InvalidRequestError,
        "token_ids",
        r"token_ids is 49152, expected ids below 49152",
    ),
    "too long": (
        Request(token_ids=coordinator_pb2.TokenPrompt(ids=[5] * 8192)),
        InvalidRequestError,
        "prompt",
        r"prompt is '8192 tokens', expected at most 8191, as the context is 8192",
    ),
    "K": (
        Request(text="hi", speculation=Speculation(num_draft_tokens=17)),
        InvalidRequestError,
        "speculation.num_draft_tokens",
        r"speculation.num_draft_tokens is 17, expected 0 to 16",
    ),
    "drafter": (
        Request(text="hi", speculation=Speculation(drafter="crystal_ball")),
        NotFoundError,
        "speculation.drafter",
        r"speculation.drafter is 'crystal_ball', "
        "expected one of: eagle, hybrid, layer_skip, lookup, model, suffix",
    ),
    "resume": (
        Request(text="hi", resume_offset=3),
        InvalidRequestError,
        "resume_offset",
        r"resume_offset is 3",
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_bad_request(
    stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub, stack: Stack, name: str
) -> None:
    request, kind, field, sentence = CASES[name]
    good = stub.Generate(Request(text="Once", stop=coordinator_pb2.StopConditions(max_tokens=6)))
    events = aiter(good)
    assert (await anext(events)).HasField("started")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(request).read()
    error = from_rpc_error(caught.value)
    assert type(error) is kind
    assert error.field == field
    assert re.match(sentence, error.message), error.message
    # The request beside it goes on to its end.
    assert [event async for event in events][-1].HasField("finished")
    await settle_empty(stack)


async def test_message_over_the_limit(
    stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub, stack: Stack
) -> None:
    async with grpc.aio.insecure_channel(stack.address) as channel:  # without our own limit
        unbounded = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unbounded.Generate(Request(text="x" * 5_000_000)).read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max (5000" in (caught.value.details() or "")


OLD = common_pb2.Proposal(stamp=common_pb2.Stamp(session_id="raw"))


def target_requests(epoch: int, *messages: Any) -> list[target_pb2.TargetSessionRequest]:
    """An Open of three tokens, and what follows it."""
    from splitspec.tokens import TokenLog

    log = TokenLog([5, 6, 7])
    stamp = common_pb2.Stamp(
        session_id="raw", epoch=epoch, base_length=3, prefix_hash=log.prefix_hash(), round=0
    )
    open_ = common_pb2.Open(
        token_ids=list(log),
        sampling=Sampling(temperature=0, seed=1),
        rule=common_pb2.VERIFICATION_RULE_GREEDY,
    )
    requests = [target_pb2.TargetSessionRequest(stamp=stamp, open=open_)]
    for round_number, message in enumerate(messages, start=1):
        stamp = common_pb2.Stamp()
        stamp.CopyFrom(requests[0].stamp)
        stamp.round = round_number
        requests.append(target_pb2.TargetSessionRequest(stamp=stamp, **message))
    return requests


@pytest.mark.parametrize(
    ("message", "code", "sentence"),
    [
        (
            {"decode": target_pb2.Decode(num_tokens=0)},
            "INVALID_ARGUMENT",
            "decode.num_tokens is 0, expected 1 to",
        ),
        ({}, "INVALID_ARGUMENT", "message is None, expected open, verify, decode or close"),
        (
            {"verify": target_pb2.Verify(proposal=OLD)},
            "ABORTED",
            "epoch 0 of session raw is not the current one",
        ),
    ],
)
async def test_bad_message_ends_its_own_stream(
    stack: Stack, message: dict[str, Any], code: str, sentence: str
) -> None:
    async with grpc.aio.insecure_channel(stack.target.address) as channel:
        stub = target_pb2_grpc.TargetWorkerServiceStub(channel)
        call = stub.TargetSession()
        opening, bad = target_requests(1, message)
        await call.write(opening)
        opened = await call.read()
        assert isinstance(opened, target_pb2.TargetSessionResponse)
        assert opened.opened.length == 3
        await call.write(bad)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code().name == code
    assert sentence in (caught.value.details() or "")
    await settle_empty(stack)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (common_pb2.Open(tenant="t" * 300), "open.tenant has 300 bytes, expected at most 256"),
        (common_pb2.Open(handle="h" * 300), "open.handle has 300 bytes, expected at most 256"),
        (
            common_pb2.Open(sampling=Sampling(banned_token_ids=[1] * 5000)),
            "sampling.banned_token_ids has 5000 entries, expected at most 4096",
        ),
        (
            common_pb2.Open(output=common_pb2.Output(ending_token_ids=[1] * 600)),
            "output.ending_token_ids has 600 entries, expected at most 512",
        ),
        (
            common_pb2.Open(features=common_pb2.FeatureRequest(layers=[1] * 100)),
            "open.features.layers has 100 entries, expected at most 64",
        ),
    ],
)
async def test_a_worker_has_limits_of_its_own(stack: Stack, change: common_pb2.Open, sentence: str) -> None:
    (opening,) = target_requests(1)
    opening.open.MergeFrom(change)
    async with grpc.aio.insecure_channel(stack.target.address) as channel:
        call = target_pb2_grpc.TargetWorkerServiceStub(channel).TargetSession()
        await call.write(opening)
        with pytest.raises(grpc.aio.AioRpcError, match=sentence) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await settle_empty(stack)


async def test_tables_of_ids_that_differ(tiny_model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    tokenizer = Tokenizer.from_file(str(other / "tokenizer.json"))
    tokenizer.add_tokens(["<|one more|>"])
    tokenizer.save(str(other / "tokenizer.json"))
    async with (
        Stack(model=tiny_model, drafters=[f"model={other}"]) as running,
        AsyncClient(running.address) as client,
    ):
        with pytest.raises(HandshakeError) as caught:
            await client.generate([5, 6], max_tokens=2, drafter="model").result()
        theirs, ours = Vocabulary.load(other), Vocabulary.load(tiny_model)
        for part in ("drafter model", str(other), theirs.hash, "the target", str(tiny_model), ours.hash):
            assert part in str(caught.value)
        # Only what asks for it is refused.
        plain = await client.generate([5, 6], max_tokens=2, ignore_eos=True, speculate=False).result()
        assert len(plain.tokens) == 2
