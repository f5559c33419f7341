"""Greedy text through the service is the library's own, token for token, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient
from splitspec.vocabulary import Vocabulary
from tests.integration.prompts import ALL

NEW_TOKENS = 64
#: One short, one in Japanese with characters of several tokens, one long.
FEW = (0, 7, 8)
CASES = [
    (0, "lookup"),
    (4, "layer_skip"),
    (8, "model"),
    (4, "hybrid"),
    (8, "eagle"),
    *(
        pytest.param(k, drafter, marks=pytest.mark.full)
        for k, drafter in (
            *((1, "lookup"), (4, "lookup"), (8, "lookup"), (4, "suffix")),
            *((1, "layer_skip"), (8, "layer_skip"), (1, "model"), (4, "model"), (4, "eagle")),
        )
    ),
]

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(1800)]

Reference = Callable[[int], tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def reference(demo_model: Path) -> Reference:
    """Prompt ids, and the 64 tokens that the library's `generate` continues them with."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    known: dict[int, tuple[list[int], list[int]]] = {}

    def of(index: int) -> tuple[list[int], list[int]]:
        if index not in known:
            chat = [{"role": "user", "content": ALL[index]}]
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            prompt: list[int] = tokenizer.encode(str(text), add_special_tokens=False)
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                output = model.generate(
                    ids,
                    # Without it the library takes the prompt's end-of-turn tokens for padding.
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=NEW_TOKENS,
                    do_sample=False,
                    pad_token_id=2,
                )
            known[index] = (prompt, output[0, len(prompt) :].tolist())
        return known[index]

    return of


async def check(stack: Stack, reference: Reference, index: int, num_draft_tokens: int, drafter: str) -> None:
    prompt, expected = reference(index)
    async with AsyncClient(stack.address) as client:
        result = await client.generate(
            prompt,
            temperature=0,
            max_tokens=NEW_TOKENS,
            ignore_eos=True,
            num_draft_tokens=num_draft_tokens,
            drafter=drafter,
        ).result()
    assert result.token_ids == expected
    acceptance = result.finished.acceptance
    if num_draft_tokens == 0:
        assert acceptance.num_spec_steps == 0
    elif drafter not in ("lookup", "suffix"):  # which propose only what they have seen
        assert acceptance.num_spec_steps > 0
        assert acceptance.num_draft_missed_steps == 0
    if num_draft_tokens and drafter == "model":
        # The draft model is the target: only near ties of its passes of another shape are rejected.
        assert acceptance.draft_acceptance_rate > 0.9


@pytest.mark.parametrize(("num_draft_tokens", "drafter"), CASES)
async def test_greedy_equals_generate(
    stack: Stack, reference: Reference, num_draft_tokens: int, drafter: str
) -> None:
    for index in FEW if drafter != "layer_skip" else FEW[:2]:
        await check(stack, reference, index, num_draft_tokens, drafter)


@pytest.mark.full
@pytest.mark.parametrize(("num_draft_tokens", "drafter"), CASES)
async def test_greedy_equals_generate_for_all_prompts(
    stack: Stack, reference: Reference, num_draft_tokens: int, drafter: str
) -> None:
    for index in range(len(ALL)):
        await check(stack, reference, index, num_draft_tokens, drafter)


async def test_two_prompts_are_long(demo_model: Path) -> None:
    tokenizer = Vocabulary.load(demo_model).tokenizer
    assert sum(len(tokenizer.encode(prompt).ids) > 1000 for prompt in ALL) == 2
