"""Our decoding beside what people would use instead, on Spec-Bench questions.

    .venv/bin/python benchmarks/spec_bench.py [--quick] [--eagle DIR] [--distilled DIR] [--drafters "..."]

Needs the extra `benchmarks`. In one run, on one machine, with one target in bfloat16: our service plain
(K = 0) and with each drafter, through all its processes over gRPC as `splitspec up` starts them; the
library's `generate`, its prompt lookup, and its assisted generation with our distilled draft, in a process
of their own with as many threads. All of them answer a question before the next one comes, in an order that
changes, and one at a time. Every request is a tenant of its own, so that no prompt is found in the target's
cache, which the library doesn't have. The second turn of a conversation follows our plain greedy answer to
the first, so that all get the same prompt. Answers end where the model ends them. At temperature 1 the rule
is block, which requests without a seed get; seeds only make the run repeatable.

The last line is JSON, for `hybrid`, or for the last drafter when there is no hybrid (`drafter` says which):
`speedup_greedy`, `speedup_t1` (tokens per second over our plain decoding, all answers),
`speedup_min_category`, `vs_library_best_greedy` (over the library's fastest mode, all answers),
`vs_library_best_min_category`, `mean_acceptance_length` (greedy), `same_text` (greedy answers with the tokens
of our plain decoding) and `compared`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

from common import RESULTS, machine, save_result  # benchmarks/common.py; first, as it sets how threads wait
from library import ASSISTED, LibraryProcess  # benchmarks/library.py
from prompts import GROUPS, Question, questions  # benchmarks/prompts.py
from spec_arms import Arm, LibraryArm, Prompt, ServiceArm  # benchmarks/spec_arms.py
from spec_picture import draw  # benchmarks/spec_picture.py
from spec_table import PLAIN, Sample, markdown, rows, summary  # benchmarks/spec_table.py

import torch  # isort: skip

from coordinator.text import TextCodec
from draft_worker.drafters import DrafterSpec
from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient, Message
from splitspec.errors import ConfigError
from splitspec.models import fetch_demo_model
from splitspec.types import MAX_NUM_DRAFT_TOKENS

DTYPE = "bfloat16"
TEMPERATURES = (0.0, 1.0)
HEADLINE = "hybrid"


async def converse(
    question: Question, number: int, arms: Sequence[Arm], codec: TextCodec, max_tokens: int
) -> AsyncIterator[Sample]:
    """Every arm's answers to each turn of a question, at both temperatures. number: turns the order."""
    order = [*arms[number % len(arms) :], *arms[: number % len(arms)]]
    before: list[int] = []
    for turn, text in enumerate(question.turns, start=1):
        message = [Message("user", text)]
        before += codec.encode_turn(message, before) if before else codec.encode_chat(message)
        category = question.group if turn == 1 else f"{question.group}, turn {turn}"
        answer: tuple[int, ...] = ()
        for temperature in TEMPERATURES:
            prompt = Prompt(category, question.id, before, temperature, max_tokens)
            for arm in order:
                sample = await arm.answer(prompt)
                if arm.name == PLAIN and not temperature:
                    answer = sample.token_ids
                yield sample
        before += answer


@asynccontextmanager
async def everything(arguments: argparse.Namespace) -> AsyncIterator[list[Arm]]:
    """All arms, while their processes run; each has answered once."""
    model: Path = arguments.model
    threads = [f"--threads={arguments.threads}"]
    stack = Stack(
        model=model, drafters=arguments.drafters, dtype=DTYPE, target_args=threads, draft_args=threads
    )
    library = LibraryProcess(
        model, DTYPE, arguments.threads, arguments.lookup_tokens, assistant=arguments.distilled
    )
    async with stack, AsyncClient(stack.address) as client, library:
        names = [DrafterSpec.parse(text).name for text in arguments.drafters]
        arms: list[Arm] = [ServiceArm(client, PLAIN, 0)]
        arms += [ServiceArm(client, name, arguments.num_draft_tokens.get(name)) for name in names]
        arms += [LibraryArm(library, mode) for mode in library.modes]
        for arm in arms:
            for temperature in TEMPERATURES:
                await arm.answer(Prompt("", 0, [1, *range(1000, 1064)], temperature, 8))
        yield arms


