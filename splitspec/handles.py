"""What a worker holds for its sessions: committed tokens and KV under unguessable handles."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from protos.v1 import common_pb2
from splitspec.errors import InvalidRequestError, NotFoundError, OutOfSyncError, OverloadedError, StaleError
from splitspec.limits import MAX_TEXT_TOKENS
from splitspec.tokens import TokenLog

T = TypeVar("T")


@dataclass(eq=False)
class Held(Generic[T]):
    """One session as a worker holds it. `state` is the engine's or drafter's own (its KV)."""

    session_id: str
    tenant: str
    state: T
    epoch: int
    handle: str = field(default_factory=lambda: secrets.token_urlsafe(18))
    tokens: TokenLog = field(default_factory=TokenLog)
    revision: int = 0
    round: int = 0
    attached: bool = True
    fenced: bool = False
    expires_at: float = 0.0

    def check_epoch(self, stamp: common_pb2.Stamp) -> None:
        """Raise StaleError when the message, or this stream, belongs to an owner that was replaced."""
        if stamp.session_id != self.session_id:
            raise InvalidRequestError.of(
                "stamp.session_id", stamp.session_id, f"{self.session_id}, as opened"
            )
        if self.fenced or stamp.epoch != self.epoch:
            raise StaleError(
                f"epoch {stamp.epoch} of session {stamp.session_id} is not the current one: "
                "another coordinator owns the session"
            )

    def check_prefix(self, stamp: common_pb2.Stamp) -> None:
        """Raise OutOfSyncError unless the message builds on exactly the tokens that are held."""
        held = (len(self.tokens), self.tokens.prefix_hash())
        if (stamp.base_length, stamp.prefix_hash) != held:
            raise OutOfSyncError(
                f"base_length is {stamp.base_length} with prefix_hash {stamp.prefix_hash:#x}, but the worker "
                f"holds {held[0]} tokens with prefix_hash {held[1]:#x}: open the session again"
            )

    def stamp(self) -> common_pb2.Stamp:
        """Where the session stands now."""
        return common_pb2.Stamp(
            session_id=self.session_id,
            epoch=self.epoch,
            revision=self.revision,
            round=self.round,
            base_length=len(self.tokens),
            prefix_hash=self.tokens.prefix_hash(),
        )


class HandleStore(Generic[T]):
    """All sessions of a worker. Not thread-safe: used from the event loop only.

    A handle is attached while a stream works on it. Detached handles live until their lease ends, and
    the least recently used of them makes room when the store is full.
    """

    def __init__(
        self,
        max_sessions: int,
        clock: Callable[[], float] = time.monotonic,
        let_go: Callable[[T], None] = lambda state: None,
    ) -> None:
        """let_go: called with the state of each handle that is freed."""
        self._max_sessions = max_sessions
        self._let_go = let_go
        self._clock = clock
        self._held: dict[str, Held[T]] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def held(self) -> Sequence[Held[T]]:
        return list(self._held.values())

    @property
    def num_attached(self) -> int:
        return sum(held.attached for held in self._held.values())

    def attach(
        self, stamp: common_pb2.Stamp, handle: str, tenant: str, new_state: Callable[[], T]
    ) -> Held[T]:
        """The session under `handle`, or a new one when the handle is empty or no longer held.

        The stream that had it under an older epoch is fenced off. Raises StaleError for an epoch that isn't
        newer, NotFoundError when the handle belongs to another session or tenant, and OverloadedError when
        every place is taken by a running request.
        """
        self.reap()
        previous = self._held.get(handle)
        if previous is None:
            self._make_room()
            held = Held(stamp.session_id, tenant, new_state(), stamp.epoch)
            self._held[held.handle] = held
            return held
        if (previous.session_id, previous.tenant) != (stamp.session_id, tenant):
            raise NotFoundError(
                f"the handle doesn't belong to session {stamp.session_id}", field="open.handle"
            )
        if stamp.epoch <= previous.epoch:
            raise StaleError(
                f"epoch {stamp.epoch} of session {stamp.session_id} is not newer than {previous.epoch}: "
                "another coordinator owns the session"
            )
        previous.fenced = True
        held = Held(
            previous.session_id,
            tenant,
            previous.state,
            stamp.epoch,
            handle,
            previous.tokens,
            previous.revision,
            previous.round,
        )
        self._held[handle] = held
        return held

    def detach(self, held: Held[T], lease_s: float) -> None:
        """The stream has ended: keep the handle for `lease_s` seconds, or free it at once when 0."""
        if held.fenced:
            return
        held.attached = False
        held.expires_at = self._clock() + lease_s
        # Order of use: the least recently used first.
        self._held.pop(held.handle)
        if lease_s > 0:
            self._held[held.handle] = held
        else:
            self._let_go(held.state)

    def release(self, handle: str, stamp: common_pb2.Stamp) -> bool:
        """Free a handle; a stream on it is fenced off. False when it isn't held. Raises StaleError."""
        held = self._held.get(handle)
        if held is None or held.session_id != stamp.session_id:
            return False
        if stamp.epoch < held.epoch:
            held.check_epoch(stamp)
        held.fenced = True
        self._free(held)
        return True

    def reap(self) -> None:
        """Free the handles whose lease has ended."""
        now = self._clock()
        for held in self.held:
            if not held.attached and held.expires_at <= now:
                self._free(held)

    def _make_room(self) -> None:
        if len(self._held) < self._max_sessions:
            return
        idle = next((held for held in self._held.values() if not held.attached), None)
        if idle is None:
            raise OverloadedError(
                f"all {self._max_sessions} sessions of this worker are running a request; try again",
                retry_after_s=1.0,
            )
        self._free(idle)

    def _free(self, held: Held[T]) -> None:
        del self._held[held.handle]
        self._let_go(held.state)


