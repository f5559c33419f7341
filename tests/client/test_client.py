from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.v1 import common_pb2, coordinator_pb2
from splitspec import errors
from splitspec.client import (
    AsyncClient,
    Chunk,
    Client,
    Logprobs,
    Message,
    Token,
    TokenLogprob,
)
from splitspec.client.values import to_json
from splitspec.errors import (
    HandshakeError,
    NotFoundError,
    SessionBusyError,
    SplitspecError,
    UnavailableError,
)
from splitspec.types import FinishReason, Origin, Rule
from tests.client.scripted import Script, chunk, finished, serving, started, whole

EXAMPLES = Path(errors.__file__).parent / "client" / "examples"
CHUNKS = [
    Chunk(
        0,
        (Token(7, Origin.PLAIN, 2), Token(8, Origin.ACCEPTED, 2), Token(9, Origin.ACCEPTED, 3)),
        "Grü",
        True,
    ),
    Chunk(3, (Token(10, Origin.BONUS, 5),), "ße", True),
]


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def address(script: Script) -> Iterator[str]:
    with serving(script) as address:
        yield address


async def test_chunks_then_what_is_known_at_the_end(address: str) -> None:
    async with AsyncClient(address) as client:
        generation = client.generate("Hi")
        assert [piece async for piece in generation] == CHUNKS
        assert generation.started.seed == 2**64 - 1
        assert generation.finished.reason is FinishReason.STOP_STRING
        assert generation.finished.rule is Rule.GREEDY
        assert generation.finished.acceptance.acceptance_histogram == (0, 0, 1)
        assert generation.finished.timings.draft_us == 300
        assert [piece async for piece in generation] == []


def test_sync_says_the_same(address: str) -> None:
    with Client(address) as client:
        generation = client.generate("Hi")
        assert list(generation) == CHUNKS
        result = generation.result()
        assert result == client.generate("Hi").result()
        assert result.text == "Grüße" == client.generate("Hi").text()
        assert result.token_ids == [7, 8, 9, 10]
        assert result.finished.usage.completion_tokens == 4


async def test_result_after_a_part_was_read(address: str) -> None:
    async with AsyncClient(address) as client, client.generate("Hi") as generation:
        with pytest.raises(RuntimeError, match="first chunk"):
            _ = generation.started
        assert await generation.read() == CHUNKS[0]
        with pytest.raises(RuntimeError, match="last chunk"):
            _ = generation.finished
        assert (await generation.result()).text == "Grüße"
        assert await generation.text() == "Grüße"


def test_pieces_give_each_token_its_text() -> None:
    assert [text for _, text in CHUNKS[0].pieces] == ["Gr", "", "ü"]
    later = Chunk(3, (Token(10, Origin.BONUS, 4), Token(11, Origin.PLAIN, 5)), "ße", True)
    assert [text for _, text in later.pieces] == ["ß", "e"]
    assert Chunk(0, (), "", True).pieces == []


def test_json_has_names_for_enumerations(address: str) -> None:
    with Client(address) as client:
        shown = to_json(client.generate("Hi").result())
    assert shown["tokens"][0] == {"id": 7, "origin": "plain", "text_end": 2, "logprobs": None}
    assert shown["finished"]["requested_rule"] is None
    assert shown["finished"]["reason"] == "stop_string"
    assert shown["finished"]["acceptance"]["acceptance_histogram"] == [0, 0, 1]


def test_every_option_reaches_its_field(address: str, script: Script) -> None:
    with Client(address) as client:
        client.generate(
            "Hi",
            temperature=0.5,
            top_k=3,
            top_p=0.9,
            min_p=0.01,
            repetition_penalty=1.1,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={8: -1.5},
            allowed_token_ids=[9, 8],
            banned_token_ids=[7],
            logprobs=2,
            seed=7,
            max_tokens=9,
            min_tokens=4,
            stop=["!", "?"],
            stop_token_ids=[5, 4],
            ignore_eos=True,
            speculate=False,
            num_draft_tokens=0,
            drafter="lookup",
            rule=Rule.TOKEN,
            session_id="s",
            request_id="r",
            resume_offset=3,
            tenant="t",
            one_token_per_chunk=True,
        ).result()
        client.generate("Hi").result()
    full, bare = script.requests
    assert full == coordinator_pb2.GenerateRequest(
        request_id="r",
        session_id="s",
        tenant="t",
        text="Hi",
        sampling=common_pb2.SamplingParams(
            temperature=0.5,
            top_k=3,
            top_p=0.9,
            min_p=0.01,
            repetition_penalty=1.1,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={8: -1.5},
            allowed_token_ids=[8, 9],
            banned_token_ids=[7],
            logprobs=2,
            seed=7,
        ),
        stop=coordinator_pb2.StopConditions(
            max_tokens=9, stop_token_ids=[4, 5], stop_strings=["!", "?"], ignore_eos=True, min_tokens=4
        ),
        speculation=coordinator_pb2.SpeculationOptions(
            disabled=True,
            num_draft_tokens=0,
            drafter="lookup",
            rule=common_pb2.VERIFICATION_RULE_TOKEN,
        ),
        resume_offset=3,
        one_token_per_chunk=True,
    )
    assert not bare.stop.HasField("max_tokens")
    assert not bare.sampling.HasField("seed")
    assert not bare.speculation.HasField("num_draft_tokens")
    assert not bare.sampling.HasField("logprobs")
    assert not bare.speculation.rule


