"""How soon the controller settles when conditions change under a running request, on simulated models.

    .venv/bin/python benchmarks/changes.py [--quick]

The machine of overlap.py: a draft token takes 3 ms, a pass of the target 25 ms and 0.3 for each position. One
request runs, told neither mode nor K. After some rounds the round trip jumps from 1 to 50 ms, or acceptance
from 0.9 to 0.4, or 31 more requests come in. What each of its rounds then does is read from its trace.

What a choice of mode and K is worth is its speed under the new conditions over that of the best: by the
closed forms (closed_forms.py) with the hits of the run, and for 32 sessions as measured with all of them
pinned to it. The control has settled with the first round from which on the choices of every ten rounds are
worth at least 0.9 on average. It is steady with the first from which on eight of every ten are the one that
the last twenty rounds have most: the same mode, and K within one, or a quarter. Several choices can be worth
nearly the same. Rounds that try something out are left out of both.

The last line is JSON: of each change the rounds until it had settled and was steady, the median and the worst
of all runs; null for never.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from closed_forms import Site, tokens_per_s, top  # benchmarks/closed_forms.py
from common import machine, save_result  # benchmarks/common.py
from overlap import DRAFT_MS, PASS_MS, POSITION_MS, PROMPT, SESSIONS, Bench  # benchmarks/overlap.py

from coordinator.control.forecast import Arm
from splitspec.client.request import GenerateOptions
from splitspec.telemetry import names
from splitspec.telemetry.reading import SpanRecord, read_spans
from splitspec.types import Mode, Rule

BEFORE, AFTER = 60, 100
#: What is measured under load.
CROWD_ARMS = [
    Arm(Mode.PLAIN, 0),
    *(Arm(Mode.SEQUENTIAL, k) for k in (2, 4, 8)),
    *(Arm(mode, 4) for mode in (Mode.PIPELINED, Mode.PREFETCH_PULL, Mode.PREFETCH_PUSH)),
]
_WINDOW, _LAST, _MOST_TOKENS = 10, 20, 4000


@dataclass(frozen=True, slots=True)
class Did:
    """One round. at_s: its end, after the change. tried: to learn, not because it was thought best.

    worth: of its choice after the change, 0 to 1.
    """

    at_s: float
    mode: str
    k: int
    tokens: int
    tried: bool
    worth: float = 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """One run: what the request did before, and after the change."""

    name: str
    before: tuple[Did, ...]
    after: tuple[Did, ...]

    @property
    def settled(self) -> int | None:
        """Rounds from the change on until it had settled; None if it hadn't."""
        return _first(self.after, [did.worth for did in self.after], 0.9)

    @property
    def steady(self) -> int | None:
        """The same until it was steady."""
        last = [(did.mode, did.k) for did in self.after if not did.tried][-_LAST:]
        ((mode, k), _), *_ = Counter(last).most_common(1)
        same = [float(did.mode == mode and abs(did.k - k) <= max(1, k / 4)) for did in self.after]
        return _first(self.after, same, 0.8)


def _first(rounds: Sequence[Did], values: Sequence[float], least: float) -> int | None:
    """The first round with so high a value from which on every ten have it on average; tries left out."""
    meant = [i for i, did in enumerate(rounds) if not did.tried]
    first = None
    for place in range(len(meant) - _WINDOW, -1, -1):
        if statistics.fmean(values[i] for i in meant[place : place + _WINDOW]) < least:
            break
        if values[meant[place]] >= least:
            first = meant[place]
    return first


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


@dataclass(frozen=True, slots=True)
class Ran:
    """A request that was led through a change. site: after it; None under load."""

    name: str
    request_id: str
    changed_ns: int
    site: Site | None


async def endless(bench: Bench, seed: int, counts: list[int], choice: Arm | None = None) -> None:
    """A request that goes on until it is cancelled, and adds up its tokens in counts[0]."""
    options: GenerateOptions = {"rule": Rule.TOKEN, "seed": seed, "max_tokens": _MOST_TOKENS}
    if choice is not None:
        options |= {"mode": choice.mode, "num_draft_tokens": choice.num_draft_tokens}
    async with contextlib.aclosing(bench.client.generate(PROMPT, **options)) as chunks:
        async for chunk in chunks:
            counts[0] += len(chunk.tokens)