async def measure(arguments: argparse.Namespace) -> list[Sample]:
    codec = TextCodec.load(arguments.model)
    asked = questions(arguments.per_group, arguments.groups)
    samples = []
    async with everything(arguments) as arms:
        for number, question in enumerate(asked):
            answers = converse(question, number, arms, codec, arguments.max_tokens)
            samples += [sample async for sample in answers]
            print(f"{number + 1}/{len(asked)} {question.group} {question.id}", flush=True)
    return samples


def main() -> None:
    arguments = _arguments()
    left_out = {} if arguments.distilled else {ASSISTED: "no distilled draft was given (--distilled)"}
    for name, reason in left_out.items():
        print(f"{name}: left out, {reason}")
    samples = asyncio.run(measure(arguments))
    table = rows(samples)
    names = [DrafterSpec.parse(text).name for text in arguments.drafters]
    headline = HEADLINE if HEADLINE in names else names[-1]
    found = {"drafter": headline, **summary(table, headline)}
    result = {
        "machine": machine(),
        "dtype": DTYPE,
        "threads": arguments.threads or torch.get_num_threads(),
        "drafters": [text.replace(f"{arguments.model.parent}/", "") for text in arguments.drafters],
        "num_draft_tokens": arguments.num_draft_tokens,
        "library_lookup_tokens": arguments.lookup_tokens,
        "groups": list(arguments.groups),
        "questions_per_group": arguments.per_group,
        "max_tokens": arguments.max_tokens,
        "left_out": left_out,
        "summary": found,
        "table": [asdict(row) for row in table],
    }
    stem = f"spec_bench{'-quick' if arguments.quick else ''}"
    save_result("spec_bench", result, quick=arguments.quick)
    (RESULTS / f"{stem}.md").write_text(markdown(table))
    draw(table, RESULTS / f"{stem}.png")
    print(markdown(table))
    print(json.dumps(found))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="by default 1 question of each group and 16 tokens")
    add("--per-group", type=_count, default=8, help="questions of each group, or `all`; default 8")
    add("--groups", nargs="+", choices=GROUPS, default=GROUPS, help="groups of questions; default all")
    add("--max-tokens", type=int, default=64, help="tokens of an answer at most; default 64")
    add("--drafters", type=str.split, help="as `splitspec up --drafters`; default: all that can be")
    add("--eagle", type=Path, metavar="DIR", help="draft for our `eagle`, and `hybrid`")
    add("--distilled", type=Path, metavar="DIR", help="draft for our `model`, and the library's assistant")
    add("--num-draft-tokens", type=_of_drafter, nargs="+", default=[], metavar="NAME=K")
    add("--lookup-tokens", type=int, default=10, help="K of the library's prompt lookup; default 10")
    add("--threads", type=int, default=0, help="of each model; 0 leaves torch's choice")
    add("--model", type=Path, metavar="DIR", help="target instead of the demo model")
    if parser.parse_args().quick:
        parser.set_defaults(per_group=1, max_tokens=16)
    arguments = parser.parse_args()
    arguments.model = arguments.model or fetch_demo_model()
    if arguments.drafters is None:
        arguments.drafters = _drafters(arguments.model, arguments.eagle, arguments.distilled)
    arguments.num_draft_tokens = dict(arguments.num_draft_tokens)
    try:
        names = [DrafterSpec.parse(text).name for text in arguments.drafters]
    except ConfigError as error:
        parser.error(str(error))
    if not names:
        parser.error("--drafters is empty, expected at least one")
    if unknown := [name for name in arguments.num_draft_tokens if name not in names]:
        parser.error(f"--num-draft-tokens names {unknown}, expected some of {names}")
    return arguments


def _drafters(model: Path, eagle: Path | None, distilled: Path | None) -> list[str]:
    """Those that need no checkpoint, and those whose checkpoint there is; the hybrid takes the better one."""
    models = [f"model={distilled}"] if distilled else []
    features = [f"eagle={eagle},target={model}"] if eagle else []
    hybrids = [f"hybrid,drafter={draft}" for draft in [*features, *models][:1]]
    return ["lookup", "suffix", *features, *models, *hybrids]


def _count(text: str) -> int | None:
    """None for all."""
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected `all` or a whole number, at least 1")
    return int(text)


def _of_drafter(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if not count.isdecimal() or not 1 <= int(count) <= MAX_NUM_DRAFT_TOKENS:
        expected = f"NAME=K with a drafter's name and K from 1 to {MAX_NUM_DRAFT_TOKENS}"
        raise argparse.ArgumentTypeError(f"{text!r}, expected {expected}")
    return name, int(count)


if __name__ == "__main__":
    main()
