"""In bfloat16 too: the same tokens for every K, alone and beside others (fault 21, its cause removed)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient
from splitspec.engine.linear import has_tile_registers
from tests.integration.conftest import PATIENT
from tests.integration.prompts import ALL, SHORT

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(1500)]

KINDS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "seed": 5}}


@pytest.mark.parametrize(
    ("prompts", "max_tokens"),
    [(SHORT[:2], 16), pytest.param(ALL, 128, marks=pytest.mark.full)],
    ids=["few", "all"],
)
async def test_tokens_are_identical_for_every_k_alone_and_side_by_side(
    demo_model: Path, prompts: tuple[str, ...], max_tokens: int
) -> None:
    async with (
        Stack(
            model=str(demo_model),
            drafters=["lookup", f"layer_skip={demo_model}"],
            dtype="bfloat16",
            coordinator_args=PATIENT,
        ) as stack,
        AsyncClient(stack.address) as client,
    ):
        (model,) = (await client.describe()).models
        if not model.deterministic:
            pytest.skip("in bfloat16 this processor's sums depend on the number of keys: nothing is promised")

        async def tokens(prompt: str, kind: str, k: int, drafter: str) -> list[int]:
            result = await client.generate(
                prompt,
                max_tokens=max_tokens,
                ignore_eos=True,
                num_draft_tokens=k,
                drafter=drafter,
                **KINDS[kind],
            ).result()
            return result.token_ids

        cases = [(prompt, kind) for prompt in prompts for kind in KINDS]
        alone = {case: await tokens(*case, 0, "") for case in cases}
        for k, drafter in ((3, "layer_skip"), (7, "lookup")):
            for case in cases:
                assert await tokens(*case, k, drafter) == alone[case], (case, k)
        mixed = [(case, k) for k in (0, 3, 7) for case in cases]
        results = await asyncio.gather(*(tokens(*case, k, "lookup") for case, k in mixed))
        for (case, k), found in zip(mixed, results, strict=True):
            assert found == alone[case], (case, k)


async def test_the_setting_can_be_switched_off(tiny_model: Path) -> None:
    """Then nothing is promised where large products take other kernels."""
    async with (
        Stack(
            model=tiny_model,
            drafters=[],
            dtype="bfloat16",
            target_args=["--deterministic=false"],
        ) as stack,
        AsyncClient(stack.address) as client,
    ):
        (model,) = (await client.describe()).models
        assert not (model.deterministic and has_tile_registers())
