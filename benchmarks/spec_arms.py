"""The ways of decoding that spec_bench.py compares: each answers a prompt, and says how it went."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from library import Asked, LibraryProcess  # benchmarks/library.py
from spec_table import Sample, Spent  # benchmarks/spec_table.py

from splitspec.client import AsyncClient, GenerateOptions, Result
from splitspec.types import Rule


@dataclass(frozen=True)
class Prompt:
    """What is answered. question: its id. max_tokens: fewer where the model ends its answer."""

    category: str
    question: int
    token_ids: Sequence[int]
    temperature: float
    max_tokens: int


class Arm(Protocol):
    """A way to decode."""

    name: str

    async def answer(self, prompt: Prompt) -> Sample: ...


class ServiceArm:
    """Our service. num_draft_tokens: None for the service's default, 0 for plain decoding."""

    def __init__(self, client: AsyncClient, name: str, num_draft_tokens: int | None) -> None:
        self.name = name
        self._client = client
        self._options = GenerateOptions(num_draft_tokens=num_draft_tokens)
        if num_draft_tokens != 0:
            self._options["drafter"] = name

    async def answer(self, prompt: Prompt) -> Sample:
        options = self._options.copy()
        options["tenant"] = f"{self.name}/{prompt.temperature:g}/{prompt.question}/{prompt.category}"
        options["temperature"], options["seed"] = prompt.temperature, prompt.question
        options["rule"] = Rule.BLOCK if prompt.temperature else None
        options["max_tokens"] = prompt.max_tokens
        started = time.perf_counter()
        generation = self._client.generate(prompt.token_ids, **options)
        result = await generation.result()
        return _sample(self.name, prompt, result, time.perf_counter() - started)


class LibraryArm:
    """One of the library's modes."""

    def __init__(self, process: LibraryProcess, mode: str) -> None:
        self.name = mode
        self._process = process

    async def answer(self, prompt: Prompt) -> Sample:
        asked = Asked(
            self.name, list(prompt.token_ids), prompt.temperature, prompt.question, prompt.max_tokens
        )
        answered = await self._process.ask(asked)
        return Sample(
            arm=self.name,
            temperature=prompt.temperature,
            category=prompt.category,
            question=prompt.question,
            token_ids=tuple(answered.token_ids),
            seconds=answered.seconds,
            rounds=answered.passes,
        )


def _sample(arm: str, prompt: Prompt, result: Result, seconds: float) -> Sample:
    acceptance, timings = result.finished.acceptance, result.finished.timings
    own_us = timings.draft_us + timings.target_us
    spent = Spent(
        draft=timings.draft_us / 1e6,
        target=timings.target_us / 1e6,
        overhead=(timings.total_us - timings.open_us - own_us) / 1e6,
        missed_rounds=acceptance.num_draft_missed_steps,
    )
    return Sample(
        arm=arm,
        temperature=prompt.temperature,
        category=prompt.category,
        question=prompt.question,
        token_ids=tuple(result.token_ids),
        seconds=seconds,
        rounds=acceptance.num_spec_steps + acceptance.num_plain_steps,
        proposals=acceptance.num_spec_steps,
        proposed_tokens=round(acceptance.mean_acceptance_length * acceptance.num_spec_steps),
        spent=spent,
    )
