"""One Generate in its coordinator: coordinator/{generation,rounds,links,session}.py.

`Request.at` is what it waits for; each function is what it does next. A request that isn't scheduled any more
has crashed; one that is scheduled late is a zombie. Both need no step of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.protocol.scripts import run_script
from tests.protocol.values import (
    DRAFT,
    DRAFT_STREAM,
    STREAMS_PER_REQUEST,
    TARGETS,
    Bounds,
    Call,
    Close,
    Closed,
    Decode,
    Down,
    Open,
    Opened,
    Proposal,
    Propose,
    Request,
    Rules,
    Stamp,
    State,
    Step,
    Stream,
    Tokens,
    Up,
    Verdict,
    Verify,
)
from tests.protocol.workers import draft_token

#: More rounds than any request has: a generation that was cut.
_ENDED = 99


def act(rules: Rules, bounds: Bounds, state: State, r: int) -> Iterator[Step]:
    """What request r can do of its own accord."""
    request = state.requests[r]
    if request.at == "client" and may_start(state, r):
        yield Step(f"request {r} is sent by its client", generate(state, r), r)
    elif request.at == "target":
        for worker in TARGETS[: bounds.targets]:
            # The one that holds the session's KV unless it can't be reached.
            held = state.records[request.session].target
            other = held is not None and held[0] != worker
            text = f"request {r} opens on target {worker}"
            yield Step(text, open_target(bounds, state, r, worker), r, fault=other)
    elif request.at == "round":
        plan = bounds.rounds[request.session][request.rounds_done :][:1]
        if plan in ("v", "x") and bounds.draft and request.draft_ready:
            yield Step(f"request {r} asks for a proposal", propose(state, r), r)
        elif plan in ("v", "x") and not bounds.draft:
            yield Step(f"request {r} sends Verify", verify(state, r), r)
        if plan in ("d", "x") or (plan == "v" and bounds.draft):
            yield Step(f"request {r} sends Decode", decode(state, r), r)
        if not plan and request.append is None:
            yield Step(f"request {r} sends Close", close(state, r), r)
    elif request.at == "proposal":
        yield Step(f"request {r} misses the proposal: Decode", decode(state, r), r)
    if request.at not in ("client", "opening", "done", "failed"):
        yield Step(f"request {r} gives up", fail(state, r), r, fault=True)
    if request.at in ("opened", "verdict") and request.stream == 0:
        if bounds.retries:
            yield Step(f"request {r} tries again on a new stream", retry(state, r), r, fault=True)
        for worker in TARGETS[: bounds.targets] if bounds.replaces else ():
            text = f"request {r} opens anew on target {worker}"
            yield Step(text, replace_target(state, r, worker), r, fault=True)


def may_start(state: State, r: int) -> bool:
    """Requests of a session start in their order, so that exchanging them makes no new states."""
    session = state.requests[r].session
    return all(q.at != "client" for q in state.requests[:r] if q.session == session)


def generate(state: State, r: int) -> State:
    call = Call("open_session", r, state.requests[r].session)
    return send_call(state, r, call, "opening")


def reply(rules: Rules, bounds: Bounds, state: State, r: int, call: Call, outcome: str) -> State:
    """A script's reply, to the request that waits for it. A refusal ends the stream to the client."""
    request = state.requests[r]
    if outcome != "ok":
        return fail(state, r)
    if call.script == "open_session":
        return opened_session(rules, bounds, state, r)
    if call == request.append:
        return appended(state, r, call)
    if call.script == "save":
        end = Call("end_session", r, request.session, request.epoch)
        return send_call(state, r, end, "ended")
    return state.with_request(r, request._replace(at="done", call=None))


def opened_session(rules: Rules, bounds: Bounds, state: State, r: int) -> State:
    """The session as its record has it, with the request's prompt."""
    request = state.requests[r]
    record = state.records[request.session]
    order = [q for q, other in enumerate(state.requests) if other.session == request.session]
    prompts = bounds.prompts[request.session]
    prompt = prompts[min(order.index(r), len(prompts) - 1)]
    request = request._replace(
        at="target",
        life=record.life,
        epoch=record.epoch,
        tokens=(*record.journal, *prompt),
        prompt_end=len(record.journal),
        revision=record.revision,
        round=record.round,
        call=None,
    )
    return state.with_request(r, request)


def open_target(bounds: Bounds, state: State, r: int, worker: int) -> State:
    """Open on the target, and beside it on the draft worker."""
    request = state.requests[r]
    record = state.records[request.session]
    held = record.target[1] if record.target is not None and record.target[0] == worker else None
    if bounds.draft:
        start = request.prompt_end if record.draft is not None else 0
        draft_open = Open(stamp(request), record.draft, start)
        state = open_stream(state, r, DRAFT_STREAM, DRAFT)
        state = send(state, r, DRAFT_STREAM, draft_open)
    state = open_stream(state, r, 0, worker)
    message = Open(stamp(request), held, request.prompt_end if held is not None else 0)
    return ask(state, r, message, "opened")


