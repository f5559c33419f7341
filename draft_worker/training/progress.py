"""Progress and rate of a long command, a line every few seconds."""

from __future__ import annotations

import time

from rich.console import Console

_EVERY_S = 5.0


class Rate:
    """Counts things done out of `total`, of which `begun` were done before, and tokens."""

    def __init__(self, console: Console, what: str, begun: int, total: int) -> None:
        self._console = console
        self._what = what
        self._done = begun
        self._total = total
        self._tokens = 0
        self._started = self._shown = time.monotonic()

    def advance(self, done: int, tokens: int) -> None:
        self._done += done
        self._tokens += tokens
        now = time.monotonic()
        if now - self._shown > _EVERY_S or self._done == self._total:
            self._shown = now
            rate = self._tokens / max(now - self._started, 1e-9)
            self._console.print(f"{self._what}: {self._done} of {self._total}, {rate:.0f} tokens/s")
