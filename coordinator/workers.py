"""The workers that a coordinator can use: found in the directory, accepted by a handshake."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
import structlog

from protos.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from splitspec.errors import (
    HandshakeError,
    InvalidRequestError,
    NotFoundError,
    SplitspecError,
    UnavailableError,
    from_rpc_error,
)
from splitspec.registry import Registry, SessionRecord, WorkerEntry
from splitspec.serving import channel
from splitspec.types import PROTOCOL_VERSION, Mode
from splitspec.vocabulary import Vocabulary, check_same_vocabulary

log = structlog.get_logger()

_HANDSHAKE_TIMEOUT_S = 5.0
_RELEASE_TIMEOUT_S = 5.0


@dataclass(frozen=True, eq=False)
class TargetHost:
    """A target worker that can be reached and fits."""

    worker_id: str
    stub: target_pb2_grpc.TargetWorkerServiceAsyncStub
    description: target_pb2.TargetWorkerServiceDescribeResponse

    @property
    def fingerprint(self) -> str:
        return self.description.model.fingerprint

    @property
    def max_context(self) -> int:
        """Tokens of the longest text that it can hold."""
        return self.description.model.max_context

    @property
    def limit(self) -> str:
        """Where that comes from."""
        if self.max_context < self.description.model.kv_tokens:
            return f"the context is {self.max_context}"
        return f"the target worker's KV (its kv_memory_mib) has room for {self.max_context} tokens"

    def check_features(self, features: common_pb2.FeatureRequest) -> None:
        """Raise HandshakeError unless the worker keeps what a drafter wants."""
        kept = list(self.description.model.feature_layers)
        if not set(features.layers) <= set(kept):
            raise HandshakeError(
                f"the drafter wants features of the target's layers {list(features.layers)}, but "
                f"target worker {self.worker_id} keeps {kept}: set its feature_layers"
            )


def roomiest(hosts: Sequence[TargetHost], num_tokens: int) -> list[TargetHost]:
    """Those that can hold so many tokens, or, where none can, those that can hold the most."""
    needed = min(num_tokens, max((host.max_context for host in hosts), default=0))
    return [host for host in hosts if host.max_context >= needed]


@dataclass(frozen=True, eq=False)
class DraftHost:
    """A draft worker that can be reached."""

    worker_id: str
    stub: draft_pb2_grpc.DraftWorkerServiceAsyncStub
    description: draft_pb2.DraftWorkerServiceDescribeResponse

    def drafter(self, name: str) -> draft_pb2.DrafterInfo | None:
        return next((info for info in self.description.drafters if info.name == name), None)

    def modes(self, name: str) -> frozenset[Mode]:
        """What a drafter can do while the target verifies."""
        info = self.drafter(name)
        assert info is not None
        return frozenset([Mode.PLAIN, Mode.SEQUENTIAL, *(Mode(value) for value in info.modes)])

    def check_mode(self, name: str, mode: Mode | None) -> None:
        """Raise InvalidRequestError for a mode, named by a request, that a drafter lacks."""
        modes = self.modes(name)
        if mode is not None and mode not in modes:
            known = ", ".join(known.name.lower() for known in Mode if known in modes)
            raise InvalidRequestError.of(
                "speculation.mode", mode.name.lower(), f"one that drafter {name} has: {known}"
            )


H = TypeVar("H", bound=TargetHost | DraftHost)


class WorkerPool:
    """Channels to the workers of the directory.

    A worker describes itself once, when it is first seen. Its channel ends with the last request on it
    after it has left the directory.
    """

    def __init__(self, registry: Registry, vocabulary: Vocabulary, model: str, default_drafter: str) -> None:
        self._vocabulary = vocabulary
        self._model = model
        self._default_drafter = default_drafter
        self._drafters_seen: dict[str, draft_pb2.DrafterInfo] = {}
        self._fingerprint = ""
        self._refused: set[str] = set()
        self._targets: _Hosts[TargetHost] = _Hosts(registry, "target", self._connect_target)
        self._drafts: _Hosts[DraftHost] = _Hosts(registry, "draft", self._connect_draft)

    async def targets(self, prefer: str = "") -> list[TargetHost]:
        """Target workers, at least one: the preferred one first, then the least loaded.

        Raises UnavailableError when there is none, HandshakeError when those that there are don't fit.
        """
        hosts = self._of_one_model(await self._targets.refresh(prefer))
        if not hosts:
            raise self._targets.refused or self._no_target()
        return hosts

    def _no_target(self) -> UnavailableError:
        if self._fingerprint:
            return UnavailableError(
                "all target workers have left the directory, expected at least one: those that run come back "
                "by themselves, as after a time without Redis",
                retry_after_s=1.0,
            )
        return UnavailableError(
            "no target worker is at hand, expected at least one: "
            "start `splitspec serve target` with the same Redis"
        )

    def _of_one_model(self, hosts: list[TargetHost]) -> list[TargetHost]:
        """The hosts with the model that this coordinator serves: the first one's, as long as any has it.

        Another model, other weights, another element type or device class would be another distribution.
        """
        if hosts and all(host.fingerprint != self._fingerprint for host in hosts):
            self._fingerprint = hosts[0].fingerprint
        for host in hosts:
            if host.fingerprint != self._fingerprint and host.worker_id not in self._refused:
                self._refused.add(host.worker_id)
                log.warning(
                    "target worker refused: another model",
                    worker=host.worker_id,
                    fingerprint=host.fingerprint,
                    expected=self._fingerprint,
                )
        return [host for host in hosts if host.fingerprint == self._fingerprint]

    async def draft(self, drafter: str, prefer: str = "", *, named: bool = True) -> DraftHost | None:
        """The best draft worker with this drafter, or None when all that had it are away.

        named: by the request; then a drafter that was never there raises NotFoundError. Raises
        HandshakeError for one whose model has another vocabulary than the target.
        """
        hosts = await self._drafts.refresh(prefer)
        fitting = next((host for host in hosts if host.drafter(drafter)), None)
        if fitting is not None:
            self._check_vocabulary(fitting, drafter)
            return fitting
        if drafter in self._drafters_seen or not hosts or not named:
            return None
        known = ", ".join(sorted(self._drafters_seen))
        raise NotFoundError(
            f"speculation.drafter is {drafter!r}, expected one of: {known}", field="speculation.drafter"
        )

    def features(self, drafter: str) -> common_pb2.FeatureRequest | None:
        """The target's features that a drafter wants, as it was last seen; None for none."""
        info = self._drafters_seen.get(drafter)
        return info.features if info is not None and info.features.layers else None

    async def drafters(self) -> list[str]:
        """Names of the drafters at hand."""
        hosts = await self._drafts.refresh()
        return list(dict.fromkeys(info.name for host in hosts for info in host.description.drafters))

    async def default_drafter(self) -> str:
        """The drafter of requests that name none; empty when there is none at all."""
        return self._default_drafter or next(iter(await self.drafters()), "")

    async def release(self, record: SessionRecord) -> None:
        """Free a session's handles on the workers that can be reached; leases free the others."""
        stamp = common_pb2.Stamp(session_id=record.session_id, epoch=record.epoch)
        for held, hosts, request in (
            (record.target, self._targets, target_pb2.TargetWorkerServiceReleaseRequest),
            (record.draft, self._drafts, draft_pb2.DraftWorkerServiceReleaseRequest),
        ):
            host: Any = None
            if held is not None:
                host = next((h for h in await hosts.refresh() if h.worker_id == held.worker_id), None)
            if held is not None and host is not None:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await host.stub.Release(
                        request(stamp=stamp, handle=held.handle), timeout=_RELEASE_TIMEOUT_S
                    )

    async def _connect_target(self, entry: WorkerEntry) -> TargetHost:
        stub = target_pb2_grpc.TargetWorkerServiceStub(channel(entry.address))
        description = await _describe(entry, stub.Describe, target_pb2.TargetWorkerServiceDescribeRequest())
        model = description.model
        theirs = f"target worker {entry.worker_id} ({model.name})"
        ours = f"the coordinator ({self._model})"
        check_same_vocabulary(ours, self._vocabulary, theirs, model.vocabulary_hash, model.vocabulary_size)
        return TargetHost(entry.worker_id, stub, description)

    async def _connect_draft(self, entry: WorkerEntry) -> DraftHost:
        stub = draft_pb2_grpc.DraftWorkerServiceStub(channel(entry.address))
        description = await _describe(entry, stub.Describe, draft_pb2.DraftWorkerServiceDescribeRequest())
        self._drafters_seen |= {info.name: info for info in description.drafters}
        return DraftHost(entry.worker_id, stub, description)

    def _check_vocabulary(self, host: DraftHost, drafter: str) -> None:
        """A drafter with a model must have the target's vocabulary; one without fits any."""
        info = host.drafter(drafter)
        if info is not None and info.HasField("model"):
            theirs = f"drafter {drafter} of draft worker {host.worker_id} ({info.model.name})"
            ours = f"the target ({self._model})"
            model = info.model
            check_same_vocabulary(
                ours, self._vocabulary, theirs, model.vocabulary_hash, model.vocabulary_size
            )


