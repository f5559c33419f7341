"""Traces and metrics of one process: where they go, and how they are started and flushed."""

from splitspec.telemetry.process import Telemetry
from splitspec.telemetry.tracing import NO_SPAN, Span

__all__ = ["NO_SPAN", "Span", "Telemetry"]
