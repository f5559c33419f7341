"""What the whole service says: text, tokens, and that both are those of its own functions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from draft_worker.drafters import DrafterSpec, Loading, build_drafter
from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient
from splitspec.engine.causal_lm import CausalLM
from splitspec.types import Drawing, Origin, Output, Rule, Sampling
from tests.integration.functions import speak

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session")]

PROMPT = "Emoji 🦊👩‍🚀 and 日本語, é and e\u0301:"


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
async def test_text_does_not_depend_on_chunks(tiny: Stack, tiny_model: Path, num_draft_tokens: int) -> None:
    # A random model's text is full of bytes that are no character, and of characters of several tokens.
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    whole = []
    async with AsyncClient(tiny.address) as client:
        for one_each in (False, True):
            generation = client.generate(
                PROMPT,
                temperature=0,
                max_tokens=300,
                ignore_eos=True,
                num_draft_tokens=num_draft_tokens,
                one_token_per_chunk=one_each,
            )
            chunks = [chunk async for chunk in generation]
            result = await generation.result()
            whole.append((result.token_ids, result.text))
            assert "".join(chunk.text for chunk in chunks) == tokenizer.decode(result.token_ids)
            assert result.tokens[-1].text_end == len(result.text)
            for chunk in chunks:
                assert result.text[: chunk.tokens[-1].text_end].endswith(chunk.text)
            if one_each:
                assert all(len(chunk.tokens) == 1 for chunk in chunks)
    assert whole[0] == whole[1]
    assert "\ufffd" in whole[0][1]


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK, Rule.SHARED_NOISE])
@pytest.mark.parametrize("drafter", ["model", "lookup"])
async def test_sampled_tokens_are_those_of_the_functions(
    tiny: Stack, tiny_model: Path, drafter: str, rule: Rule
) -> None:
    sampling = Sampling(temperature=0.8, top_k=50, top_p=0.95, presence_penalty=0.5, seed=1234)
    prompt, k, count = list(range(500, 540)), 3, 120
    drawing = Drawing(sampling, rule, Output(len(prompt)))
    async with AsyncClient(tiny.address) as client:
        result = await client.generate(
            prompt,
            temperature=0.8,
            top_k=50,
            top_p=0.95,
            presence_penalty=0.5,
            seed=1234,
            rule=rule,
            max_tokens=count,
            ignore_eos=True,
            num_draft_tokens=k,
            drafter=drafter,
        ).result()
    target = CausalLM.load(tiny_model, name="tiny", dtype="float32", device="cpu")
    spec = "lookup" if drafter == "lookup" else f"model={tiny_model}"
    drafting = build_drafter(DrafterSpec.parse(spec), Loading("float32", "cpu"))
    spoken = speak(target, drafting, drawing, prompt, k, count)
    assert result.token_ids == spoken.token_ids
    assert result.finished.acceptance.num_accepted_draft_tokens == spoken.num_accepted
    assert drafter == "lookup" or spoken.num_accepted > count / 2
    assert (result.finished.rule, result.finished.rule_reason) == (rule, "")


async def test_origins_are_those_of_the_counts(tiny: Stack) -> None:
    async with AsyncClient(tiny.address) as client:
        result = await client.generate(
            PROMPT, temperature=1.0, seed=5, max_tokens=100, ignore_eos=True
        ).result()
    origins = [token.origin for token in result.tokens]
    acceptance = result.finished.acceptance
    assert origins.count(Origin.ACCEPTED) == acceptance.num_accepted_draft_tokens
    assert origins.count(Origin.PLAIN) == acceptance.num_plain_steps
    assert origins.count(Origin.CORRECTION) + origins.count(Origin.BONUS) == acceptance.num_spec_steps
    assert sum(acceptance.acceptance_histogram) == acceptance.num_spec_steps
    assert result.finished.usage.completion_tokens == len(origins) == 100


def grpcurl(*arguments: str) -> str:
    program = Path(sys.executable).with_name("grpcurl")
    command = [str(program), "-plaintext", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


async def test_grpcurl_needs_no_protos(tiny: Stack) -> None:
    assert "splitspec.v1.CoordinatorService" in grpcurl(tiny.address, "list").split()
    # The line of the README.
    readme = Path(__file__).parents[2].joinpath("README.md").read_text()
    request = readme.partition("grpcurl -plaintext -d '")[2].partition("'")[0]
    answer = grpcurl("-d", request, tiny.address, "splitspec.v1.CoordinatorService/Generate")
    decoder, events = json.JSONDecoder(), []
    while answer.strip():
        event, end = decoder.raw_decode(answer.lstrip())
        events.append(event)
        answer = answer.lstrip()[end:]
    assert "started" in events[0]
    assert 1 <= int(events[-1]["finished"]["usage"]["completion_tokens"]) <= 40
