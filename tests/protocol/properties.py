"""S1 to S5, checked on each step; docs/protocol.md, "Model check", says them in words."""

from __future__ import annotations

from collections.abc import Iterator

from tests.protocol.values import DRAFT, STREAMS_PER_REQUEST, Draw, Held, Record, Request, State, Step
from tests.protocol.workers import busy


def violations(before: State, step: Step) -> Iterator[str]:
    """What the step breaks; each begins with the property's name."""
    after = step.state
    for s, (old, new) in enumerate(zip(before.records, after.records, strict=True)):
        if old is not new:
            yield from _record(s, old, new, step)
    for r, (was, request) in enumerate(zip(before.requests, after.requests, strict=True)):
        yield from _request(r, was, request)
    yield from _seen(after)
    yield from _kv(after)
    for number, (left, right) in enumerate(zip(before.workers, after.workers, strict=True)):
        if left is not right:
            for was_held, held in zip(left.handles, right.handles, strict=True):
                if was_held is not None and held is not None and was_held != held:
                    yield from _handle(number, was_held, held, step)
    for draw in after.draws - before.draws:
        yield from _draw(before, draw)


def _record(s: int, old: Record, new: Record, step: Step) -> Iterator[str]:
    if old.life == new.life and new.journal[: len(old.journal)] != old.journal:
        yield f"S1: journal of session {s} rewritten: {old.journal} became {new.journal}"
    if old.life == new.life and len(set(new.journal)) != len(new.journal):
        yield f"S1: journal of session {s} has a token twice: {new.journal}"
    if old.life == new.life and old.journal != new.journal:
        yield from _noise(s, new, step.state)
    if step.by is not None and step.by[1:] < (old.life, old.epoch):
        yield f"S3: epoch {step.by[2]} changed the record of session {s}, which epoch {old.epoch} owns"
    if (new.life, new.epoch) < (old.life, old.epoch):
        yield f"S5: epoch of session {s} fell from {old.epoch} to {new.epoch}"
    if new.life == old.life and new.round < old.round:
        yield f"S5: saved round of session {s} fell from {old.round} to {new.round}"


def _noise(s: int, record: Record, state: State) -> Iterator[str]:
    """S4 and S5 in the journal: rounds rise from draw to draw, so that none share their noise."""
    last_round = 0
    for length, token in enumerate(record.journal):
        base = record.journal[:length]
        for draw in state.draws:
            if draw[:2] == (s, record.life) and draw.base == base and draw.tokens[0] == token:
                if draw.round <= last_round:
                    yield f"S4: the journal has noise of round {draw.round} twice: {record.journal}"
                last_round = draw.round


def _request(r: int, was: Request, request: Request) -> Iterator[str]:
    """What a coordinator sees."""
    if was is request or request.at == "failed" or was.epoch != request.epoch:
        return
    if request.round < was.round or request.revision < was.revision:
        yield f"S5: request {r} fell from {was.round, was.revision} to {request.round, request.revision}"
    if request.seen[: len(was.seen)] != was.seen:
        yield f"S1: request {r} took back what its client saw"


def _seen(state: State) -> Iterator[str]:
    for r, request in enumerate(state.requests):
        record = state.records[request.session]
        if request.life == record.life and record.journal[: len(request.seen)] != request.seen:
            yield f"S1: the client of request {r} saw {request.seen}, the journal has {record.journal}"


def _kv(state: State) -> Iterator[str]:
    """S2, where the owner builds on a target's KV."""
    for record in state.records:
        if record.owner is None:
            continue
        owner = state.requests[record.owner]
        stream = state.streams[record.owner * STREAMS_PER_REQUEST + owner.stream]
        mine = (owner.life, owner.epoch) == (record.life, record.epoch)
        if not mine or owner.at in ("failed", "done") or stream is None:
            continue
        held = state.workers[stream.worker].handles[stream.handle] if stream.handle is not None else None
        index = record.owner * STREAMS_PER_REQUEST + owner.stream
        # While a job of it waits, the owner hasn't built on anything yet.
        if held is None or held.stream != index or not held.opened or busy(state, index):
            continue
        if held.kv != held.tokens[:-1]:
            yield f"S2: target {stream.worker} holds KV of {held.kv} for the tokens {held.tokens}"
        shared = min(len(held.tokens), len(record.journal))
        if held.tokens[:shared] != record.journal[:shared]:
            yield f"S2: target {stream.worker} holds {held.tokens}, the journal has {record.journal}"


def _handle(number: int, old: Held, new: Held, step: Step) -> Iterator[str]:
    kind = "draft worker" if number == DRAFT else f"target {number}"
    session, *by = step.by or (old.session, old.life, old.epoch)
    # Until the new epoch's own first job has run, a queued one of the old epoch may touch the KV.
    changed = old._replace(stream=new.stream, kv=old.kv if old.opened else new.kv) != new
    if session != old.session and changed:
        yield f"S3: a message of session {session} changed session {old.session} at {kind}"
    elif by < [old.life, old.epoch] and changed:
        yield f"S3: epoch {by[1]} changed what {kind} holds for epoch {old.epoch}"
    # An Open sets revision and round of its epoch.
    if new.epoch < old.epoch or (old.opened and new.epoch == old.epoch and new.revision < old.revision):
        yield f"S5: {kind} fell from revision {old.revision} to {new.revision}"
    if old.opened and new.epoch == old.epoch and new.round < old.round:
        yield f"S5: {kind} fell from round {old.round} to {new.round}"


def _draw(before: State, draw: Draw) -> Iterator[str]:
    for other in before.draws:
        if (*other[:3], other.round) == (*draw[:3], draw.round):
            yield f"S4: round {draw.round} of epoch {draw.epoch} decided twice: {other.tokens}, {draw.tokens}"