def opened(rules: Rules, state: State, r: int, message: Opened) -> State:
    """The worker holds all tokens, or is sent those that it lacks; then the prompt is journaled."""
    request = state.requests[r]
    request = request._replace(handle=message.handle)
    state = state.with_request(r, request)
    asked = request.asked
    assert isinstance(asked, Open)
    if message.length < len(asked.stamp.base):
        if message.length >= asked.start:
            return fail(state, r)
        return ask(state, r, Open(asked.stamp, message.handle, message.length), "opened")
    if request.rounds_done or request.append is not None or request.seen:
        # Opened anew: the prompt is in the journal or on its way.
        at = "prompt" if request.append is not None and not request.seen else "round"
        return state.with_request(r, request._replace(at=at, asked=None))
    start = request.prompt_end
    return send_append(rules, state, r, start, request.tokens[start:], "prompt")


def propose(state: State, r: int) -> State:
    request = state.requests[r]
    request = request._replace(round=request.round + 1)
    message = Propose(stamp(request), request.draft_sent)
    request = request._replace(at="proposal", asked=message, draft_sent=len(request.tokens))
    return send(state.with_request(r, request), r, DRAFT_STREAM, message)


def verify(state: State, r: int, proposal: Proposal | None = None) -> State:
    """Relay the proposal; without a draft worker in the model it is made up here."""
    request = state.requests[r]
    if proposal is None:
        request = request._replace(round=request.round + 1)
        proposal = Proposal(stamp(request), draft_token(stamp(request)))
    state = state.with_request(r, request)
    return ask(state, r, Verify(proposal.stamp, proposal.body), "verdict")


def decode(state: State, r: int) -> State:
    request = state.requests[r]
    request = request._replace(round=request.round + 1)
    return ask(state.with_request(r, request), r, Decode(stamp(request)), "verdict")


def verdict(rules: Rules, state: State, r: int, message: Verdict) -> Iterator[tuple[str, State]]:
    """Cut, commit, and deliver beside the next round."""
    request = state.requests[r]
    asked = request.asked
    assert asked is not None
    theirs, ours = message.stamp, asked.stamp
    if rules.verdict_matched and theirs.round != ours.round:
        return
    if rules.verdict_of_epoch and theirs[:2] != ours[:2]:
        return
    if request.append is not None:
        return  # the delivery of the last block is awaited first
    for length in range(len(message.tokens), 0, -1):
        kept = message.tokens[:length]
        text = "" if length == len(message.tokens) else ", cut, the last"
        tokens = (*request.tokens, *kept)
        if not text and message.stamp.base != tokens:
            yield ", OutOfSync", fail(state, r)
            continue
        # A cut ends the generation: no rounds are left.
        done = _ENDED if text else request.rounds_done + 1
        after = request._replace(
            tokens=tokens, revision=message.stamp.revision, rounds_done=done, asked=None, at="round"
        )
        yield text, send_append(rules, state.with_request(r, after), r, len(request.tokens), kept, "round")


def send_append(rules: Rules, state: State, r: int, offset: int, tokens: Tokens, at: str) -> State:
    request = state.requests[r]
    call = Call("append", r, request.session, request.epoch, (offset, tokens, request.round))
    if not rules.chunk_after_append:
        request = request._replace(seen=request.tokens)
    state = state.with_request(r, request._replace(append=call, at=at, asked=None))
    return state._replace(calls=state.calls | {(call, 0)})


def appended(state: State, r: int, call: Call) -> State:
    """The journal has it: the chunk leaves."""
    request = state.requests[r]
    offset, tokens, _ = call.args
    assert isinstance(offset, int)
    assert isinstance(tokens, tuple)
    seen = request.tokens[: offset + len(tokens)]
    at = "round" if request.at == "prompt" else request.at
    return state.with_request(r, request._replace(append=None, seen=seen, at=at))


def close(state: State, r: int) -> State:
    """The final cut, at the draft worker too."""
    request = state.requests[r]
    if state.streams[r * STREAMS_PER_REQUEST + DRAFT_STREAM] is not None:
        state = send(state, r, DRAFT_STREAM, Close(stamp(request)))
    return ask(state, r, Close(stamp(request)), "closed")


def closed(state: State, r: int) -> State:
    request = state.requests[r]
    stream = state.streams[r * STREAMS_PER_REQUEST + request.stream]
    assert stream is not None
    target = (stream.worker, request.handle)
    fields = (target, request.draft_handle, request.revision, request.round)
    call = Call("save", r, request.session, request.epoch, fields)
    return send_call(state, r, call, "saved")


def fail(state: State, r: int) -> State:
    """Leave both workers and give the session up; whatever was in flight may still arrive.

    The service also notes that no worker holds the session: left out, since less can go wrong then.
    """
    request = state.requests[r]
    for k in range(STREAMS_PER_REQUEST):
        state = _abandon(state, r, k)
    state = send_call(state, r, Call("end_session", r, request.session, request.epoch), "failed")
    failed = Request(request.session, "failed", request.life, request.epoch, seen=request.seen)
    return state.with_request(r, failed)


