"""`python benchmarks/deterministic.py [--quick]`: is a text the same whatever it is computed with?

The demo model in bfloat16 goes on with prompts of Spec-Bench, greedy and with a seed (shared noise). Each
text is compared, token by token, with that of plain decoding alone: drafted by lookup with K of 3 and 7,
alone; and plain and drafted in one batch of four prompts and both kinds. The same prompts, fewer of them,
without `deterministic`. Nothing is timed, so other work beside it does no harm.

The last line is JSON: `identical` of `compared`, and both `_without`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter

from common import machine, save_result  # benchmarks/common.py; first, as it sets how threads wait
from prompts import prompts
from sessions import identical

from splitspec.engine.causal_lm import CausalLM
from splitspec.models import fetch_demo_model

#: Prompts whose sessions share a batch: with two kinds and three K, 24 sessions.
AT_ONCE = 4


def compare(model: CausalLM, texts: list[tuple[int, ...]], num_tokens: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for start in range(0, len(texts), AT_ONCE):
        found.update(identical(model, texts[start : start + AT_ONCE], num_tokens))
        print(f"from prompt {start} of {len(texts)}: {dict(found)}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="8 prompts of 64 tokens, 16 more tokens each")
    arguments = parser.parse_args()
    directory = fetch_demo_model()
    if arguments.quick:
        texts, num_tokens = prompts(directory, 2, 64)[:8], 16
    else:
        texts, num_tokens = prompts(directory, 11, 384)[:64], 128
    result: dict[str, int] = {}
    for deterministic, ending, some in ((True, "", texts), (False, "_without", texts[:16])):
        print(f"deterministic={deterministic}")
        model = CausalLM.load(
            directory, name="demo", dtype="bfloat16", device="cpu", deterministic=deterministic
        )
        found = compare(model, some, num_tokens)
        result |= {f"{name}{ending}": found[name] for name in ("identical", "compared")}
    noted = {"machine": machine(), "prompts": len(texts), "num_tokens": num_tokens, "summary": result}
    save_result("deterministic", noted, quick=arguments.quick)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
