"""Sessions that this process has left early: the service notices the end of their calls a moment later."""

from __future__ import annotations

import time
from threading import Lock

from splitspec.errors import SessionBusyError, SplitspecError

#: How long a coordinator may take to free a session.
_FREEING_S = 30.0

#: What a session is known by: the coordinator's address, tenant, session id, and the request's id if there is
#: no other.
SessionKey = tuple[str, str, str, str]

_until: dict[SessionKey, float] = {}
_lock = Lock()


def leave(session: SessionKey) -> None:
    """A call on the session has ended without the coordinator's last word."""
    now = time.monotonic()
    with _lock:
        for key in [key for key, until in _until.items() if until <= now]:
            del _until[key]
        _until[session] = now + _FREEING_S


def is_being_freed(session: SessionKey, failure: SplitspecError, deadline: float) -> bool:
    """Whether a call that failed will do after failure.retry_after_s, and before the deadline."""
    freed_by = min(deadline, _until.get(session, 0.0))
    return isinstance(failure, SessionBusyError) and time.monotonic() + failure.retry_after_s < freed_by
