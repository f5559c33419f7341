"""Features from the target's passes to a drafter: what a worker sends, and how a coordinator relays it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeAlias

import grpc
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from protos.v1 import common_pb2, target_pb2, target_pb2_grpc
from splitspec.cli.stack import Stack
from splitspec.features import FeatureFormat
from splitspec.tokens import TokenLog
from tests.integration.raw import Stream

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session")]

#: Of the four that the tiny model has; what the target worker keeps of its own accord is [1, 2].
WANTED = common_pb2.FeatureRequest(layers=[2, 1], dtype="bfloat16")
FORMAT = FeatureFormat((2, 1), "bfloat16")
Stub: TypeAlias = "target_pb2_grpc.TargetWorkerServiceAsyncStub"


@pytest.fixture(scope="module")
def library(tiny_model: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    return loaded


@torch.inference_mode()
def assert_clean(
    library: PreTrainedModel, token_ids: list[int], features: torch.Tensor, start: int = 0
) -> None:
    """Features of all tokens from `start` on are those of one pass over the whole text."""
    states = library(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    expected = torch.stack([states[layer + 1][0] for layer in WANTED.layers], dim=1)[start:]
    torch.testing.assert_close(features.float(), expected, atol=1e-3, rtol=2**-7)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def target(tiny_model: Path) -> AsyncIterator[Stub]:
    async with (
        Stack(model=tiny_model, drafters=[]) as stack,
        grpc.aio.insecure_channel(stack.target.address) as channel,
    ):
        yield target_pb2_grpc.TargetWorkerServiceStub(channel)


def session(target: Stub, name: str) -> Stream:
    stream = Stream(target, name)
    stream.features = WANTED
    return stream


class TestTarget:
    """The verdicts of a real worker, over a raw stream."""

    async def test_it_says_what_it_keeps(self, target: Stub) -> None:
        description = await target.Describe(target_pb2.TargetWorkerServiceDescribeRequest())
        assert list(description.model.feature_layers) == [1, 2]

    async def test_a_verdict_brings_exactly_the_missing_ones(
        self, target: Stub, library: PreTrainedModel
    ) -> None:
        """Through plain tokens, rejection, acceptance and a tree's path; and never unasked."""
        stream, parts = session(target, "missing"), []
        assert (await stream.open()).length == 5
        plain = await stream.decode(1, 3, features_start=0)
        assert [verdict.HasField("features") for verdict in plain] == [False, False, True]
        right = plain[-1]
        for round_number, draft, parents in (
            (4, [7, 8], ()),  # rejected
            (5, None, ()),  # accepted
            (6, None, (0, 0, 2)),
        ):
            features = FORMAT.decode(right.features)
            assert right.features.start == sum(len(part) for part in parts)
            assert right.features.start + len(features) == len(stream.tokens) - 1
            parts.append(features)
            if draft is None:
                draft = await self.continuation(library, stream.tokens, 2)
                draft = [7, *draft] if parents else draft
            right = await stream.verify(round_number, draft, parents, features_start=len(stream.tokens) - 1)
        assert list(right.path) == [1, 2]
        parts.append(FORMAT.decode(right.features))
        assert_clean(library, stream.tokens[:-1], torch.cat(parts))
        unasked = await stream.verify(7, [7], features_start=None)
        assert not unasked.HasField("features")
        stream.call.cancel()

    @staticmethod
    async def continuation(library: PreTrainedModel, tokens: TokenLog, count: int) -> list[int]:
        """What the target says next in greedy decoding."""
        text = list(tokens)
        with torch.inference_mode():
            for _ in range(count):
                text.append(int(library(torch.tensor([text])).logits[0, -1].argmax()))
        return text[-count:]

    async def test_of_a_prefix_that_was_cached(self, target: Stub, library: PreTrainedModel) -> None:
        """Shared by another session, and kept under the session's own handle."""
        text = [*range(1000, 1150)]
        first, second = session(target, "first"), session(target, "second")
        handles = []
        for stream, cached in ((first, 0), (second, 128)):
            stream.tokens = TokenLog(text)
            opened = await stream.open(lease_ms=60_000)
            assert (opened.length, opened.cached_length) == (150, cached)
            handles.append(opened.handle)
            (verdict,) = await stream.decode(1, 1, features_start=0)
            assert_clean(library, text, FORMAT.decode(verdict.features))
        await second.call.done_writing()
        assert await second.call.read() == grpc.aio.EOF
        again = session(target, "second")
        again.tokens, again.epoch = second.tokens, second.epoch + 1
        opened = await again.open(handles[1])
        assert opened.cached_length == 150
        verdict = await again.verify(2, [], features_start=140)
        assert_clean(library, again.tokens[:-1], FORMAT.decode(verdict.features), start=140)
        first.call.cancel()
        again.call.cancel()

    async def test_the_repeated_verdict_brings_them_again(self, target: Stub) -> None:
        stream = session(target, "repeated")
        await stream.open()
        first = await stream.verify(1, [21], features_start=2)
        earlier = {"base_length": 5, "revision": 0, "prefix_hash": TokenLog(range(11, 16)).prefix_hash()}
        await stream.send(1, [21], features_start=2, **earlier)
        again = await stream.verdict()
        assert again.repeated
        assert again.features == first.features
        assert again.features.start == 2
        stream.call.cancel()

    @pytest.mark.parametrize(
        ("wanted", "sentence"),
        [
            (
                common_pb2.FeatureRequest(layers=[1, 3], dtype="float16"),
                "open.features.layers is [1, 3], expected layers that this worker keeps, of [1, 2]",
            ),
            (
                common_pb2.FeatureRequest(layers=[1], dtype="float32"),
                "open.features.dtype is 'float32', expected one of float16, bfloat16",
            ),
        ],
        ids=["layers", "dtype"],
    )
    async def test_what_it_doesnt_have_is_refused(
        self, target: Stub, wanted: common_pb2.FeatureRequest, sentence: str
    ) -> None:
        stream = Stream(target, "refused")
        stream.features = wanted
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.open()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert sentence in (caught.value.details() or "")

    @pytest.mark.parametrize("kind", ["verify", "decode"])
    @pytest.mark.parametrize(
        ("wanted", "start", "expected"),
        [
            (WANTED, 5, "5, expected 0 to 4, the committed tokens but the last"),
            (None, 0, "0, expected none, as open.features has none"),
        ],
        ids=["too late", "unwanted"],
    )
    async def test_a_start_that_cant_be(
        self, target: Stub, kind: str, wanted: common_pb2.FeatureRequest | None, start: int, expected: str
    ) -> None:
        stream = Stream(target, "start")
        stream.features = wanted
        await stream.open()
        asked = stream.verify(1, [], features_start=start) if kind == "verify" else stream.decode(1, 1, start)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asked
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"{kind}.features_start is {expected}" in (caught.value.details() or "")
