"""Prompts for the real model: eight short ones, and two of more than 1,000 tokens."""

from __future__ import annotations

import random

SHORT = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain to a child why the sky is blue.",
    "List the numbers from one to twenty, each on its own line.",
    "Translate into German: The weather is nice today and we are going for a walk.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Tell me a story about a fox 🦊 and a heron, with a moral.",
    "日本の首都はどこですか。",
)

_PLACES = ("Alder Quay", "Brennan's Reach", "Corvin Point", "Dunmore", "Eastwick", "Fallow Bay")
_CARGO = ("barley", "copper wire", "glass", "machine parts", "paper", "salted fish", "timber", "wool")


def ship_log(seed: int, entries: int) -> str:
    """A harbour's log, the same for the same seed: about 25 tokens an entry."""
    rng = random.Random(seed)
    lines = []
    for day in range(1, entries + 1):
        origin, destination = rng.sample(_PLACES, 2)
        cargo, tons = rng.choice(_CARGO), rng.randint(3, 90)
        lines.append(f"Day {day}: a ship from {origin} to {destination} carried {tons} tons of {cargo}.")
    return "\n".join(lines)


LONG = (
    ship_log(1, 60) + "\n\nWrite the log of the first ten days again, word by word.",
    ship_log(2, 70) + "\n\nWhich cargo was carried most often? Explain how you counted.",
)

ALL = SHORT + LONG
