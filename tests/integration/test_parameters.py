"""Parameters through the whole service: a seed gives one output, however it is speculated or interrupted."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient, FinishReason, GenerateOptions, Origin, Result, Rule
from splitspec.engine.causal_lm import CausalLM
from splitspec.errors import InvalidRequestError, SessionBusyError
from tests.integration.conftest import tiny_stack

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

PROMPT = list(range(700, 730))
COUNT = 40
#: Narrow enough that tokens come again, so that penalties have something to do.
NARROW = frozenset(range(1000, 1040))
PARAMETERS: dict[str, GenerateOptions] = {
    "temperature": {"temperature": 0.7},
    "top": {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": {
        "allowed_token_ids": sorted(NARROW),
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
    },
    "ids": {
        "allowed_token_ids": sorted(NARROW),
        "banned_token_ids": [1003, 1004],
        "logit_bias": {1005: 3.0, 1006: -3.0},
        "temperature": 2.0,
    },
    "greedy with penalties": {
        "temperature": 0.0,
        "allowed_token_ids": sorted(NARROW),
        "presence_penalty": 1.0,
        "frequency_penalty": 0.8,
    },
}


async def generate(client: AsyncClient, **options: Any) -> Result:
    whole: GenerateOptions = {"max_tokens": COUNT, "ignore_eos": True, **options}  # type: ignore[typeddict-item]
    return await client.generate(PROMPT, **whole).result()


@pytest.mark.parametrize("name", PARAMETERS)
async def test_one_output_for_every_k_and_drafter(tiny: Stack, name: str) -> None:
    options = PARAMETERS[name]
    async with AsyncClient(tiny.address) as client:
        plain = await generate(client, seed=5, speculate=False, **options)
        accepted = 0
        for drafter, k in itertools.product(("model", "lookup"), (1, 3, 8)):
            result = await generate(client, seed=5, num_draft_tokens=k, drafter=drafter, **options)
            assert result.token_ids == plain.token_ids, (drafter, k)
            assert result.finished.rule is (Rule.GREEDY if "greedy" in name else Rule.SHARED_NOISE)
            accepted += result.finished.acceptance.num_accepted_draft_tokens
        # The draft is the target itself, so its draws are nearly always the same.
        assert accepted > COUNT
        if "greedy" not in name:
            other = await generate(client, seed=6, **options)
            assert other.token_ids != plain.token_ids


async def test_what_the_parameters_forbid_never_comes(tiny: Stack) -> None:
    async with AsyncClient(tiny.address) as client:
        for rule in (Rule.TOKEN, Rule.BLOCK, Rule.SHARED_NOISE):
            ids = Counter[int]()
            for seed in range(5):
                result = await generate(client, seed=seed, rule=rule, **PARAMETERS["ids"])
                assert result.finished.acceptance.num_accepted_draft_tokens > 0
                ids.update(result.token_ids)
            assert set(ids) <= NARROW - {1003, 1004}
            assert ids[1005] > 10 > ids[1006]


async def test_min_tokens_holds_off_every_end(tiny: Stack) -> None:
    """End-of-sequence and a stop id are the likeliest of three, so that the output ends as soon as it may."""
    options: dict[str, Any] = {
        "allowed_token_ids": [2, 1000, 1001],
        "logit_bias": {2: 100.0},
        "stop_token_ids": [1001],
    }
    async with AsyncClient(tiny.address) as client:
        for rule, k in itertools.product((Rule.TOKEN, Rule.BLOCK, Rule.SHARED_NOISE, Rule.GREEDY), (0, 1, 4)):
            result = await client.generate(
                PROMPT,
                max_tokens=COUNT,
                min_tokens=9,
                seed=1,
                rule=rule,
                temperature=0.0 if rule is Rule.GREEDY else 1.0,
                num_draft_tokens=k,
                **options,
            ).result()
            assert result.token_ids == [1000] * 9 + [2]
            assert result.finished.reason is FinishReason.EOS


async def test_a_killed_draft_worker_changes_no_token_of_a_seed(tiny_model: Path) -> None:
    async with tiny_stack(tiny_model) as stack, AsyncClient(stack.address) as client:
        expected = await generate(client, seed=11, max_tokens=200, speculate=False)
        generation = client.generate(PROMPT, seed=11, max_tokens=200, ignore_eos=True)
        origins: list[Origin] = []
        async for chunk in generation:
            origins += [token.origin for token in chunk.tokens]
            if Origin.ACCEPTED in origins and Origin.PLAIN in origins[:1] and len(origins) < 50:
                await stack.draft.kill()
        result = await generation.result()
        assert result.token_ids == expected.token_ids
        assert {Origin.ACCEPTED, Origin.PLAIN} <= set(origins)
        assert origins[-1] is Origin.PLAIN


@pytest.mark.parametrize("seed", [None, 12])
async def test_a_retried_request_goes_on_with_its_noise(tiny: Stack, seed: int | None) -> None:
    """Unseeded too: the seed that was drawn is stored before the first round."""
    async with AsyncClient(tiny.address) as client:
        options: dict[str, Any] = {"max_tokens": 80, "ignore_eos": True, "seed": seed}
        request_id = f"retried-{seed}"
        first = client.generate(PROMPT, request_id=request_id, **options)
        received: list[int] = []
        while len(received) < 20:
            chunk = await first.read()
            assert chunk is not None
            received += [token.id for token in chunk.tokens]
        await first.aclose()
        while True:  # until its coordinator has left the session
            try:
                again = await client.generate(PROMPT, request_id=request_id, **options).result()
                break
            except SessionBusyError:
                await asyncio.sleep(0.05)
        assert again.token_ids[: len(received)] == received
        assert again.started.seed == first.started.seed
        assert again.tokens[0].origin is Origin.REPEATED
        if seed is not None:
            fresh = await generate(client, speculate=False, **options)
            assert fresh.token_ids == again.token_ids


async def test_requests_side_by_side_are_as_if_alone(tiny: Stack) -> None:
    """Fault 1: seeded, unseeded and greedy requests in every order of a batch."""
    kinds: dict[str, GenerateOptions] = {
        "seeded": {"seed": 21},
        "another seed": {"seed": 22},
        "block with a seed": {"seed": 21, "rule": Rule.BLOCK},
        "greedy": {"temperature": 0.0},
        "unseeded": {},
        "unseeded again": {},
    }
    fixed = [name for name in kinds if "unseeded" not in name]
    async with AsyncClient(tiny.address) as client:
        alone = {name: (await generate(client, max_tokens=20, **kinds[name])).token_ids for name in fixed}
        assert len({tuple(ids) for ids in alone.values()}) == len(fixed)
        orders = [*itertools.permutations(kinds)]
        unseeded: set[tuple[int, ...]] = set()
        for order in random.Random(1).sample(orders, 15):
            results = await asyncio.gather(
                *(generate(client, max_tokens=20, **kinds[name]) for name in order)
            )
            for name, result in zip(order, results, strict=True):
                if name in fixed:
                    assert result.token_ids == alone[name], order
                else:
                    unseeded.add(tuple(result.token_ids))
        assert len(unseeded) == 2 * 15


async def test_logprobs_are_the_target_s_at_every_position(tiny: Stack, tiny_model: Path) -> None:
    """Fault 9: whatever a token's origin, by one pass of the model over the whole text."""
    model = CausalLM.load(tiny_model, name="tiny", dtype="float32", device="cpu")
    async with AsyncClient(tiny.address) as client:
        for rule in (Rule.TOKEN, Rule.BLOCK, Rule.SHARED_NOISE):
            result = await generate(client, seed=3, rule=rule, temperature=0.8, top_k=30, logprobs=4)
            ids = result.token_ids
            rows = model.forward(model.new_kv(), [*PROMPT, *ids[:-1]], len(ids)).double()
            raw = torch.log_softmax(rows, dim=1)
            assert {token.origin for token in result.tokens} > {Origin.ACCEPTED}
            for token, row, scaled in zip(result.tokens, raw, rows / 0.8, strict=True):
                assert token.logprobs is not None
                assert token.logprobs.raw == pytest.approx(float(row[token.id]), abs=1e-4)
                values, best = torch.topk(row, 4)
                assert [top.id for top in token.logprobs.top_raw] == best.tolist()
                assert [top.logprob for top in token.logprobs.top_raw] == pytest.approx(
                    values.tolist(), abs=1e-4
                )
                kept = torch.topk(scaled, 30)
                processed = dict(
                    zip(kept.indices.tolist(), torch.log_softmax(kept.values, dim=0).tolist(), strict=True)
                )
                assert token.logprobs.processed == pytest.approx(processed[token.id], abs=1e-4)
                for top in token.logprobs.top_processed:
                    assert top.logprob == pytest.approx(processed[top.id], abs=1e-4)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"allowed_token_ids": [49152]}, "sampling.allowed_token_ids"),
        ({"logit_bias": {50000: 1.0}}, "sampling.logit_bias"),
        ({"banned_token_ids": [2**32 - 1]}, "sampling.banned_token_ids"),
        ({"allowed_token_ids": [2], "ignore_eos": False, "min_tokens": 1}, "sampling.allowed_token_ids"),
        ({"rule": Rule.GREEDY}, "speculation.rule"),
        ({"rule": Rule.TREE_TOP_M}, "speculation.rule"),
    ],
)
async def test_what_leaves_nothing_or_is_unknown_is_refused(
    tiny: Stack, options: dict[str, Any], field: str
) -> None:
    async with AsyncClient(tiny.address) as client:
        with pytest.raises(InvalidRequestError) as caught:
            await generate(client, **options)
        assert caught.value.field == field


async def test_a_rule_at_temperature_0_says_why_it_was_greedy(tiny: Stack) -> None:
    async with AsyncClient(tiny.address) as client:
        finished = (await generate(client, temperature=0.0, rule=Rule.BLOCK)).finished
    assert (finished.rule, finished.requested_rule) == (Rule.GREEDY, Rule.BLOCK)
    assert "temperature 0" in finished.rule_reason
