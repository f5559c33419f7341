"""Reads a trace file back: for tests, and for whoever wants to see where a request's time went."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STATUS_ERROR = 2


@dataclass(frozen=True)
class SpanRecord:
    """A finished span. parent_id: empty for a root. Times are nanoseconds since 1970, by its host's clock."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    failed: bool
    attributes: Mapping[str, Any]

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


def read_spans(path: str | Path) -> list[SpanRecord]:
    """All spans of a trace file, in the order of their start. Raises OSError when it can't be read."""
    with open(path, encoding="utf-8") as lines:
        spans = [span for line in lines for span in _spans(json.loads(line))]
    return sorted(spans, key=lambda span: span.start_ns)


def _spans(request: Mapping[str, Any]) -> Iterator[SpanRecord]:
    for resource in request["resourceSpans"]:
        service = _attributes(resource["resource"]["attributes"])["service.name"]
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                yield SpanRecord(
                    name=span["name"],
                    service=service,
                    trace_id=span["traceId"],
                    span_id=span["spanId"],
                    parent_id=span.get("parentSpanId", ""),
                    start_ns=int(span["startTimeUnixNano"]),
                    end_ns=int(span["endTimeUnixNano"]),
                    failed=span.get("status", {}).get("code") == _STATUS_ERROR,
                    attributes=_attributes(span.get("attributes", ())),
                )


def _attributes(pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {pair["key"]: _value(pair["value"]) for pair in pairs}


def _value(value: Mapping[str, Any]) -> Any:
    """An OTLP value as Python's: 64-bit integers are strings in JSON."""
    ((kind, content),) = value.items()
    if kind == "intValue":
        return int(content)
    if kind == "arrayValue":
        return [_value(item) for item in content.get("values", ())]
    return content