async def ended(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    tasks.clear()


async def crowd_speeds(bench: Bench, site: Site) -> dict[Arm, float]:
    """Tokens per second of all sessions, pinned to each choice."""
    bench.set(site)
    found = {}
    for arm in CROWD_ARMS:
        counts = [0]
        tasks = [asyncio.create_task(endless(bench, seed, counts, arm)) for seed in range(SESSIONS)]
        await asyncio.sleep(2)
        before, since = counts[0], time.perf_counter()
        await asyncio.sleep(4)
        found[arm] = (counts[0] - before) / (time.perf_counter() - since)
        await ended(tasks)
    return found


async def measure(bench: Bench, repeats: int) -> tuple[list[Ran], dict[Arm, float]]:
    """Every change, and what choices are worth under load."""
    calm = Site(0.8, DRAFT_MS, PASS_MS, POSITION_MS, 5.0)
    others: list[asyncio.Task[None]] = []

    async def crowd() -> None:
        others.extend(asyncio.create_task(endless(bench, seed, [0])) for seed in range(2, SESSIONS + 1))

    jumps = {
        "round_trip": (replace(calm, round_trip_ms=1.0), replace(calm, round_trip_ms=50.0)),
        "acceptance": (replace(calm, acceptance=0.9), replace(calm, acceptance=0.4)),
    }
    found = []
    for _ in range(repeats):
        for name, (before, after) in jumps.items():

            async def jump(after: Site = after) -> None:
                bench.set(after)

            found.append(Ran(name, *await run(bench, before, jump), after))
        found.append(Ran("load", *await run(bench, calm, crowd), None))
        await ended(others)
    return found, await crowd_speeds(bench, calm)


def changes(spans: Sequence[SpanRecord], found: Sequence[Ran], crowd: Mapping[Arm, float]) -> list[Change]:
    traces = {span.attributes.get(names.REQUEST_ID.name): span.trace_id for span in spans}
    result = []
    for ran in found:
        rounds = [
            span
            for span in spans
            if span.trace_id == traces[ran.request_id]
            and span.name == names.ROUND_SPAN.name
            and names.NUM_ACCEPTED.name in span.attributes
        ]
        before = [_did(span, ran.changed_ns) for span in rounds if span.start_ns < ran.changed_ns]
        after = [_did(span, ran.changed_ns) for span in rounds if span.start_ns >= ran.changed_ns]
        worth = functools.partial(_crowd_worth, crowd)
        if ran.site is not None:
            hit_rate = rounds[-1].attributes[names.CONTROL_HIT_RATE.name]
            worth = functools.partial(_worth, replace(ran.site, hit_rate=hit_rate))
        valued = [replace(did, worth=worth(did)) for did in after]
        result.append(Change(ran.name, tuple(before), tuple(valued)))
    return result


def _worth(site: Site, did: Did) -> float:
    return tokens_per_s(Mode[did.mode.upper()], site, did.k) / top(site, 1)[0].tokens_per_s


def _crowd_worth(crowd: Mapping[Arm, float], did: Did) -> float:
    """Of the mode's nearest length that was measured."""
    mode = Mode[did.mode.upper()]
    nearest = min(
        (arm for arm in crowd if arm.mode is mode), key=lambda arm: abs(arm.num_draft_tokens - did.k)
    )
    return crowd[nearest] / max(crowd.values())


def _did(span: SpanRecord, changed_ns: int) -> Did:
    found = span.attributes
    return Did(
        at_s=(span.end_ns - changed_ns) / 1e9,
        mode=found[names.MODE.name],
        k=found[names.CONTROL_NUM_DRAFT_TOKENS.name],
        tokens=found[names.NUM_ACCEPTED.name] + 1,
        tried=found[names.CONTROL_TRIED.name],
    )


async def measure_all(repeats: int, directory: Path) -> tuple[list[Change], dict[Arm, float]]:
    trace = directory / "trace.jsonl"
    async with Bench.started(directory, trace) as bench:
        found, crowd = await measure(bench, repeats)
    return changes(read_spans(trace), found, crowd), crowd


def summary(runs: Sequence[Change]) -> dict[str, float | None]:
    """Of each change; never is later than any round."""
    result: dict[str, float | None] = {}
    for name in dict.fromkeys(run.name for run in runs):
        for what in ("settled", "steady"):
            rounds = [getattr(run, what) for run in runs if run.name == name]
            late = [math.inf if n is None else n for n in rounds]
            for of, value in (("median", statistics.median(late)), ("worst", max(late))):
                result[f"{name}_{what}_{of}"] = None if value == math.inf else value
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="each change once instead of five times")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        runs, crowd = asyncio.run(measure_all(1 if arguments.quick else 5, Path(directory)))
    last = summary(runs)
    kept = [{"settled": run.settled, "steady": run.steady} | asdict(run) for run in runs]
    speeds = {f"{arm.mode.name.lower()} {arm.num_draft_tokens}": speed for arm, speed in crowd.items()}
    result = {"machine": machine(), "summary": last, "crowd_tokens_per_s": speeds, "runs": kept}
    saved = save_result("changes", result, quick=arguments.quick)
    from changes_picture import draw  # benchmarks/changes_picture.py; only it needs matplotlib

    draw(runs, saved.with_suffix(".png"))
    print(json.dumps(last))


if __name__ == "__main__":
    main()
