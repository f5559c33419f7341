"""Telemetry of one process: started from its settings and the standard OTEL_* variables, flushed at its end.

The exporters are an extra, `splitspec[telemetry]`: nothing of them is imported before one is asked for.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import structlog
from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_SCHEDULE_DELAY,
    OTEL_EXPORTER_OTLP_ENDPOINT,
    OTEL_EXPORTER_OTLP_METRICS_ENDPOINT,
    OTEL_EXPORTER_OTLP_METRICS_PROTOCOL,
    OTEL_EXPORTER_OTLP_PROTOCOL,
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
    OTEL_SDK_DISABLED,
    OTEL_SERVICE_NAME,
)
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from splitspec.addresses import is_loopback, joined
from splitspec.config import ServerSettings
from splitspec.errors import ConfigError
from splitspec.telemetry.metrics import Metrics
from splitspec.telemetry.tracing import Tracing

log = structlog.get_logger()

_SCOPE = "splitspec"
#: Spans reach the file this soon: what a killed process loses. OTEL_BSP_SCHEDULE_DELAY overrides it.
_FILE_DELAY_MS = 200
#: The exporters' own limit is 10 seconds for each signal, which a process that is told to stop may not have.
_FLUSH_LIMIT_S = 5.0


@dataclass(frozen=True)
class _Signal:
    """The standard variables of one signal."""

    exporter: str
    endpoint: str
    protocol: str

    @property
    def by_otlp(self) -> bool:
        """Whether the variables ask for OTLP. Raises ConfigError for what this process can't do."""
        exporter = os.environ.get(self.exporter, "")
        if exporter not in ("", "otlp", "none"):
            raise ConfigError(f"{self.exporter} is {exporter!r}, expected otlp or none")
        endpoints = (self.endpoint, OTEL_EXPORTER_OTLP_ENDPOINT)
        wanted = exporter == "otlp" or (exporter == "" and any(os.environ.get(name) for name in endpoints))
        for name in (self.protocol, OTEL_EXPORTER_OTLP_PROTOCOL) if wanted else ():
            protocol = os.environ.get(name, "")
            if protocol not in ("", "grpc"):
                raise ConfigError(f"{name} is {protocol!r}, expected grpc")
            if protocol:
                break  # the signal's own variable goes before the common one
        return wanted

    @property
    def channel_options(self) -> tuple[tuple[str, int], ...] | None:
        """For the exporter's channel: a collector on this machine isn't behind a proxy."""
        endpoint = os.environ.get(self.endpoint) or os.environ.get(OTEL_EXPORTER_OTLP_ENDPOINT)
        local = not endpoint or is_loopback(endpoint)
        return (("grpc.enable_http_proxy", 0),) if local else None


_TRACES = _Signal(
    "OTEL_TRACES_EXPORTER", OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_PROTOCOL
)
_METRICS = _Signal(
    "OTEL_METRICS_EXPORTER", OTEL_EXPORTER_OTLP_METRICS_ENDPOINT, OTEL_EXPORTER_OTLP_METRICS_PROTOCOL
)


