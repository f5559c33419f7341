"""Breadth-first search through all states, so that the trace to a violation is a shortest one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.protocol.coordinator import generate
from tests.protocol.properties import violations
from tests.protocol.values import STREAMS_PER_REQUEST, Bounds, Closed, Request, Rules, State, Stream
from tests.protocol.world import initial, steps


@dataclass(frozen=True)
class Result:
    """violation: the first that was found, after the steps of `trace`; empty when there is none."""

    num_states: int
    violation: str = ""
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{number:3}  {text}" for number, text in enumerate(self.trace, 1)]
        return "\n".join([f"{self.num_states} states", *lines, self.violation or "no violation"])


def explore(rules: Rules, bounds: Bounds, *, dead_ends: bool = True, limit: int | None = None) -> Result:
    """Visit every reachable state, until the first violation. dead_ends: check for those as well.

    Raises AssertionError beyond `limit` states.
    """
    start = initial(bounds)
    parents: dict[State, tuple[State, str] | None] = {start: None}
    finishing = Finishing(rules, bounds)
    level = [start]
    while level:
        following = []
        for state in level:
            if dead_ends and (stuck := finishing.dead_end(state)):
                return Result(len(parents), stuck, _trace(parents, state))
            for step in steps(rules, bounds, state):
                if step.state is state:
                    continue
                broken = next(violations(state, step), "")
                if step.state not in parents:
                    parents[step.state] = (state, step.text)
                    following.append(step.state)
                if broken:
                    return Result(len(parents), broken, (*_trace(parents, state), step.text))
            assert limit is None or len(parents) <= limit, f"more than {limit} states"
        level = following
    return Result(len(parents))


class Finishing:
    """Whether a request can finish when nothing more goes wrong."""

    def __init__(self, rules: Rules, bounds: Bounds) -> None:
        self._rules = rules
        self._bounds = bounds
        self._finishes: set[tuple[int, State]] = set()
        self._left: set[object] = set()

    def dead_end(self, state: State) -> str:
        """Who can't finish: an owner that nothing has cut off, or the one after it. Empty when all can."""
        for s, record in enumerate(state.records):
            owner = record.owner
            if owner is not None and _unharmed(state, owner) and not self._can(state, owner):
                return f"L: request {owner}, the owner of session {s}, can't finish any more"
            # Whoever comes next sees what is left in Redis and at the workers, and nothing else.
            ends = tuple(stream and (stream.worker, stream.handle, stream.ended) for stream in state.streams)
            left = (s, state.records, state.workers, ends)
            if left in self._left:
                continue
            self._left.add(left)
            successor = max(r for r, request in enumerate(state.requests) if request.session == s)
            if not self._can(_left_alone(state, s, successor), successor):
                return f"L: nobody can finish on session {s} any more"
        return ""

    def _can(self, state: State, r: int) -> bool:
        """Depth first, through steps that serve r and are no faults."""
        if (r, state) in self._finishes:
            return True
        path, seen = [(state, self._next(state, r))], {state}
        while path:
            current, following = path[-1]
            if current.requests[r].at == "done" or (r, current) in self._finishes:
                self._finishes.update((r, visited) for visited, _ in path)
                return True
            ahead = next((s for s in following if s not in seen), None)
            if ahead is None:
                path.pop()
            else:
                seen.add(ahead)
                path.append((ahead, self._next(ahead, r)))
        return False

    def _next(self, state: State, r: int) -> Iterator[State]:
        if state.requests[r].at == "client":
            yield generate(state, r)
        for step in steps(self._rules, self._bounds, state):
            if not step.fault and step.request in (None, r):
                yield step.state


def _unharmed(state: State, r: int) -> bool:
    """Whether r still owns its session, waits for something, and no stream of it was cut off."""
    request, record = state.requests[r], state.records[state.requests[r].session]
    stream = state.streams[r * STREAMS_PER_REQUEST + request.stream]
    cut_off = stream is not None and stream.ended and not any(isinstance(m, Closed) for m in stream.down)
    mine = (request.life, request.epoch) == (record.life, record.epoch)
    return mine and not cut_off and request.at not in ("client", "failed", "done")


def _left_alone(state: State, s: int, successor: int) -> State:
    """The lease has ended and all others are gone, but for what they left at the workers."""
    requests = tuple(
        request if r == successor else Request(request.session, "failed")
        for r, request in enumerate(state.requests)
    )
    streams = tuple(
        stream and Stream(stream.worker, stream.handle, stream.ended, abandoned=True)
        for stream in state.streams
    )
    state = state._replace(requests=requests, streams=streams, calls=frozenset(), draws=frozenset())
    return state.with_record(s, state.records[s]._replace(leased=False))


def _trace(parents: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    texts: list[str] = []
    while (parent := parents[state]) is not None:
        state, text = parent
        texts.append(text)
    return tuple(reversed(texts))
