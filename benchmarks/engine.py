"""`python benchmarks/engine.py [--quick]`: the engine's passes, beside the library's `generate`.

All in one run, on the demo model, in bfloat16 and float32: plain tokens per second of the engine and of the
library in turns; time of one pass over 1 to 33 rows, and over 1 to 32 sessions with 1 row (plain decoding)
and 5 rows (verification of K = 4) each; prompt tokens per second; what the same bits in any batch cost;
tokens per second of 1 to 32 sessions that go on with prompts of Spec-Bench, plain and drafted by lookup; how
much of the text of a few is the same for every K, alone and in mixed batches (deterministic.py compares
more); how long a target worker's health service takes to answer while prompts of 2,000 tokens are fed.
Only ratios of one run mean much: the machine and what else runs on it change all of them together.

The last line is JSON: `plain_vs_library_bf16` and `_fp32` (tokens per second, engine / library),
`batch16_vs_1` (tokens per second of 16 sessions / of one, bfloat16), `weight_bandwidth_share` (bytes of
weights per second in plain decoding / measured read bandwidth, bfloat16), `deterministic_cost` (time of a
pass, deterministic / not, less 1; bfloat16, median of the batches of 1, 4, 16 and 32 sessions with 1 and 5
rows each), `speculation_vs_plain_min` (tokens per second with K by a table of the best K for each number of
sessions, 0 included, / those at K = 0; the table from one half of the repetitions, the ratio from the other;
bfloat16, worst number of sessions), `deterministic_identical` of `deterministic_compared` (texts that are
token by token those of K = 0 alone; bfloat16), `health_ms_p99` and `health_ms_max`.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import machine, save_result  # benchmarks/common.py; first, as it sets how threads wait
from prompts import prompts
from service import health_latencies_ms
from sessions import Request, identical, run

import torch  # isort: skip
from transformers import AutoModelForCausalLM

from splitspec.engine.causal_lm import CausalLM
from splitspec.engine.feed import Feed
from splitspec.models import fetch_demo_model

PROMPT = list(range(1000, 1064))
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ROWS = (1, 2, 5, 9, 17, 33)
SESSIONS = (1, 4, 16, 32)
LENGTH = 128
DRAFTED = (0, 2, 4, 7)
#: Prompts whose texts are compared.
COMPARED = 4


def seconds(job: Callable[[], object]) -> float:
    started = time.perf_counter()
    job()
    return time.perf_counter() - started


def in_turns(jobs: list[Callable[[], object]], repetitions: int) -> list[float]:
    """Median seconds of each job; they take turns, after a round that isn't counted."""
    rounds = [[seconds(job) for job in jobs] for _ in range(repetitions + 1)][1:]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def decode(model: CausalLM, num_tokens: int) -> None:
    """Prompt and greedy tokens, one by one."""
    kv = model.new_kv()
    logits = model.forward(kv, PROMPT, 1)
    for _ in range(num_tokens - 1):
        logits = model.forward(kv, [int(logits.argmax())], 1)
    kv.free()


def generate(library: Any, num_tokens: int) -> None:
    """The same with the library."""
    ids = torch.tensor([PROMPT])
    library.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )


class Batch:
    """Some sessions of LENGTH tokens each, fed a few rows over and over."""

    def __init__(self, model: CausalLM, sessions: int) -> None:
        self._model = model
        self._kvs = [model.new_kv() for _ in range(sessions)]
        for index, kv in enumerate(self._kvs):
            model.forward(kv, [(index + place * 97) % 40000 for place in range(LENGTH)], 0)

    def step(self, rows: int) -> None:
        feeds = [Feed(kv, PROMPT[:rows], rows) for kv in self._kvs]
        self._model.forward_batch(feeds)
        for kv in self._kvs:
            kv.truncate(LENGTH)

    def free(self) -> None:
        for kv in self._kvs:
            kv.free()


def batch_ms(
    models: list[CausalLM], sessions: int, rows: Sequence[int], repetitions: int
) -> dict[int, list[float]]:
    """For each number of rows, milliseconds of a pass of each model, in turns."""
    batches = [Batch(model, sessions) for model in models]
    found = {}
    for count in rows:
        jobs: list[Callable[[], object]] = [functools.partial(batch.step, count) for batch in batches]
        found[count] = [1e3 * value for value in in_turns(jobs, repetitions)]
    for batch in batches:
        batch.free()
    return found


def prompt_tokens_per_s(model: CausalLM, repetitions: int) -> float:
    """In chunks of 256."""
    ids = [place * 97 % 40000 for place in range(1024)]

    def feed() -> None:
        kv = model.new_kv()
        for start in range(0, len(ids), 256):
            model.forward(kv, ids[start : start + 256], 0)
        kv.free()

    return len(ids) / in_turns([feed], repetitions)[0]


def read_bandwidth(repetitions: int) -> float:
    """Bytes per second of a sum over 256 MiB."""
    numbers = torch.ones(64 * 1024 * 1024)
    return numbers.nbytes / in_turns([numbers.sum], repetitions)[0]


