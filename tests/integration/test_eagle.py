"""EAGLE drafts through the whole service: features from the target's passes, chains and trees back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient, Mode
from tests.draft_worker import eagles
from tests.integration.conftest import PATIENT

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

#: Of 20 tokens each.
PROMPTS = [list(range(start, start + 20)) for start in (1000, 2000, 3000)]
TREES = ("chain", "static", "dynamic")
PREFETCH = (Mode.PREFETCH_PULL, Mode.PREFETCH_PUSH)
LENGTH = 24


@pytest.fixture(scope="module")
def said(tiny_model: Path) -> list[int]:
    """What the tiny model says in greedy decoding: a draft that knows these ids alone is sometimes right."""
    library = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    found: set[int] = set()
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = library.generate(
                ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=2
            )
        found.update(output[0, len(prompt) :].tolist())
    return sorted(found)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(
    tiny_model: Path, said: list[int], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    """With a random draft in each form, always waited for."""
    directory = tmp_path_factory.mktemp("eagle") / "draft"
    eagles.checkpoint(directory, tiny_model, hidden_size=64, layers=(1, 2), ids=said)
    spec = f"eagle={directory},target={tiny_model},depth=4,width=4"
    async with Stack(
        model=tiny_model,
        drafters=[
            *(f"{spec},tree={tree},name={tree}" for tree in TREES),
            f"hybrid,min_match=3,drafter={spec},tree=dynamic",
        ],
        coordinator_args=PATIENT,
    ) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def client(stack: Stack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(stack.address) as connected:
        yield connected


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("seed", [None, 5], ids=["greedy", "seeded"])
async def test_text_is_that_of_plain_decoding(
    client: AsyncClient, said: list[int], tree: str, seed: int | None
) -> None:
    """Side by side, so that sessions draft in lock step; and some draft tokens are accepted."""

    async def generate(prompt: list[int], speculate: bool) -> tuple[list[int], int, int]:
        result = await client.generate(
            prompt,
            temperature=0.0 if seed is None else 1.0,
            allowed_token_ids=[] if seed is None else said,
            seed=seed,
            max_tokens=LENGTH,
            ignore_eos=True,
            speculate=speculate,
            num_draft_tokens=8,
            drafter=tree,
        ).result()
        acceptance = result.finished.acceptance
        return result.token_ids, acceptance.num_spec_steps, acceptance.num_accepted_draft_tokens

    plain = [(await generate(prompt, False))[0] for prompt in PROMPTS]
    drafted = await asyncio.gather(*(generate(prompt, True) for prompt in PROMPTS))
    assert [tokens for tokens, _, _ in drafted] == plain
    assert all(steps for _, steps, _ in drafted)
    assert sum(accepted for _, _, accepted in drafted) > 0


@pytest.mark.parametrize("mode", PREFETCH)
@pytest.mark.parametrize("seed", [None, 5], ids=["greedy", "seeded"])
async def test_prefetched_text_is_that_of_plain_decoding(
    client: AsyncClient, said: list[int], mode: Mode, seed: int | None
) -> None:
    """Some rounds are those that were drafted ahead, before the target's features of their text came."""

    async def generate(prompt: list[int], mode: Mode, drafter: str) -> tuple[list[int], int]:
        result = await client.generate(
            prompt,
            temperature=0.0 if seed is None else 1.0,
            # Few, so that what is prepared for comes now and then.
            allowed_token_ids=said[:3],
            seed=seed,
            max_tokens=LENGTH,
            ignore_eos=True,
            speculate=mode is not Mode.PLAIN,
            mode=mode,
            num_draft_tokens=4,
            drafter=drafter,
        ).result()
        return result.token_ids, result.finished.acceptance.num_ahead_steps

    plain = [(await generate(prompt, Mode.PLAIN, TREES[0]))[0] for prompt in PROMPTS]
    ahead = 0
    while not ahead:  # a draft has to be ready when its parent's verdict comes
        for drafter in (*TREES, "hybrid"):
            drafted = await asyncio.gather(*(generate(prompt, mode, drafter) for prompt in PROMPTS))
            assert [tokens for tokens, _ in drafted] == plain, drafter
            ahead += sum(num_ahead_steps for _, num_ahead_steps in drafted)


@pytest.mark.parametrize("tree", TREES)
async def test_a_conversation(client: AsyncClient, tree: str) -> None:
    """Later turns draft from features of the new tokens alone."""
    for turn, prompt in enumerate(PROMPTS):
        answers = []
        for session, speculate in ((f"plain {tree}", False), (f"drafted {tree}", True)):
            result = await client.generate(
                prompt,
                session_id=session,
                temperature=0.0,
                max_tokens=8,
                ignore_eos=True,
                speculate=speculate,
                num_draft_tokens=4,
                drafter=tree,
            ).result()
            answers.append(result.token_ids)
        assert answers[0] == answers[1]
        assert result.finished.acceptance.num_spec_steps > 0, turn
    for session in (f"plain {tree}", f"drafted {tree}"):
        assert await client.close_session(session)


@pytest.mark.parametrize("tree", TREES)
async def test_without_a_seed(client: AsyncClient, said: list[int], tree: str) -> None:
    """Drawn children and certain ones are verified by the rules of trees, and none is lost on the way."""
    result = await client.generate(
        PROMPTS[0],
        temperature=1.0,
        allowed_token_ids=said[:4],
        max_tokens=64,
        ignore_eos=True,
        num_draft_tokens=6,
        drafter=tree,
    ).result()
    acceptance = result.finished.acceptance
    assert set(result.token_ids) <= set(said[:4])
    assert acceptance.num_accepted_draft_tokens > 0
    assert acceptance.num_one_hot_tokens == 0