class _Hosts(Generic[H]):
    """The known workers of one kind. refused: why the last one that didn't fit was refused."""

    def __init__(
        self, registry: Registry, kind: Any, connect: Callable[[WorkerEntry], Coroutine[Any, Any, H]]
    ) -> None:
        self._registry = registry
        self._kind = kind
        self._connect = connect
        self._known: dict[str, H] = {}
        self.refused: HandshakeError | None = None

    async def refresh(self, prefer: str = "") -> list[H]:
        """The workers of the directory that can be reached and fit, `prefer` first, then by load."""
        entries: list[WorkerEntry] = await self._registry.workers(self._kind)
        self.refused = None
        for entry in entries:
            if entry.worker_id not in self._known:
                try:
                    self._known[entry.worker_id] = await self._connect(entry)
                except SplitspecError as error:
                    log.warning(
                        "worker not usable", worker=entry.worker_id, address=entry.address, error=str(error)
                    )
                    self.refused = error if isinstance(error, HandshakeError) else self.refused
        present = {entry.worker_id: entry for entry in entries}
        self._known = {worker_id: host for worker_id, host in self._known.items() if worker_id in present}
        return sorted(
            self._known.values(),
            key=lambda host: (host.worker_id != prefer, _live_sessions(present[host.worker_id])),
        )


def _live_sessions(entry: WorkerEntry) -> int:
    """The worker's load as of its last heartbeat."""
    if entry.kind == "target":
        return target_pb2.TargetWorkerServiceDescribeResponse.FromString(entry.description).load.live_sessions
    return draft_pb2.DraftWorkerServiceDescribeResponse.FromString(entry.description).load.live_sessions


async def _describe(entry: WorkerEntry, method: Any, request: Any) -> Any:
    """The worker's handshake. Raises UnavailableError, or HandshakeError for another protocol version."""
    try:
        description = await method(request, timeout=_HANDSHAKE_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        reason = f"{error.code().name}: {error.details()}"
        raise from_rpc_error(error) or UnavailableError(
            f"{entry.kind} worker {entry.worker_id} at {entry.address}: {reason}"
        ) from None
    if description.protocol_version != PROTOCOL_VERSION:
        raise HandshakeError(
            f"{entry.kind} worker {entry.worker_id} speaks protocol version {description.protocol_version}, "
            f"the coordinator {PROTOCOL_VERSION}: expected the same"
        )
    return description
