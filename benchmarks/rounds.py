"""What a round costs through gRPC, beside the same round in one process.

    .venv/bin/python benchmarks/rounds.py [--quick] [--model DIR]

For each K, one request through three processes and the same rounds in this process take turns: the same
drafter (layer_skip, so that a real q crosses the wire), target, parameters, prompt and number of rounds.
A round's time through gRPC is the gap between two chunks. Two target models: the demo model, and a tiny
random one with the same vocabulary, whose short passes let the overhead stand out from their noise.

The overhead is the part of a gRPC round that neither worker accounts for: coordinator, gRPC, event loops, and
the wire, by the spans of a trace. (The plain difference of the two rounds is in the table, too; it is mostly
noise, and one process isn't always the faster: two have their own caches.)

The last line is JSON: `overhead_ms_p50` (tiny model, median over K of medians over rounds), `overhead_ratio`
(gRPC round / in-process round, demo model, median over K of medians over repetitions), and
`bytes_per_drafted_token` (a serialised Proposal / K, at the largest K).
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
from pathlib import Path
from typing import Any

from common import machine, save_result  # benchmarks/common.py

from draft_worker.drafters import DrafterSpec, Loading, build_drafter
from draft_worker.drafters.base import Drafter
from draft_worker.drawing import DraftCounterNoise
from protos.v1 import common_pb2
from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient
from splitspec.engine.causal_lm import CausalLM
from splitspec.engine.scheduler import Timer, run_alone
from splitspec.models import fetch_demo_model
from splitspec.telemetry import names
from splitspec.telemetry.reading import read_spans
from splitspec.tokens import TokenLog
from splitspec.types import Drawing, Output, Rule, Sampling
from splitspec.wire import Draft
from target_worker.verifier import verify

PROMPT = list(range(1000, 1064))
SAMPLING = Sampling(temperature=0.7, seed=11)
DRAWING = Drawing(SAMPLING, Rule.BLOCK, Output(len(PROMPT)))
DTYPE = "bfloat16"


def tiny_model(directory: Path, demo: Path) -> Path:
    """A random Llama of 4 small layers with the demo model's tokenizer."""
    import shutil

    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    )
    config.dtype = torch.bfloat16
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, directory / name)
    return directory


class OneProcess:
    """Drafter and target in this process, called as the two workers call them."""

    def __init__(self, model: Path) -> None:
        self._target = CausalLM.load(model, name=str(model), dtype=DTYPE, device="cpu")
        spec = DrafterSpec.parse(f"layer_skip={model}")
        self._drafter: Drafter = build_drafter(spec, Loading(DTYPE, "cpu"))
        self.bytes_per_token = 0.0

    def rounds(self, k: int, max_tokens: int) -> list[float]:
        """Milliseconds of each round of one request; the prompt is fed before."""
        tokens = TokenLog(PROMPT)
        kv = self._target.new_kv()
        self._target.forward(kv, PROMPT[:-1], 0)
        state = self._drafter.open()
        run_alone(self._drafter.feed(state, tokens))
        took = []
        round_number = 0
        while len(tokens) - len(PROMPT) < max_tokens:
            started = time.perf_counter()
            round_number += 1
            remaining = max_tokens - (len(tokens) - len(PROMPT))
            draft = Draft.certain(())
            if min(k, remaining - 1) > 0:
                noise = DraftCounterNoise(DRAWING.seed, round_number)
                steps = self._drafter.propose(state, tokens, min(k, remaining - 1), DRAWING, noise)
                draft = run_alone(steps)
            verified = run_alone(verify(self._target, kv, tokens, draft, DRAWING, round_number, Timer()))
            tokens.extend(verified.committed)
            took.append((time.perf_counter() - started) * 1e3)
            if k and len(draft.token_ids) == k:
                proposal = common_pb2.Proposal(body=draft.encode(b""), num_draft_tokens=k)
                self.bytes_per_token = proposal.ByteSize() / k
        return took[1:]


async def service_rounds(client: AsyncClient, k: int, max_tokens: int) -> tuple[list[float], str]:
    """Milliseconds of each round of one request, and the request's id."""
    generation = client.generate(
        PROMPT,
        temperature=SAMPLING.temperature,
        seed=SAMPLING.seed,
        rule=DRAWING.rule,
        max_tokens=max_tokens,
        ignore_eos=True,
        num_draft_tokens=k,
        drafter="layer_skip",
    )
    arrivals = [time.perf_counter() async for _ in generation]
    return [(b - a) * 1e3 for a, b in itertools.pairwise(arrivals)], generation.started.request_id


