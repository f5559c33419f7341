"""All that can happen next: coordinators act, Redis runs scripts, messages arrive, jobs run, things break."""

from __future__ import annotations

from collections.abc import Iterator

from tests.protocol import coordinator, workers
from tests.protocol.handles import end_stream
from tests.protocol.scripts import delete_session
from tests.protocol.values import (
    STREAMS_PER_REQUEST,
    TARGETS,
    Bounds,
    Down,
    Held,
    Open,
    Opened,
    Record,
    Request,
    Rules,
    State,
    Step,
    Stream,
    Up,
    Verdict,
    Worker,
    put,
)


def initial(bounds: Bounds) -> State:
    """No request has come yet. One more request than bounded: only the check for dead ends starts it."""
    sessions = range(len(bounds.prompts))
    requests = tuple(Request(s) for s in sessions for _ in (*bounds.prompts[s], "successor"))
    streams = (None,) * (len(requests) * STREAMS_PER_REQUEST)
    none: tuple[Held | None, ...] = (None,) * (len(sessions) + len(streams))
    records = tuple(Record() for _ in sessions)
    target = Worker(none)
    if bounds.journal:
        # An earlier request has ended, its last verdict perhaps not journaled.
        held = (*bounds.journal, *bounds.provisional)
        records = tuple(
            Record(True, 0, 1, target=(0, s), revision=1, round=1, journal=bounds.journal) for s in sessions
        )
        handles = tuple(Held(s, 0, 1, None, held, held[:-1], 1, 1) for s in sessions)
        target = Worker((*handles, *none[len(sessions) :]))
    return State(records, requests, (target, Worker(none), Worker(none)), streams)


def steps(rules: Rules, bounds: Bounds, state: State) -> Iterator[Step]:
    """Every step from this state; those of the successors only when there is nothing else to start."""
    for r, request in enumerate(state.requests):
        if request.at != "client" or not is_successor(state, r):
            yield from coordinator.act(rules, bounds, state, r)
    for call, times in state.calls:
        yield from coordinator.execute(rules, bounds, state, call, times)
    for index, stream in enumerate(state.streams):
        if stream is not None:
            yield from _arrivals(rules, bounds, state, index, stream)
            yield from _answers(rules, bounds, state, index, stream)
            if not stream.ended:
                ended = end_stream(state, index)
                text = f"{_name(index)} is cut off at worker {stream.worker}"
                yield Step(text, ended, None, fault=not stream.abandoned)
    for number in TARGETS:
        yield from _jobs(rules, state, number)
    yield from _time(rules, bounds, state)


def is_successor(state: State, r: int) -> bool:
    return r + 1 == len(state.requests) or state.requests[r + 1].session != state.requests[r].session


def _arrivals(rules: Rules, bounds: Bounds, state: State, index: int, stream: Stream) -> Iterator[Step]:
    """Messages at a worker."""
    if stream.ended or workers.busy(state, index):
        return
    if bounds.ordered:
        if stream.up_taken < len(stream.up):
            taken = state.with_stream(index, stream._replace(up_taken=stream.up_taken + 1))
            yield _arrival(rules, taken, index, index, stream.up[stream.up_taken], fault=False)
        return
    for other, source in enumerate(state.streams):
        if source is None or source.worker != stream.worker:
            continue
        for message in source.up:
            # The first message on a stream is its own: Opened carries no stamp that could tell.
            if stream.handle is not None or (other == index and isinstance(message, Open)):
                yield _arrival(rules, state, other, index, message, fault=other != index)


def _arrival(rules: Rules, state: State, source: int, index: int, message: Up, fault: bool) -> Step:
    stamp = message.stamp
    sender = state.requests[source // STREAMS_PER_REQUEST]
    after = workers.receive(rules, state, index, message)
    place = "" if source == index else f" on {_name(index)}"
    text = (
        f"{type(message).__name__} of {_name(source)} (epoch {stamp.epoch}, round {stamp.round}, "
        f"base {' '.join(stamp.base)}) arrives{place}"
    )
    return Step(
        text, after, index // STREAMS_PER_REQUEST, fault, by=(stamp.session, sender.life, stamp.epoch)
    )


def _answers(rules: Rules, bounds: Bounds, state: State, index: int, stream: Stream) -> Iterator[Step]:
    """Messages at a coordinator."""
    r, k = divmod(index, STREAMS_PER_REQUEST)
    if stream.abandoned:
        return
    if bounds.ordered:
        if stream.down_taken == len(stream.down):
            return
        message = stream.down[stream.down_taken]
        if isinstance(message, Verdict) and state.requests[r].append is not None:
            return  # waits for the delivery of the last block
        taken = state.with_stream(index, stream._replace(down_taken=stream.down_taken + 1))
        results = list(coordinator.take(rules, taken, r, k, message)) or [(", dropped", taken)]
        yield from (_answer(message, index, index, text, after, False) for text, after in results)
        return
    for other, source in enumerate(state.streams):
        if source is None or source.worker != stream.worker:
            continue
        for message in source.down:
            if other != index and isinstance(message, Opened):
                continue  # says nothing but a handle, which is its own stream's
            for text, after in coordinator.take(rules, state, r, k, message):
                yield _answer(message, other, index, text, after, fault=other != index)


def _answer(message: Down, source: int, index: int, text: str, after: State, fault: bool) -> Step:
    what = type(message).__name__
    if isinstance(message, Verdict):
        what += f" {' '.join(message.tokens)} (epoch {message.stamp.epoch}, round {message.stamp.round})"
    place = f"request {index // STREAMS_PER_REQUEST}"
    return Step(
        f"{what} of {_name(source)} reaches {place}{text}", after, index // STREAMS_PER_REQUEST, fault
    )


def _jobs(rules: Rules, state: State, number: int) -> Iterator[Step]:
    if not state.workers[number].jobs:
        return
    job = state.workers[number].jobs[0]
    sender = state.requests[job.stream // STREAMS_PER_REQUEST]
    by = (sender.session, sender.life, job.message.stamp.epoch)
    for text, after in workers.run_job(rules, state, number):
        fault = "cancelled" in text
        text = f"target {number}, job of {_name(job.stream)}: {text}"
        yield Step(text, after, None, fault, by)


def _time(rules: Rules, bounds: Bounds, state: State) -> Iterator[Step]:
    """Leases end, clients close sessions, handles are evicted."""
    for s, record in enumerate(state.records):
        if record.leased:
            text = f"the lease of session {s} ends (epoch {record.epoch})"
            yield Step(text, state.with_record(s, record._replace(leased=False)), None, fault=True)
        elif bounds.deletes and record.exists and record.life == 0:
            text = f"a client closes session {s}"
            yield Step(text, state.with_record(s, delete_session(rules, record)), None, fault=True)
    if not bounds.evicts:
        return
    for number, worker in enumerate(state.workers):
        for h, held in enumerate(worker.handles):
            if held is not None and held.stream is None:
                freed = state.with_worker(number, worker._replace(handles=put(worker.handles, h, None)))
                yield Step(f"worker {number} evicts handle {h}", freed, None, fault=True)


def _name(index: int) -> str:
    r, k = divmod(index, STREAMS_PER_REQUEST)
    return f"request {r}'s {('stream', 'second stream', 'draft stream')[k]}"
