"""How soon the controller settles when conditions change under a running request, on simulated models.

    .venv/bin/python benchmarks/changes.py [--quick]

The machine of overlap.py: a draft token takes 3 ms, a pass of the target 25 ms and 0.3 for each position. One
request runs, told neither mode nor K. After some rounds the round trip jumps from 1 to 50 ms, or acceptance
from 0.9 to 0.4, or 31 more requests come in. What each of its rounds then does is read from its trace.

It has settled with the first round from which on, of every ten rounds, eight do what the last twenty do most:
the same mode, and K within one, or a quarter. Rounds that try something out aren't counted as anything.

The last line is JSON: of each change the rounds until it had settled, the worst of all runs; null for never.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from closed_forms import Site  # benchmarks/closed_forms.py
from common import machine, save_result  # benchmarks/common.py
from overlap import DRAFT_MS, PASS_MS, POSITION_MS, PROMPT, Bench  # benchmarks/overlap.py

from splitspec.telemetry import names
from splitspec.telemetry.reading import SpanRecord, read_spans
from splitspec.types import Rule

BEFORE, AFTER = 60, 100
SESSIONS = 32
_WINDOW, _LAST, _MOST_TOKENS = 10, 20, 4000


@dataclass(frozen=True, slots=True)
class Did:
    """One round. at_s: its end, after the change. tried: to learn, not because it was thought best."""

    at_s: float
    mode: str
    k: int
    tokens: int
    tried: bool


@dataclass(frozen=True, slots=True)
class Change:
    """One run: what the request did before, and after the change."""

    name: str
    before: tuple[Did, ...]
    after: tuple[Did, ...]

    @property
    def settled(self) -> int | None:
        """Rounds from the change on until it had settled; None if it hadn't."""
        return settled(self.after)


def settled(rounds: Sequence[Did]) -> int | None:
    """See the head of this file."""
    meant = [(i, did) for i, did in enumerate(rounds) if not did.tried]
    if len(meant) < _LAST:
        return None
    ((mode, k), _), *_ = Counter((did.mode, did.k) for _, did in meant[-_LAST:]).most_common(1)
    same = [did.mode == mode and abs(did.k - k) <= max(1, k / 4) for _, did in meant]
    first = None
    for start in range(len(meant) - _WINDOW, -1, -1):
        if sum(same[start : start + _WINDOW]) < 8:
            break
        first = start
    while first is not None and not same[first]:
        first += 1
    return None if first is None else meant[first][0]


async def run(bench: Bench, site: Site, change: Callable[[], Awaitable[None]]) -> tuple[str, int]:
    """A request through the change: its id, and when the change was, in nanoseconds since 1970."""
    bench.set(site)
    generation = bench.client.generate(PROMPT, rule=Rule.TOKEN, seed=1, max_tokens=_MOST_TOKENS)
    rounds, changed_ns = 0, 0
    async for _ in generation:
        rounds += 1
        if rounds == BEFORE:
            await change()
            changed_ns = time.time_ns()
        if rounds == BEFORE + AFTER:
            break
    await generation.aclose()
    return generation.started.request_id, changed_ns


async def measure(bench: Bench, repeats: int) -> list[tuple[str, str, int]]:
    """Name, request and time of every change."""
    calm = Site(0.8, DRAFT_MS, PASS_MS, POSITION_MS, 5.0)
    others: list[asyncio.Task[None]] = []

    async def set_to(site: Site) -> None:
        bench.set(site)

    async def other(seed: int) -> None:
        generation = bench.client.generate(PROMPT, rule=Rule.TOKEN, seed=seed, max_tokens=_MOST_TOKENS)
        async with contextlib.aclosing(generation):
            async for _ in generation:
                pass

    async def crowd() -> None:
        others.extend(asyncio.create_task(other(seed)) for seed in range(2, SESSIONS + 1))

    scenes: list[tuple[str, Site, Callable[[], Awaitable[None]]]] = [
        (
            "round_trip",
            replace(calm, round_trip_ms=1.0),
            functools.partial(set_to, replace(calm, round_trip_ms=50.0)),
        ),
        (
            "acceptance",
            replace(calm, acceptance=0.9),
            functools.partial(set_to, replace(calm, acceptance=0.4)),
        ),
        ("load", calm, crowd),
    ]
    found = []
    for name, site, change in scenes * repeats:
        found.append((name, *await run(bench, site, change)))
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        others.clear()
    return found


def changes(spans: Sequence[SpanRecord], found: Sequence[tuple[str, str, int]]) -> list[Change]:
    traces = {span.attributes.get(names.REQUEST_ID.name): span.trace_id for span in spans}
    result = []
    for name, request_id, changed_ns in found:
        rounds = [
            span
            for span in spans
            if span.trace_id == traces[request_id]
            and span.name == names.ROUND_SPAN.name
            and names.NUM_ACCEPTED.name in span.attributes
        ]
        did = [(span.start_ns >= changed_ns, _did(span, changed_ns)) for span in rounds]
        before, after = (tuple(d for later, d in did if later is side) for side in (False, True))
        result.append(Change(name, before, after))
    return result


def _did(span: SpanRecord, changed_ns: int) -> Did:
    found = span.attributes
    return Did(
        at_s=(span.end_ns - changed_ns) / 1e9,
        mode=found[names.MODE.name],
        k=found[names.CONTROL_NUM_DRAFT_TOKENS.name],
        tokens=found[names.NUM_ACCEPTED.name] + 1,
        tried=found[names.CONTROL_TRIED.name],
    )


async def measure_all(repeats: int, directory: Path) -> list[Change]:
    trace = directory / "trace.jsonl"
    async with Bench.started(directory, trace) as bench:
        found = await measure(bench, repeats)
    return changes(read_spans(trace), found)


def summary(runs: Sequence[Change]) -> dict[str, int | None]:
    """The worst of each change."""
    result: dict[str, int | None] = {}
    for name in dict.fromkeys(run.name for run in runs):
        rounds = [run.settled for run in runs if run.name == name]
        result[f"settled_{name}"] = None if None in rounds else max(n for n in rounds if n is not None)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="each change once instead of five times")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        runs = asyncio.run(measure_all(1 if arguments.quick else 5, Path(directory)))
    last = summary(runs)
    kept = [{"settled": run.settled} | asdict(run) for run in runs]
    saved = save_result(
        "changes", {"machine": machine(), "summary": last, "runs": kept}, quick=arguments.quick
    )
    from changes_picture import draw  # benchmarks/changes_picture.py; only it needs matplotlib

    draw(runs, saved.with_suffix(".png"))
    print(json.dumps(last))


if __name__ == "__main__":
    main()