def overheads(trace: Path, k_of_request: dict[str, int]) -> dict[int, list[float]]:
    """For each K, milliseconds of each full round that neither worker accounts for, from the trace."""
    spans = read_spans(trace)
    k_of_trace = {
        span.trace_id: k_of_request[span.attributes[names.REQUEST_ID.name]]
        for span in spans
        if span.attributes.get(names.REQUEST_ID.name) in k_of_request
    }
    workers: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        if span.name in (names.PROPOSE.name, names.VERIFY.name, names.DECODE.name):
            workers[span.parent_id] += span.attributes.get(names.TOTAL_US.name, 0) / 1e3
    found: dict[int, list[float]] = defaultdict(list)
    for span in spans:
        k = k_of_trace.get(span.trace_id)
        if span.name == names.ROUND_SPAN.name and span.attributes.get(names.NUM_DRAFT_TOKENS.name) == k:
            assert k is not None
            found[k].append(span.duration_s * 1e3 - workers[span.span_id])
    return found


async def measure(
    model: Path, ks: list[int], repetitions: int, max_tokens: int, trace: Path
) -> dict[int, dict[str, float]]:
    """For each K: medians over the repetitions of both rounds, their difference and their ratio."""
    here = OneProcess(model)
    rows: dict[int, list[tuple[float, float]]] = {k: [] for k in ks}
    k_of_request: dict[str, int] = {}
    flags = ["--draft-patience", "1000", "--draft-timeout-s", "30", f"--trace-file={trace}"]
    stack = Stack(model=str(model), drafters=[f"layer_skip={model}"], dtype=DTYPE, coordinator_args=flags)
    async with stack, AsyncClient(stack.address) as client:
        for repetition in range(repetitions + 1):
            for k in ks:
                gaps, request_id = await service_rounds(client, k, max_tokens)
                one = here.rounds(k, max_tokens)
                if repetition:  # the first one warms up
                    rows[k].append((statistics.median(gaps), statistics.median(one)))
                    k_of_request[request_id] = k
    outside = overheads(trace, k_of_request)
    table = {}
    for k, values in rows.items():
        table[k] = {
            "grpc_ms": statistics.median(v[0] for v in values),
            "one_process_ms": statistics.median(v[1] for v in values),
            "difference_ms": statistics.median(v[0] - v[1] for v in values),
            "ratio": statistics.median(v[0] / v[1] for v in values),
            "overhead_ms": statistics.median(outside[k]),
        }
    table[max(ks)]["bytes_per_drafted_token"] = here.bytes_per_token
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, two values of K")
    parser.add_argument("--model", type=Path, help="model directory instead of the demo model")
    arguments = parser.parse_args()
    ks = [1, 4] if arguments.quick else [0, 1, 4, 8]
    repetitions = 3 if arguments.quick else 5
    demo = fetch_demo_model()
    tables = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, model, max_tokens in (
            ("demo", arguments.model or demo, 24),
            ("tiny", tiny_model(Path(directory) / "tiny", demo), 64),
        ):
            trace = Path(directory) / f"{name}.jsonl"
            tables[name] = asyncio.run(measure(model, ks, repetitions, max_tokens, trace))
            print(f"\n{name} model, {DTYPE}, ms per round (medians of {repetitions})")
            print(f"{'K':>3} {'gRPC':>9} {'one process':>12} {'difference':>11} {'ratio':>7} {'overhead':>9}")
            for k, row in tables[name].items():
                print(
                    f"{k:>3} {row['grpc_ms']:>9.2f} {row['one_process_ms']:>12.2f} "
                    f"{row['difference_ms']:>11.2f} {row['ratio']:>7.3f} {row['overhead_ms']:>9.2f}"
                )
    summary = {
        "overhead_ms_p50": round(statistics.median(row["overhead_ms"] for row in tables["tiny"].values()), 3),
        "overhead_ratio": round(statistics.median(row["ratio"] for row in tables["demo"].values()), 4),
        "bytes_per_drafted_token": round(tables["demo"][max(ks)]["bytes_per_drafted_token"], 1),
    }
    save_result("rounds", {"machine": machine(), "summary": summary, "tables": tables}, quick=arguments.quick)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
