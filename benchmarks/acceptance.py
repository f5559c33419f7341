"""Accepted draft tokens per round of each verification rule, and what sampling costs per row.

One process, no network: the target, a drafter, and the service's own rules. Rules that take the same draft
(token and block) are compared on the very same drafts and target rows, each with fresh noise several times;
the text goes on with what the block rule commits. Run `python benchmarks/acceptance.py`; `--quick` takes a
few minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common import machine, save_result  # benchmarks/common.py
from prompts import questions  # benchmarks/prompts.py

from coordinator.text import TextCodec
from draft_worker.drafters import DrafterSpec, Loading, build_drafter
from draft_worker.drafters.base import Drafter
from draft_worker.drawing import DraftCounterNoise
from protos.v1 import coordinator_pb2
from splitspec.engine.causal_lm import CausalLM
from splitspec.engine.scheduler import run_alone
from splitspec.models import fetch_demo_model
from splitspec.sampling.randomness import CounterNoise
from splitspec.sampling.rows import ProcessedRows
from splitspec.tokens import TokenLog
from splitspec.types import Drawing, Output, Rule, Sampling
from splitspec.verification.rules import decide
from splitspec.wire import Draft

if TYPE_CHECKING:
    import torch

K = 4
#: Verdicts on each draft, each with noise of its own.
NUM_VERDICTS = 16
TEMPERATURES = (0.0, 0.7, 1.0)
#: What the cost of sampling is measured for.
COSTS = {
    "temperature 0": Sampling(temperature=0, seed=1),
    "temperature 1": Sampling(seed=1),
    "top_p 0.9": Sampling(top_p=0.9, seed=1),
    "top_k 50, top_p 0.9, min_p 0.02": Sampling(top_k=50, top_p=0.9, min_p=0.02, seed=1),
    "all penalties": Sampling(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5, seed=1),
}


@dataclass(frozen=True)
class Round:
    """What a rule needs to decide: logits are [K+1, vocabulary]."""

    logits: torch.Tensor
    draft: Draft
    tokens: list[int]
    output: Output


class Walk:
    """One prompt's text as it grows, with the target's KV and the drafter's state."""

    def __init__(self, target: CausalLM, drafter: Drafter, prompt: Sequence[int]) -> None:
        self._target, self._drafter = target, drafter
        self._tokens, self._kv, self._state = TokenLog(prompt), target.new_kv(), drafter.open()
        self._output = Output(len(prompt))
        self._round = 0
        target.forward(self._kv, prompt[:-1], 0)

    def round(self, sampling: Sampling, rule: Rule) -> Round:
        """A draft that is drawn as `rule` has it, and the target's rows over it."""
        self._round += 1
        drawing = Drawing(sampling, rule, self._output)
        noise = DraftCounterNoise(drawing.seed, self._round)
        draft = run_alone(self._drafter.propose(self._state, self._tokens, K, drawing, noise))
        fed = [self._tokens[-1], *draft.token_ids]
        logits = self._target.forward(self._kv, fed, len(fed))
        self._kv.truncate(len(self._tokens) - 1)
        return Round(logits, draft, list(self._tokens), self._output)

    def go_on(self, token_ids: Sequence[int]) -> None:
        self._target.forward(self._kv, [self._tokens[-1], *token_ids[:-1]], 0)
        self._tokens.extend(token_ids)


def verdict(round: Round, sampling: Sampling, rule: Rule, noise: CounterNoise) -> tuple[int, list[int]]:
    """Accepted draft tokens, and all committed ones."""
    rows = ProcessedRows(round.logits, Drawing(sampling, rule, round.output), round.tokens, round.draft.paths)
    outcome = decide(rule, rows, round.draft, len(round.tokens), noise)
    accepted = [round.draft.token_ids[node] for node in outcome.path]
    return len(accepted), [*accepted, outcome.next_token]


