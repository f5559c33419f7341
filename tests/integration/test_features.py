"""Features from the target's passes to a drafter: what a worker sends, and how a coordinator relays it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from draft_worker.drafters.lookup import LookupDrafter
from protos.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient, AsyncGeneration
from splitspec.errors import HandshakeError
from splitspec.features import FeatureFormat
from splitspec.telemetry import names
from splitspec.tokens import TokenLog
from splitspec.types import Origin
from tests.integration.conftest import PATIENT
from tests.integration.raw import Stream
from tests.integration.recorder import Recorded, Recorder, serving
from tests.integration.test_traces import trace_of
from tests.waiting import until

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


@torch.inference_mode()
def continuation(library: PreTrainedModel, token_ids: Sequence[int], count: int) -> list[int]:
    """What the target says next in greedy decoding."""
    text = list(token_ids)
    for _ in range(count):
        text.append(int(library(torch.tensor([text])).logits[0, -1].argmax()))
    return text[-count:]


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces") / "trace.jsonl"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def plain(tiny_model: Path, trace_file: Path) -> AsyncIterator[Stack]:
    """A stack without a draft worker, which the tests bring; it is always waited for."""
    traced = f"--trace-file={trace_file}"
    async with Stack(model=tiny_model, drafters=[], coordinator_args=[*PATIENT, traced]) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def target(plain: Stack) -> AsyncIterator[Stub]:
    async with grpc.aio.insecure_channel(plain.target.address) as channel:
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
        stream = session(target, "missing")
        assert (await stream.open()).length == 5
        plain = await stream.decode(1, 3, features_start=0)
        assert [verdict.HasField("features") for verdict in plain] == [False, False, True]
        parts = [FORMAT.decode(plain[-1].features)]

        async def verify(round_number: int, draft: list[int], parents: tuple[int, ...] = ()) -> list[int]:
            """What was accepted."""
            start = len(stream.tokens) - 1
            assert start == sum(map(len, parts))
            verdict = await stream.verify(round_number, draft, parents, features_start=start)
            assert verdict.features.start == start
            parts.append(FORMAT.decode(verdict.features))
            return list(verdict.token_ids[:-1])

        assert await verify(4, [7, 8]) == []
        said = continuation(library, stream.tokens, 2)
        assert await verify(5, said) == said
        said = continuation(library, stream.tokens, 2)
        assert await verify(6, [7, *said], (0, 0, 2)) == said
        assert_clean(library, stream.tokens[:-1], torch.cat(parts))
        assert not (await stream.verify(7, [7])).HasField("features")
        stream.call.cancel()

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
        hashed = TokenLog(range(11, 16)).prefix_hash()
        await stream.send(1, [21], features_start=2, base_length=5, revision=0, prefix_hash=hashed)
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


def sent(start: int, *shape: int, dtype: str = "bfloat16") -> common_pb2.Features:
    size = 2 * math.prod(shape)
    return common_pb2.Features(start=start, shape=shape, dtype=dtype, data=bytes(size))


class TestDraftWorker:
    """What a draft worker makes of the features in a Propose on five tokens, over a raw stream."""

    @staticmethod
    async def propose(address: str, drafter: str, features: common_pb2.Features) -> common_pb2.Proposal:
        tokens = TokenLog([11, 12, 13, 14, 15])
        stamp = common_pb2.Stamp(
            session_id="s", epoch=1, base_length=len(tokens), prefix_hash=tokens.prefix_hash()
        )
        opening = common_pb2.Open(
            token_ids=list(tokens),
            sampling=common_pb2.SamplingParams(temperature=0, seed=1),
            rule=common_pb2.VERIFICATION_RULE_GREEDY,
            drafter=drafter,
        )
        asking = draft_pb2.Propose(num_draft_tokens=2, start=len(tokens), features=features)
        async with grpc.aio.insecure_channel(address) as channel:
            call: Any = draft_pb2_grpc.DraftWorkerServiceStub(channel).DraftSession()
            await call.write(draft_pb2.DraftSessionRequest(stamp=stamp, open=opening))
            opened = (await call.read()).opened
            assert (opened.length, opened.features_length) == (5, 0)
            stamp.round = 1
            await call.write(draft_pb2.DraftSessionRequest(stamp=stamp, propose=asking))
            proposal: common_pb2.Proposal = (await call.read()).proposal
            return proposal

    async def test_it_hands_them_to_the_drafter(self, plain: Stack) -> None:
        recorder = Recorder("recorder", WANTED, [11, 12, 13, 14, 15, 16, 17])
        async with serving(plain.redis_url, recorder) as address:
            proposal = await self.propose(address, "recorder", sent(0, 4, 2, 64))
            assert proposal.num_draft_tokens == 2
            proposal = await self.propose(address, "recorder", sent(0, 3, 2, 64))
            assert proposal.num_draft_tokens == 0
        assert [state.taken for state in recorder.states] == [[(0, 4, 5)], [(0, 3, 5)]]

    @pytest.mark.parametrize(
        ("drafter", "features", "code", "sentence"),
        [
            (
                "lookup",
                sent(0, 4, 2, 64),
                "INVALID_ARGUMENT",
                "propose.features is 'features of shape [4, 2, 64]', expected none, as lookup drafts without",
            ),
            (
                "recorder",
                sent(0, 5, 2, 64),
                "INVALID_ARGUMENT",
                "propose.features is '5 tokens from 0 on', expected tokens before the last of the 5",
            ),
            (
                "recorder",
                sent(0, 4, 2, 64, dtype="float16"),
                "INVALID_ARGUMENT",
                "propose.features.dtype is 'float16', expected bfloat16",
            ),
            (
                "recorder",
                sent(1, 3, 2, 64),
                "FAILED_PRECONDITION",
                "propose.features.start is 1, but the worker holds those of 0 tokens",
            ),
        ],
        ids=["unwanted", "too many", "another type", "a gap"],
    )
    async def test_what_cant_be_is_refused(
        self, plain: Stack, drafter: str, features: common_pb2.Features, code: str, sentence: str
    ) -> None:
        recorder = Recorder("recorder", WANTED)
        async with serving(plain.redis_url, recorder, LookupDrafter("lookup", 3, 1)) as address:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await self.propose(address, drafter, features)
        assert caught.value.code().name == code
        assert sentence in (caught.value.details() or "")
        assert all(not state.taken for state in recorder.states)


PROMPT = list(range(1000, 1040))


async def known_text(client: AsyncClient, prompt: list[int], count: int) -> list[int]:
    """The prompt and what the target says to it, decoded plainly."""
    generation = client.generate(prompt, temperature=0.0, ignore_eos=True, max_tokens=count, speculate=False)
    result = await generation.result()
    return [*prompt, *result.token_ids]


def asked(
    client: AsyncClient, drafter: str, prompt: list[int], count: int, session: str = ""
) -> AsyncGeneration:
    return client.generate(
        prompt,
        temperature=0.0,
        ignore_eos=True,
        max_tokens=count,
        drafter=drafter,
        num_draft_tokens=3,
        session_id=session,
    )


def assert_each_once(state: Recorded) -> None:
    """Every hand-over begins where the one before has ended, and has all that the target held then."""
    assert state.taken
    end = 0
    for start, stop, num_committed in state.taken:
        assert start == end
        assert stop == num_committed - 1
        end = stop
    assert end == len(state.features)


class TestRelay:
    """The whole service, with a drafter of the test's own."""

    async def test_a_drafter_gets_each_tokens_features_once(
        self, plain: Stack, library: PreTrainedModel, trace_file: Path
    ) -> None:
        """Over rejected and accepted proposals, and in the session's next request; lookup gets none."""
        async with AsyncClient(plain.address) as client:
            text = await known_text(client, PROMPT, 60)
            recorder = Recorder("recorder", WANTED, text)
            async with serving(plain.redis_url, recorder, LookupDrafter("lookup", 3, 1)):
                first = await asked(client, "recorder", PROMPT, 40, "recorded").result()
                assert [*PROMPT, *first.token_ids] == text[:80]
                assert {Origin.ACCEPTED, Origin.CORRECTION} <= {token.origin for token in first.tokens}
                second = await asked(client, "recorder", [7, 8, 9], 20, "recorded").result()
                await client.close_session("recorded")
                await asked(client, "lookup", [*PROMPT, *PROMPT], 20, "looked up").result()
                await client.close_session("looked up")
        (state,) = recorder.states
        assert_each_once(state)
        whole = [*text[:80], 7, 8, 9, *second.token_ids]
        assert state.tokens == whole[: len(state.tokens)]
        assert len(state.features) > 83
        assert_clean(library, whole[: len(state.features)], torch.stack(state.features))
        brought = {
            session: [
                span.attributes[names.FEATURE_BYTES.name]
                for span in await trace_of(trace_file, session)
                if names.FEATURE_BYTES.name in span.attributes
            ]
            for session in ("recorded", "looked up")
        }
        assert sum(brought["recorded"]) >= len(state.features) * 2 * 64 * 2
        assert brought["looked up"] == []

    async def test_a_replaced_draft_worker_gets_them_from_the_start(
        self, plain: Stack, library: PreTrainedModel
    ) -> None:
        async with AsyncClient(plain.address) as client:
            text = await known_text(client, PROMPT, 1000)
            first, second = (Recorder("recorder", WANTED, text) for _ in range(2))

            async def proposed() -> bool:
                return first.num_proposals >= 4

            async with contextlib.AsyncExitStack() as later:
                async with serving(plain.redis_url, first):
                    running = asked(client, "recorder", PROMPT, 1000)
                    await running.read()
                    await until(proposed)
                    await later.enter_async_context(serving(plain.redis_url, second))
                result = await running.result()
        assert result.token_ids == text[40:]
        for recorder in (first, second):
            (state,) = recorder.states
            assert_each_once(state)
            assert_clean(library, text[: len(state.features)], torch.stack(state.features))
        assert second.states[0].taken[0][1] > 40 + 4
        assert second.num_proposals > 0

    async def test_a_draft_worker_that_comes_later_and_wants_others_gets_none(self, plain: Stack) -> None:
        others = common_pb2.FeatureRequest(layers=[1], dtype="bfloat16")
        async with AsyncClient(plain.address) as client:
            text = await known_text(client, PROMPT, 1000)
            first, second = (Recorder("recorder", wanted, text) for wanted in (WANTED, others))
            async with contextlib.AsyncExitStack() as later:
                async with serving(plain.redis_url, first):
                    running = asked(client, "recorder", PROMPT, 1000)
                    await running.read()
                    await later.enter_async_context(serving(plain.redis_url, second))
                result = await running.result()
                assert result.token_ids == text[40:]
                assert [state.taken for state in second.states] == [[]]
                await asked(client, "recorder", PROMPT, 8).result()
                assert_each_once(second.states[-1])

    async def test_those_of_a_long_text_take_several_rounds(
        self, plain: Stack, library: PreTrainedModel
    ) -> None:
        """A message has 3 MiB for them: here 768 tokens."""
        prompt = list(range(1000, 3000))
        wide = common_pb2.FeatureRequest(layers=[2, 1] * 16, dtype="bfloat16")
        recorder = Recorder("wide", wide)
        async with AsyncClient(plain.address) as client, serving(plain.redis_url, recorder):
            result = await asked(client, "wide", prompt, 8).result()
        (state,) = recorder.states
        assert [(start, stop) for start, stop, _ in state.taken[:2]] == [(0, 768), (768, 1536)]
        assert state.taken[2][0] == 1536
        assert state.taken[2][1] == state.taken[2][2] - 1
        features = torch.stack(state.features)
        assert torch.equal(features[:, :2], features[:, -2:])
        assert_clean(library, [*prompt, *result.token_ids][: len(features)], features[:, :2])

    async def test_features_that_no_target_keeps(self, plain: Stack) -> None:
        recorder = Recorder("deep", common_pb2.FeatureRequest(layers=[3], dtype="bfloat16"))
        async with AsyncClient(plain.address) as client, serving(plain.redis_url, recorder):
            sentence = r"the drafter wants features of the target's layers \[3\], but target worker .* keeps"
            with pytest.raises(HandshakeError, match=sentence):
                await asked(client, "deep", PROMPT, 4).result()
