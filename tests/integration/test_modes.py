"""Modes that overlap, through the whole service: what they draft ahead changes no token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient, Mode, Origin, Result, Rule
from splitspec.errors import InvalidRequestError
from tests.integration.conftest import PATIENT

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

#: Of 20 tokens each.
PROMPTS = [list(range(start, start + 20)) for start in (1000, 2000)]
#: What is pipelined holds behind drafts that are accepted whole, the target's own;
#: most of its layers, and what came before, are right now and then.
CASES = [
    (Mode.PIPELINED, "model"),
    (Mode.PREFETCH_PULL, "layer_skip"),
    (Mode.PREFETCH_PUSH, "layer_skip"),
    (Mode.PREFETCH_PULL, "suffix"),
    (Mode.PREFETCH_PUSH, "lookup"),
]
LENGTH = 40


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(tiny_model: Path) -> AsyncIterator[Stack]:
    drafters = [f"model={tiny_model}", f"layer_skip={tiny_model}", "lookup", "suffix"]
    async with Stack(model=tiny_model, drafters=drafters, coordinator_args=PATIENT) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def client(stack: Stack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(stack.address) as connected:
        yield connected


async def generate(
    client: AsyncClient, prompt: list[int], mode: Mode, drafter: str = "", rule: Rule | None = None
) -> Result:
    return await client.generate(
        prompt,
        temperature=0.0 if rule is None else 1.0,
        # Few, so that a draft is right now and then.
        allowed_token_ids=range(100, 106),
        seed=None if rule is None else 5,
        rule=rule,
        max_tokens=LENGTH,
        ignore_eos=True,
        speculate=mode is not Mode.PLAIN,
        mode=mode,
        num_draft_tokens=4,
        drafter=drafter,
    ).result()


@pytest.mark.parametrize(("mode", "drafter"), CASES)
@pytest.mark.parametrize("rule", [None, Rule.SHARED_NOISE], ids=["greedy", "shared_noise"])
async def test_text_is_that_of_plain_decoding(
    client: AsyncClient, rule: Rule | None, mode: Mode, drafter: str
) -> None:
    plain = [(await generate(client, prompt, Mode.PLAIN, rule=rule)).token_ids for prompt in PROMPTS]
    num_ahead = 0
    while not num_ahead:  # a draft has to be ready when its parent's verdict comes
        results = await asyncio.gather(*(generate(client, prompt, mode, drafter, rule) for prompt in PROMPTS))
        assert [result.token_ids for result in results] == plain
        num_ahead = sum(result.finished.acceptance.num_ahead_steps for result in results)


@pytest.mark.parametrize(("mode", "drafter"), CASES[1:])
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
async def test_what_is_prepared_is_what_would_be_drafted(
    client: AsyncClient, rule: Rule, mode: Mode, drafter: str
) -> None:
    """The same rounds to the token: a branch that is sent is the proposal that it stands for."""
    sequential = await asyncio.gather(
        *(generate(client, prompt, Mode.SEQUENTIAL, drafter, rule) for prompt in PROMPTS)
    )
    num_ahead = 0
    while not num_ahead:  # a draft has to be ready when its parent's verdict comes
        results = await asyncio.gather(*(generate(client, prompt, mode, drafter, rule) for prompt in PROMPTS))
        for one, other in zip(results, sequential, strict=True):
            assert one.token_ids == other.token_ids
            assert replace(one.finished.acceptance, num_ahead_steps=0) == other.finished.acceptance
        num_ahead = sum(result.finished.acceptance.num_ahead_steps for result in results)


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
async def test_pipelined_rounds_hold_their_bonus_back(client: AsyncClient, rule: Rule) -> None:
    """A draft that is always right: rounds of K tokens and no next token follow one another."""
    result = await generate(client, PROMPTS[0], Mode.PIPELINED, "model", rule)
    acceptance = result.finished.acceptance
    assert acceptance.draft_acceptance_rate == 1
    assert acceptance.num_ahead_steps > acceptance.num_spec_steps / 2
    drafted = [token.origin for token in result.tokens]
    assert drafted.count(Origin.ACCEPTED) > LENGTH - acceptance.num_spec_steps / 2


async def test_a_mode_that_the_drafter_lacks_is_refused(client: AsyncClient) -> None:
    with pytest.raises(InvalidRequestError, match=r"speculation.mode is 'pipelined', expected .*sequential"):
        await client.generate(PROMPTS[0], drafter="lookup", mode=Mode.PIPELINED, max_tokens=8).result()
