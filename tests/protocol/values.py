"""States and messages of the model, small and immutable.

A tuple of tokens stands for a prefix's length and hash.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple, TypeVar

T = TypeVar("T")
Tokens = tuple[str, ...]

#: Workers by number: two targets, one draft worker.
TARGETS = (0, 1)
DRAFT = 2
#: Streams of one request by number: to its target worker, the one that replaces it, to the draft worker.
TARGET_STREAMS = (0, 1)
DRAFT_STREAM = 2
STREAMS_PER_REQUEST = 3


@dataclass(frozen=True)
class Rules:
    """What the protocol demands, one field each: the model without one of them shows what it is for."""

    append_checks_epoch: bool = True
    append_checks_offset: bool = True
    #: append stores the last round, so that who follows a crash repeats none that is in the journal.
    round_journaled: bool = True
    #: A record that was deleted and comes again goes on with newer epochs.
    epoch_outlives_record: bool = True
    chunk_after_append: bool = True
    worker_checks_epoch: bool = True
    session_checked: bool = True
    open_checks_hash: bool = True
    #: An Open of an epoch that has opened already takes nothing back.
    open_once_per_epoch: bool = True
    #: An Open takes its tokens over once the KV is cut: a cut that never runs leaves both as they were.
    truncate_before_tokens: bool = True
    stale_round_dropped: bool = True
    verdict_kept: bool = True
    #: ... for the handle, so that a new stream finds it.
    verdict_kept_by_handle: bool = True
    #: The coordinator takes a verdict on the round that it asked about ...
    verdict_matched: bool = True
    #: ... and of its own session and epoch.
    verdict_of_epoch: bool = True

    def without(self, *names: str) -> Rules:
        kept = {field.name: field.name not in names and getattr(self, field.name) for field in fields(self)}
        return Rules(**kept)


@dataclass(frozen=True)
class Bounds:
    """How large the model is.

    prompts: for each session, the prompt of each of its requests.
    rounds: for each session, the rounds of a request: "v" verifies, "d" decodes, "x" tries both.
    journal: of every session at the start, held by target 0 beside `provisional` tokens that no journal
    has; empty: the sessions don't exist yet.
    ordered: streams keep their order and double nothing, as gRPC's do. Else any message may arrive again
    and again, in any order, on any stream of its worker.
    draft: proposals come from the draft worker, else the coordinator makes them up.
    targets: how many may be used. doubled: each call to Redis may run twice, the second time late.
    deletes: CloseSession may come once. evicts: detached handles may be freed at any time.
    replaces: a request may leave its target once, and open anew on one from its committed tokens.
    retries: a request may instead send its last message again on a new stream to the same handle.
    """

    prompts: tuple[tuple[Tokens, ...], ...]
    rounds: tuple[str, ...]
    journal: Tokens = ("p",)
    provisional: Tokens = ()
    ordered: bool = False
    draft: bool = False
    targets: int = 1
    doubled: bool = False
    deletes: bool = False
    evicts: bool = False
    replaces: bool = False
    retries: bool = False


class Stamp(NamedTuple):
    """base: base_length and prefix_hash in one."""

    session: int
    epoch: int
    revision: int
    round: int
    base: Tokens


class Open(NamedTuple):
    stamp: Stamp
    handle: int | None
    start: int


class Propose(NamedTuple):
    stamp: Stamp
    start: int


class Verify(NamedTuple):
    """A proposal, relayed; its stamp is the message's. body: one draft token."""

    stamp: Stamp
    body: str


class Decode(NamedTuple):
    stamp: Stamp


class Close(NamedTuple):
    stamp: Stamp


class Opened(NamedTuple):
    handle: int
    length: int


class Proposal(NamedTuple):
    stamp: Stamp
    body: str


class Verdict(NamedTuple):
    """stamp: where the session stands after it."""

    stamp: Stamp
    tokens: Tokens


class Closed(NamedTuple):
    length: int


Up = Open | Propose | Verify | Decode | Close
Down = Opened | Proposal | Verdict | Closed


class Call(NamedTuple):
    """A script's call. args: append: offset, tokens and round; save: target, draft, revision, round."""

    script: str
    request: int
    session: int
    epoch: int = 0
    args: tuple[object, ...] = ()


class Record(NamedTuple):
    """A session in Redis. life: counts deletions (the model's own, for the properties)."""

    exists: bool = False
    life: int = 0
    epoch: int = 0
    owner: int | None = None
    leased: bool = False
    target: tuple[int, int] | None = None
    draft: int | None = None
    revision: int = 0
    round: int = 0
    journal: Tokens = ()


class Held(NamedTuple):
    """A handle of a worker. stream: the one that is attached. kv: the tokens whose KV is there."""

    session: int
    life: int
    epoch: int
    stream: int | None
    tokens: Tokens = ()
    kv: Tokens = ()
    revision: int = 0
    round: int = 0
    opened: bool = False
    last: tuple[int, str, Verdict] | None = None


class Job(NamedTuple):
    """Waits for the model thread. same, kept: of an Open; tokens: committed when a verify was submitted."""

    kind: str
    stream: int
    message: Up
    same: int | None = None
    kept: int = 0
    tokens: Tokens = ()


class Worker(NamedTuple):
    handles: tuple[Held | None, ...]
    jobs: tuple[Job, ...] = ()


class Stream(NamedTuple):
    """up, down: all that was sent; taken: how much of it an ordered stream has delivered."""

    worker: int
    handle: int | None = None
    ended: bool = False
    abandoned: bool = False
    up: tuple[Up, ...] = ()
    up_taken: int = 0
    down: tuple[Down, ...] = ()
    down_taken: int = 0


class Request(NamedTuple):
    """One Generate in its coordinator. at: what it waits for. seen: what its client has of the session."""

    session: int
    at: str = "client"
    life: int = 0
    epoch: int = 0
    tokens: Tokens = ()
    prompt_end: int = 0
    revision: int = 0
    round: int = 0
    rounds_done: int = 0
    stream: int = 0
    asked: Up | None = None
    handle: int | None = None
    draft_ready: bool = False
    draft_sent: int = 0
    draft_handle: int | None = None
    append: Call | None = None
    call: Call | None = None
    seen: Tokens = ()


class Draw(NamedTuple):
    """A decision of a target, kept for ever by the model for the properties."""

    session: int
    life: int
    epoch: int
    round: int
    base: Tokens
    tokens: Tokens


class State(NamedTuple):
    """calls: those sent to Redis, with how often each has run."""

    records: tuple[Record, ...]
    requests: tuple[Request, ...]
    workers: tuple[Worker, ...]
    streams: tuple[Stream | None, ...]
    calls: frozenset[tuple[Call, int]] = frozenset()
    draws: frozenset[Draw] = frozenset()

    def with_record(self, index: int, record: Record) -> State:
        return self._replace(records=put(self.records, index, record))

    def with_request(self, index: int, request: Request) -> State:
        return self._replace(requests=put(self.requests, index, request))

    def with_worker(self, index: int, worker: Worker) -> State:
        return self._replace(workers=put(self.workers, index, worker))

    def with_stream(self, index: int, stream: Stream) -> State:
        return self._replace(streams=put(self.streams, index, stream))


class Step(NamedTuple):
    """One thing that happens. request: the one that it serves; None: all. fault: nobody can count on it.

    by: session, life and epoch of whoever caused it, for S3; None where no owner did.
    """

    text: str
    state: State
    request: int | None = None
    fault: bool = False
    by: tuple[int, int, int] | None = None


def put(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])
