"""One pass of the target over a proposal, and the rule's decision on it."""

from __future__ import annotations

import time

from splitspec.engine.causal_lm import CausalLM
from splitspec.engine.kv import KV
from splitspec.model_thread import Timer
from splitspec.sampling.distribution import probabilities
from splitspec.sampling.randomness import CounterNoise
from splitspec.types import Rule, Sampling
from splitspec.verification.greedy import verify_greedy
from splitspec.verification.outcome import Outcome
from splitspec.verification.token import verify_token
from splitspec.wire import Draft


def verify(
    model: CausalLM,
    kv: KV,
    last_token: int,
    draft: Draft,
    sampling: Sampling,
    rule: Rule,
    round_number: int,
    timer: Timer,
) -> Outcome:
    """Verify a draft in one forward pass over K+1 positions; K = 0 is plain decoding.

    kv holds all committed tokens but the last, before and after: rejected tokens are rolled back.
    """
    committed = kv.length + 1
    logits = model.forward(kv, [last_token, *draft.token_ids], num_rows=len(draft.token_ids) + 1)
    started = time.perf_counter()
    if rule is Rule.GREEDY:
        outcome = verify_greedy(logits, draft.token_ids)
    else:
        assert sampling.seed is not None
        p = probabilities(logits, sampling)
        outcome = verify_token(
            p, draft.token_ids, draft.distributions, CounterNoise(sampling.seed, round_number)
        )
    timer.sampling_s += time.perf_counter() - started
    model.truncate(kv, committed + outcome.num_accepted)
    return outcome
