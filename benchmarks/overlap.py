"""Every mode of overlap beside its closed form, on simulated models and a network with a chosen round trip.

    .venv/bin/python benchmarks/overlap.py [--quick]

One machine plays two accelerators and two sites: a draft token takes 3 ms, a pass of the target 25 ms and
0.3 for each position, asleep for nearly all of it (splitspec/engine/simulated.py), and the leg between
coordinator and target goes through a proxy that delays each direction by half the round trip
(delay_proxy.py). The other legs are loopback. Requests are at temperature 1 under the token rule, one at a
time.

In each cell of acceptance and round trip every mode runs with the K that is best by its closed form, then
those of the three best choices of all that are still missing, and then the controller, which is told neither
mode nor K; its first request in a cell isn't counted, since there it learns. A speed is tokens over the time
from the first chunk to the last. Closed forms (closed_forms.py) are taken at the acceptance and the hits that
the run had.

The last line is JSON, the worst cell of each: `sequential_vs_closed_form` (a round's time by the form over
the mean measured, round trips of 5 ms and more), `best_vs_closed_form` (the fastest run over the best form),
`controller_vs_best_fixed`, `controller_vs_plain`; and `overhead_ms_p50`: what a sequential round takes beyond
both workers' own time, waits for a pass included, and the round trip, by its trace, the median over all; and
`overhead_32_ms_p50`, the same of 32 sessions at once.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from closed_forms import Choice, Site, best, sequential_ms, tokens_per_s, top  # benchmarks/closed_forms.py
from common import machine, save_result  # benchmarks/common.py
from delay_proxy import DelayProxy, Leg  # benchmarks/delay_proxy.py
from overlap_table import CONTROLLER, Cell, Run, markdown, summary  # benchmarks/overlap_table.py

from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient
from splitspec.client.request import GenerateOptions
from splitspec.client.values import AcceptanceStats
from splitspec.engine.simulated import SimulatedConfig
from splitspec.telemetry import names
from splitspec.telemetry.reading import read_spans
from splitspec.types import Mode, Rule

DRAFT_MS, PASS_MS, POSITION_MS = 3.0, 25.0, 0.3
#: Hits that the choice of K counts on, before a run has shown its own.
EXPECTED_HITS = 0.8
ACCEPTANCES = (0.6, 0.8, 0.95)
ROUND_TRIPS_MS = (0.5, 5.0, 20.0, 50.0, 100.0)

#: At once, and what they draft.
SESSIONS, CROWD_K = 32, 4

PROMPT = list(range(16))
#: Drafts are always waited for. So much is done ahead that the longest round trip can be hidden.
FLAGS = ("--draft-patience=1000", "--draft-timeout-s=30", "--decode-window=8", "--num-ahead=16")


@dataclass(eq=False)
class Bench:
    """The service, whose acceptance and round trip can be set while it runs."""

    client: AsyncClient
    proxy: DelayProxy
    draft: Path
    #: Site and K of each sequential request, by its id; and of those that ran beside 31 others.
    sequential: dict[str, tuple[Site, int]]
    crowded: dict[str, tuple[Site, int]]

    @classmethod
    @asynccontextmanager
    async def started(cls, directory: Path, trace: Path) -> AsyncIterator[Bench]:
        target, draft = directory / "target", directory / "draft"
        SimulatedConfig(pass_ms=PASS_MS, position_ms=POSITION_MS).save(target)
        SimulatedConfig(pass_ms=DRAFT_MS, acceptance=ACCEPTANCES[0]).save(draft)
        async with DelayProxy() as proxy:
            stack = Stack(
                model=target,
                drafters=[f"model={draft}"],
                target_args=[f"--advertise={proxy.address}"],
                coordinator_args=[*FLAGS, f"--trace-file={trace}"],
            )
            async with stack, AsyncClient(stack.address) as client:
                proxy.upstream = stack.target.address
                yield cls(client, proxy, draft, {}, {})

    def set(self, site: Site) -> None:
        """Both ends follow at once: the draft with its next pass, the proxy with its next bytes."""
        SimulatedConfig(pass_ms=DRAFT_MS, acceptance=site.acceptance).save(self.draft)
        self.proxy.up = self.proxy.down = Leg(delay_ms=site.round_trip_ms / 2)

    async def run(self, site: Site, choice: Choice | None, seconds: float) -> Run:
        """One request of about so many seconds. choice: None leaves mode and K to the controller."""
        expected = choice.tokens_per_s if choice else top(site, 1)[0].tokens_per_s
        options: GenerateOptions = {
            "rule": Rule.TOKEN,
            "seed": 1,
            "max_tokens": max(32, int(seconds * expected)),
        }
        if choice is not None:
            options |= {"mode": choice.mode, "num_draft_tokens": choice.k}
        generation = self.client.generate(PROMPT, **options)
        arrivals = [(time.perf_counter(), len(chunk.tokens)) async for chunk in generation]
        spent_s = arrivals[-1][0] - arrivals[0][0]
        tokens = sum(count for _, count in arrivals[1:])
        stats = generation.finished.acceptance
        found = Run(
            CONTROLLER if choice is None else choice.mode.name.lower(),
            None if choice is None else choice.k,
            tokens,
            tokens / spent_s,
            acceptance=_acceptance(stats, choice.k if choice else None),
            hit_rate=stats.num_ahead_steps / stats.num_spec_steps if stats.num_spec_steps else 0.0,
        )
        if choice is None:
            return found
        realised = replace(site, hit_rate=found.hit_rate)
        if found.acceptance is not None:
            realised = replace(realised, acceptance=found.acceptance)
        found = replace(found, closed_form=tokens_per_s(choice.mode, realised, choice.k))
        # The first proposal waits for the draft worker to open, the last ones are cut to what may still come.
        gaps_ms = [(b - a) * 1e3 for (a, _), (b, _) in itertools.pairwise(arrivals[1:-2])]
        if choice.mode is not Mode.SEQUENTIAL or not gaps_ms:
            return found
        self.sequential[generation.started.request_id] = site, choice.k
        return replace(
            found, round_ms=statistics.fmean(gaps_ms), closed_round_ms=sequential_ms(site, choice.k)
        )

    async def crowd(self, site: Site, num_tokens: int) -> None:
        """SESSIONS sequential requests at once."""
        self.set(site)

        async def one(seed: int) -> None:
            generation = self.client.generate(
                PROMPT,
                rule=Rule.TOKEN,
                seed=seed,
                max_tokens=num_tokens,
                mode=Mode.SEQUENTIAL,
                num_draft_tokens=CROWD_K,
            )
            await generation.result()
            self.crowded[generation.started.request_id] = site, CROWD_K

        await asyncio.gather(*(one(seed) for seed in range(SESSIONS)))


def _acceptance(stats: AcceptanceStats, k: int | None) -> float | None:
    """Of the draft tokens that were reached. A proposal's first rejection ends it; k: None for any length."""
    accepted = stats.num_accepted_draft_tokens
    if k is None:  # which proposals were accepted whole isn't known
        return None
    rejected = sum(stats.acceptance_histogram[:k])
    return accepted / (accepted + rejected) if accepted + rejected else None


