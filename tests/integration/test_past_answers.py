"""Past answers of a tenant are proposed to its own requests, and to nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient
from splitspec.types import Rule
from tests.integration.conftest import PATIENT, settle_empty

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

NEW_TOKENS = 40


async def test_past_answers_serve_their_own_tenant(tiny_model: Path) -> None:
    """A random model repeats nothing, so that what is accepted comes from an answer to the same request."""
    async with (
        Stack(model=tiny_model, drafters=["suffix,past_answers=5000"], coordinator_args=PATIENT) as stack,
        AsyncClient(stack.address) as client,
    ):

        async def ask(tenant: str, rule: Rule) -> tuple[list[int], int]:
            """The answer, and how many of its tokens were proposed."""
            result = await client.generate(
                [11, 12, 13, 14],
                temperature=1.0,
                seed=5,
                rule=rule,
                max_tokens=NEW_TOKENS,
                ignore_eos=True,
                num_draft_tokens=8,
                drafter="suffix",
                tenant=tenant,
            ).result()
            await settle_empty(stack)
            return result.token_ids, result.finished.acceptance.num_accepted_draft_tokens

        answer, accepted = await ask("a", Rule.SHARED_NOISE)
        assert accepted < 5
        assert await ask("b", Rule.SHARED_NOISE) == (answer, accepted)
        again, accepted_again = await ask("a", Rule.SHARED_NOISE)
        assert again == answer
        assert accepted_again > NEW_TOKENS / 2
        # Drawn with its own seed: nothing that the block rule may be given.
        _, accepted_of_own_seed = await ask("a", Rule.BLOCK)
        assert accepted_of_own_seed < 5