def replace_target(state: State, r: int, worker: int) -> State:
    """The target is lost: another, or the same anew, takes the session from its committed tokens."""
    state = open_stream(_abandon(state, r, 0), r, 1, worker)
    request = state.requests[r]._replace(stream=1)
    return ask(state.with_request(r, request), r, Open(stamp(request), None, 0), "opened")


def retry(state: State, r: int) -> State:
    """A broken stream is replaced, with the same handle: Open again, then what was asked."""
    request = state.requests[r]
    old = state.streams[r * STREAMS_PER_REQUEST]
    assert old is not None
    asked = request.asked
    assert asked is not None
    state = open_stream(_abandon(state, r, 0), r, 1, old.worker)
    request = request._replace(stream=1)
    state = state.with_request(r, request)
    if isinstance(asked, Open):
        return send(state, r, 1, asked)
    # The worker stands before or after this round, and its Open doesn't tell which.
    again = Open(asked.stamp._replace(round=asked.stamp.round - 1), request.handle, 0)
    return send(send(state, r, 1, again), r, 1, asked)


def take(rules: Rules, state: State, r: int, k: int, message: Down) -> Iterator[tuple[str, State]]:
    """A worker's answer, on stream k of request r: dropped when nothing waits for such a one."""
    request = state.requests[r]
    if k == DRAFT_STREAM:
        if isinstance(message, Opened) and not request.draft_ready:
            yield "", _draft_opened(state, r, message)
        due = request.asked.stamp.round if request.asked is not None and request.at == "proposal" else None
        if isinstance(message, Proposal) and message.stamp.round == due:
            yield "", verify(state, r, message)
    elif k != request.stream:
        return
    elif isinstance(message, Opened) and request.at == "opened":
        yield "", opened(rules, state, r, message)
    elif isinstance(message, Verdict) and request.at == "verdict":
        yield from verdict(rules, state, r, message)
    elif isinstance(message, Closed) and request.at == "closed":
        yield "", closed(state, r)


def execute(rules: Rules, bounds: Bounds, state: State, call: Call, times: int) -> Iterator[Step]:
    """Redis runs a call: its reply arrives, or is lost, or was lost before and the call runs again."""
    request = state.requests[call.request]
    outcome, record = run_script(rules, state.records[call.session], call)
    if outcome == "busy":
        return  # the client comes again later
    calls = state.calls - {(call, times)}
    if bounds.doubled and times == 0:
        calls |= {(call, 1)}
    after = state.with_record(call.session, record)._replace(calls=calls)
    life = state.records[call.session].life if call.script == "open_session" else request.life
    by = (call.session, life, call.epoch if call.script != "open_session" else record.epoch)
    text = f"Redis runs {call.script} of request {call.request} (epoch {by[2]}): {outcome}"
    if call in (request.call, request.append):
        replied = reply(rules, bounds, after, call.request, call, outcome)
        yield Step(text, replied, call.request, by=by)
        if bounds.doubled and times == 0:
            yield Step(text + ", the reply is lost", after, call.request, fault=True, by=by)
    else:
        yield Step(text + ", nobody waits", after, None, fault=True, by=by)


def stamp(request: Request) -> Stamp:
    return Stamp(request.session, request.epoch, request.revision, request.round, request.tokens)


def send_call(state: State, r: int, call: Call, at: str) -> State:
    state = state.with_request(r, state.requests[r]._replace(at=at, call=call))
    return state._replace(calls=state.calls | {(call, 0)})


def ask(state: State, r: int, message: Up, at: str) -> State:
    request = state.requests[r]._replace(at=at, asked=message)
    return send(state.with_request(r, request), r, request.stream, message)


def open_stream(state: State, r: int, k: int, worker: int) -> State:
    return state.with_stream(r * STREAMS_PER_REQUEST + k, Stream(worker))


def send(state: State, r: int, k: int, message: Up) -> State:
    index = r * STREAMS_PER_REQUEST + k
    stream = state.streams[index]
    assert stream is not None
    return state.with_stream(index, stream._replace(up=(*stream.up, message)))


def _abandon(state: State, r: int, k: int) -> State:
    index = r * STREAMS_PER_REQUEST + k
    stream = state.streams[index]
    return state if stream is None else state.with_stream(index, stream._replace(abandoned=True))


def _draft_opened(state: State, r: int, message: Opened) -> State:
    """The draft worker is ready, or gets all tokens."""
    request = state.requests[r]
    stream = state.streams[r * STREAMS_PER_REQUEST + DRAFT_STREAM]
    assert stream is not None
    opening = stream.up[0]
    assert isinstance(opening, Open)
    if message.length < len(opening.stamp.base):
        again = Open(opening.stamp, message.handle, 0)
        return state if again in stream.up else send(state, r, DRAFT_STREAM, again)
    request = request._replace(draft_ready=True, draft_sent=message.length, draft_handle=message.handle)
    return state.with_request(r, request)
