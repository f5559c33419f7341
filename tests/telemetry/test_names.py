"""Names: complete, conventional, and the same in docs/telemetry.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, rpc_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from opentelemetry.semconv.attributes import error_attributes

from splitspec.telemetry import names
from splitspec.telemetry.names import Attribute, Kind, Metric, SpanName

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "telemetry.md").read_text()


def table(heading: str) -> list[tuple[str, ...]]:
    """The rows of the table under a heading, without its header."""
    (section,) = re.findall(rf"(?ms)^## {heading}\n(.*?)(?=^## |\Z)", DOCUMENT)
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [tuple(cell.strip() for cell in row) for row in rows[2:]]


def code(items: list[str] | tuple[str, ...]) -> str:
    return ", ".join(f"`{item}`" for item in items) or "none"


def test_document_has_exactly_the_spans() -> None:
    assert table("Spans") == [
        (f"`{span.name}`", code(span.parent), span.description, code([a.name for a in span.attributes]))
        for span in names.SPANS.values()
    ]


def test_document_has_exactly_the_attributes() -> None:
    assert table("Attributes") == [(f"`{a.name}`", a.description) for a in names.ATTRIBUTES.values()]


def test_document_has_exactly_the_metrics() -> None:
    assert table("Metrics") == [
        (f"`{m.name}`", m.kind.value, f"`{m.unit}`", code([a.name for a in m.attributes]), m.description)
        for m in names.METRICS.values()
    ]


@pytest.mark.parametrize("kind", [Attribute, SpanName, Metric])
def test_no_name_is_taken_twice(kind: type[Attribute | SpanName | Metric]) -> None:
    found = [value.name for value in vars(names).values() if isinstance(value, kind)]
    assert len(found) == len(set(found)) > 0


def test_every_attribute_has_a_user_and_is_listed() -> None:
    owners: list[SpanName | Metric] = [*names.SPANS.values(), *names.METRICS.values()]
    used = {attribute for owner in owners for attribute in owner.attributes}
    assert used == set(names.ATTRIBUTES.values())
    assert all(attribute.description for attribute in used)


def test_every_metric_has_a_unit_and_a_description_and_only_histograms_have_buckets() -> None:
    for metric in names.METRICS.values():
        assert re.fullmatch(r"s|By|\{[a-z]+\}", metric.unit), metric.name
        assert re.fullmatch(r"[A-Z].*\.", metric.description), metric.name
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name


def test_every_parent_is_a_span_and_only_the_request_is_a_root() -> None:
    assert {parent for span in names.SPANS.values() for parent in span.parent} <= set(names.SPANS)
    assert [span.name for span in names.SPANS.values() if not span.parent] == ["request"]


def test_names_by_convention_are_the_convention_s() -> None:
    modules = (gen_ai_attributes, rpc_attributes, gen_ai_metrics, error_attributes)
    known = {value for module in modules for value in vars(module).values() if isinstance(value, str)}
    ours = [name for name in (*names.ATTRIBUTES, *names.METRICS) if not name.startswith("splitspec.")]
    assert set(ours) - known == {"position"}  # vLLM's label
    assert len(ours) > 10


def test_names_are_written_nowhere_else() -> None:
    known = {name for name in (*names.ATTRIBUTES, *names.METRICS) if "." in name}
    known |= {name for name in names.SPANS if "." in name}
    folders = ("splitspec", "coordinator", "draft_worker", "target_worker")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    files.remove(ROOT / "splitspec" / "telemetry" / "names.py")
    written = {
        (path.name, node.value)
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in known
    }
    assert written == set()
