"""The running service says what its functions say, id for id, over thousands of short sequences."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM

from draft_worker.drafters import DrafterSpec, Loading, build_drafter
from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient
from splitspec.engine.causal_lm import CausalLM
from splitspec.types import Drawing, Output, Rule, Sampling
from tests.integration.conftest import PATIENT
from tests.integration.functions import speak

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]

VOCABULARY_SIZE = 24
NUM_SEQUENCES = [1000, pytest.param(5000, marks=pytest.mark.full)]
AT_ONCE = 16


def save_model(directory: Path, seed: int) -> Path:
    """A random model over a few words; its passes take less than a millisecond."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        eos_token_id=0,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    words = {f"w{index}": index for index in range(VOCABULARY_SIZE)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize("num_sequences", NUM_SEQUENCES)
async def test_sequences(tmp_path: Path, num_sequences: int) -> None:
    target_model, draft_model = save_model(tmp_path / "target", 1), save_model(tmp_path / "draft", 2)
    target = CausalLM.load(target_model, name="target", dtype="float32", device="cpu")
    specs = ["lookup", "suffix", f"model={draft_model}", f"hybrid,drafter=model={draft_model}"]
    built = [build_drafter(DrafterSpec.parse(text), Loading("float32", "cpu")) for text in specs]
    drafters = {drafter.info.name: drafter for drafter in built}
    generator = random.Random(3)
    accepted: Counter[Rule] = Counter()

    async def check(client: AsyncClient, seed: int) -> None:
        rule = generator.choice([Rule.TOKEN, Rule.BLOCK, Rule.SHARED_NOISE])
        prompt = [generator.randrange(VOCABULARY_SIZE) for _ in range(generator.randrange(1, 5))]
        drafter, k, count = generator.choice([*drafters]), generator.randrange(5), generator.randrange(2, 8)
        sampling = Sampling(
            temperature=generator.choice([0.7, 1.0]),
            top_p=generator.choice([0.9, 1.0]),
            frequency_penalty=generator.choice([0.0, 0.5]),
            seed=seed,
        )
        result = await client.generate(
            prompt,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            frequency_penalty=sampling.frequency_penalty,
            seed=seed,
            rule=rule,
            max_tokens=count,
            ignore_eos=True,
            num_draft_tokens=k,
            drafter=drafter,
        ).result()
        drawing = Drawing(sampling, rule, Output(len(prompt)))
        spoken = speak(target, drafters[drafter], drawing, prompt, k, count)
        assert result.token_ids == spoken.token_ids, (drawing, prompt, drafter, k)
        assert result.finished.acceptance.num_accepted_draft_tokens == spoken.num_accepted
        accepted[rule] += spoken.num_accepted

    async with (
        Stack(
            model=str(target_model),
            drafters=specs,
            coordinator_args=PATIENT,
        ) as stack,
        AsyncClient(stack.address) as client,
    ):
        for first in range(0, num_sequences, AT_ONCE):
            seeds = range(first, min(first + AT_ONCE, num_sequences))
            await asyncio.gather(*(check(client, seed) for seed in seeds))
    # Each rule had its share of accepted tokens, so that agreeing on them says something.
    assert min(accepted[rule] for rule in (Rule.TOKEN, Rule.BLOCK, Rule.SHARED_NOISE)) > num_sequences / 12, (
        accepted
    )
