"""`splitspec generate`: one generation, streamed."""

from __future__ import annotations

import json
import time

from rich.console import Console

from splitspec.cli.origins import legend, marked, needs_signs
from splitspec.client import AsyncClient, AsyncGeneration, GenerateOptions, Prompt
from splitspec.client.values import to_json
from splitspec.types import Origin


async def stream(
    address: str, prompt: Prompt, options: GenerateOptions, as_json: bool, out: Console, err: Console
) -> None:
    """The text on `out`, in colour by origin on a terminal and bare elsewhere; what was counted on `err`."""
    async with AsyncClient(address) as client:
        generation = client.generate(prompt, **options)
        if as_json:
            ascii_only = not out.encoding.startswith("utf")
            out.out(json.dumps(to_json(await generation.result()), ensure_ascii=ascii_only))
            return
        origins, first_s = await show(generation, out, err)
        if not needs_signs(out):
            err.print(legend(origins, signs=False))
        err.print(_summary(generation, first_s), style="dim")


async def show(generation: AsyncGeneration, out: Console, err: Console) -> tuple[set[Origin], float]:
    """Print the text as it comes; returns the origins that it has, and the seconds to the first chunk."""
    begun = time.monotonic()
    with err.status("waiting for the first token"):
        chunk = await generation.read()
    origins: set[Origin] = set()
    first_s = time.monotonic() - begun
    while chunk is not None:
        pieces = [(token.origin, text) for token, text in chunk.pieces]
        origins |= {origin for origin, _ in pieces}
        if needs_signs(out):
            out.out(chunk.text, end="")
        else:
            out.print(marked(pieces, signs=False), end="", soft_wrap=True)
        chunk = await generation.read()
    out.print()
    return origins, first_s


def _summary(generation: AsyncGeneration, first_s: float) -> str:
    finished = generation.finished
    acceptance = finished.acceptance
    words = [
        f"{finished.usage.completion_tokens} tokens, ended by {finished.reason.name.lower()}",
        f"first after {first_s:.2f} s",
    ]
    if acceptance.num_spec_steps:
        words.append(
            f"{finished.drafter}: mean acceptance length {acceptance.mean_acceptance_length:.2f}, "
            f"acceptance rate {acceptance.draft_acceptance_rate:.2f}"
        )
    return " · ".join(words)