class Telemetry:
    """What a process traces and counts with. Without `start` it traces nothing and shows its counts nobody.

    Nothing is global: two of them in one process don't meet.
    """

    def __init__(self) -> None:
        self.tracing = Tracing(None)
        self.metrics = Metrics()
        self._resources = contextlib.ExitStack()

    @classmethod
    def start(
        cls, settings: ServerSettings, service_name: str, instance_id: str, slow_round_s: float = 0.0
    ) -> Self:
        """Start what the settings and the OTEL_* variables ask for; nothing else runs or is imported.

        service_name: unless OTEL_SERVICE_NAME says otherwise. slow_round_s: see Tracing. Raises ConfigError
        for a wrong variable, a file that can't be written, a port that is taken, or a missing extra.
        """
        telemetry = cls()
        if os.environ.get(OTEL_SDK_DISABLED, "").lower() == "true":
            return telemetry
        resource = _resource(service_name, instance_id)
        with contextlib.ExitStack() as resources:
            if processors := list(_span_processors(settings, resources)):
                tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
                for processor in processors:
                    tracers.add_span_processor(processor)
                resources.callback(tracers.shutdown)
                telemetry.tracing = Tracing(tracers.get_tracer(_SCOPE), slow_round_s)
            if readers := list(_metric_readers(settings, resources)):
                meters = MeterProvider(readers, resource, shutdown_on_exit=False)
                resources.callback(meters.shutdown)
                telemetry.metrics = Metrics(meters.get_meter(_SCOPE))
            telemetry._resources = resources.pop_all()
        return telemetry

    def shutdown(self) -> None:
        """Flush spans and metrics, and stop the endpoint. Blocks for a few seconds at most: call it off the
        event loop. What a collector hasn't taken by then is lost."""
        flush = threading.Thread(target=self._resources.close, name="telemetry-flush", daemon=True)
        flush.start()
        flush.join(_FLUSH_LIMIT_S)
        if flush.is_alive():
            log.warning("telemetry not flushed", limit_s=_FLUSH_LIMIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()


def _resource(service_name: str, instance_id: str) -> Resource:
    return Resource.create(
        {
            "service.name": os.environ.get(OTEL_SERVICE_NAME) or service_name,
            "service.namespace": "splitspec",
            "service.instance.id": instance_id,
            "service.version": importlib.metadata.version("splitspec"),
        }
    )


def _span_processors(settings: ServerSettings, resources: contextlib.ExitStack) -> Iterator[SpanProcessor]:
    if _TRACES.by_otlp:
        exporter = _extra("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
        yield BatchSpanProcessor(exporter.OTLPSpanExporter(channel_options=_TRACES.channel_options))
    if settings.trace_file:
        exporter = _extra("opentelemetry.exporter.otlp.json.file.trace_exporter")
        stream = resources.enter_context(_append_only(settings.trace_file))
        delay = None if OTEL_BSP_SCHEDULE_DELAY in os.environ else _FILE_DELAY_MS
        yield BatchSpanProcessor(exporter.FileSpanExporter(stream=stream), schedule_delay_millis=delay)


def _metric_readers(settings: ServerSettings, resources: contextlib.ExitStack) -> Iterator[MetricReader]:
    if _METRICS.by_otlp:
        exporter = _extra("opentelemetry.exporter.otlp.proto.grpc.metric_exporter")
        yield PeriodicExportingMetricReader(
            exporter.OTLPMetricExporter(channel_options=_METRICS.channel_options)
        )
    if settings.metrics_port:
        prometheus = _extra("prometheus_client")
        registry = prometheus.CollectorRegistry()
        yield _extra("opentelemetry.exporter.prometheus").PrometheusMetricReader(
            scope_info_enabled=False, registry=registry
        )
        try:
            server, thread = prometheus.start_http_server(settings.metrics_port, settings.host, registry)
        except OSError as error:
            address = joined(settings.host, settings.metrics_port)
            raise ConfigError(
                f"--metrics-port (SPLITSPEC_METRICS_PORT): can't listen on {address}, "
                "expected a free port on an address of this host"
            ) from error
        resources.callback(thread.join)
        resources.callback(server.server_close)
        resources.callback(server.shutdown)


class _AppendOnly(io.TextIOWrapper):
    """A stream whose every write is one system call at the end of the file: processes can share it.

    What can't be written, to a full disk for example, is lost, and told once until it works again.
    """

    _failing = False

    def write(self, text: str) -> int:
        try:
            super().write(text)
        except OSError as error:
            if not self._failing:
                log.warning("spans can't be written", trace_file=self.buffer.name, error=error.strerror)
            self._failing = True
        else:
            self._failing = False
        return len(text)


def _append_only(path: str) -> _AppendOnly:
    try:
        return _AppendOnly(open(path, "ab", buffering=0), encoding="utf-8", write_through=True)
    except OSError as error:
        raise ConfigError(
            f"--trace-file (SPLITSPEC_TRACE_FILE) is {path!r}: {error.strerror}, expected a file to append to"
        ) from error


def _extra(module: str) -> Any:
    """A module of the extra that has the exporters."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"traces and metrics are asked for, but {error.name} isn't installed, "
            "expected the extra: pip install 'splitspec[telemetry]'"
        ) from error