def speculation(
    model: CausalLM, texts: list[tuple[int, ...]], repetitions: int, num_tokens: int
) -> dict[int, dict[str, float]]:
    """By number of sessions: tokens per second at each K, and at the best K of half of the repetitions."""
    found = {}
    for count in SESSIONS:

        def per_s(k: int, repetition: int, count: int = count) -> float:
            chosen = [texts[(repetition + index) % len(texts)] for index in range(count)]
            requests = [Request(text, "greedy", k, num_tokens) for text in chosen]
            return count * num_tokens / run(model, requests)[1]

        rates = {k: [per_s(k, repetition) for repetition in range(repetitions)] for k in DRAFTED}
        _, best = max((statistics.fmean(rates[k][::2]), k) for k in DRAFTED)
        plain, drafted = (statistics.fmean(rates[k][1::2]) for k in (0, best))
        found[count] = {f"k{k}_tokens_per_s": statistics.fmean(rates[k]) for k in DRAFTED}
        found[count] |= {"best_k": best, "best_vs_plain": drafted / plain}
    return found


def measure(
    directory: Path, dtype: str, repetitions: int, num_tokens: int, texts: list[tuple[int, ...]]
) -> dict[str, Any]:
    model = CausalLM.load(directory, name="demo", dtype=dtype, device="cpu")
    loose = CausalLM.load(directory, name="demo", dtype=dtype, device="cpu", deterministic=False)
    library: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[dtype])
    ours, theirs = in_turns(
        [lambda: decode(model, num_tokens), lambda: generate(library, num_tokens)], repetitions
    )
    batches = {
        f"{sessions}x{rows}": times
        for sessions in SESSIONS
        for rows, times in batch_ms([model, loose], sessions, (1, 5), repetitions).items()
    }
    service = {}
    if dtype == "bfloat16":  # as targets are served
        service = {
            "speculation": speculation(model, texts, max(2, repetitions // 2), min(num_tokens, 64)),
            "deterministic": identical(model, texts[:COMPARED], num_tokens),
        }
    return {
        **service,
        "self_test_equal": model.info.deterministic,
        "plain_tokens_per_s": num_tokens / ours,
        "library_tokens_per_s": num_tokens / theirs,
        "rows_ms": {rows: times[0] for rows, times in batch_ms([model], 1, ROWS, repetitions).items()},
        "sessions_x_rows_ms": {size: times[0] for size, times in batches.items()},
        "not_deterministic_ms": {size: times[1] for size, times in batches.items()},
        "prompt_tokens_per_s": prompt_tokens_per_s(model, repetitions),
        "prompt_tokens_per_s_not_deterministic": prompt_tokens_per_s(loose, repetitions),
        "weight_bytes": sum(weight.nbytes for weight in library.parameters()),
        "read_bytes_per_s": read_bandwidth(repetitions),
    }


def summary(tables: dict[str, dict[str, Any]]) -> dict[str, float]:
    half, full = tables["bfloat16"], tables["float32"]
    passes, loose = half["sessions_x_rows_ms"], half["not_deterministic_ms"]
    weights_per_s = half["weight_bytes"] / (half["rows_ms"][1] / 1e3)
    return {
        "plain_vs_library_bf16": round(half["plain_tokens_per_s"] / half["library_tokens_per_s"], 3),
        "plain_vs_library_fp32": round(full["plain_tokens_per_s"] / full["library_tokens_per_s"], 3),
        "batch16_vs_1": round(16 * passes["1x1"] / passes["16x1"], 3),
        "weight_bandwidth_share": round(weights_per_s / half["read_bytes_per_s"], 3),
        "deterministic_cost": round(statistics.median(passes[size] / loose[size] for size in passes) - 1, 3),
        "speculation_vs_plain_min": round(
            min(row["best_vs_plain"] for row in half["speculation"].values()), 3
        ),
        "deterministic_identical": half["deterministic"]["identical"],
        "deterministic_compared": half["deterministic"]["compared"],
    }


def rounded(value: Any) -> Any:
    """For people: two digits behind the point."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return round(value, 2) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, shorter texts")
    arguments = parser.parse_args()
    repetitions, num_tokens = (3, 16) if arguments.quick else (9, 128)
    directory = fetch_demo_model()
    texts = prompts(directory, 1, 64)[:2] if arguments.quick else prompts(directory, 11, 768)[:64]
    tables = {}
    for dtype in DTYPES:
        tables[dtype] = measure(directory, dtype, repetitions, num_tokens, texts)
        print(f"\n{dtype}")
        for name, value in tables[dtype].items():
            print(f"  {name}: {rounded(value)}")
    health = sorted(asyncio.run(health_latencies_ms(directory, "bfloat16")))
    result = summary(tables)
    result |= {
        "health_ms_p99": round(health[len(health) * 99 // 100], 1),
        "health_ms_max": round(health[-1], 1),
    }
    save_result("engine", {"machine": machine(), "summary": result, "tables": tables}, quick=arguments.quick)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
