"""What is known of a session beside its record, so that none goes on from less than its client was given.

Redis may have lost tokens: its last writes, or all, when it was restarted or failed over; or it was away when
they came, and their coordinator has died since.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

from coordinator.retry import Note
from splitspec.errors import LostTokensError
from splitspec.registry import SessionRecord


@dataclass(frozen=True)
class Left:
    """A session as this coordinator left it: tokens of its journal, under an epoch.

    changed: epoch of the last request that put tokens into it, as far as is known. seen: tokens that it had
    before its last request, or that the request's client had seen: some may have been given up.
    """

    epoch: int
    length: int
    changed: int = 0
    seen: int = 0


class LeftSessions:
    """The sessions that this coordinator has left within the time that their records are kept."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        #: In order of time.
        self._left: OrderedDict[tuple[str, str], tuple[float, Left]] = OrderedDict()

    def __setitem__(self, key: tuple[str, str], left: Left) -> None:
        now = time.monotonic()
        self._left.pop(key, None)
        self._left[key] = now, left
        while self._left and next(iter(self._left.values()))[0] + self._keep_s < now:
            self._left.popitem(last=False)

    def get(self, key: tuple[str, str]) -> Left | None:
        at, left = self._left.get(key, (0.0, None))
        return left if at + self._keep_s >= time.monotonic() else None


@dataclass(frozen=True)
class Claim:
    """What a request takes for granted of its session.

    length: tokens of it that the client has seen; 0 when it doesn't say. request_id, digest, resume_offset:
    of the request, which may be a retry.
    """

    length: int
    request_id: str
    digest: str
    resume_offset: int

    def at_least(self, left: Left | None) -> int:
        """Tokens that the session should hold."""
        return max(self.length, left.length if left else 0)

    def since(self, left: Left | None) -> int:
        """Epoch that the session should have reached."""
        return left.changed if left else 0

    def check(self, record: SessionRecord, left: Left | None) -> None:
        """Refuse a session that was abandoned or holds fewer tokens than it should. Raises LostTokensError.

        left: as this coordinator left it. A retry says itself what it has, and gets the rest.
        """
        note, length = Note.decode(record.request), len(record.token_ids)
        if note is not None and note.of_same_request(self.request_id, self.digest):
            kept = note.prompt_end + self.resume_offset if self.resume_offset else note.start
            self._check_length(record, kept, "the request goes on from")
            return
        if left is not None and record.epoch <= left.epoch:  # else another coordinator has had it since
            self._check_length(record, left.length, "its last request left")
            if record.epoch < left.changed:  # tokens that its last request had given up, perhaps
                raise LostTokensError(
                    f"Redis holds an earlier state of session {record.session_id!r}, expected what its last "
                    "request left; close the session and send the whole conversation"
                )
        if left is None or record.epoch != left.epoch or self.length > left.seen:
            # Else it's all there, and shorter as the request gave tokens up before its client heard of it.
            self._check_length(record, self.length, "its client has seen")
        if record.abandoned and not self.length and not (note is not None and note.finished):
            raise LostTokensError(
                f"the last request on session {record.session_id!r} was cut off with its coordinator, and the"
                f" {length} tokens in Redis may lack its last ones, expected session_length, or that request"
                " again under its request_id; or close the session and send the whole conversation"
            )

    @staticmethod
    def _check_length(record: SessionRecord, expected: int, whose: str) -> None:
        if len(record.token_ids) < expected:
            raise LostTokensError(
                f"Redis holds {len(record.token_ids)} tokens of session {record.session_id!r}, expected the "
                f"{expected} that {whose}: the others are lost, unless the coordinator that had them still "
                "runs; close the session and send the whole conversation",
                retry_after_s=1.0 if record.abandoned else 0.0,
            )
