"""The exact joint law of what rounds emit, by walking through every outcome of their randomness.

Nothing of a rule is derived again here: the service's own functions run, and each request for randomness
forks the run. The probability of a branch is measured: the share of 64-bit integers for which the service's
own primitive gives that branch's result.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from splitspec.sampling import randomness
from splitspec.sampling.distribution import probabilities
from splitspec.sampling.randomness import Noise, Purpose
from splitspec.types import Sampling
from splitspec.verification.outcome import Outcome
from splitspec.verification.token import verify_token
from splitspec.wire import Draft, SparseDistribution

T = TypeVar("T")
Prefix = tuple[int, ...]
#: A model: the next token's distribution ([vocabulary] float64) after each prefix.
Table = Callable[[Prefix], torch.Tensor]
#: Probabilities of token sequences.
Law = dict[Prefix, float]
#: Primitive that decides whether u < numerator / denominator.
Accepts = Callable[[float, float, float], bool]

_SEAL = 7


class Piece(NamedTuple):
    """The raw 64-bit integers from `start` to before `end`, for all of which a primitive gives `result`."""

    result: int
    start: int
    end: int


Range = tuple[int, int]
#: Every raw integer.
ALL: Range = (0, 2**64)


def pieces(primitive: Callable[[int], int], within: Range) -> tuple[Piece, ...]:
    """Cut a range of raw integers where the primitive's result changes, found by bisection to the last bit.

    Each result of the primitive must belong to one stretch of integers, as those of an inverse distribution
    function do.
    """
    start, end = within
    found = []
    while start < end:
        result = primitive(start)
        inside, outside = start, end
        if primitive(end - 1) == result:
            inside = end - 1
        while outside - inside > 1:
            middle = (inside + outside) // 2
            if primitive(middle) == result:
                inside = middle
            else:
                outside = middle
        found.append(Piece(result, start, outside))
        start = outside
    return tuple(found)


@functools.cache
def _acceptance(accepts: Accepts, numerator: float, denominator: float, within: Range) -> tuple[Piece, ...]:
    return pieces(lambda raw: accepts(randomness.unit(raw), numerator, denominator), within)


@functools.cache
def _inversion(weights: bytes, within: Range) -> tuple[Piece, ...]:
    tensor = torch.tensor(np.frombuffer(weights))
    return pieces(lambda raw: randomness.invert(randomness.unit(raw), tensor), within)


@functools.cache
def _draft_draw(ids: bytes, weights: bytes, within: Range) -> tuple[Piece, ...]:
    q = SparseDistribution(np.frombuffer(ids, np.uint32), np.frombuffer(weights, np.uint16))
    return pieces(lambda raw: q.token_at(randomness.below(raw, q.total)), within)


class BranchingNoise:
    """Noise that follows one branch and notes the others.

    Each stream (index, purpose) is one raw integer, as in CounterNoise: what is known of it is a range, and
    each request narrows that range. So a rule that asks a stream twice gets dependent answers, as it would
    from the service.
    """

    def __init__(self, script: tuple[int, ...], accepts: Accepts) -> None:
        self.forks: list[tuple[int, ...]] = []
        self._script = script
        self._path: tuple[int, ...] = ()
        self._ranges: dict[tuple[int, Purpose], Range] = {}
        self._accepts = accepts

    @property
    def probability(self) -> float:
        """Probability of the branch that was followed."""
        return math.prod((end - start) / 2**64 for start, end in self._ranges.values())

    def accepts(self, index: int, numerator: float, denominator: float) -> bool:
        cut = functools.partial(_acceptance, self._accepts, numerator, denominator)
        return bool(self._follow(index, Purpose.ACCEPTANCE, cut))

    def draw(self, index: int, purpose: Purpose, weights: torch.Tensor) -> int:
        return self._follow(index, purpose, functools.partial(_inversion, weights.numpy().tobytes()))

    def draft_token(self, index: int, q: SparseDistribution) -> int:
        """A token of q, as the draft draws it: `q.token_at(noise.below(index, Purpose.DRAFT, q.total))`."""
        cut = functools.partial(_draft_draw, q.ids.tobytes(), q.weights.tobytes())
        return self._follow(index, Purpose.DRAFT, cut)

    def _follow(self, index: int, purpose: Purpose, cut: Callable[[Range], tuple[Piece, ...]]) -> int:
        branches = cut(self._ranges.get((index, purpose), ALL))
        position = len(self._path)
        if position < len(self._script):
            branch = self._script[position]
        else:
            branch = 0
            self.forks += [(*self._path, other) for other in range(1, len(branches))]
        self._path += (branch,)
        self._ranges[index, purpose] = branches[branch].start, branches[branch].end
        return branches[branch].result


def outcomes(
    run: Callable[[BranchingNoise], T], accepts: Accepts = randomness.accepts
) -> Iterator[tuple[T, float]]:
    """Each result of `run`, with the probability of the branch that leads to it."""
    pending: list[tuple[int, ...]] = [()]
    while pending:
        noise = BranchingNoise(pending.pop(), accepts)
        result = run(noise)
        pending += noise.forks
        yield result, noise.probability


#: A drafter: (noise, q, prefix, number of draft tokens) to a draft.
Propose = Callable[[BranchingNoise, Table, Prefix, int], Draft]
#: One draft token: (noise, index, row of q) to the token and the distribution to send.
Step = Callable[[BranchingNoise, int, torch.Tensor], tuple[int, SparseDistribution | None]]
Verify = Callable[
    [torch.Tensor, Sequence[int], Sequence[SparseDistribution | None], Noise],
    Outcome,
]


def over_the_wire(draft: Draft, vocabulary_size: int) -> Draft:
    """The draft as the target reads it."""
    return Draft.decode(draft.encode(_SEAL), _SEAL, vocabulary_size)[0]


@dataclass(frozen=True)
class Implementation:
    """Both sides of a round and what lies between. The wrong ones replace one part."""

    propose: Propose
    verify: Verify = verify_token
    relay: Callable[[Draft, int], Draft] = over_the_wire
    accepts: Accepts = randomness.accepts


def chain(step: Step) -> Propose:
    """A drafter that makes all of its tokens by one step."""

    def propose(noise: BranchingNoise, q: Table, prefix: Prefix, num_draft_tokens: int) -> Draft:
        tokens: Prefix = ()
        distributions: tuple[SparseDistribution | None, ...] = ()
        for i in range(num_draft_tokens):
            token, distribution = step(noise, i, q(prefix + tokens))
            tokens, distributions = (*tokens, token), (*distributions, distribution)
        return Draft(tokens, distributions)

    return propose


def top(row: torch.Tensor, size: int) -> SparseDistribution:
    """The `size` most probable tokens of a row, quantised."""
    ids = torch.argsort(row, descending=True, stable=True)[:size]
    return SparseDistribution.quantised(ids.numpy(), row[ids].numpy())


def round_law(
    implementation: Implementation, p: Table, q: Table, prefix: Prefix, num_draft_tokens: int
) -> dict[tuple[Prefix, Outcome], float]:
    """Law of one round after a prefix: its committed tokens, with the outcome that they come from."""
    vocabulary_size = len(p(prefix))

    def run(noise: BranchingNoise) -> tuple[Prefix, Outcome]:
        draft = implementation.relay(
            implementation.propose(noise, q, prefix, num_draft_tokens), vocabulary_size
        )
        tokens = draft.token_ids
        rows = torch.stack([p(prefix + tokens[:i]) for i in range(len(tokens) + 1)])
        outcome = implementation.verify(rows, tokens, draft.distributions, noise)
        return (*tokens[: outcome.num_accepted], outcome.next_token), outcome

    law: dict[tuple[Prefix, Outcome], float] = defaultdict(float)
    for result, probability in outcomes(run, implementation.accepts):
        law[result] += probability
    return law


def emitted_law(
    implementation: Implementation, p: Table, q: Table, length: int, num_draft_tokens: int
) -> Law:
    """Law of the first `length` tokens that rounds emit, each on the tokens that those before committed."""
    law: Law = defaultdict(float)
    law[()] = 1.0
    for start in range(length):
        for prefix in [prefix for prefix in law if len(prefix) == start]:
            mass = law.pop(prefix)
            committed = round_law(implementation, p, q, prefix, num_draft_tokens)
            for (tokens, _), probability in committed.items():
                law[(prefix + tokens)[:length]] += mass * probability
    return law


def target_law(p: Table, length: int) -> Law:
    """Law of `length` tokens drawn one by one from the target. Sequences of probability 0 are absent."""
    law: Law = {(): 1.0}
    for _ in range(length):
        law = {
            (*prefix, token): mass * probability
            for prefix, mass in law.items()
            for token, probability in enumerate(p(prefix).tolist())
            if probability
        }
    return law


def total_variation(a: Law, b: Law) -> float:
    return math.fsum(abs(a.get(tokens, 0.0) - b.get(tokens, 0.0)) for tokens in a.keys() | b.keys()) / 2


def impossible(emitted: Law, target: Law) -> set[Prefix]:
    """Sequences that are emitted, however rarely, although the target never gives them."""
    return emitted.keys() - target.keys()


def random_table(vocabulary_size: int, seed: int, allowed: Sequence[int] | None = None) -> Table:
    """Rows of random shape; about a third of the entries are 0. `allowed`: the tokens that may have mass."""
    candidates = np.arange(vocabulary_size) if allowed is None else np.array(allowed)

    @functools.cache
    def row(prefix: Prefix) -> torch.Tensor:
        generator = np.random.default_rng((seed, len(prefix), *prefix))
        weights = generator.gamma(0.7, size=vocabulary_size)
        support = candidates[generator.random(len(candidates)) > 1 / 3]
        if not len(support):
            support = candidates[:1]
        masked = np.zeros(vocabulary_size)
        masked[support] = weights[support]
        return torch.from_numpy(masked / masked.sum())

    return row


def processed_table(vocabulary_size: int, seed: int, sampling: Sampling) -> Table:
    """Rows of random float32 logits, with a tie in each, through the service's processing."""

    @functools.cache
    def row(prefix: Prefix) -> torch.Tensor:
        generator = np.random.default_rng((seed, len(prefix), *prefix))
        logits = generator.normal(scale=2.0, size=(1, vocabulary_size)).astype(np.float32)
        logits[0, generator.integers(vocabulary_size)] = logits[0, 0]
        return probabilities(torch.from_numpy(logits), sampling)[0]

    return row
