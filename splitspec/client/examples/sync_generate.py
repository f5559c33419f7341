"""One question, streamed, then how speculation went.  Usage: python sync_generate.py HOST:PORT"""

from __future__ import annotations

import sys

from splitspec.client import Client, Message

with Client(sys.argv[1]) as client:
    generation = client.generate([Message("user", "What is the capital of France?")], temperature=0.7, seed=1)
    for chunk in generation:
        print(chunk.text, end="", flush=True)
    finished = generation.finished
    print(f"\n{finished.reason.name}: {finished.usage.completion_tokens} tokens")
    print(f"{finished.acceptance.mean_acceptance_length:.2f} tokens per round with a proposal")
