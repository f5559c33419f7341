"""The exact joint law of what rounds emit, beside that of the target decoded plainly."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pytest

from coordinator.stopping import Stopper
from splitspec.sampling.randomness import Noise
from splitspec.sampling.rows import Rows
from splitspec.types import Rule, Stop
from splitspec.verification import rules
from splitspec.verification.outcome import Outcome
from splitspec.wire import Draft
from tests.exactness.drafting import Propose, RoundNoise
from tests.exactness.enumeration import SERVICE, Primitives, Streams, outcomes
from tests.exactness.tables import Model, Prefix

#: Probabilities of token sequences.
Law = dict[Prefix, float]
#: (target rows, draft, committed tokens before it, noise) to the decision.
Decide = Callable[[Rows, Draft, int, Noise], Outcome]
#: The drafts of a request so far, and the vocabulary's size, to the last of them as the target reads it.
Relay = Callable[[Sequence[Draft], int], Draft]

#: (target, emitted tokens, paths of draft tokens) to the rows that are decided on.
ReadRows = Callable[[Model, Prefix, tuple[Prefix, ...]], Rows]

TOLERANCE = 1e-12
_KEY = b"key"


def over_the_wire(drafts: Sequence[Draft], vocabulary_size: int) -> Draft:
    return _decoded(drafts[-1].encode(_KEY), vocabulary_size)


@functools.cache
def _decoded(body: bytes, vocabulary_size: int) -> Draft:
    return Draft.decode(body, _KEY, vocabulary_size)[0]


def decide_by(rule: Rule) -> Decide:
    """The service's own decision."""
    return functools.partial(rules.decide, rule)


@dataclass(frozen=True)
class Implementation:
    """Both sides of a round and what lies between. The wrong ones replace one part."""

    propose: Propose
    decide: Decide
    relay: Relay = over_the_wire
    primitives: Primitives = SERVICE
    rows: ReadRows = lambda p, prefix, paths: p(prefix, paths)

    def round(
        self,
        noise: RoundNoise,
        p: Model,
        q: Model,
        prefix: Prefix,
        num_draft_tokens: int,
        drafts: list[Draft],
    ) -> tuple[Prefix, Outcome]:
        """One round after a prefix: its committed tokens, with the outcome that they come from.

        drafts: those of the rounds before, which this one's is added to.
        """
        drafts.append(self.propose(noise, q, prefix, num_draft_tokens))
        vocabulary_size = len(p(prefix, ((),)).probabilities(0))
        draft = self.relay(drafts, vocabulary_size)
        outcome = self.decide(self.rows(p, prefix, tuple(draft.paths)), draft, len(prefix), noise)
        return (*(draft.token_ids[node] for node in outcome.path), outcome.next_token), outcome


class _NoText:
    """Detokenizer of a vocabulary without text."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def stopper(length: int, stop: frozenset[int]) -> Stopper:
    """The coordinator's cut: at the first token of `stop`, or after `length` tokens."""
    conditions = Stop(stop_token_ids=stop)
    return Stopper(conditions, _NoText(), eos_token_ids=frozenset(), max_tokens=length, room=length)


def round_law(
    implementation: Implementation, p: Model, q: Model, prefix: Prefix, num_draft_tokens: int
) -> dict[tuple[Prefix, Outcome], float]:
    """Law of one round after a prefix: its committed tokens, with the outcome that they come from."""

    def run(streams: Streams) -> tuple[Prefix, Outcome]:
        return implementation.round(streams.round(0), p, q, prefix, num_draft_tokens, [])

    law: dict[tuple[Prefix, Outcome], float] = defaultdict(float)
    for result, probability in outcomes(run, implementation.primitives):
        law[result] += probability
    return law


def emitted_law(
    implementation: Implementation,
    p: Model,
    q: Model,
    length: int,
    num_draft_tokens: int,
    stop: frozenset[int] = frozenset(),
) -> Law:
    """Law of what rounds emit, each on the tokens that those before committed, up to the coordinator's cut.

    The noise of each round is its own, so that a round depends on those before through the tokens alone;
    `session_law` doesn't take this for granted.
    """
    going_on: Law = defaultdict(float, {(): 1.0})
    ended: Law = defaultdict(float)
    for start in range(length):
        for prefix in [prefix for prefix in going_on if len(prefix) == start]:
            mass = going_on.pop(prefix)
            for (tokens, _), probability in round_law(implementation, p, q, prefix, num_draft_tokens).items():
                cut = stopper(length, stop)
                if prefix:
                    cut.push(prefix)
                emission = cut.push(tokens)
                kept = prefix + tuple(token.token_id for token in emission.tokens)
                (ended if emission.finish else going_on)[kept] += mass * probability
    return ended


def session(
    implementation: Implementation,
    p: Model,
    q: Model,
    length: int,
    num_draft_tokens: int,
    rounds: Iterable[RoundNoise],
    stop: frozenset[int] = frozenset(),
) -> Prefix:
    """What a request emits, round by round, up to the coordinator's cut."""
    tokens: Prefix = ()
    drafts: list[Draft] = []
    cut = stopper(length, stop)
    for noise in rounds:
        committed, _ = implementation.round(noise, p, q, tokens, num_draft_tokens, drafts)
        emission = cut.push(committed)
        tokens += tuple(token.token_id for token in emission.tokens)
        if emission.finish:
            break
    return tokens


def session_law(
    implementation: Implementation, p: Model, q: Model, length: int, num_draft_tokens: int
) -> Law:
    """Law of what a request emits, with all rounds in one enumeration, so that they may share noise."""

    def run(streams: Streams) -> Prefix:
        rounds = map(streams.round, range(1, length + 1))
        return session(implementation, p, q, length, num_draft_tokens, rounds)

    law: Law = defaultdict(float)
    for tokens, probability in outcomes(run, implementation.primitives):
        law[tokens] += probability
    return law


def target_law(p: Model, length: int, stop: frozenset[int] = frozenset()) -> Law:
    """Law of what the target emits token by token. Sequences of probability 0 are absent."""
    going_on: Law = {(): 1.0}
    ended: Law = {}
    for _ in range(length):
        drawn = {
            (*prefix, token): mass * probability
            for prefix, mass in going_on.items()
            for token, probability in enumerate(p(prefix, ((),)).probabilities(0).tolist())
            if probability
        }
        ended |= {tokens: mass for tokens, mass in drawn.items() if tokens[-1] in stop}
        going_on = {tokens: mass for tokens, mass in drawn.items() if tokens[-1] not in stop}
    return ended | going_on


def total_variation(a: Law, b: Law) -> float:
    return math.fsum(abs(a.get(tokens, 0.0) - b.get(tokens, 0.0)) for tokens in a.keys() | b.keys()) / 2


def impossible(emitted: Law, target: Law) -> set[Prefix]:
    """Sequences that are emitted, however rarely, although the target never gives them."""
    return emitted.keys() - target.keys()


def assert_exact(emitted: Law, target: Law) -> None:
    """What every right implementation passes and every wrong one fails."""
    assert not impossible(emitted, target)
    assert math.fsum(emitted.values()) == pytest.approx(1, abs=TOLERANCE)
    assert total_variation(emitted, target) < TOLERANCE
