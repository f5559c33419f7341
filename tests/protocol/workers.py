"""The handlers of target_worker/servicer.py and draft_worker/servicer.py.

A stream's handler takes one message at a time. What waits for the model thread is a job there; the stream
may end while its job is queued (it never runs) or runs (its effect on the KV stays).
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.protocol.handles import (
    RefusedError,
    attach,
    check_epoch,
    end_stream,
    find_held,
    handle_of,
    held_by,
    hold,
    receive_open,
    stream_of,
)
from tests.protocol.values import (
    DRAFT,
    Close,
    Closed,
    Decode,
    Down,
    Draw,
    Held,
    Job,
    Open,
    Opened,
    Proposal,
    Propose,
    Rules,
    Stamp,
    State,
    Tokens,
    Up,
    Verdict,
    Verify,
    put,
)


def receive(rules: Rules, state: State, index: int, message: Up) -> State:
    """One message at the handler of stream `index`."""
    try:
        if isinstance(message, Open):
            return open_(rules, state, index, message)
        held = held_by(state, index)
        check_epoch(rules, state, index, held, message.stamp)
        if isinstance(message, Propose):
            return propose(rules, state, index, held, message)
        if isinstance(message, Verify):
            return verify(rules, state, index, held, message)
        if isinstance(message, Decode):
            return decode(rules, state, index, held, message)
        return close(state, index, held, message)
    except RefusedError:
        return end_stream(state, index)


def open_(rules: Rules, state: State, index: int, message: Open) -> State:
    """Take over the committed tokens and feed those that the KV lacks."""
    if stream_of(state, index).handle is None:
        state = attach(rules, state, index, message)
    held = held_by(state, index)
    check_epoch(rules, state, index, held, message.stamp)
    if rules.open_once_per_epoch and held.opened:
        # Opened before under this epoch: a repeated Open only cuts what a cancelled pass left in the KV.
        if held.tokens[: len(message.stamp.base)] != message.stamp.base:
            raise RefusedError
        here = Stamp(held.session, held.epoch, held.revision, held.round, held.tokens)
        message = message._replace(stamp=here, start=len(held.tokens))
    same = receive_open(rules, held, message)
    tokens = message.stamp.base
    if same is None:
        # Too few are held: those stay. Or other ones: none does.
        tokens = held.tokens if len(held.tokens) < message.start else ()
    kept = min(len(tokens) if same is None else same, len(held.kv), max(len(tokens) - 1, 0))
    if not rules.truncate_before_tokens:
        held = held._replace(tokens=tokens)
    state = hold(state, index, held)
    return _submit(state, index, Job("truncate", index, message, same, kept, tokens))


def verify(rules: Rules, state: State, index: int, held: Held, message: Verify) -> State:
    """The verdict on a proposal; none for a stale one."""
    stamp = message.stamp
    if (kept := _kept(rules, held, message)) is not None:
        return _answer(state, index, kept)
    if rules.stale_round_dropped and (
        stamp.round <= held.round or stamp.revision < held.revision or len(stamp.base) < len(held.tokens)
    ):
        return state
    if stamp.base != held.tokens:
        raise RefusedError
    return _submit(state, index, Job("verify", index, message, tokens=held.tokens))


def decode(rules: Rules, state: State, index: int, held: Held, message: Decode) -> State:
    """One plain token."""
    if (kept := _kept(rules, held, message)) is not None:
        return _answer(state, index, kept)
    if rules.stale_round_dropped and message.stamp.round <= held.round:
        return state
    return _submit(state, index, Job("verify", index, message, tokens=held.tokens))


def _kept(rules: Rules, held: Held, message: Verify | Decode) -> Verdict | None:
    """The verdict that the same message got before."""
    same = held.last is not None and held.last[:2] == (message.stamp.round, _body(message))
    return held.last[2] if rules.verdict_kept and held.last is not None and same else None


def _body(message: Up) -> str:
    return message.body if isinstance(message, Verify) else ""


def propose(rules: Rules, state: State, index: int, held: Held, message: Propose) -> State:
    """A proposal on the stamp's tokens. The pass is one step with its answer."""
    stamp = message.stamp
    if stamp.round <= held.round or message.start < len(held.tokens):
        return state
    if (*held.tokens, *stamp.base[message.start :]) != stamp.base:
        raise RefusedError
    held = held._replace(tokens=stamp.base, kv=stamp.base, revision=stamp.revision, round=stamp.round)
    return _answer(hold(state, index, held), index, Proposal(stamp, draft_token(stamp)))


def close(state: State, index: int, held: Held, message: Close) -> State:
    """The final cut."""
    base = message.stamp.base
    if stream_of(state, index).worker != DRAFT and len(base) > len(held.tokens):
        raise RefusedError
    held = held._replace(tokens=held.tokens[: len(base)])
    state = _answer(hold(state, index, held), index, Closed(len(held.tokens)))
    return end_stream(state, index)


