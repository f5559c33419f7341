"""One pass of the target over a proposal, and the rule's decision on it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from splitspec.engine.causal_lm import CausalLM
from splitspec.engine.kv import KV
from splitspec.model_thread import Timer
from splitspec.sampling.logprobs import Logprobs
from splitspec.sampling.randomness import CounterNoise
from splitspec.sampling.rows import ProcessedRows
from splitspec.types import Drawing, Rule
from splitspec.verification.outcome import Outcome
from splitspec.verification.rules import decide, rule_for
from splitspec.wire import Draft


@dataclass(frozen=True, slots=True)
class Verified:
    """A draft's outcome, by `rule`. committed: the accepted tokens and the next one.

    logprobs: of each of them, or none at all when they weren't asked for.
    """

    outcome: Outcome
    rule: Rule
    committed: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]


def verify(
    model: CausalLM,
    kv: KV,
    tokens: Sequence[int],
    draft: Draft,
    drawing: Drawing,
    round_number: int,
    timer: Timer,
) -> Verified:
    """Verify a draft on the committed tokens in one forward pass over K+1 positions; K = 0 is plain decoding.

    kv holds all committed tokens but the last, before and after: rejected tokens are rolled back.
    """
    base_length = len(tokens)
    logits = model.forward(kv, [tokens[-1], *draft.token_ids], num_rows=len(draft.token_ids) + 1)
    started = time.perf_counter()
    rows = ProcessedRows(logits, drawing, tokens, draft.paths)
    outcome = decide(drawing.rule, rows, draft, base_length, CounterNoise(drawing.seed, round_number))
    committed = (*(draft.token_ids[node] for node in outcome.path), outcome.next_token)
    logprobs: tuple[Logprobs, ...] = ()
    if drawing.sampling.logprobs is not None:
        visited = [0, *(node + 1 for node in outcome.path)]
        logprobs = tuple(rows.logprobs(row, token) for row, token in zip(visited, committed, strict=True))
    timer.sampling_s += time.perf_counter() - started
    model.truncate(kv, base_length + outcome.num_accepted)
    return Verified(outcome, rule_for(drawing.rule, draft), committed, logprobs)