def test_logprobs_and_the_reason_for_another_rule(address: str, script: Script) -> None:
    events = whole()
    top = [common_pb2.TokenLogprob(id=3, logprob=-0.5), common_pb2.TokenLogprob(id=10, logprob=-1.5)]
    events[2].chunk.tokens[0].logprobs.CopyFrom(
        common_pb2.Logprobs(raw=-1.5, processed=-0.25, top_raw=top, top_processed=top[1:])
    )
    events[3].finished.requested_rule = common_pb2.VERIFICATION_RULE_BLOCK
    events[3].finished.rule_reason = "because"
    script.answer = lambda context: events
    with Client(address) as client:
        result = client.generate("Hi").result()
    assert result.tokens[0].logprobs is None
    assert result.tokens[3].logprobs == Logprobs(
        -1.5, -0.25, (TokenLogprob(3, -0.5), TokenLogprob(10, -1.5)), (TokenLogprob(10, -1.5),)
    )
    finished = result.finished
    assert (finished.rule, finished.requested_rule, finished.rule_reason) == (
        Rule.GREEDY,
        Rule.BLOCK,
        "because",
    )


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("Hi", {"text": "Hi"}),
        ([3, 4], {"token_ids": coordinator_pb2.TokenPrompt(ids=[3, 4])}),
        (
            [Message("system", "S"), {"role": "user", "content": "U"}],
            {
                "chat": coordinator_pb2.ChatPrompt(
                    messages=[
                        coordinator_pb2.ChatMessage(role="system", content="S"),
                        coordinator_pb2.ChatMessage(role="user", content="U"),
                    ]
                )
            },
        ),
    ],
)
def test_kinds_of_prompt(address: str, script: Script, prompt: Any, field: dict[str, Any]) -> None:
    with Client(address) as client:
        client.generate(prompt).result()
    expected = coordinator_pb2.GenerateRequest(**field)
    kind = expected.WhichOneof("prompt")
    assert script.requests[0].WhichOneof("prompt") == kind
    assert getattr(script.requests[0], str(kind)) == getattr(expected, str(kind))


def test_what_was_seen_of_a_session_goes_with_its_next_request(address: str, script: Script) -> None:
    with Client(address) as client:
        for options in (
            {"session_id": "s"},
            {"session_id": "s"},
            {"session_id": "s", "session_length": 3},
            {"session_id": "s", "tenant": "other"},
            {},
            {},
        ):
            client.generate("Hi", **options).result()
        client.generate("Hi", session_id="left").read()
        client.generate("Hi", session_id="left").result()
        client.close_session("s")
        client.generate("Hi", session_id="s").result()
    generated = [r for r in script.requests if isinstance(r, coordinator_pb2.GenerateRequest)]
    assert [request.session_length for request in generated] == [0, 9, 3, 0, 0, 0, 0, 8, 0]


def test_session_and_description(address: str, script: Script) -> None:
    script.description = coordinator_pb2.DescribeResponse(
        protocol_version=1,
        models=[common_pb2.ModelInfo(name="m", eos_token_ids=[2, 3])],
        drafters=["lookup"],
        rules=[Rule.TOKEN.value],
        limits=coordinator_pb2.RequestLimits(max_tokens=10),
    )
    with Client(address) as client:
        assert client.close_session("known", tenant="t")
        assert not client.close_session("unknown")
        description = client.describe()
    assert script.requests[0].tenant == "t"
    assert description.models[0].eos_token_ids == (2, 3)
    assert description.rules == (Rule.TOKEN,)
    assert description.limits.max_tokens == 10


@pytest.mark.parametrize(
    "error",
    [
        NotFoundError("no such drafter", "speculation.drafter"),
        SessionBusyError("busy", retry_after_s=0.5),
        UnavailableError("no target worker is at hand"),
    ],
)
def test_errors_are_those_of_the_coordinator(address: str, script: Script, error: SplitspecError) -> None:
    def answer(context: grpc.ServicerContext) -> Iterator[coordinator_pb2.GenerateResponse]:
        yield from whole()[:2]
        raise error

    script.answer = answer
    with Client(address) as client:
        generation = client.generate("Hi")
        assert generation.read() == CHUNKS[0]
        with pytest.raises(type(error)) as caught:
            generation.read()
    assert (caught.value.message, caught.value.field, caught.value.retry_after_s) == (
        error.message,
        error.field,
        error.retry_after_s,
    )