def run_job(rules: Rules, state: State, number: int) -> Iterator[tuple[str, State]]:
    """The first job of the model thread: its outcomes, each with the stream alive and with it cancelled."""
    worker = state.workers[number]
    job, left = worker.jobs[0], worker.jobs[1:]
    state = state.with_worker(number, worker._replace(jobs=left))
    handle = stream_of(state, job.stream).handle
    held = worker.handles[handle] if handle is not None else None
    if held is None:
        # Released while the job waited: the KV is garbage, the stream fenced.
        yield f"{job.kind} runs in vain", end_stream(state, job.stream)
        return
    assert handle is not None
    base = job.message.stamp.base
    for text, kv, tokens in _outcomes(held, job):
        handles = put(worker.handles, handle, held._replace(kv=kv))
        after = state.with_worker(number, worker._replace(jobs=left, handles=handles))
        failed = job.kind == "truncate" and not rules.truncate_before_tokens and job.kept > len(held.kv)
        yield (
            text,
            end_stream(after, job.stream) if failed else _resume(rules, after, job, base, tokens),
        )
        yield f"{text}, its stream is cancelled meanwhile", end_stream(after, job.stream)


def _outcomes(held: Held, job: Job) -> Iterator[tuple[str, Tokens, Tokens]]:
    """Text, KV afterwards, verdict."""
    stamp = job.message.stamp
    if job.kind == "truncate":
        yield f"KV cut to {job.kept}", held.kv[: job.kept], ()
    elif job.kind == "feed":
        yield "prompt fed", held.kv + stamp.base[len(held.kv) : -1], ()
    else:
        # The last token is fed with its round. Every draw is another token: it names what it depends on.
        last = job.tokens[-1:]
        name = f"n{stamp.epoch}.{stamp.round}"
        yield "verdict: next token", held.kv + last, (name,)
        if isinstance(job.message, Verify):
            accepted = (*held.kv, *last, job.message.body)
            yield "verdict: accepted, next token", accepted, (job.message.body, name + "+")


def _resume(rules: Rules, state: State, job: Job, base: Tokens, tokens: Tokens) -> State:
    """The handler goes on after its job, unless it was fenced off."""
    index, stamp = job.stream, job.message.stamp
    held = find_held(state, index)
    if held is None or (rules.worker_checks_epoch and held.stream != index):
        return end_stream(state, index)
    if job.kind == "truncate":
        held = held._replace(tokens=job.tokens)
        state = hold(state, index, held)
        if job.same is None:
            return _answer(state, index, Opened(handle_of(state, index), len(held.tokens)))
        if len(held.kv) < len(base) - 1:
            return _submit(state, index, Job("feed", index, job.message))
        return _opened(state, index, stamp)
    if job.kind == "feed":
        return _opened(state, index, stamp)
    committed = (*held.tokens, *tokens)
    after = Stamp(held.session, held.epoch, held.revision + 1, stamp.round, committed)
    verdict = Verdict(after, tokens)
    draw = Draw(held.session, held.life, held.epoch, stamp.round, held.tokens, tokens)
    held = held._replace(
        tokens=committed,
        revision=after.revision,
        round=stamp.round,
        last=(stamp.round, _body(job.message), verdict),
    )
    state = state._replace(draws=state.draws | {draw}) if draw not in state.draws else _twice(state, draw)
    return _answer(hold(state, index, held), index, verdict)


def _twice(state: State, draw: Draw) -> State:
    """The same decision made again: as bad as another one, so it is noted as one."""
    return state._replace(draws=state.draws | {draw._replace(tokens=(*draw.tokens, "again"))})


def _opened(state: State, index: int, stamp: Stamp) -> State:
    held = held_by(state, index)
    held = held._replace(revision=stamp.revision, round=stamp.round, opened=True)
    return _answer(hold(state, index, held), index, Opened(handle_of(state, index), len(stamp.base)))


def busy(state: State, index: int) -> bool:
    """The stream's handler waits for its job."""
    return any(job.stream == index for job in state.workers[stream_of(state, index).worker].jobs)


def draft_token(stamp: Stamp) -> str:
    return f"d{stamp.epoch}.{stamp.round}"


def _submit(state: State, index: int, job: Job) -> State:
    if stream_of(state, index).worker == DRAFT:
        # The draft worker's passes can't hurt: one step with their answer.
        assert isinstance(job.message, Open)
        state = hold(state, index, held_by(state, index)._replace(tokens=job.tokens, kv=job.tokens))
        if job.same is None:
            return _answer(state, index, Opened(handle_of(state, index), len(job.tokens)))
        return _opened(state, index, job.message.stamp)
    number = stream_of(state, index).worker
    worker = state.workers[number]
    return state.with_worker(number, worker._replace(jobs=(*worker.jobs, job)))


def _answer(state: State, index: int, message: Down) -> State:
    stream = stream_of(state, index)
    if message in stream.down:
        return state
    return state.with_stream(index, stream._replace(down=(*stream.down, message)))
