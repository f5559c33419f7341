"""Every mode of overlap on the demo model with its trained draft, near and far.

    .venv/bin/python benchmarks/modes.py [--quick] [--drafters SPEC ...]

Draft and target worker have one thread each, in bfloat16. The leg between coordinator and target goes through
a proxy (delay_proxy.py) that adds nothing, or half of the round trip in each direction. For each drafter, and
each mode that it has, the same questions are answered greedily, one at a time; a speed is tokens over the
time from the first chunk to the last, of all questions together. "controller" chooses mode and K itself; it
has answered one question before.

The last line is JSON: by round trip, the fastest fixed mode and the controller over plain decoding.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from common import machine, save_result  # benchmarks/common.py
from delay_proxy import DelayProxy, Leg  # benchmarks/delay_proxy.py
from paired import Work, tokens_per_second  # benchmarks/paired.py
from prompts import questions  # benchmarks/prompts.py

from protos.v1 import draft_pb2, draft_pb2_grpc
from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient, Message
from splitspec.client.request import GenerateOptions
from splitspec.models import fetch_demo_model
from splitspec.serving import channel
from splitspec.types import Mode

ROUND_TRIPS_MS = (0.0, 50.0)
CONTROLLER, PLAIN = "controller", "plain"
#: Draft tokens of fixed modes: nodes of a tree, or the length of a chain.
NUM_DRAFT_TOKENS = 6
#: Both workers on one machine: what is late is waited for, so that each mode is what it is.
FLAGS = ("--draft-patience=1000", "--draft-timeout-s=30")


@dataclass(frozen=True, slots=True)
class Run:
    """A drafter's answers in one mode. mean_acceptance_length: tokens of a round with a proposal."""

    round_trip_ms: float
    drafter: str
    mode: str
    tokens_per_s: float
    mean_acceptance_length: float
    ahead: float


@dataclass(eq=False)
class Bench:
    client: AsyncClient
    proxy: DelayProxy
    prompts: Sequence[Sequence[Message]]
    max_tokens: int

    async def run(self, drafter: str, mode: Mode | None) -> Run:
        """mode: None leaves mode and length to the controller."""
        options: GenerateOptions = {"temperature": 0, "max_tokens": self.max_tokens, "drafter": drafter}
        if mode is not None:
            options |= {"mode": mode, "num_draft_tokens": 0 if mode is Mode.PLAIN else NUM_DRAFT_TOKENS}
        works, rounds, tokens, ahead = [], 0, 0.0, 0
        for prompt in self.prompts:
            generation = self.client.generate(prompt, **options)
            arrivals = [(time.perf_counter(), len(chunk.tokens)) async for chunk in generation]
            works.append(Work(sum(n for _, n in arrivals[1:]), arrivals[-1][0] - arrivals[0][0]))
            stats = generation.finished.acceptance
            rounds += stats.num_spec_steps
            tokens += stats.num_spec_steps * stats.mean_acceptance_length
            ahead += stats.num_ahead_steps
        return Run(
            round_trip_ms=self.proxy.up.delay_ms * 2,
            drafter=drafter,
            mode=CONTROLLER if mode is None else mode.name.lower(),
            tokens_per_s=tokens_per_second(works),
            mean_acceptance_length=tokens / rounds if rounds else 1.0,
            ahead=ahead / rounds if rounds else 0.0,
        )


async def measure(drafters: Sequence[str], num_questions: int, max_tokens: int) -> list[Run]:
    prompts = [(Message("user", question.turns[0]),) for question in questions(1)[:num_questions]]
    runs = []
    async with DelayProxy() as proxy:
        stack = Stack(
            model=fetch_demo_model(),
            drafters=drafters,
            dtype="bfloat16",
            target_args=["--threads=1", f"--advertise={proxy.address}"],
            draft_args=["--threads=1"],
            coordinator_args=FLAGS,
        )
        async with stack, AsyncClient(stack.address) as client:
            proxy.upstream = stack.target.address
            bench = Bench(client, proxy, prompts, max_tokens)
            for round_trip_ms in ROUND_TRIPS_MS:
                proxy.up = proxy.down = Leg(delay_ms=round_trip_ms / 2)
                for name, modes in (await modes_of(stack.draft.address)).items():
                    await bench.run(name, None)
                    for mode in (*modes, None):
                        runs.append(await bench.run(name, mode))
                        print(row(runs[-1]), flush=True)
    return runs


async def modes_of(address: str) -> dict[str, list[Mode]]:
    """The modes of each drafter of a draft worker."""
    async with channel(address) as opened:
        stub = draft_pb2_grpc.DraftWorkerServiceStub(opened)
        found = await stub.Describe(draft_pb2.DraftWorkerServiceDescribeRequest())
    return {
        info.name: [Mode.PLAIN, Mode.SEQUENTIAL, *(Mode(mode) for mode in info.modes)]
        for info in found.drafters
    }


def row(run: Run) -> str:
    return (
        f"| {run.round_trip_ms:g} | {run.drafter} | {run.mode} | {run.tokens_per_s:.1f} "
        f"| {run.mean_acceptance_length:.2f} | {run.ahead:.2f} |"
    )


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    last: dict[str, Any] = {}
    for round_trip_ms in ROUND_TRIPS_MS:
        here = [run for run in runs if run.round_trip_ms == round_trip_ms]
        plain = max(run.tokens_per_s for run in here if run.mode == PLAIN)
        fixed = max((run for run in here if run.mode != CONTROLLER), key=lambda run: run.tokens_per_s)
        chosen = max(run.tokens_per_s for run in here if run.mode == CONTROLLER)
        last[f"{round_trip_ms:g} ms"] = {
            "best": f"{fixed.drafter} {fixed.mode}",
            "best_vs_plain": round(fixed.tokens_per_s / plain, 3),
            "controller_vs_plain": round(chosen / plain, 3),
        }
    return last


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two questions instead of six, shorter answers")
    parser.add_argument("--drafters", nargs="+", default=["eagle=demo", "hybrid,drafter=eagle=demo"])
    arguments = parser.parse_args()
    num_questions, max_tokens = (2, 24) if arguments.quick else (6, 64)
    print("| R ms | drafter | mode | tokens/s | mean acceptance length | ahead |\n|---|---|---|---|---|---|")
    runs = asyncio.run(measure(arguments.drafters, num_questions, max_tokens))
    last = summary(runs)
    kept = [asdict(run) for run in runs]
    save_result("modes", {"machine": machine(), "summary": last, "runs": kept}, quick=arguments.quick)
    print(json.dumps(last))


if __name__ == "__main__":
    main()