def accepted_by_rule(
    walk: Walk, sampling: Sampling, max_tokens: int, found: dict[Rule, list[float]]
) -> list[Round]:
    """Add each round's mean of accepted tokens for each rule; returns some of the rounds."""
    count = number = 0
    kept = []
    while count < max_tokens:
        number += 1
        rules = [Rule.GREEDY] if sampling.greedy else [Rule.TOKEN, Rule.BLOCK]
        round = walk.round(sampling, rules[-1])
        for rule in rules:
            times = 1 if sampling.greedy else NUM_VERDICTS
            verdicts = [verdict(round, sampling, rule, CounterNoise(seed, number)) for seed in range(times)]
            found[rule].append(statistics.fmean(accepted for accepted, _ in verdicts))
        if not sampling.greedy:
            shared = walk.round(sampling, Rule.SHARED_NOISE)
            accepted, _ = verdict(shared, sampling, Rule.SHARED_NOISE, CounterNoise(sampling.seed or 0, 0))
            found[Rule.SHARED_NOISE].append(accepted)
        committed = verdicts[0][1]
        walk.go_on(committed)
        count += len(committed)
        kept.append(round)
    return kept[:: max(1, len(kept) // 4)]


def sampling_us_per_row(rounds: Sequence[Round]) -> dict[str, dict[str, float]]:
    """Microseconds per row of a whole verdict on K+1 rows, by parameters and rule: the median."""
    costs: dict[str, dict[str, float]] = {}
    for name, sampling in COSTS.items():
        rules = [Rule.GREEDY] if sampling.greedy else [Rule.TOKEN, Rule.BLOCK, Rule.SHARED_NOISE]
        costs[name] = {}
        for rule in rules:
            took = [verdict_seconds(round, sampling, rule) / len(round.logits) for round in rounds]
            costs[name][rule.name.lower()] = round_to(statistics.median(took) * 1e6)
    return costs


def verdict_seconds(round: Round, sampling: Sampling, rule: Rule) -> float:
    """The best of three runs."""
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        verdict(round, sampling, rule, CounterNoise(1, 1))
        best = min(best, time.perf_counter() - started)
    return best


def round_to(value: float, digits: int = 3) -> float:
    return float(f"{value:.{digits}g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer prompts and tokens")
    quick: bool = parser.parse_args().quick
    per_group, max_tokens = (1, 16) if quick else (4, 48)
    directory = fetch_demo_model()
    codec = TextCodec.load(directory)
    target = CausalLM.load(directory, name="demo", dtype="bfloat16", device="cpu")
    spec = DrafterSpec.parse(f"layer_skip={directory}")
    drafter = build_drafter(spec, Loading("bfloat16", "cpu"))

    found: dict[float, dict[Rule, list[float]]] = {t: defaultdict(list) for t in TEMPERATURES}
    kept: list[Round] = []
    for question in questions(per_group):
        message = coordinator_pb2.ChatMessage(role="user", content=question.turns[0])
        prompt = codec.encode_chat([message])
        for temperature in TEMPERATURES:
            walk = Walk(target, drafter, prompt)
            sampling = Sampling(temperature=temperature, seed=question.id)
            kept += accepted_by_rule(walk, sampling, max_tokens, found[temperature])
        print(f"{question.group} {question.id}", flush=True)

    accepted = {
        str(temperature): {rule.name.lower(): summary(values) for rule, values in by_rule.items()}
        for temperature, by_rule in found.items()
    }
    gain = {
        str(temperature): summary(
            [block - token for token, block in zip(by_rule[Rule.TOKEN], by_rule[Rule.BLOCK], strict=True)]
        )
        for temperature, by_rule in found.items()
        if temperature
    }
    costs = sampling_us_per_row(kept[:: max(1, len(kept) // 20)])
    result: dict[str, Any] = {
        "machine": machine(),
        "drafter": "layer_skip",
        "num_draft_tokens": K,
        "prompts": 6 * per_group,
        "max_tokens": max_tokens,
        "verdicts_per_draft": NUM_VERDICTS,
        "accepted_per_round": accepted,
        "block_minus_token": gain,
        "sampling_us_per_row": costs,
    }
    print(save_result("acceptance", result, quick=quick))
    means = {t: {rule: value["mean"] for rule, value in by.items()} for t, by in accepted.items()}
    print(json.dumps({"accepted_per_round": means, "sampling_us_per_row": costs}))


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean over rounds with its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5
    return {"mean": round_to(statistics.fmean(values)), "error": round_to(error, 2), "rounds": len(values)}


if __name__ == "__main__":
    main()
