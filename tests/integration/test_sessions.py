"""Sessions that outlive requests, processes and Redis: real processes, a tiny random model."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Unpack

import pytest
import torch

from protos.v1 import target_pb2
from splitspec.cli.health import health_status
from splitspec.cli.process import ServerProcess
from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient, AsyncGeneration, Chunk, GenerateOptions, Message
from splitspec.engine.feed import PIECE
from splitspec.errors import InvalidRequestError, OverloadedError, SessionBusyError, UnavailableError
from splitspec.types import Origin
from tests.integration.conftest import loads, target_load, tiny_stack
from tests.integration.proxy import Proxy
from tests.waiting import until

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

TARGET_SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetWorkerService"].full_name
PROMPT = list(range(1000, 1040))


def greedy(client: AsyncClient, prompt: list[int], **options: Unpack[GenerateOptions]) -> AsyncGeneration:
    merged: GenerateOptions = {"temperature": 0.0, "ignore_eos": True, **options}
    return client.generate(prompt, **merged)


async def reference(client: AsyncClient, prompt: list[int], max_tokens: int) -> list[int]:
    """What plain decoding in a request of its own says."""
    result = await greedy(client, prompt, max_tokens=max_tokens, speculate=False).result()
    return result.token_ids


async def test_five_turns_feed_only_new_tokens(tiny: Stack) -> None:
    fed = []
    async with AsyncClient(tiny.address) as client:
        for turn in range(5):
            messages = [Message("user", f"Question number {turn}, please answer it.")]
            options: GenerateOptions = {"temperature": 0.0, "max_tokens": 12, "session_id": "turns"}
            result = await client.generate(messages, **options).result()
            fed.append(result.started.prompt_tokens - result.started.cached_tokens)
            length = result.started.prompt_tokens + len(result.tokens)
        assert length > sum(fed[1:]) + fed[0]
        # Each later turn feeds the template's words around one question, the question, and one token
        # of the answer before it.
        assert max(fed[1:]) < 35
        assert len(set(fed[2:])) == 1
        assert await client.close_session("turns")


async def test_a_turn_is_encoded_as_in_the_whole_conversation(tiny: Stack, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    async with AsyncClient(tiny.address) as client:
        options: GenerateOptions = {"temperature": 0.0, "max_tokens": 6, "session_id": "encoded"}
        first = await client.generate([Message("user", "One?")], **options).result()
        second = await client.generate([Message("user", "Two?")], **options).result()
        await client.close_session("encoded")
    opening = tokenizer.apply_chat_template(
        [{"role": "user", "content": "One?"}], add_generation_prompt=True, tokenize=False
    )
    answer = str(tokenizer.decode(first.token_ids))
    closing = "" if answer.endswith("<|im_end|>") else "<|im_end|>"
    whole = f"{opening}{answer}{closing}\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
    expected = len(tokenizer.encode(str(opening))) + len(first.token_ids)
    expected += len(tokenizer.encode(whole.removeprefix(f"{opening}{answer}")))
    assert second.started.prompt_tokens == expected


async def test_two_requests_at_once_on_a_session(tiny: Stack) -> None:
    async with AsyncClient(tiny.address) as client:
        first = greedy(client, PROMPT, session_id="busy", max_tokens=400)
        await first.read()
        with pytest.raises(SessionBusyError, match="another request runs on session 'busy'"):
            await greedy(client, PROMPT, session_id="busy", max_tokens=4).result()
        with pytest.raises(SessionBusyError):
            await client.close_session("busy")
        assert len((await first.result()).tokens) == 400
        assert await client.close_session("busy")


async def test_the_turn_after_one_that_was_left_early(tiny: Stack) -> None:
    """By `break`, by a deadline, and by a client that is gone; from the same client and from another one."""
    async with AsyncClient(tiny.address) as client, AsyncClient(tiny.address) as other:

        def long(client: AsyncClient, timeout: float | None = None) -> AsyncGeneration:
            options: GenerateOptions = {"session_id": "left", "max_tokens": 2000, "timeout": timeout}
            return greedy(client, [5, 6, 7], **options)

        async def following(client: AsyncClient) -> None:
            result = await greedy(client, [8], session_id="left", max_tokens=2).result()
            assert len(result.tokens) == 2

        for each in (client, other) * 3:
            async for _ in long(client):
                break
            await following(each)
        with pytest.raises(UnavailableError, match="deadline"):
            await long(client, timeout=0.2).result()
        await following(client)
        async with AsyncClient(tiny.address) as gone:
            await long(gone).read()
        await following(other)
        async for _ in long(client):
            break
        assert await client.close_session("left")


async def test_200_sessions_leave_nothing(tiny: Stack) -> None:
    before = await loads(tiny)
    async with AsyncClient(tiny.address) as client:

        async def one(name: str) -> None:
            result = await greedy(client, [7, 8, 9], session_id=name, max_tokens=5).result()
            assert len(result.tokens) == 5
            assert await client.close_session(name)

        for start in range(0, 200, 20):
            await asyncio.gather(*(one(f"s{i}") for i in range(start, start + 20)))

    async def left() -> bool:
        after = await loads(tiny)
        return [(load.handles, load.live_sessions, load.kv_tokens) for load in after] == [
            (load.handles, load.live_sessions, load.kv_tokens) for load in before
        ] and all(a.kv_blocks_used <= b.kv_blocks_used for a, b in zip(after, before, strict=True))

    await until(left)


async def test_retried_request_says_the_same_again(tiny: Stack) -> None:
    options: GenerateOptions = {
        "temperature": 1.0,
        "max_tokens": 40,
        "request_id": "said",
        "ignore_eos": True,
    }
    async with AsyncClient(tiny.address) as client:
        first = await client.generate(PROMPT, **options).result()
        again = client.generate(PROMPT, **options)
        second = await again.result()
        assert second.token_ids == first.token_ids
        assert second.text == first.text
        assert second.finished == first.finished
        assert {token.origin for token in second.tokens} == {Origin.REPEATED}
        assert second.started.seed == first.started.seed
        with pytest.raises(InvalidRequestError, match="request_id is 'said', expected a new id"):
            await client.generate([1, 2], **options).result()


async def test_a_request_cut_off_goes_on_where_it_was(tiny: Stack) -> None:
    async with AsyncClient(tiny.address) as client:
        expected = await reference(client, PROMPT, 300)
        generation = greedy(client, PROMPT, request_id="cut", max_tokens=300)
        seen: list[Chunk] = []
        while len(seen) < 3 and (chunk := await generation.read()) is not None:
            seen.append(chunk)
        await generation.aclose()
        ids = [token.id for chunk in seen for token in chunk.tokens]
        retried = greedy(client, PROMPT, request_id="cut", max_tokens=300, resume_offset=len(ids))

        async def free() -> bool:  # the first call's ownership ends with its cancellation
            return all(load.live_sessions == 0 for load in await loads(tiny))

        await until(free)
        result = await retried.result()
        assert result.tokens[0].origin in (Origin.REPEATED, Origin.ACCEPTED, Origin.PLAIN)
        assert ids + result.token_ids == expected
        assert result.finished.usage.completion_tokens == 300


async def test_duplicated_and_delayed_verdicts_change_nothing(tiny_model: Path) -> None:
    count = 0

    def tamper(answer: bytes) -> list[tuple[float, bytes]]:
        nonlocal count
        count += 1
        copies = [(0.05 if count % 5 == 0 else 0.0, answer)]
        is_verdict = target_pb2.TargetSessionResponse.FromString(answer).HasField("verdict")
        return copies * 2 if is_verdict and count % 3 == 0 else copies

    async with Proxy(tamper) as proxy:
        advertised = ("--advertise", f"127.0.0.1:{proxy.port}")
        async with tiny_stack(tiny_model, target=advertised) as stack:
            proxy.upstream = stack.target.address
            async with AsyncClient(stack.address) as client:
                for k in (0, 3):
                    result = await greedy(client, PROMPT, max_tokens=60, num_draft_tokens=k).result()
                    assert len(result.tokens) == 60
                    if k == 0:
                        expected = result.token_ids
                    assert result.token_ids == expected
    assert count > 60


async def test_a_wrong_verdict_is_never_committed(tiny_model: Path) -> None:
    count = 0

    def tamper(answer: bytes) -> list[tuple[float, bytes]]:
        nonlocal count
        response = target_pb2.TargetSessionResponse.FromString(answer)
        if response.HasField("verdict"):
            count += 1
            if count in (4, 9):  # the token is another than the hash says
                response.verdict.token_ids[-1] ^= 1
        return [(0.0, response.SerializeToString())]

    async with Proxy(tamper) as proxy:
        advertised = ("--advertise", f"127.0.0.1:{proxy.port}")
        async with tiny_stack(tiny_model, target=advertised) as stack:
            proxy.upstream = stack.target.address
            async with AsyncClient(stack.address) as client:
                generation = greedy(client, PROMPT, max_tokens=60)
                chunks = [chunk async for chunk in generation]
                ids = [token.id for chunk in chunks for token in chunk.tokens]
                assert [chunk.offset for chunk in chunks[1:]] == [
                    chunk.offset + len(chunk.tokens) for chunk in chunks[:-1]
                ]
                assert ids == await reference(client, PROMPT, 60)
    assert count > 9


async def test_requests_over_the_limit_are_refused(tiny_model: Path) -> None:
    async with (
        tiny_stack(tiny_model, coordinator=("--max-requests", "1")) as stack,
        AsyncClient(stack.address) as client,
    ):
        first = greedy(client, PROMPT, max_tokens=300)
        await first.read()
        with pytest.raises(OverloadedError, match="all 1 requests") as caught:
            await greedy(client, PROMPT, max_tokens=2).result()
        assert caught.value.retry_after_s > 0
        assert len((await first.result()).tokens) == 300
        assert len((await greedy(client, PROMPT, max_tokens=2).result()).tokens) == 2


async def test_target_killed_and_restarted_between_turns(tiny_model: Path) -> None:
    async with tiny_stack(tiny_model) as stack, AsyncClient(stack.address) as client:
        options: GenerateOptions = {"session_id": "moved", "max_tokens": 10}
        first = await greedy(client, PROMPT, **options).result()
        await stack.target.kill()
        with pytest.raises(UnavailableError):
            await greedy(client, [50, 51], **options).result()
        await stack.target.start()
        second = await greedy(client, [50, 51], **options).result()
        assert second.started.cached_tokens == 0
        whole = [*PROMPT, *first.token_ids, 50, 51]
        # The failed request's prompt was committed; it is part of the conversation.
        assert second.started.prompt_tokens in (len(whole), len(whole) + 2)
        prompt = [*whole, 50, 51] if second.started.prompt_tokens > len(whole) else whole
        assert second.token_ids == await reference(client, prompt, 10)


async def test_another_target_takes_over_in_mid_stream(tiny_model: Path, tmp_path: Path) -> None:
    async with tiny_stack(tiny_model) as stack, AsyncClient(stack.address) as client:
        expected = await reference(client, PROMPT, 400)
        arguments = [f"--model={tiny_model}", "--dtype=float32", f"--redis-url={stack.redis_url}"]
        other = ServerProcess("second target worker", "target_worker", TARGET_SERVICE, arguments, tmp_path)
        generation = greedy(client, PROMPT, max_tokens=400)
        await generation.read()
        await other.start()
        try:
            await stack.target.kill()
            result = await generation.result()
        finally:
            await other.stop()
        assert result.token_ids == expected


async def test_draft_worker_rejoins_the_running_request(tiny_model: Path) -> None:
    async with tiny_stack(tiny_model) as stack, AsyncClient(stack.address) as client:
        expected = await reference(client, PROMPT, 1000)
        generation = greedy(client, PROMPT, max_tokens=1000, num_draft_tokens=2)
        chunks: list[Chunk] = []
        async for chunk in generation:
            chunks.append(chunk)
            if len(chunks) == 5:
                os.kill(stack.coordinator.pid, signal.SIGSTOP)  # however long the worker takes to start
                try:
                    await stack.draft.kill()
                    await stack.draft.start()
                finally:
                    os.kill(stack.coordinator.pid, signal.SIGCONT)
        origins = [token.origin for chunk in chunks for token in chunk.tokens]
        lost = origins.index(Origin.PLAIN, 5)
        assert Origin.ACCEPTED in origins[lost:]
        assert [token.id for chunk in chunks for token in chunk.tokens] == expected


async def test_client_that_vanishes_frees_the_workers(tiny: Stack) -> None:
    script = (
        "import sys; from splitspec.client import Client\n"
        "with Client(sys.argv[1]) as client:\n"
        "    for chunk in client.generate([5, 6, 7], max_tokens=3500, ignore_eos=True):\n"
        "        print(1, flush=True)\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, tiny.address, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.readline()
    assert (await target_load(tiny)).live_sessions == 1
    process.kill()
    await process.wait()

    async def freed() -> bool:
        return all(load.handles == 0 for load in await loads(tiny))

    await until(freed)


async def test_stopping_coordinator_hands_requests_back(tiny_model: Path) -> None:
    async with tiny_stack(tiny_model, coordinator=("--shutdown-grace-s", "0")) as stack:
        async with AsyncClient(stack.address) as client:
            expected = await reference(client, PROMPT, 800)
            generation = greedy(client, PROMPT, request_id="back", max_tokens=800)
            ids = [token.id for token in (await generation.read() or _no_chunk()).tokens]
            stopping = asyncio.create_task(stack.coordinator.stop())
            try:
                while (chunk := await generation.read()) is not None:
                    ids += [token.id for token in chunk.tokens]
                pytest.fail("the request wasn't handed back")
            except UnavailableError as error:
                assert "this server is stopping" in str(error)  # noqa: PT017
                assert error.retry_after_s > 0  # noqa: PT017
            await stopping
        assert 0 < len(ids) < 800
        await stack.coordinator.start()
        async with AsyncClient(stack.address) as client:
            retried = greedy(client, PROMPT, request_id="back", resume_offset=len(ids), max_tokens=800)
            assert ids + (await retried.result()).token_ids == expected


async def test_health_answers_while_a_long_prompt_is_fed(stack: Stack) -> None:
    """Many times within a pass: an event loop that waits for passes gives an answer or two in each."""
    num_answers = 60
    async with AsyncClient(stack.address) as client:
        prompt = [1000 + i % 700 for i in range(3000)]
        reading = asyncio.create_task(client.generate(prompt, max_tokens=1, speculate=False).result())

        async def feeding() -> bool:
            return (await target_load(stack)).kv_tokens > 0

        await until(feeding)
        begun = (await target_load(stack)).kv_tokens
        for _ in range(num_answers):
            assert await health_status(stack.target.address, TARGET_SERVICE) == "SERVING"
        fed = (await target_load(stack)).kv_tokens
        assert fed < 2999
        assert not reading.done()
        assert num_answers > 4 * (fed - begun) / PIECE
        await reading


def _no_chunk() -> Chunk:
    pytest.fail("the generation ended before its first chunk")


async def test_a_target_with_another_model_is_not_used(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    other_model = tmp_path / "other"
    shutil.copytree(tiny_model, other_model)
    model = AutoModelForCausalLM.from_pretrained(other_model)
    with torch.no_grad():
        model.lm_head.weight.neg_()
    model.save_pretrained(other_model)
    async with tiny_stack(tiny_model) as stack, AsyncClient(stack.address) as client:
        expected = await reference(client, PROMPT, 400)
        arguments = [f"--model={other_model}", "--dtype=float32", f"--redis-url={stack.redis_url}"]
        other = ServerProcess("another target worker", "target_worker", TARGET_SERVICE, arguments, tmp_path)
        await other.start()
        try:
            for _ in range(3):
                assert (await greedy(client, PROMPT, max_tokens=20).result()).token_ids == expected[:20]
            generation = greedy(client, PROMPT, max_tokens=400)
            await generation.read()
            await stack.target.kill()
            with pytest.raises(UnavailableError):
                await generation.result()
        finally:
            await other.stop()


async def test_a_draft_worker_that_hung_comes_back_into_the_running_request(tiny_model: Path) -> None:
    async with (
        tiny_stack(tiny_model, coordinator=("--draft-patience", "2")) as stack,
        AsyncClient(stack.address) as client,
    ):
        expected = await reference(client, PROMPT, 1500)
        generation = greedy(client, PROMPT, max_tokens=1500, num_draft_tokens=2)
        origins: list[Origin] = []
        ids: list[int] = []
        stopped_at = 0
        async for chunk in generation:
            origins += [token.origin for token in chunk.tokens]
            ids += [token.id for token in chunk.tokens]
            if not stopped_at and Origin.ACCEPTED in origins:
                os.kill(stack.draft.pid, signal.SIGSTOP)
                stopped_at = len(ids)
            elif stopped_at and origins[stopped_at:].count(Origin.PLAIN) == 10:
                os.kill(stack.draft.pid, signal.SIGCONT)
        # All are plain for a while; then drafts are accepted again.
        alone = origins.index(Origin.PLAIN, stopped_at)
        assert Origin.ACCEPTED in origins[alone:]
        assert generation.finished.acceptance.num_draft_missed_steps > 0
        assert ids == expected
