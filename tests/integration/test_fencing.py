"""The order of messages as a target worker enforces it, over a raw stream to the real process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from protos.v1 import common_pb2, target_pb2, target_pb2_grpc
from splitspec.cli.stack import Stack
from splitspec.tokens import TokenLog
from tests.integration.raw import Stream

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stub(tiny_model: Path) -> AsyncIterator[target_pb2_grpc.TargetWorkerServiceAsyncStub]:
    async with (
        Stack(model=tiny_model, drafters=[]) as stack,
        grpc.aio.insecure_channel(stack.target.address) as channel,
    ):
        yield target_pb2_grpc.TargetWorkerServiceStub(channel)


@pytest_asyncio.fixture(loop_scope="session")
async def stream(
    stub: target_pb2_grpc.TargetWorkerServiceAsyncStub, request: pytest.FixtureRequest
) -> AsyncIterator[Stream]:
    stream = Stream(stub, request.node.name)
    assert (await stream.open()).length == 5
    yield stream
    stream.call.cancel()


async def test_repeated_verify_gets_the_verdict_that_it_got(stream: Stream) -> None:
    first = await stream.verify(1, [21, 22])
    before = stream.stamp(1)
    # The same message again, as it was sent then.
    await stream.send(
        1, [21, 22], base_length=5, revision=0, prefix_hash=TokenLog(range(11, 16)).prefix_hash()
    )
    again = await stream.verdict()
    assert again.repeated
    assert not first.repeated
    again.repeated = False
    assert again == first
    # And nothing was committed by it.
    assert (await stream.verify(2, [])).stamp.base_length == before.base_length + 1


async def test_stale_messages_get_no_answer(stream: Stream) -> None:
    first = await stream.verify(3, [21])
    await stream.send(2, [22])  # an older round
    await stream.send(3, [22])  # the same round with another body
    await stream.send(4, [22], revision=first.stamp.revision - 1)
    await stream.send(5, [22], base_length=5)
    await stream.call.write(
        target_pb2.TargetSessionRequest(stamp=stream.stamp(3), decode=target_pb2.Decode(num_tokens=1))
    )
    verdict = await stream.verify(6, [])
    assert verdict.stamp.round == 6
    assert verdict.stamp.base_length == first.stamp.base_length + 1


@pytest.mark.parametrize(
    ("changes", "code", "sentence"),
    [
        ({"base_length": 9}, "FAILED_PRECONDITION", "base_length is 9"),
        ({"prefix_hash": 1}, "FAILED_PRECONDITION", "prefix_hash 0x1"),
        ({"epoch": 9}, "ABORTED", "epoch 9"),
        ({"epoch": 11}, "ABORTED", "epoch 11"),
    ],
)
async def test_messages_that_build_on_something_else(
    stream: Stream, changes: dict[str, int], code: str, sentence: str
) -> None:
    await stream.send(1, [21], (), **changes)
    got, details = await stream.refused()
    assert got == code
    assert sentence in details


async def test_a_cut_beyond_what_was_committed_is_refused(stream: Stream) -> None:
    stream.tokens.extend([21])
    request = target_pb2.TargetSessionRequest(stamp=stream.stamp(1), close=common_pb2.Close(keep_handle=True))
    await stream.call.write(request)
    code, details = await stream.refused()
    assert code == "FAILED_PRECONDITION"
    assert "base_length is 6" in details


@pytest.mark.parametrize("num_right", [0, 1, 2])
async def test_a_tree_is_verified_to_its_path(
    stub: target_pb2_grpc.TargetWorkerServiceAsyncStub, num_right: int
) -> None:
    """Siblings before and beside the right ones; then the session goes on as if decoded plainly."""
    plain = Stream(stub, f"plain-{num_right}")
    await plain.open()
    right = [(await plain.verify(round_number, [])).token_ids[0] for round_number in range(1, 6)]
    wrong = next(token for token in range(100) if token not in right)
    tokens = [wrong, right[0], wrong + 1, right[1], wrong]
    if num_right < 2:
        tokens[3] = wrong + 2
    if num_right < 1:
        tokens[1] = wrong + 3
    stream = Stream(stub, f"tree-{num_right}")
    await stream.open()
    verdict = await stream.verify(1, tokens, parents=[0, 0, 2, 2, 4])
    assert list(verdict.path) == [1, 3][:num_right]
    assert (verdict.num_draft_tokens, verdict.num_accepted) == (5, num_right)
    assert verdict.next_origin == common_pb2.TOKEN_ORIGIN_CORRECTION
    assert list(verdict.token_ids) == right[: num_right + 1]
    following = [(await stream.verify(number, [])).token_ids[0] for number in range(2, 6 - num_right)]
    assert [*verdict.token_ids, *following] == right
    for session in (plain, stream):
        session.call.cancel()


async def test_a_new_owner_fences_the_old_one_off(
    stub: target_pb2_grpc.TargetWorkerServiceAsyncStub,
) -> None:
    old = Stream(stub, "fenced")
    opened = await old.open(lease_ms=60_000)
    await old.verify(1, [21])
    new = Stream(stub, "fenced")
    new.epoch = 11
    new.tokens = TokenLog(old.tokens)
    taken = await new.open(opened.handle, lease_ms=60_000)
    assert taken.handle == opened.handle
    assert taken.cached_length == len(new.tokens) - 1
    await old.send(2, [21])
    assert (await old.refused())[0] == "ABORTED"
    assert (await new.verify(2, [])).stamp.epoch == 11
    late = Stream(stub, "fenced")
    with pytest.raises(grpc.aio.AioRpcError, match="not newer than 11"):
        await late.open(opened.handle)
    released = await stub.Release(
        target_pb2.TargetWorkerServiceReleaseRequest(stamp=new.stamp(0), handle=opened.handle)
    )
    assert released.released


async def test_a_repeated_open_takes_nothing_back(stream: Stream) -> None:
    await stream.verify(1, [21])
    tokens, stream.tokens = stream.tokens, TokenLog(range(11, 16))
    assert (await stream.open()).length == len(tokens)
    stream.tokens = tokens
    await stream.verify(2, [22])


async def test_nothing_comes_before_a_complete_open(
    stub: target_pb2_grpc.TargetWorkerServiceAsyncStub,
) -> None:
    stream = Stream(stub, "incomplete")
    open_ = common_pb2.Open(
        start=3,
        token_ids=stream.tokens[3:],
        sampling=common_pb2.SamplingParams(temperature=0, seed=1),
        rule=common_pb2.VERIFICATION_RULE_GREEDY,
    )
    await stream.call.write(target_pb2.TargetSessionRequest(stamp=stream.stamp(0), open=open_))
    assert (await stream.call.read()).opened.length == 0
    await stream.send(1, [21])
    code, details = await stream.refused()
    assert code == "INVALID_ARGUMENT"
    assert "open first" in details


async def test_plain_tokens_are_those_of_verification(
    stub: target_pb2_grpc.TargetWorkerServiceAsyncStub,
) -> None:
    plain, verified = Stream(stub, "plain"), Stream(stub, "verified")
    await asyncio.gather(plain.open(), verified.open())
    await plain.call.write(
        target_pb2.TargetSessionRequest(stamp=plain.stamp(1), decode=target_pb2.Decode(num_tokens=4))
    )
    ids: list[int] = []
    for round_number in range(1, 5):
        verdict = await plain.verdict()
        assert verdict.stamp.round == round_number
        ids += verdict.token_ids
    whole = await verified.verify(1, ids[:3])
    assert whole.num_accepted == 3
    assert list(whole.token_ids) == ids
    plain.call.cancel()
    verified.call.cancel()
