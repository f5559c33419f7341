"""What the service's own functions say, called one after another in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draft_worker.drafters.base import Drafter
from draft_worker.drawing import DraftCounterNoise
from splitspec.engine.paged import PagedLM
from splitspec.engine.scheduler import Timer, run_alone
from splitspec.tokens import TokenLog
from splitspec.types import Drawing
from splitspec.wire import Draft
from target_worker.verifier import verify


@dataclass(frozen=True)
class Spoken:
    token_ids: list[int]
    num_accepted: int


def speak(
    target: PagedLM, drafter: Drafter, drawing: Drawing, prompt: Sequence[int], k: int, count: int
) -> Spoken:
    """`count` tokens by the rounds of a request in a session of its own, a draft worker at hand."""
    tokens, kv, state = TokenLog(prompt), target.new_kv(), drafter.open()
    if len(prompt) > 1:
        target.forward(kv, prompt[:-1], 0)
    round_number = accepted = 0
    while (remaining := len(prompt) + count - len(tokens)) > 0:
        draft = Draft.certain(())
        if min(k, remaining - 1) and round_number:  # the first round is plain
            round_number += 1
            noise = DraftCounterNoise(drawing.seed, round_number)
            draft = run_alone(drafter.propose(state, tokens, min(k, remaining - 1), drawing, noise))
        if not draft.token_ids:
            round_number += 1  # a plain round follows the one whose proposal was empty
        verified = run_alone(verify(target, kv, tokens, draft, drawing, round_number, Timer()))
        tokens.extend(verified.committed)
        accepted += verified.outcome.num_accepted
    return Spoken(tokens[len(prompt) :], accepted)
