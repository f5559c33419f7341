"""Sessions of a target model in this process, drafted by prompt lookup: the workers' code, but no wire."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from draft_worker.drafters.lookup import LookupDrafter
from draft_worker.drawing import DraftCounterNoise
from splitspec.engine.causal_lm import CausalLM
from splitspec.engine.scheduler import Scheduler, Timer, run_alone
from splitspec.tokens import TokenLog
from splitspec.types import Drawing, Output, Rule, Sampling
from splitspec.wire import Draft
from target_worker.verifier import take_over, verify

#: Two kinds of requests whose text doesn't depend on K when passes are deterministic.
KINDS = {
    "greedy": (Sampling(temperature=0.0, seed=5), Rule.GREEDY),
    "shared noise": (Sampling(temperature=0.8, seed=5), Rule.SHARED_NOISE),
}


@dataclass(frozen=True)
class Request:
    """num_tokens more tokens behind the prompt's, with up to `k` draft tokens in each round."""

    prompt: tuple[int, ...]
    kind: str
    k: int
    num_tokens: int


def run(model: CausalLM, requests: Sequence[Request]) -> tuple[list[list[int]], float]:
    """The tokens of each, all at once, and the seconds of their rounds; prompts are fed before."""
    scheduler = Scheduler(max_positions=512)
    try:
        return asyncio.run(_all(model, scheduler, requests))
    finally:
        scheduler.close()


async def _all(
    model: CausalLM, scheduler: Scheduler, requests: Sequence[Request]
) -> tuple[list[list[int]], float]:
    kvs = [model.new_kv() for _ in requests]
    for kv, request in zip(kvs, requests, strict=True):
        await scheduler.run(take_over(model, kv, TokenLog(request.prompt)), Timer())
    started = time.perf_counter()

    async def one(index: int) -> list[int]:
        request, kv = requests[index], kvs[index]
        sampling, rule = KINDS[request.kind]
        drawing = Drawing(sampling, rule, Output(len(request.prompt)))
        tokens, end = TokenLog(request.prompt), len(request.prompt) + request.num_tokens
        drafter, round_number = LookupDrafter("lookup", 4, 1), 0
        state = drafter.open()
        while len(tokens) < end:
            round_number += 1
            k, draft = min(request.k, end - len(tokens) - 1), Draft.certain(())
            if k:
                noise = DraftCounterNoise(drawing.seed, round_number)
                draft = run_alone(drafter.propose(state, tokens, k, drawing, noise))
            steps = verify(model, kv, tokens, draft, drawing, round_number, Timer())
            tokens.extend((await scheduler.run(steps, Timer())).committed)
        return list(tokens)[len(request.prompt) :]

    texts = await asyncio.gather(*(one(index) for index in range(len(requests))))
    took = time.perf_counter() - started
    for kv in kvs:
        kv.free()
    return texts, took


def identical(model: CausalLM, texts: Sequence[tuple[int, ...]], num_tokens: int) -> dict[str, int]:
    """How many texts are those of K = 0 alone, of how many: each kind with K of 3 and 7 alone, and with 0, 3
    and 7 in one batch of all of them."""
    cases = [(text, kind) for text in texts for kind in KINDS]
    alone = {case: run(model, [Request(*case, 0, num_tokens)])[0][0] for case in cases}
    mixed = [Request(*case, k, num_tokens) for case in cases for k in (0, 3, 7)]
    drafted = [request for request in mixed if request.k]
    results = [run(model, [request])[0][0] for request in drafted] + run(model, mixed)[0]
    same = [
        result == alone[request.prompt, request.kind]
        for request, result in zip([*drafted, *mixed], results, strict=True)
    ]
    return {"identical": sum(same), "compared": len(same)}