async def test_nobody_listens() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError, match=r"coordinator at 127\.0\.0\.1:1 can't be reached"):
            await client.generate("Hi").result()
        with pytest.raises(UnavailableError, match="can't be reached"):
            await client.describe()


def test_the_deadline_is_named(address: str, script: Script) -> None:
    script.answer = lambda context: waits(context)
    with Client(address) as client, pytest.raises(UnavailableError, match=r"deadline of 0\.2 s"):
        client.generate("Hi", timeout=0.2).result()


def test_a_stream_without_its_last_message(address: str, script: Script) -> None:
    script.answer = lambda context: whole()[:2]
    with Client(address) as client, pytest.raises(UnavailableError, match="without its last message"):
        client.generate("Hi").result()


def test_a_server_that_fails(address: str, script: Script) -> None:
    def answer(context: grpc.ServicerContext) -> Iterator[coordinator_pb2.GenerateResponse]:
        yield started()
        context.abort(grpc.StatusCode.INTERNAL, "the log has it")

    script.answer = answer
    with Client(address) as client, pytest.raises(SplitspecError, match=r"INTERNAL: the log has it"):
        client.generate("Hi").result()


def test_an_origin_that_is_newer_than_the_client(address: str, script: Script) -> None:
    newer = chunk(0, "a", (1, Origin.PLAIN, 1))
    newer.chunk.tokens[0].origin = 99  # type: ignore[assignment]
    script.answer = lambda context: [started(), newer, finished()]
    with Client(address) as client, pytest.raises(HandshakeError, match="origin = 99"):
        client.generate("Hi").result()


def waits(context: grpc.ServicerContext) -> Iterator[coordinator_pb2.GenerateResponse]:
    """One chunk, then nothing for as long as the call lasts."""
    yield from whole()[:2]
    gone = threading.Event()
    if context.add_callback(gone.set):
        gone.wait()


async def test_leaving_early_cancels(address: str, script: Script) -> None:
    script.answer = waits
    async with AsyncClient(address) as client:
        generation = client.generate("Hi")
        async for _ in generation:
            break
        assert await asyncio.to_thread(script.ended.wait, 10)
        assert await generation.read() is None
        with pytest.raises(RuntimeError, match="last chunk"):
            await generation.result()


def test_leaving_early_cancels_sync(address: str, script: Script) -> None:
    script.answer = waits
    with Client(address) as client:
        generation = client.generate("Hi")
        for _ in generation:
            break
        assert script.ended.wait(10)


async def test_a_cancelled_task_cancels_the_call(address: str, script: Script) -> None:
    script.answer = waits
    async with AsyncClient(address) as client:
        generation = client.generate("Hi")
        await generation.read()
        reading = asyncio.create_task(generation.read())
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert await asyncio.to_thread(script.ended.wait, 10)


def test_closing_from_another_thread_ends_the_iteration(address: str, script: Script) -> None:
    script.answer = waits
    with Client(address) as client:
        generation = client.generate("Hi")
        chunks = iter(generation)
        next(chunks)
        threading.Timer(0.1, generation.close).start()
        assert list(chunks) == []
        assert script.ended.wait(10)


def test_a_generation_that_outlives_its_client(address: str, script: Script) -> None:
    script.answer = waits
    with Client(address) as client:
        chunks = iter(client.generate("Hi"))
        next(chunks)
    assert script.ended.wait(10)
    del chunks  # closes the generation: warnings are errors


def test_a_whole_call_is_not_cancelled(address: str, script: Script) -> None:
    """What the server does after its last message isn't cut off."""
    cut_off: list[bool] = []
    script.answer = lambda context: ends(context, cut_off)
    with Client(address) as client:
        for _ in client.generate("Hi"):
            pass
    assert cut_off == [False]


def ends(context: grpc.ServicerContext, cut_off: list[bool]) -> Iterator[coordinator_pb2.GenerateResponse]:
    yield from whole()
    cancelled = threading.Event()
    context.add_callback(cancelled.set)
    cut_off.append(cancelled.wait(0.3))


@pytest.mark.parametrize("name", ["async_generate.py", "sync_generate.py"])
def test_examples_run(address: str, name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name, address], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 tokens" in done.stdout


def test_clients_side_by_side_are_quiet(address: str, caplog: pytest.LogCaptureFixture) -> None:
    def work() -> None:
        with Client(address) as client:
            for _ in range(50):
                client.generate("Hi").result()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert caplog.records == []
