"""Rounds that are drafted ahead of their verdicts emit the target's joint law to floating point.

What is drafted ahead draws from the noise of its own round, and a fresh proposal of that round draws from the
same again when it was for nothing: both in one enumeration, so that what they share counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from protos.v1 import common_pb2
from splitspec.engine.scheduler import Timer
from splitspec.overlap import begins_with
from splitspec.tokens import TokenLog
from splitspec.types import Drawing, Origin, Output, Rule, Sampling
from splitspec.wire import Draft
from target_worker import verifier
from tests.exactness import drafting, law, tables
from tests.exactness.drafting import chain
from tests.exactness.enumeration import SERVICE, BranchNoise, Streams, outcomes
from tests.exactness.tables import Prefix, ProcessedModel

RULES = [Rule.TOKEN, Rule.BLOCK]
PROMPT = (0,)
PROPOSE = chain(drafting.drawn)
#: (vocabulary, length, number of draft tokens).
SIZES = [(3, 3, 1), (2, 3, 2)]

#: (committed so far, draft, its child, committed by the verdict, rule) to whether the child is used.
Uses = Callable[[Prefix, Draft, Draft, Prefix, Rule], bool]
#: (draft, its child) to whether the target is to hold its bonus back.
Holds = Callable[[Draft, Draft], bool]


class KV:
    """A table model's, which is no state."""

    def truncate(self, length: int) -> None: ...


def verdict(
    noise: BranchNoise, p: ProcessedModel, tokens: Prefix, draft: Draft, rule: Rule, hold: bool
) -> tuple[Prefix, Origin | None]:
    """The target worker's own, with the table's logits as the answer to its pass."""
    drawing = Drawing(Sampling(seed=0), rule, Output(len(PROMPT)))
    model: Any = None
    kv: Any = KV()
    steps = verifier.verify(model, kv, PROMPT + tokens, draft, drawing, noise.round_number, Timer(), hold)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verifier, "CounterNoise", lambda seed, round_number: noise)
        next(steps)
        with pytest.raises(StopIteration) as ended:
            steps.send(p.logits(tokens, tuple(draft.paths)))
    verified = ended.value.value
    return verified.committed, verified.next_origin


def bears_out(tokens: Prefix, draft: Draft, child: Draft, committed: Prefix, rule: Rule) -> bool:
    """What workers and coordinator go by."""
    assumed = TokenLog(PROMPT + tokens + draft.token_ids)
    stamp = common_pb2.Stamp(base_length=len(assumed), prefix_hash=assumed.prefix_hash())
    first = begins_with(stamp, TokenLog(PROMPT + tokens + committed), rule)
    return first is not None and child.token_ids[: len(first)] == first


def always(draft: Draft, child: Draft) -> bool:
    return True


def pipelined_law(
    rule: Rule, size: tuple[int, int, int], uses: Uses = bears_out, holds: Holds = always
) -> tuple[law.Law, law.Law]:
    """Law of what is emitted when every proposal is drafted before the verdict before, and the target's."""
    vocabulary_size, length, num_draft_tokens = size
    p, q = (tables.processed_model(vocabulary_size, seed, Sampling(), prompt=PROMPT) for seed in (20, 21))

    def run(streams: Streams) -> Prefix:
        tokens: Prefix = ()
        draft: Draft | None = None
        for number in range(1, length + 1):
            noise = streams.round(number)
            if draft is None:
                draft = PROPOSE(noise, q, tokens, num_draft_tokens)
            child = PROPOSE(streams.round(number + 1), q, tokens + draft.token_ids, num_draft_tokens)
            committed, origin = verdict(noise, p, tokens, draft, rule, holds(draft, child))
            assert committed
            if not uses(tokens, draft, child, committed, rule):
                draft = None
            elif origin is None:
                draft = child
            else:  # the child's first token is the bonus that was drawn
                draft = child.after(1)
            tokens += committed
            if len(tokens) >= length:
                break
        return tokens[:length]

    emitted: law.Law = defaultdict(float)
    for tokens, probability in outcomes(run, SERVICE):
        emitted[tokens] += probability
    return emitted, law.target_law(p, length)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rule", RULES)
def test_pipelined(rule: Rule, size: tuple[int, int, int]) -> None:
    law.assert_exact(*pipelined_law(rule, size))


def begins_with_the_bonus(tokens: Prefix, draft: Draft, child: Draft, committed: Prefix, rule: Rule) -> bool:
    """Right under the rules of equality, and only there."""
    return bears_out(tokens, draft, child, committed, Rule.SHARED_NOISE)


@pytest.mark.parametrize("rule", RULES)
def test_rejects_a_child_that_is_chosen_by_its_first_token(rule: Rule) -> None:
    emitted, target = pipelined_law(rule, SIZES[0], begins_with_the_bonus, lambda draft, child: False)
    assert law.total_variation(emitted, target) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_rejects_a_bonus_that_is_held_for_some_children(rule: Rule) -> None:
    """Whether the bonus is drawn at once or waits must not depend on what the child begins with."""
    emitted, target = pipelined_law(rule, SIZES[0], holds=lambda draft, child: child.token_ids[0] == 0)
    assert law.total_variation(emitted, target) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_prefetched(rule: Rule) -> None:
    """A branch for each verdict; the one that came is used, and it is the fresh proposal of its round."""
    vocabulary_size, length = 2, 3
    p, q = (tables.processed_model(vocabulary_size, seed, Sampling(), prompt=PROMPT) for seed in (22, 23))

    def run(streams: Streams) -> Prefix:
        tokens: Prefix = ()
        draft = PROPOSE(streams.round(1), q, tokens, 1)
        for number in range(1, length + 1):
            noise, ahead = streams.round(number), streams.round(number + 1)
            grown = [(*draft.token_ids[:k], t) for k in range(2) for t in range(vocabulary_size)]
            branches = {growth: PROPOSE(ahead, q, tokens + growth, 1) for growth in grown}
            committed, _ = verdict(noise, p, tokens, draft, rule, hold=False)
            tokens += committed
            draft = branches[committed]
            assert draft == PROPOSE(ahead, q, tokens, 1)
            if len(tokens) >= length:
                break
        return tokens[:length]

    emitted: law.Law = defaultdict(float)
    for tokens, probability in outcomes(run, SERVICE):
        emitted[tokens] += probability
    law.assert_exact(emitted, law.target_law(p, length))
