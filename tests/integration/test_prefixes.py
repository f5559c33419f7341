"""What a session needn't feed again is the same with speculation on and off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient, GenerateOptions, Message, Result
from splitspec.engine.feed import PIECE

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session")]

QUESTIONS = [f"Question {turn}: {' '.join(f'word{turn * 40 + i}' for i in range(40))}?" for turn in range(5)]
#: How a conversation is speculated: not at all, and with rounds that accept much, or little.
WAYS: dict[str, GenerateOptions] = {
    "plain": {"speculate": False},
    "model": {"drafter": "model", "num_draft_tokens": 4},
    "lookup": {"drafter": "lookup", "num_draft_tokens": 3},
}
OPTIONS: GenerateOptions = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 30}


@pytest_asyncio.fixture(loop_scope="session")
async def client(tiny: Stack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(tiny.address) as client:
        yield client


async def in_each_way(
    talk: Callable[[str, GenerateOptions], Awaitable[list[Result]]], name: str
) -> list[Result]:
    """The conversation's turns without speculation; those of the other ways are the same.

    They run side by side, each as a tenant of its own, so that they share nothing.
    """
    options: list[GenerateOptions] = [{**OPTIONS, **WAYS[way], "tenant": f"{name}-{way}"} for way in WAYS]
    plain, *others = await asyncio.gather(*map(talk, WAYS, options))
    for way, turns in zip(list(WAYS)[1:], others, strict=True):
        assert [turn.token_ids for turn in turns] == [turn.token_ids for turn in plain], way
        assert cached(turns) == cached(plain), way
        drafted = sum(turn.finished.acceptance.num_draft_tokens for turn in turns)
        accepted = sum(turn.finished.acceptance.num_accepted_draft_tokens for turn in turns)
        assert (accepted > 75) if way == "model" else (accepted < drafted / 2), way
    return plain


def cached(turns: list[Result]) -> list[int]:
    return [turn.started.cached_tokens for turn in turns]


async def test_sessions_hold_the_same_after_each_turn(client: AsyncClient) -> None:
    async def talk(way: str, options: GenerateOptions) -> list[Result]:
        options = {**options, "session_id": way}
        turns = [await client.generate([Message("user", q)], **options).result() for q in QUESTIONS]
        await client.close_session(way, tenant=options["tenant"])
        return turns

    plain = await in_each_way(talk, "sessions")
    # All that was committed before but the last token, which is never in the KV.
    held = [turn.started.prompt_tokens + len(turn.tokens) - 1 for turn in plain]
    assert cached(plain) == [0, *held[:-1]]


async def test_whole_conversations_find_the_same_blocks(client: AsyncClient) -> None:
    """No session: each request brings the whole conversation, and shares blocks with those before it."""

    async def talk(way: str, options: GenerateOptions) -> list[Result]:
        messages: list[Message] = []
        turns: list[Result] = []
        for question in QUESTIONS:
            messages.append(Message("user", question))
            turns.append(await client.generate(messages, **options).result())
            messages.append(Message("assistant", turns[-1].text))
        return turns

    plain = await in_each_way(talk, "whole")
    assert cached(plain)[0] == 0
    for before, found in zip(plain, cached(plain)[1:], strict=False):
        assert before.started.prompt_tokens - 2 * PIECE < found <= before.started.prompt_tokens
    assert cached(plain)[-1] >= 2 * PIECE
