"""Speculation up to the last token that the context has room for."""

from __future__ import annotations

import asyncio

import pytest

from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient, GenerateOptions
from splitspec.errors import InvalidRequestError
from splitspec.types import FinishReason

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session")]

OPTIONS: GenerateOptions = {"temperature": 0.0, "ignore_eos": True}
PLAIN: GenerateOptions = {**OPTIONS, "speculate": False}


def text_of(length: int) -> list[int]:
    return [1000 + i * i % 7001 for i in range(length)]


@pytest.mark.parametrize(
    "num_draft_tokens", [4, *(pytest.param(k, marks=pytest.mark.full) for k in (1, 7, 16))]
)
async def test_every_length_up_to_the_context_limit(tiny: Stack, num_draft_tokens: int) -> None:
    async with AsyncClient(tiny.address) as client:
        (model,) = (await client.describe()).models
        longest = model.max_context
        text = text_of(longest)
        for length in range(longest - num_draft_tokens - 1, longest):
            plain = await client.generate(text[:length], **PLAIN).result()
            assert len(plain.tokens) == longest - length
            assert plain.finished.reason is FinishReason.CONTEXT_LIMIT
            for drafter in ("model", "lookup"):
                options: GenerateOptions = {
                    **OPTIONS,
                    "drafter": drafter,
                    "num_draft_tokens": num_draft_tokens,
                }
                result = await client.generate(text[:length], **options).result()
                assert (result.token_ids, result.finished.reason) == (plain.token_ids, plain.finished.reason)
                drafted = result.finished.acceptance.num_draft_tokens
                # The first round is plain, and the last token isn't drafted.
                if drafter == "model" and longest - length > 2:
                    assert drafted > 0
        with pytest.raises(InvalidRequestError, match=f"expected at most {longest - 1}"):
            await client.generate(text, **OPTIONS).result()


async def test_sessions_side_by_side_meet_the_limit_each_at_its_own_length(tiny: Stack) -> None:
    async with AsyncClient(tiny.address) as client:
        (model,) = (await client.describe()).models
        text = text_of(model.max_context)
        lengths = range(model.max_context - 6, model.max_context)

        async def ids(length: int, options: GenerateOptions) -> list[int]:
            return (await client.generate(text[:length], **options).result()).token_ids

        plain = [await ids(length, PLAIN) for length in lengths]
        assert await asyncio.gather(*(ids(length, OPTIONS) for length in lengths)) == plain
