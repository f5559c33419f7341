"""The blocks of random numbers that the product asks for, while it runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from splitspec.sampling.randomness import Purpose


class Asked(NamedTuple):
    """A stream of Philox, of which a draw takes the first word, and a race as many as there are tokens.

    place: the index within the round; for shared noise the position, and its round is 0.
    """

    seed: int
    round_number: int
    place: int
    purpose: Purpose


class Recorder:
    """Every stream that was asked for, in order, with the thread that asked."""

    def __init__(self) -> None:
        self._asked: list[tuple[int, Asked]] = []

    def by(self, *threads: int) -> list[Asked]:
        """What these threads have asked for; without any, what all have."""
        return [asked for thread, asked in self._asked if not threads or thread in threads]

    def record(self, counter: Any, key: Any) -> None:
        block, stream, place, round_number = map(int, counter)
        # Else two streams could run into each other.
        assert (block, stream) == (0, 0)
        asked = Asked(int(key[0]), round_number, place, Purpose(int(key[1])))
        self._asked.append((threading.get_ident(), asked))


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Record what is asked of numpy's Philox until the block ends."""
    recorder, philox = Recorder(), np.random.Philox

    def recorded(*, counter: Any, key: Any) -> Any:
        recorder.record(counter, key)
        return philox(counter=counter, key=key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np.random, "Philox", recorded)
        yield recorder
