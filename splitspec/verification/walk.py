"""The walk that every rule of equality takes, through chains and trees alike."""

from __future__ import annotations

from collections.abc import Callable

from splitspec.verification.outcome import Outcome
from splitspec.wire import Draft


def walk(draft: Draft, choose: Callable[[int, int], int]) -> Outcome:
    """Choose a token at each row, and go on at the child that equals it; the first without one is the next.

    choose: (row, number of tokens accepted before it) to a token. Each row is asked for at most once.
    """
    children = draft.children
    path: tuple[int, ...] = ()
    row = 0
    while True:
        token = choose(row, len(path))
        equal = [node for node in children[row] if draft.token_ids[node] == token]
        if not equal:
            return Outcome(len(draft.token_ids), path, token, complete=not children[row])
        path = (*path, equal[0])
        row = equal[0] + 1
