"""Whether gRPC works in this process: it doesn't in one that was forked while it ran.

Such a process has none of gRPC's threads, but its locks and queues as they were: calls hang or abort. A
fork is fine when gRPC has ended before, as it does once every channel is closed. With
GRPC_ENABLE_FORK_SUPPORT it is fine beside open channels too, if they aren't asyncio's, as those of clients
are.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any
from weakref import WeakSet

from grpc._cython import cygrpc  # type: ignore[attr-defined]  # not in the stubs

#: How long gRPC's threads may take to end behind the last client.
_ENDING_S = 1.0

_open: WeakSet[Any] = WeakSet()
_ended_by = 0.0
_runs = False
_broken = False


def opens(connection: object) -> None:
    """Called before its channel is opened. Raises RuntimeError where gRPC doesn't work."""
    if _broken:
        raise RuntimeError(
            "this process was forked while gRPC ran, which gRPC doesn't survive: expected all clients closed "
            "before the fork, or a process started by multiprocessing's methods spawn or forkserver"
        )
    _open.add(connection)


def closed(connection: object) -> None:
    """Called when its channel is closed."""
    global _ended_by
    _open.discard(connection)
    _ended_by = time.monotonic() + _ENDING_S


def is_other_process(pid: int) -> bool:
    """Whether what process `pid` opened can't be used here: this is a process that was forked since."""
    return os.getpid() != pid


def require_process(pid: int) -> None:
    """Raises RuntimeError in another process than the one that opened a client."""
    if is_other_process(pid):
        raise RuntimeError("the client was opened before a fork, expected one that this process opens")


def _before_fork() -> None:
    global _runs
    while not _open and time.monotonic() < _ended_by and _has_threads():
        time.sleep(0.01)
    _runs = bool(_open) or (_has_threads() and not cygrpc.is_fork_support_enabled())


def _after_in_child() -> None:
    global _broken
    _broken = _broken or _runs
    _open.clear()


def _has_threads() -> bool:
    """Whether gRPC's threads run; where there is no /proc to see them in, only clients are known."""
    names = []
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            names.append(task.read_text())
    return any(name.startswith(("grpc_", "event_engine")) for name in names)


os.register_at_fork(before=_before_fork, after_in_child=_after_in_child)
