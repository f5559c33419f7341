"""A draft worker whose proposals are wrong, and a client that stops reading."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from protos.v1 import coordinator_pb2_grpc, draft_pb2
from splitspec.client import AsyncClient, GenerateOptions
from splitspec.client.request import generate_request
from splitspec.types import Origin
from tests.integration.conftest import loads, settle_empty, tiny_stack
from tests.integration.proxy import Proxy
from tests.waiting import until

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session")]

PROMPT = list(range(1000, 1040))
OPTIONS: GenerateOptions = {"temperature": 0.0, "ignore_eos": True}


async def test_wrong_proposals_cost_the_draft_worker_its_place(tiny_model: Path) -> None:
    """It is dropped at once, by the coordinator or by the target's refusal, and tried again later."""
    options: GenerateOptions = {**OPTIONS, "max_tokens": 120, "num_draft_tokens": 2}
    wrong, count = "", 0

    def tamper(answer: bytes) -> list[tuple[float, bytes]]:
        nonlocal count
        response = draft_pb2.DraftSessionResponse.FromString(answer)
        if response.HasField("proposal") and wrong:
            count += 1
            if wrong == "stamp":
                response.proposal.stamp.base_length += 1
            elif wrong == "body":
                response.proposal.body = response.proposal.body[:-1]
            else:
                response.proposal.num_draft_tokens += 1
        return [(0.0, response.SerializeToString())]

    async with Proxy(tamper) as proxy:
        stack = tiny_stack(
            tiny_model,
            draft=("--advertise", f"127.0.0.1:{proxy.port}"),
            coordinator=("--draft-retry-s", "0.02"),
        )
        async with stack, AsyncClient(stack.address) as client:
            proxy.upstream = stack.draft.address
            alone: GenerateOptions = {**options, "speculate": False}
            plain = await client.generate(PROMPT, **alone).result()
            for wrong in ("stamp", "body", "count"):
                count = 0
                generation = client.generate(PROMPT, **options)
                origins: list[Origin] = []
                ids: list[int] = []
                async for chunk in generation:
                    origins += [token.origin for token in chunk.tokens]
                    ids += [token.id for token in chunk.tokens]
                    if count == 2:  # dropped, and dropped again when it had come back
                        wrong = ""
                assert ids == plain.token_ids
                assert count == 2
                assert set(origins[:3]) == {Origin.PLAIN}
                assert Origin.ACCEPTED in origins
                await settle_empty(stack)


async def test_a_client_that_stops_reading_loses_its_request(tiny_model: Path) -> None:
    # Log-probabilities and a small window, so that what isn't read soon fills the buffers on the way.
    options: GenerateOptions = {**OPTIONS, "request_id": "unread", "max_tokens": 700, "logprobs": 20}
    small_window = [("grpc.http2.bdp_probe", 0)]
    async with (
        tiny_stack(tiny_model, coordinator=("--client-timeout-s", "1")) as stack,
        grpc.aio.insecure_channel(stack.address, options=small_window) as channel,
        AsyncClient(stack.address) as client,
    ):
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        call = stub.Generate(generate_request(PROMPT, options))
        async for event in call:
            if event.HasField("chunk"):
                break
        seen = [token.id for token in event.chunk.tokens]

        async def left() -> bool:
            return all(load.handles == 0 for load in await loads(stack))

        await until(left)
        resumed: GenerateOptions = {**options, "resume_offset": len(seen)}
        result = await client.generate(PROMPT, **resumed).result()
        # It was ended before its last token, and goes on behind what was committed until then.
        assert result.tokens[0].origin is Origin.REPEATED
        assert result.tokens[-1].origin is not Origin.REPEATED
        whole: GenerateOptions = {**OPTIONS, "max_tokens": options["max_tokens"]}
        plain = await client.generate(PROMPT, **whole).result()
        assert seen + result.token_ids == plain.token_ids
        with pytest.raises(grpc.aio.AioRpcError, match="the client has read nothing for 1 s"):
            async for _ in call:
                pass
