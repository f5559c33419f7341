"""splitspec/handles.py: what a worker holds, and which stream it is attached to."""

from __future__ import annotations

from tests.protocol.values import STREAMS_PER_REQUEST, Held, Open, Rules, Stamp, State, Stream, put


class RefusedError(Exception):
    """The handler raises: the stream ends, and its handle is detached."""


def attach(rules: Rules, state: State, index: int, message: Open) -> State:
    """The handle for a new stream; the stream that had it under an older epoch is fenced off by that."""
    stream, stamp = stream_of(state, index), message.stamp
    worker = state.workers[stream.worker]
    previous = worker.handles[message.handle] if message.handle is not None else None
    if previous is None or message.handle is None:
        # A new handle: its number is the stream's, so that the order of creation makes no new states.
        handle = len(state.records) + index
        held = Held(stamp.session, _life(state, index), stamp.epoch, index)
    else:
        handle = message.handle
        if previous.session != stamp.session:
            raise RefusedError
        newer = stamp.epoch > previous.epoch
        again = stamp.epoch == previous.epoch and previous.stream is None
        if not (newer or again) and rules.worker_checks_epoch:
            raise RefusedError
        held = previous._replace(
            epoch=stamp.epoch,
            stream=index,
            life=_life(state, index),
            opened=previous.opened and again,
            last=previous.last if again and rules.verdict_kept_by_handle else None,
        )
    state = state.with_stream(index, stream._replace(handle=handle))
    return hold(state, index, held)


def receive_open(rules: Rules, held: Held, message: Open) -> int | None:
    """How many leading tokens are as before; None when the tokens before `start` aren't held."""
    tokens = message.stamp.base
    known = held.tokens[: message.start]
    if len(known) < message.start:
        return None
    if not rules.open_checks_hash:
        return min(len(held.tokens), len(tokens))
    if known != tokens[: message.start]:
        return None
    pairs = zip(held.tokens, tokens, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(held.tokens), len(tokens)))


def end_stream(state: State, index: int) -> State:
    """The handler ends, however it ends: a queued job never runs, the handle is detached."""
    stream = stream_of(state, index)
    worker = state.workers[stream.worker]
    jobs = tuple(job for job in worker.jobs if job.stream != index)
    held = find_held(state, index)
    state = state.with_worker(stream.worker, worker._replace(jobs=jobs))
    state = state.with_stream(index, stream._replace(ended=True))
    if held is None or held.stream != index:
        return state
    return hold(state, index, held._replace(stream=None))


def held_by(state: State, index: int) -> Held:
    held = find_held(state, index)
    if held is None:
        raise RefusedError
    return held


def check_epoch(rules: Rules, state: State, index: int, held: Held, stamp: Stamp) -> None:
    if rules.worker_checks_epoch and (held.stream != index or stamp.epoch != held.epoch):
        raise RefusedError
    if rules.session_checked and stamp.session != held.session:
        raise RefusedError


def find_held(state: State, index: int) -> Held | None:
    stream = stream_of(state, index)
    return None if stream.handle is None else state.workers[stream.worker].handles[stream.handle]


def hold(state: State, index: int, held: Held) -> State:
    stream = stream_of(state, index)
    worker = state.workers[stream.worker]
    return state.with_worker(
        stream.worker, worker._replace(handles=put(worker.handles, handle_of(state, index), held))
    )


def handle_of(state: State, index: int) -> int:
    handle = stream_of(state, index).handle
    assert handle is not None
    return handle


def stream_of(state: State, index: int) -> Stream:
    stream = state.streams[index]
    assert stream is not None
    return stream


def _life(state: State, index: int) -> int:
    return state.requests[index // STREAMS_PER_REQUEST].life