@dataclass(frozen=True, eq=False)
class Offered:
    """What becomes of the committed tokens with an Open.

    tokens: those to hold. same: how many leading ones of them are held already, so that their KV may stay.
    complete: these are all; else the coordinator has to send those from len(tokens) on.
    """

    tokens: TokenLog
    same: int
    complete: bool


def offered_tokens(
    held: TokenLog, stamp: common_pb2.Stamp, message: common_pb2.Open, vocabulary_size: int
) -> Offered:
    """What an Open makes of the tokens that are held. Changes nothing: the KV has to be cut first.

    Raises InvalidRequestError for ids outside the vocabulary or lengths that don't add up.
    """
    if stamp.base_length > MAX_TEXT_TOKENS:
        raise InvalidRequestError.of(
            "stamp.base_length", stamp.base_length, f"at most {MAX_TEXT_TOKENS} tokens"
        )
    if message.start + len(message.token_ids) != stamp.base_length:
        raise InvalidRequestError.of(
            "open.token_ids",
            f"{len(message.token_ids)} ids from {message.start}",
            f"to reach {stamp.base_length}",
        )
    for token in message.token_ids:
        if token >= vocabulary_size:
            raise InvalidRequestError.of("open.token_ids", token, f"an id below {vocabulary_size}")
    if len(held) < message.start:
        return Offered(held, len(held), complete=False)
    tokens = TokenLog(held[: message.start])
    tokens.extend(message.token_ids)
    if tokens.prefix_hash() == stamp.prefix_hash:
        different = (i for i, (a, b) in enumerate(zip(held, tokens, strict=False)) if a != b)
        return Offered(tokens, next(different, min(len(held), len(tokens))), complete=True)
    if message.start == 0:
        raise InvalidRequestError.of(
            "stamp.prefix_hash", stamp.prefix_hash, f"{tokens.prefix_hash()} for these ids"
        )
    return Offered(TokenLog(), 0, complete=False)  # other tokens are held: none can be trusted
