"""The trace of a request, read back from the file of three processes, and the counts that they show."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from protos.v1 import coordinator_pb2, coordinator_pb2_grpc
from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient, Finished, GenerateOptions
from splitspec.errors import InvalidRequestError
from splitspec.telemetry import names
from splitspec.telemetry.reading import SpanRecord, read_spans
from splitspec.types import Origin
from tests.integration.conftest import draft_load, target_load
from tests.waiting import until

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

PROMPT = "Tell me about the history of sailing ships."
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
#: One runs beside the next round, and the other draws tokens of later rounds.
OUTLIVES_ITS_PARENT = {"deliver", "target.decode"}


@dataclass(frozen=True)
class Traced:
    """A stack with a trace file that its processes share, and their Prometheus ports."""

    stack: Stack
    path: Path
    ports: dict[str, int]


def options(session_id: str, max_tokens: int = 40, *, speculate: bool = True) -> GenerateOptions:
    return {
        "session_id": session_id,
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "speculate": speculate,
    }


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def traced_stack(model: Path, path: Path, ports: dict[str, int], *coordinator_args: str) -> Stack:
    """The drafter is the target itself, so that a random model accepts its proposals, too."""

    def flags(role: str) -> list[str]:
        return [f"--trace-file={path}", f"--metrics-port={ports[role]}"]

    return Stack(
        model=model,
        drafters=[f"model={model}"],
        target_args=flags("target"),
        draft_args=flags("draft"),
        coordinator_args=[
            *flags("coordinator"),
            *("--overlap=sequential", "--num-draft-tokens=4"),
            *coordinator_args,
        ],
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def traced(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Traced]:
    """Its drafter is always waited for."""
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    ports = dict(zip(["coordinator", "draft", "target"], free_ports(3), strict=True))
    patient = ("--draft-patience=1000", "--draft-timeout-s=30")
    async with traced_stack(tiny_model, path, ports, *patient) as stack:
        yield Traced(stack, path, ports)


async def trace_of(path: Path, session_id: str, decoded: int = 0, **at_least: int) -> list[SpanRecord]:
    """The spans of the session's requests, once there are so many of each name, and tokens `decoded` plainly.

    A process writes its spans as they end, so the coordinator's are all there when that of the request is.
    """
    expected = Counter({"request": 1}) | Counter(at_least)
    found: list[SpanRecord] = []

    def complete() -> bool:
        nonlocal found
        spans = read_spans(path)
        ids = {s.trace_id for s in spans if s.attributes.get(names.CONVERSATION_ID.name) == session_id}
        found = [span for span in spans if span.trace_id in ids]
        granted = sum(span.attributes["splitspec.num_tokens"] for span in named(found, "target.decode"))
        return granted >= decoded and expected <= Counter(span.name for span in found)

    await until(complete)
    return found


def named(spans: Iterable[SpanRecord], name: str) -> list[SpanRecord]:
    return [span for span in spans if span.name == name]


def check_family(spans: list[SpanRecord], caller: str = "") -> None:
    """One trace, in which every span has a parent that it may have, and lies within its time."""
    assert len({span.trace_id for span in spans}) == 1
    (request,) = named(spans, "request")
    assert request.parent_id == caller
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        process = span.name.partition(".")[0]
        assert span.service == f"splitspec-{process if process in ('draft', 'target') else 'coordinator'}"
        if span is not request:
            parent = by_id[span.parent_id]
            assert parent.name in names.SPANS[span.name].parent
            assert parent.start_ns <= span.start_ns
            if span.name not in OUTLIVES_ITS_PARENT:
                assert span.end_ns <= parent.end_ns, span.name
        allowed = {attribute.name for attribute in names.SPANS[span.name].attributes}
        assert span.attributes.keys() <= allowed


def counts(finished: Finished) -> dict[str, int]:
    """How many spans of each name a request has that went well and leaves its KV."""
    drafted, plain = finished.acceptance.num_spec_steps, finished.acceptance.num_plain_steps
    rounds = drafted + plain
    return {
        **{"request": 1, "read": 1, "admit": 1, "close": 1, "leave": 1},
        **{"choose": 2, "open": 2, "draft.open": 1, "target.open": 1},
        **{"round": rounds, "commit": rounds, "deliver": rounds, "journal": rounds + 1},
        **{"propose": drafted, "draft.propose": drafted, "verify": drafted, "target.verify": drafted},
        **{"decode": plain, "target.decode": plain},
    }


async def test_a_trace_is_complete(traced: Traced) -> None:
    async with AsyncClient(traced.stack.address) as client:
        result = await client.generate(PROMPT, **options("complete")).result()
    expected = counts(result.finished)
    spans = await trace_of(traced.path, "complete", **expected)
    check_family(spans)
    assert Counter(span.name for span in spans) == Counter(expected)
    assert expected["verify"] >= 8

    acceptance, usage = result.finished.acceptance, result.finished.usage
    (request,) = named(spans, "request")
    rounds = {
        name.removeprefix("splitspec.rounds."): values
        for name, values in request.attributes.items()
        if name.startswith("splitspec.rounds.")
    }
    assert {len(values) for values in rounds.values()} == {expected["round"]}
    assert sum(rounds["num_draft_tokens"]) == acceptance.num_draft_tokens
    assert sum(rounds["num_accepted"]) == acceptance.num_accepted_draft_tokens
    for number, span in enumerate(named(spans, "round")):
        assert span.attributes["splitspec.num_accepted"] == rounds["num_accepted"][number]
        assert rounds["total_us"][number] <= span.duration_s * 1e6 + 1000
        assert rounds["propose_us"][number] + rounds["verify_us"][number] <= rounds["total_us"][number]
    assert request.attributes["gen_ai.usage.input_tokens"] == usage.prompt_tokens
    assert request.attributes["gen_ai.usage.output_tokens"] == usage.completion_tokens == 40
    assert sum(s.attributes["splitspec.num_tokens"] for s in named(spans, "deliver")) == 40
    assert all(span.attributes["splitspec.durable"] for span in named(spans, "deliver"))
    assert request.attributes["gen_ai.response.finish_reasons"] == ["max_tokens"]
    assert request.attributes["rpc.response.status_code"] == "OK"
    assert request.attributes["splitspec.drafter"] == "model"
    assert not any("error.type" in span.attributes for span in spans)
    # The wait is the worker's own time and the wire.
    own = {s.parent_id: s.attributes["splitspec.server.total_us"] for s in named(spans, "target.verify")}
    for span in named(spans, "verify"):
        assert span.attributes["splitspec.server.total_us"] == own[span.span_id]
        waited_us = own[span.span_id] + span.attributes["splitspec.wire_us"]
        assert waited_us <= span.duration_s * 1e6 + 1000


async def test_plain_rounds_decode(traced: Traced) -> None:
    async with AsyncClient(traced.stack.address) as client:
        await client.generate(PROMPT, **options("plain", speculate=False)).result()
    # Each grant is one span at the target.
    spans = await trace_of(traced.path, "plain", decoded=40)
    check_family(spans)
    found = Counter(span.name for span in spans)
    assert found["round"] == found["decode"] == found["commit"] == found["deliver"] == 40
    assert found["open"] == found["target.open"] == found["choose"] == 1
    assert found["propose"] == found["draft.open"] == found["verify"] == 0
    granted = [span.attributes["splitspec.num_tokens"] for span in named(spans, "target.decode")]
    assert sum(granted) == 40


async def test_the_phases_add_up(traced: Traced) -> None:
    """The spans of the coordinator leave no more than 5 % of a request unexplained."""
    unexplained: list[float] = []
    while min(unexplained, default=1) >= 0.05:  # the machine may take its time between two spans
        number = len(unexplained)
        async with AsyncClient(traced.stack.address) as client:
            result = await client.generate(PROMPT, **options(f"phases-{number}")).result()
        spans = await trace_of(traced.path, f"phases-{number}")
        (request,) = named(spans, "request")
        ours = [span for span in spans if span.service == request.service]
        phases = [span for span in ours if span.parent_id == request.span_id or span.name == "deliver"]
        within = []
        for span in named(spans, "round"):
            parts = [child for child in ours if child.parent_id == span.span_id and child.name != "deliver"]
            within.append(covered_s(parts) / span.duration_s)
        total_s = result.finished.timings.total_us / 1e6
        (leave,) = named(spans, "leave")
        unexplained.append(
            max(
                1 - covered_s(phases) / request.duration_s,
                1 - sum(within) / len(within),
                abs(1 - (covered_s(phases) - leave.duration_s) / total_s),
            )
        )


def covered_s(spans: list[SpanRecord]) -> float:
    """Seconds in which at least one of the spans runs."""
    covered, end = 0, 0
    for span in sorted(spans, key=lambda span: span.start_ns):
        covered += max(0, span.end_ns - max(span.start_ns, end))
        end = max(end, span.end_ns)
    return covered / 1e9


async def test_a_cancelled_request_has_its_trace(traced: Traced) -> None:
    async with AsyncClient(traced.stack.address) as client:
        generation = client.generate(PROMPT, **options("cancelled", 3000))
        while (chunk := await generation.read()) is not None and chunk.offset < 20:
            pass
        await generation.aclose()
    spans = await trace_of(traced.path, "cancelled")
    # What the workers were doing ends a little later.
    check_family([span for span in spans if span.service == "splitspec-coordinator"])
    assert {span.parent_id for span in spans if "." in span.name} <= {span.span_id for span in spans}
    (request,) = named(spans, "request")
    assert request.attributes["error.type"] == "cancelled"
    assert request.attributes["rpc.response.status_code"] == "CANCELLED"
    assert not any(span.failed for span in spans if span.service == "splitspec-coordinator")
    found = Counter(span.name for span in spans)
    assert found["admit"] == found["leave"] == 1
    assert found["close"] == 0
    assert found["commit"] == len(request.attributes["splitspec.rounds.total_us"]) >= 4
    assert found["round"] - found["commit"] in (0, 1)
    assert request.attributes["gen_ai.usage.output_tokens"] >= 20


async def test_a_killed_draft_worker_leaves_a_complete_trace(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    ports = dict(zip(["coordinator", "draft", "target"], free_ports(3), strict=True))
    async with (
        traced_stack(tiny_model, path, ports, "--draft-patience=1000") as stack,
        AsyncClient(stack.address) as client,
    ):
        generation = client.generate(PROMPT, **options("killed", 300))
        killed = False
        async for chunk in generation:
            if not killed and Origin.ACCEPTED in [token.origin for token in chunk.tokens]:
                await until(lambda: bool(named(read_spans(path), "draft.propose")))
                await stack.draft.kill()
                killed = True
        expected = counts(generation.finished)
        of_target = {name: expected[name] for name in ("target.open", "target.verify")}
        spans = await trace_of(path, "killed", **of_target)
    check_family(spans)
    found = Counter(span.name for span in spans)
    for name in ("request", "admit", "round", "commit", "deliver", "journal", "verify", "decode", "leave"):
        assert found[name] == expected[name], name
    assert found["target.verify"] == found["verify"] > 0
    assert found["decode"] > 0
    assert 0 < found["draft.propose"] <= found["propose"]
    missed = [span for span in named(spans, "propose") if span.attributes.get("splitspec.missed")]
    # More than one when the killed worker is tried again while the directory still has it.
    assert {span.attributes["error.type"] for span in missed} == {"UnavailableError"}
    assert found["propose"] - len(missed) == found["verify"]
    (request,) = named(spans, "request")
    assert request.attributes["rpc.response.status_code"] == "OK"


async def test_the_caller_s_context_is_the_parent(traced: Traced) -> None:
    unsampled = CALLER.replace("0af7", "0af8")[:-2] + "00"
    async with grpc.aio.insecure_channel(traced.stack.address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        for traceparent in (unsampled, CALLER):
            request = coordinator_pb2.GenerateRequest(
                text=PROMPT,
                session_id="called",
                stop=coordinator_pb2.StopConditions(max_tokens=10, ignore_eos=True),
            )
            call = stub.Generate(request, metadata=[("traceparent", traceparent)])
            assert [event async for event in call][-1].HasField("finished")
    spans = await trace_of(traced.path, "called")
    check_family(spans, caller=CALLER[36:52])
    assert spans[0].trace_id == CALLER[3:35]
    assert not any(span.trace_id == unsampled[3:35] for span in read_spans(traced.path))


async def scrape(port: int) -> dict[str, float]:
    """The samples of a Prometheus endpoint by name and labels."""

    def read() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            return str(response.read().decode())

    lines = (await asyncio.to_thread(read)).splitlines()
    samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


async def growth(traced: Traced, before: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    after = {role: await scrape(port) for role, port in traced.ports.items()}
    return {
        role: {name: value - before[role].get(name, 0) for name, value in samples.items()}
        for role, samples in after.items()
    }


async def test_metrics_agree_with_what_the_client_is_told(traced: Traced, tiny_model: Path) -> None:
    async with AsyncClient(traced.stack.address) as client:
        with pytest.raises(InvalidRequestError):  # so that its kind is there from the beginning
            await client.generate([10**6], **options("counted")).result()
        before = {role: await scrape(port) for role, port in traced.ports.items()}
        first = (await client.generate(PROMPT, **options("counted")).result()).finished
        second = (await client.generate(PROMPT, **options("counted")).result()).finished
        with pytest.raises(InvalidRequestError):
            await client.generate([10**6], **options("counted")).result()
    both = [first, second]
    grown = await growth(traced, before)
    accepted = Counter[int]()
    for finished in both:
        for length, times in enumerate(finished.acceptance.acceptance_histogram):
            accepted += Counter(dict.fromkeys(range(length), times))

    def total(field: str) -> int:
        return sum(int(getattr(finished.acceptance, field)) for finished in both)

    drafted, plain = total("num_spec_steps"), total("num_plain_steps")
    spec = "splitspec_spec_decode_num"
    expected = {
        "splitspec_prompt_tokens_total": sum(finished.usage.prompt_tokens for finished in both),
        "splitspec_prompt_tokens_cached_total": second.usage.cached_tokens,
        "splitspec_generation_tokens_total": sum(finished.usage.completion_tokens for finished in both),
        f"{spec}_drafts_total": drafted,
        f"{spec}_draft_tokens_total": total("num_draft_tokens"),
        f"{spec}_accepted_tokens_total": total("num_accepted_draft_tokens"),
        "splitspec_plain_rounds_total": plain,
        "splitspec_missed_rounds_total": 0,
        "splitspec_one_hot_tokens_total": 0,
        "splitspec_round_duration_seconds_count": drafted + plain,
        'splitspec_wire_duration_seconds_count{splitspec_role="draft"}': drafted + 2,
        'splitspec_wire_duration_seconds_count{splitspec_role="target"}': drafted + plain + 2,
        "splitspec_live_sessions": 0,
    }
    positions = {
        f'{spec}_accepted_tokens_per_pos_total{{position="{position}"}}': times
        for position, times in accepted.items()
    }
    assert len(positions) == 4
    assert {name: grown["coordinator"][name] for name in [*expected, *positions]} == expected | positions
    labels = 'gen_ai_operation_name="text_completion",gen_ai_provider_name="splitspec"'
    model = f'gen_ai_request_model="{tiny_model}"'
    for name in ("time_to_first_token", "time_per_output_token"):
        assert grown["coordinator"][f"gen_ai_server_{name}_seconds_count{{{labels},{model}}}"] == 2
    # Once a request has failed, Prometheus shows the others with an empty label.
    for error_type, times in (("", 2), ("InvalidRequestError", 1)):
        every = f'error_type="{error_type}",{labels},{model}'
        assert grown["coordinator"][f"gen_ai_server_request_duration_seconds_count{{{every}}}"] == times

    # The workers' times are of their own messages; an Open may take two. No message is counted elsewhere.
    at_least = {"request": 2, "target.open": 2, "target.verify": drafted, "draft.propose": drafted}
    messages = Counter(span.name for span in await trace_of(traced.path, "counted", **at_least))
    of_target, of_draft = messages["target.open"], messages["draft.open"] + messages["draft.propose"]
    assert grown["target"]["splitspec_model_duration_seconds_count"] == of_target + drafted + plain
    assert grown["draft"]["splitspec_model_duration_seconds_count"] == of_draft
    assert of_draft >= drafted + 2
    assert grown["target"]["splitspec_spec_decode_num_drafts_total"] == 0
    # What they hold is what they say themselves.
    for role, load in (
        ("target", await target_load(traced.stack)),
        ("draft", await draft_load(traced.stack)),
    ):
        shown = await scrape(traced.ports[role])
        assert shown["splitspec_handles"] == load.handles >= 1
        assert shown["splitspec_kv_tokens"] == load.kv_tokens > first.usage.prompt_tokens
        assert shown["splitspec_kv_memory_bytes"] == load.kv_bytes > 0
        assert shown["splitspec_live_sessions"] == load.live_sessions == 0
        assert shown["splitspec_stale_messages_total"] == 0
