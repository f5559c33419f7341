"""For which next tokens continuations are prepared."""

from __future__ import annotations

import pytest
import torch

from draft_worker.drawing import DraftCounterNoise, runners_up
from splitspec.types import Rule
from tests.exactness.tables import TableRows

P = torch.tensor([0.1, 0.4, 0.0, 0.3, 0.2], dtype=torch.float64)


@pytest.mark.parametrize("rule", [Rule.GREEDY, Rule.TOKEN, Rule.BLOCK, Rule.SHARED_NOISE])
def test_runners_up_leave_out_what_follows_in_the_draft_and_what_never_comes(rule: Rule) -> None:
    """In falling order; under shared noise in the order of the race, whose winner comes first."""
    noise = DraftCounterNoise(7, 3)

    def found(count: int, without: list[int]) -> list[int]:
        return runners_up(rule, TableRows([P]), 0, 12, count, without, noise)

    order = found(9, [])
    if rule is Rule.SHARED_NOISE:
        assert order[0] == noise.race(12, P)
        assert sorted(order) == [0, 1, 3, 4]
    else:
        assert order == [1, 3, 4, 0]
    for place in range(4):
        rest = [token for token in order if token != order[place]]
        assert [found(count, [order[place]]) for count in range(4)] == [rest[:count] for count in range(4)]
