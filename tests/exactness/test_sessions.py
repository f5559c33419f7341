"""Whole requests, one after the other on a session: noise, parameters and resumption go on as they should."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from splitspec.client import Origin
from splitspec.errors import InvalidRequestError
from splitspec.sampling.randomness import Purpose
from splitspec.types import Drawing, Mode, Output, Rule, Sampling
from tests.exactness.asked import Asked, recording
from tests.exactness.service import Service, running
from tests.integration.functions import speak

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

PROMPTS = ([3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8])
LENGTH = 30
SEED = 11
OVERLAPPED = (Mode.PIPELINED, Mode.PREFETCH_PULL, Mode.PREFETCH_PUSH)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    async with running(tmp_path_factory.mktemp("simulated")) as service:
        yield service


async def three_turns(service: Service, name: str, **options: Any) -> None:
    """The second one is cut off in its midst and sent again."""
    options = {"session_id": name, "max_tokens": LENGTH, "seed": SEED, "drafter": "fair", **options}
    first, second, third = PROMPTS
    await service.client.generate(first, **options).result()
    received = await service.cut_off(second, 6, request_id=name, **options)
    result = await service.again(second, request_id=name, **options)
    assert result.token_ids[: len(received)] == received
    assert {Origin.REPEATED} < {token.origin for token in result.tokens}
    await service.client.generate(third, **options).result()


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
async def test_no_two_draws_of_a_session_share_noise(service: Service, rule: Rule, mode: Mode) -> None:
    """With one seed in all turns, so that nothing but rounds, places and purposes keeps them apart."""
    with recording() as recorder:
        await three_turns(service, f"{rule} {mode}", rule=rule, mode=mode, num_draft_tokens=5)
    drawn, drafted = recorder.by(service.target_thread), recorder.by(service.draft_thread)
    assert len(set(drawn)) == len(drawn) > LENGTH / 2
    assert {asked.seed for asked in drawn + drafted} == {SEED}
    assert {asked.purpose for asked in drafted} == ({Purpose.DRAFT} if mode is not Mode.PLAIN else set())
    if mode not in OVERLAPPED:  # else a round is drafted once for each text that it may stand on
        assert len(set(drafted)) == len(drafted)
    # The target draws in the order of the rounds, which go on from turn to turn.
    rounds = [asked.round_number for asked in drawn]
    assert rounds == sorted(rounds)
    assert Purpose.DRAFT not in {asked.purpose for asked in drawn}


@pytest.mark.parametrize("mode", Mode)
async def test_shared_noise_is_asked_for_once_at_each_position(service: Service, mode: Mode) -> None:
    with recording() as recorder:
        await three_turns(service, f"shared {mode}", rule=Rule.SHARED_NOISE, mode=mode)
    expected: list[int] = []
    for prompt in PROMPTS:
        start = (expected[-1] + 1 if expected else 0) + len(prompt)
        expected += range(start, start + LENGTH)
    raced = recorder.by(service.target_thread)
    assert [*dict.fromkeys(raced)] == [Asked(SEED, 0, i, Purpose.SHARED) for i in expected]
    # What was drawn and not committed when the client left is drawn again, and is the same again.
    assert len(raced) - len(expected) < LENGTH


PARAMETERS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "min_tokens": {"min_tokens": 7, "stop_token_ids": [*range(16)]},
}


@pytest.mark.parametrize("rule", [Rule.GREEDY, Rule.SHARED_NOISE])
@pytest.mark.parametrize("name", PARAMETERS)
async def test_parameters_count_from_the_turn_s_own_output(service: Service, name: str, rule: Rule) -> None:
    """Each turn's tokens are those of the target's own functions on the whole text before it."""
    options = PARAMETERS[name]
    sampling = Sampling(
        temperature=0.0 if rule is Rule.GREEDY else 0.8,
        seed=SEED,
        repetition_penalty=options.get("repetition_penalty", 1.0),
        presence_penalty=options.get("presence_penalty", 0.0),
        frequency_penalty=options.get("frequency_penalty", 0.0),
    )
    min_tokens, ending = options.get("min_tokens", 0), frozenset(options.get("stop_token_ids", []))
    text: list[int] = []
    told_apart = 0
    for prompt in PROMPTS:
        result = await service.client.generate(
            prompt,
            temperature=sampling.temperature,
            seed=SEED,
            drafter="fair",
            session_id=f"{name} {rule}",
            max_tokens=LENGTH,
            **options,
        ).result()
        text += prompt

        def spoken(start: int, text: list[int], count: int) -> list[int]:
            drawing = Drawing(sampling, rule, Output(start, min_tokens, ending))
            return speak(service.target, service.drafters["fair"], drawing, text, 0, count).token_ids

        count = len(result.tokens)
        assert result.token_ids == spoken(len(text), text, count)
        assert count >= min_tokens
        if ending:
            assert [token in ending for token in result.token_ids].index(True) == count - 1
        told_apart += result.token_ids != spoken(len(prompt), text, count)
        text += result.token_ids
    # A wrong beginning of the output would have shown, but where only the session counts.
    assert told_apart >= (0 if name == "repetition" else 1)


@pytest.mark.parametrize("one_token_per_chunk", [False, True])
async def test_a_finished_request_is_said_again_from_every_offset(
    service: Service, one_token_per_chunk: bool
) -> None:
    options: dict[str, Any] = {
        "request_id": f"said {one_token_per_chunk}",
        "max_tokens": 12,
        "one_token_per_chunk": one_token_per_chunk,
    }
    whole = await service.client.generate(PROMPTS[0], **options).result()
    for offset in range(13):
        generation = service.client.generate(PROMPTS[0], resume_offset=offset, **options)
        place = offset
        async for chunk in generation:
            assert chunk.offset == place
            place += len(chunk.tokens)
        again = await generation.result()
        assert place == 12
        assert again.token_ids == whole.token_ids[offset:]
        assert [token.text_end for token in again.tokens] == [
            token.text_end for token in whole.tokens[offset:]
        ]
        assert again.text == whole.text[whole.tokens[offset - 1].text_end if offset else 0 :]
        assert again.finished == whole.finished
        assert again.started.seed == whole.started.seed
    with pytest.raises(InvalidRequestError, match="resume_offset is 13, expected at most 12"):
        await service.client.generate(PROMPTS[0], resume_offset=13, **options).result()


@pytest.mark.parametrize("rule", [Rule.GREEDY, Rule.SHARED_NOISE, Rule.BLOCK])
async def test_a_request_that_was_cut_off_goes_on_from_every_offset(service: Service, rule: Rule) -> None:
    """The client has what it was given, or less of it; the rest comes as if nothing had happened."""
    seed = None if rule is Rule.BLOCK else SEED
    options: dict[str, Any] = {"max_tokens": LENGTH, "drafter": "fair", "seed": seed}
    options |= {"temperature": 0.0} if rule is Rule.GREEDY else {"rule": rule}
    for offset in range(7):
        of_request = {"request_id": f"cut {rule} {offset}", **options}
        with recording() as recorder:
            received = await service.cut_off(PROMPTS[0], 6, **of_request)
            again = await service.again(PROMPTS[0], resume_offset=offset, **of_request)
        whole = received[:offset] + again.token_ids
        assert whole[: len(received)] == received
        assert len(whole) == LENGTH
        repeated = [token.origin is Origin.REPEATED for token in again.tokens]
        assert repeated == sorted(repeated, reverse=True)
        assert sum(repeated) >= len(received) - offset
        if seed is not None:
            assert whole == (await service.client.generate(PROMPTS[0], **options).result()).token_ids
        elif rule is Rule.BLOCK:
            drawn = recorder.by(service.target_thread)
            assert {asked.seed for asked in drawn} == {again.started.seed}
            assert len(set(drawn)) == len(drawn)


async def test_tenants_share_no_kv(service: Service) -> None:
    prompt = [place * 7 % 31 for place in range(300)]
    cached: dict[str, list[int]] = {}
    for tenant in "abab":
        result = await service.client.generate(prompt, tenant=tenant, max_tokens=2).result()
        cached.setdefault(tenant, []).append(result.started.cached_tokens)
    assert cached == {"a": [0, 256], "b": [0, 256]}
