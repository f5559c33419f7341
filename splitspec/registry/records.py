"""What the registry holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WorkerKind = Literal["draft", "target"]


@dataclass(frozen=True, slots=True)
class WorkerHandle:
    """KV that a worker holds for a session. `drafter` is empty for a target worker."""

    worker_id: str
    handle: str
    drafter: str = ""


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session as its owner found it when it was opened or deleted.

    token_ids: the journal, all committed tokens. revision and round_number: 0 until first saved.
    request: the last request as its owner saved it, opaque here; empty until first saved.
    abandoned: before it was opened, its last owner's lease ended within a request.
    """

    tenant: str
    session_id: str
    epoch: int
    token_ids: tuple[int, ...] = ()
    target: WorkerHandle | None = None
    draft: WorkerHandle | None = None
    revision: int = 0
    round_number: int = 0
    request: bytes = b""
    abandoned: bool = False


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """A running worker. address: "host:port". description: its serialised answer to Describe."""

    kind: WorkerKind
    worker_id: str
    address: str
    description: bytes
