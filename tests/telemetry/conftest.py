"""Telemetry with real exporters, and an OTLP receiver of a few lines."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from splitspec.config import ServerSettings


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("OTEL_", "SPLITSPEC_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def settings(**values: Any) -> ServerSettings:
    return ServerSettings(**values)


@dataclass
class Receiver:
    """What a collector was sent, by name."""

    address: str = ""
    services: set[str] = field(default_factory=set)
    spans: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    #: Cleared: answers wait until it is set.
    answering: threading.Event = field(default_factory=threading.Event)


class TraceReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._receiver.answering.wait(30)
        for resource in request.resource_spans:
            attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
            self._receiver.services.add(attributes["service.name"])
            for scope in resource.scope_spans:
                self._receiver.spans |= {span.name: span for span in scope.spans}
        return trace_service_pb2.ExportTraceServiceResponse()


class MetricsReceiver(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._receiver.answering.wait(30)
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                self._receiver.metrics |= {metric.name: metric for metric in scope.metrics}
        return metrics_service_pb2.ExportMetricsServiceResponse()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A real OTLP receiver on a port of its own."""
    received = Receiver()
    received.answering.set()
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    # The stubs are untyped.
    add_traces = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add_traces(TraceReceiver(received), server)  # type: ignore[no-untyped-call]
    add_metrics = metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server
    add_metrics(MetricsReceiver(received), server)  # type: ignore[no-untyped-call]
    received.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield received
    server.stop(None).wait()
