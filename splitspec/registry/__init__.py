"""Sessions, leases, epochs and the worker directory in Redis."""

from splitspec.registry.embedded import EmbeddedRedis
from splitspec.registry.records import SessionRecord, WorkerEntry, WorkerHandle, WorkerKind
from splitspec.registry.registry import Registry

__all__ = ["EmbeddedRedis", "Registry", "SessionRecord", "WorkerEntry", "WorkerHandle", "WorkerKind"]