def choices(site: Site) -> list[Choice]:
    """Each mode at its best K, and those of the three best of all that are missing then."""
    found = [best(mode, site) for mode in Mode]
    return found + [choice for choice in top(site, 3) if choice not in found]


async def measure(bench: Bench, site: Site, seconds: float) -> Cell:
    bench.set(site)
    await bench.run(site, best(Mode.SEQUENTIAL, site), 0)  # connections and the new table
    runs = [await bench.run(site, choice, seconds) for choice in choices(site)]
    await bench.run(site, None, seconds)
    runs.append(await bench.run(site, None, seconds))
    return Cell(site.acceptance, site.round_trip_ms, tuple(runs))


def overheads(trace: Path, requests: Mapping[str, tuple[Site, int]]) -> dict[Site, list[float]]:
    """For each site, milliseconds of full sequential rounds beyond workers and round trip, from the trace."""
    spans = read_spans(trace)
    of_trace = {
        span.trace_id: requests[span.attributes[names.REQUEST_ID.name]]
        for span in spans
        if span.attributes.get(names.REQUEST_ID.name) in requests
    }
    workers: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        if span.name in (names.PROPOSE.name, names.VERIFY.name):
            workers[span.parent_id] += span.attributes.get(names.TOTAL_US.name, 0) / 1e3
    found: defaultdict[Site, list[float]] = defaultdict(list)
    for span in spans:
        site, k = of_trace.get(span.trace_id, (None, None))
        full = span.attributes.get(names.NUM_DRAFT_TOKENS.name) == k
        if site is not None and full and span.name == names.ROUND_SPAN.name:
            found[site].append(span.duration_s * 1e3 - workers[span.span_id] - site.round_trip_ms)
    return found


async def measure_all(
    sites: Sequence[Site], seconds: float, directory: Path
) -> tuple[list[Cell], list[float]]:
    """Cells, and overheads of rounds beside 31 others."""
    trace = directory / "trace.jsonl"
    cells = []
    async with Bench.started(directory, trace) as bench:
        for site in sites:
            cells.append(await measure(bench, site, seconds))
            print(markdown(cells[-1:]).partition("|---|\n")[2], flush=True)
        await bench.crowd(replace(sites[0], acceptance=0.8, round_trip_ms=5.0), num_tokens=100)
    found = overheads(trace, bench.sequential)
    (crowded,) = overheads(trace, bench.crowded).values()
    cells = [replace(cell, overhead_ms=tuple(found[site])) for cell, site in zip(cells, sites, strict=True)]
    return cells, crowded


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two round trips, shorter runs")
    arguments = parser.parse_args()
    round_trips, seconds = ((5.0, 50.0), 2.0) if arguments.quick else (ROUND_TRIPS_MS, 5.0)
    sites = [
        Site(a, DRAFT_MS, PASS_MS, POSITION_MS, round_trip, EXPECTED_HITS)
        for a in ACCEPTANCES
        for round_trip in round_trips
    ]
    with tempfile.TemporaryDirectory() as directory:
        cells, crowded = asyncio.run(measure_all(sites, seconds, Path(directory)))
    print(f"\n{markdown(cells)}\n")
    last = summary(cells) | {"overhead_32_ms_p50": round(statistics.median(crowded), 3)}
    kept = [asdict(cell) | {"overhead_ms": statistics.median(cell.overhead_ms)} for cell in cells]
    result = {"machine": machine(), "summary": last, "cells": kept}
    saved = save_result("overlap", result, quick=arguments.quick)
    saved.with_suffix(".md").write_text(markdown(cells) + "\n")
    from overlap_picture import draw  # benchmarks/overlap_picture.py; only it needs matplotlib

    draw(cells, saved.with_suffix(".png"))
    print(json.dumps(last))


if __name__ == "__main__":
    main()
