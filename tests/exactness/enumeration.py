"""Every outcome of a run, by walking through all that its randomness can be.

Nothing of a rule is derived again here: the service's own functions run, and each request for randomness
forks the run. The probability of a branch is measured: the share of 64-bit integers for which the service's
own primitive gives that branch's result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from splitspec.sampling import randomness
from splitspec.sampling.randomness import Purpose
from splitspec.wire import SparseDistribution

T = TypeVar("T")
#: Primitive that decides whether u < numerator / denominator.
Accepts = Callable[[float, float, float], bool]
#: Primitive that gives an integer below a bound: (raw integer, bound).
Below = Callable[[int, int], int]
Range = tuple[int, int]
#: Every raw integer.
ALL: Range = (0, 2**64)


class Piece(NamedTuple):
    """The raw 64-bit integers from `start` to before `end`, for all of which a primitive gives `result`."""

    result: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Stream:
    """What CounterNoise makes a raw integer of, beside the seed."""

    round_number: int
    index: int
    purpose: Purpose


class Fork(NamedTuple):
    """A branch that wasn't followed: the script that leads into it, and its part of a stream's integers."""

    script: tuple[int, ...]
    stream: Stream
    within: Range


class Primitives(NamedTuple):
    """How raw integers become decisions; wrong implementations replace one."""

    accepts: Accepts
    below: Below


SERVICE = Primitives(randomness.accepts, randomness.below)


def pieces(primitive: Callable[[int], int], within: Range = ALL) -> tuple[Piece, ...]:
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
def _draft_draw(below: Below, ids: bytes, weights: bytes, within: Range) -> tuple[Piece, ...]:
    q = SparseDistribution(np.frombuffer(ids, np.uint32), np.frombuffer(weights, np.uint16))
    return pieces(lambda raw: q.token_at(below(raw, q.total)), within)


class Streams:
    """The randomness of one request along one branch, which is noted while it is followed.

    Each stream is one raw integer, as in CounterNoise: what is known of it is a range, and each question
    narrows that range. So a rule that asks a stream twice, in one round or in two, gets dependent answers, as
    it would from the service.
    """

    def __init__(self, script: tuple[int, ...] = (), primitives: Primitives = SERVICE) -> None:
        self.forks: list[Fork] = []
        self.primitives = primitives
        self._script = script
        self._path: tuple[int, ...] = ()
        self._ranges: dict[Stream, Range] = {}

    @property
    def probability(self) -> float:
        """Probability of the branch that was followed."""
        return math.prod((end - start) / 2**64 for start, end in self._ranges.values())

    def round(self, number: int) -> BranchNoise:
        return BranchNoise(self, number)

    def follow(self, stream: Stream, cut: Callable[[Range], tuple[Piece, ...]]) -> int:
        branches = cut(self._ranges.get(stream, ALL))
        position = len(self._path)
        if position < len(self._script):
            branch = self._script[position]
        else:
            branch = 0
            self.forks += [
                Fork((*self._path, other), stream, (piece.start, piece.end))
                for other, piece in enumerate(branches)
                if other
            ]
        self._path += (branch,)
        self._ranges[stream] = branches[branch].start, branches[branch].end
        return branches[branch].result


class BranchNoise:
    """The noise of one round: what `DraftCounterNoise` is in the service."""

    def __init__(self, streams: Streams, round_number: int) -> None:
        self.streams = streams
        self.round_number = round_number

    def accepts(self, index: int, numerator: float, denominator: float) -> bool:
        accepts = self.streams.primitives.accepts
        cut = functools.partial(_acceptance, accepts, numerator, denominator)
        return bool(self._follow(index, Purpose.ACCEPTANCE, cut))

    def draw(self, index: int, purpose: Purpose, weights: torch.Tensor) -> int:
        return self._follow(index, purpose, functools.partial(_inversion, weights.numpy().tobytes()))

    def draft_token(self, index: int, q: SparseDistribution) -> int:
        """A token of q, as the draft draws it: `q.token_at(noise.below(index, Purpose.DRAFT, q.total))`."""
        below = self.streams.primitives.below
        cut = functools.partial(_draft_draw, below, q.ids.tobytes(), q.weights.tobytes())
        return self._follow(index, Purpose.DRAFT, cut)

    def race(self, position: int, weights: torch.Tensor) -> int:
        raise AssertionError("a race has too many outcomes to walk through")

    def delays(self, position: int, count: int) -> np.ndarray:
        raise AssertionError("a race has too many outcomes to walk through")

    def _follow(self, index: int, purpose: Purpose, cut: Callable[[Range], tuple[Piece, ...]]) -> int:
        return self.streams.follow(Stream(self.round_number, index, purpose), cut)


def outcomes(run: Callable[[Streams], T], primitives: Primitives) -> Iterator[tuple[T, float]]:
    """Each result of `run`, with the probability of the branch that leads to it."""
    pending: list[tuple[int, ...]] = [()]
    while pending:
        streams = Streams(pending.pop(), primitives)
        result = run(streams)
        pending += [fork.script for fork in streams.forks]
        yield result, streams.probability


def taken(
    run: Callable[[Streams], T], words: Callable[[Stream], np.ndarray], size: int
) -> Iterator[tuple[T, np.ndarray]]:
    """Each result of `run`, with the requests that come to it when `words` gives their raw integers.

    Exactly what running each of them would give, at the cost of one run for each branch that any takes.
    words: a stream to [size] uint64. Requests: [n] integers below size; every one comes in one result.
    """
    pending: list[tuple[tuple[int, ...], np.ndarray]] = [((), np.arange(size))]
    while pending:
        script, requests = pending.pop()
        streams = Streams(script)
        result = run(streams)
        for fork in streams.forks:
            drawn = words(fork.stream)[requests]
            start, end = fork.within
            leaves = (drawn >= np.uint64(start)) & (drawn <= np.uint64(end - 1))
            if leaves.any():
                pending.append((fork.script, requests[leaves]))
                requests = requests[~leaves]
        yield result, requests
