"""What every server process does around its service: settings, logs, the worker directory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import structlog

from splitspec.addresses import joined
from splitspec.config import ServerSettings, load_settings, redacted
from splitspec.errors import ConfigError, SplitspecError
from splitspec.registry import Registry, WorkerEntry
from splitspec.serving import Server, wait_for_signal
from splitspec.telemetry import Telemetry

log = structlog.get_logger()
S = TypeVar("S", bound=ServerSettings)


def run_process(settings_class: type[S], main: Callable[[S], Coroutine[Any, Any, None]]) -> NoReturn:
    """Run `main` with the settings of flags and environment until it ends.

    Exit code 0 after a signal, 130 for a Ctrl-C before it serves; 2 and one sentence on stderr when the
    process can't start.
    """
    try:
        settings = load_settings(settings_class, sys.argv[1:])
        _log_to_stderr(settings.log_level)
        asyncio.run(main(settings))
    except SplitspecError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)  # noqa: T201
        sys.exit(128 + signal.SIGINT)
    sys.exit(0)


@contextlib.contextmanager
def waiting_for(what: str, every_s: float = 10.0) -> Iterator[None]:
    """Log what the process waits for while the block runs: at once, and again every so many seconds.

    By a thread of its own, since what loads a model holds up the loop.
    """
    begun, over = time.monotonic(), threading.Event()

    def tell() -> None:
        while not over.wait(every_s):
            log.info("still waiting", waiting_for=what, seconds=round(time.monotonic() - begun))

    log.info("waiting", waiting_for=what)
    telling = threading.Thread(target=tell, name="waiting", daemon=True)
    telling.start()
    try:
        yield
    finally:
        over.set()
        telling.join()


async def connect_registry(settings: ServerSettings) -> Registry:
    """Raises what Registry.connect does."""
    with waiting_for(f"Redis at {redacted(settings.redis_url)}"):
        return await Registry.connect(settings.redis_url)


def unique_id(role: str) -> str:
    """An id of this running process, in the directory and in its telemetry."""
    return f"{role}-{uuid.uuid4().hex[:12]}"


@contextlib.asynccontextmanager
async def telemetry(
    settings: ServerSettings, role: str, instance_id: str, slow_round_s: float = 0.0
) -> AsyncIterator[Telemetry]:
    """The process's telemetry while the block runs; flushed at its end, beside the loop.

    Raises ConfigError as Telemetry.start does.
    """
    started = Telemetry.start(settings, f"splitspec-{role}", instance_id, slow_round_s)
    try:
        yield started
    finally:
        await asyncio.to_thread(started.shutdown)


async def serve_until_signal(server: Server, settings: ServerSettings) -> None:
    """Announce where the entered server listens, say that it is ready, and wait for the signal to stop."""
    if settings.port_file:
        _write_port_file(Path(settings.port_file), joined(settings.host, server.port))
    await server.set_ready()
    log.info("serving", address=server.address)
    await wait_for_signal()
    log.info("stopping", grace_s=settings.shutdown_grace_s)


def _write_port_file(path: Path, address: str) -> None:
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(address)
        partial.rename(path)
    except OSError as error:
        raise ConfigError(
            f"--port-file (SPLITSPEC_PORT_FILE) is {str(path)!r}: {error.strerror}, expected a file to write"
        ) from error


@contextlib.asynccontextmanager
async def registered(
    registry: Registry, describe: Callable[[], WorkerEntry], lease_s: float
) -> AsyncIterator[None]:
    """Keep a worker in the directory while the block runs: a heartbeat three times each lease.

    describe: the entry, with the load of the moment.
    """
    await registry.register_worker(describe(), round(lease_s * 1000))
    beating = asyncio.create_task(_beat(registry, describe, lease_s))
    try:
        yield
    finally:
        beating.cancel()
        entry = describe()
        with contextlib.suppress(SplitspecError):  # the lease ends what can't be ended now
            await registry.unregister_worker(entry.kind, entry.worker_id)


async def _beat(registry: Registry, describe: Callable[[], WorkerEntry], lease_s: float) -> None:
    while True:
        await asyncio.sleep(lease_s / 3)
        try:
            await registry.register_worker(describe(), round(lease_s * 1000))
        except SplitspecError as error:
            log.warning("heartbeat failed", error=str(error))


def _log_to_stderr(level: str) -> None:
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
