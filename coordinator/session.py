"""A session as the coordinator that owns it sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from protos.v1 import common_pb2
from splitspec.errors import OutOfSyncError
from splitspec.tokens import TokenLog, extended_hash
from splitspec.types import Drawing


@dataclass
class Session:
    """Committed tokens with the place in the order of messages, for one request.

    epoch: fencing, from the registry. round: the last round number taken. revision: the target's last.
    drawing: of the request, known before a worker is opened.
    """

    tenant: str
    session_id: str
    epoch: int
    tokens: TokenLog = field(default_factory=TokenLog)
    round: int = 0
    revision: int = 0
    drawing: Drawing | None = None

    def stamp(self) -> common_pb2.Stamp:
        """Where the session stands."""
        return common_pb2.Stamp(
            session_id=self.session_id,
            epoch=self.epoch,
            revision=self.revision,
            round=self.round,
            base_length=len(self.tokens),
            prefix_hash=self.tokens.prefix_hash(),
        )

    def next_round(self, count: int = 1) -> common_pb2.Stamp:
        """The stamp of a new round; `count` round numbers are taken, the stamp's is the first."""
        stamp = self.stamp()
        stamp.round = self.round + 1
        self.round += count
        return stamp

    def check(self, verdict: common_pb2.Verdict) -> None:
        """Raise OutOfSyncError when the target doesn't hold this session's tokens with the verdict's."""
        length = len(self.tokens) + len(verdict.token_ids)
        expected = extended_hash(self.tokens.prefix_hash(), verdict.token_ids)
        if (verdict.stamp.base_length, verdict.stamp.prefix_hash) != (length, expected):
            raise OutOfSyncError(
                f"the target holds {verdict.stamp.base_length} tokens of session {self.session_id} with "
                f"prefix_hash {verdict.stamp.prefix_hash:#x}, expected {length} with {expected:#x}"
            )

    def commit(self, verdict: common_pb2.Verdict, kept: list[int]) -> None:
        """Append a checked verdict's tokens up to the cut."""
        self.tokens.extend(kept)
        self.revision = verdict.stamp.revision
