"""What each shape of an EAGLE draft brings: tokens a round, and what a round costs.

One process, no network. Along answers of the target, at every STRIDE-th token, each shape proposes from the
target's features, and the target verifies it in a pass of its own: greedy answers at temperature 0, answers
sampled at 1 with a seed and without. Run `python benchmarks/trees.py --checkpoint DRAFT --data ANSWERS`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common import machine, save_result  # benchmarks/common.py
from transformers import AutoTokenizer

from draft_worker.drafters import DrafterSpec, Loading, build_drafter
from draft_worker.drafters.eagle import EagleDrafter
from draft_worker.drawing import DraftCounterNoise
from draft_worker.training.data import Example, read_examples
from splitspec.engine.causal_lm import CausalLM
from splitspec.engine.feed import Feed
from splitspec.engine.kv import KV
from splitspec.engine.scheduler import Timer, run_alone
from splitspec.models import resolve_model
from splitspec.types import Drawing, Output, Rule, Sampling
from splitspec.wire import Draft
from target_worker.verifier import verify

#: Tree, num_draft_tokens, depth, width.
SHAPES = (
    *(("chain", k, 1, 1) for k in (1, 2, 3, 4, 6)),
    *(("static", k, d, 4) for k, d in ((4, 3), (8, 4), (16, 5))),
    *(
        ("dynamic", k, d, w)
        for k, d, w in ((4, 3, 4), (8, 3, 4), (8, 4, 4), (16, 4, 4), (16, 5, 4), (16, 5, 8))
    ),
)
#: All children of one row: which rank is right how often.
RANKS = ("static", 8, 1, 8)
STRIDE = 7
#: Temperature of the answers, and the rule.
MODES = {
    "greedy": (0.0, Rule.GREEDY),
    "temperature 1": (1.0, Rule.BLOCK),
    "temperature 1, seed": (1.0, Rule.SHARED_NOISE),
}


@dataclass
class Tally:
    """Of one shape at one temperature, of each round: accepted tokens and seconds."""

    accepted: list[int] = field(default_factory=list)
    draft_s: list[float] = field(default_factory=list)
    verify_s: list[float] = field(default_factory=list)
    first_nodes: list[int] = field(default_factory=list)

    def summary(self, plain_s: float) -> dict[str, float]:
        length = 1 + sum(self.accepted) / len(self.accepted)
        draft_s, verify_s = _median(self.draft_s), _median(self.verify_s)
        return {
            "mean_acceptance_length": round(length, 3),
            "draft_ms": round(1e3 * draft_s, 2),
            "verify_ms": round(1e3 * verify_s, 2),
            "speedup": round(length * plain_s / (draft_s + verify_s), 3),
        }


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def drafter_of(checkpoint: str, model: str, shape: tuple[str, int, int, int]) -> EagleDrafter:
    tree, _, depth, width = shape
    spec = f"eagle={checkpoint},target={model},tree={tree},depth={depth},width={width}"
    built = build_drafter(DrafterSpec.parse(spec), Loading("bfloat16", "cpu", 2**28))
    assert isinstance(built, EagleDrafter)
    return built


def positions(example: Example) -> Iterator[int]:
    return iter(range(example.answer_start + 1, len(example.token_ids), STRIDE))


def walk(
    target: CausalLM,
    drafter: EagleDrafter,
    num_draft_tokens: int,
    example: Example,
    drawing: Drawing,
    tally: Tally,
) -> None:
    """All rounds of one answer by one shape."""
    kv, state = target.new_kv(), drafter.open()
    for at in positions(example):
        tokens = example.token_ids[:at]
        target.forward(kv, tokens[kv.length : -1], 0)
        start = drafter.held_features(state)
        drafter.take_features(state, start, target.features(kv, start, at - 1))
        started = time.perf_counter()
        steps = drafter.propose(state, tokens, num_draft_tokens, drawing, DraftCounterNoise(drawing.seed, at))
        draft = run_alone(steps)
        drafted = time.perf_counter()
        verified = run_alone(verify(target, kv, tokens, draft, drawing, at, Timer()))
        tally.verify_s.append(time.perf_counter() - drafted)
        tally.draft_s.append(drafted - started)
        tally.accepted.append(verified.outcome.num_accepted)
        tally.first_nodes += verified.outcome.path[:1]
        kv.truncate(at)
    kv.free()
    drafter.free(state)


def plain_seconds(target: CausalLM, example: Example) -> float:
    """Of one plain pass."""
    kv: KV = target.new_kv()
    drawing = Drawing(Sampling(temperature=0, seed=1), Rule.GREEDY, Output(0))
    found = []
    for at in positions(example):
        target.forward_batch([Feed(kv, example.token_ids[kv.length : at - 1], 0)])
        started = time.perf_counter()
        run_alone(verify(target, kv, example.token_ids[:at], Draft.certain(()), drawing, at, Timer()))
        found.append(time.perf_counter() - started)
    kv.free()
    return _median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--examples", type=int, default=16, help="of each temperature")
    parser.add_argument("--quick", action="store_true", help="2 examples, 128 tokens each")
    args = parser.parse_args()

    directory = resolve_model(args.model)
    drafters = {shape: drafter_of(args.checkpoint, args.model, shape) for shape in (*SHAPES, RANKS)}
    layers = list(drafters[RANKS].info.features.layers)
    target = CausalLM.load(
        directory,
        name=args.model,
        dtype="bfloat16",
        device="cpu",
        kv_memory_bytes=2**28,
        feature_layers=layers,
    )
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    held_out = [e for e in read_examples(args.data, tokenizer, 128 if args.quick else 512) if e.is_validation]
    result = {}
    for mode, (temperature, rule) in MODES.items():
        chosen = [e for e in held_out if e.temperature == temperature][: 2 if args.quick else args.examples]
        tallies = {shape: Tally() for shape in drafters}
        for seed, example in enumerate(chosen):
            drawing = Drawing(
                Sampling(temperature=temperature, seed=seed), rule, Output(example.answer_start)
            )
            for shape, drafter in drafters.items():
                walk(target, drafter, shape[1], example, drawing, tallies[shape])
        plain_s = _median([plain_seconds(target, example) for example in chosen])
        first = tallies[RANKS]
        ranks = [round(first.first_nodes.count(rank) / len(first.accepted), 3) for rank in range(RANKS[1])]
        result[mode] = {
            "rounds": len(first.accepted),
            "plain_ms": round(1e3 * plain_s, 2),
            "right_by_rank": ranks,
            **{" ".join(map(str, shape)): tallies[shape].summary(plain_s) for shape in SHAPES},
        }
        print(f"{mode}: {len(first.accepted)} rounds, right by rank {ranks}")
        for shape in SHAPES:
            print(f"  {shape!s:28}", tallies[shape].summary(plain_s))
    path = save_result("trees", {"machine": machine(), "layers": layers, **result}, quick=args.quick)
    print(f"written to {path}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
