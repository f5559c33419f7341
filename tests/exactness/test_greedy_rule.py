"""The greedy rule emits the target's argmax decoding, whatever is proposed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from splitspec.types import Origin
from splitspec.verification.greedy import verify_greedy
from splitspec.verification.outcome import Outcome

VOCABULARY_SIZE = 3


def logits(prefix: tuple[int, ...]) -> torch.Tensor:
    """[vocabulary] float32 on a coarse grid, so that about half of the rows have a tie at the top."""
    generator = np.random.default_rng((40, len(prefix), *prefix))
    return torch.from_numpy(generator.integers(2, size=VOCABULARY_SIZE).astype(np.float32))


def plain_decoding(length: int) -> tuple[int, ...]:
    tokens: tuple[int, ...] = ()
    for _ in range(length):
        row = logits(tokens).tolist()
        tokens += (row.index(max(row)),)  # the lowest id of those that tie
    return tokens


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 3])
def test_equals_plain_decoding_for_every_draft(num_draft_tokens: int) -> None:
    expected = plain_decoding(8)
    for start in range(8 - num_draft_tokens):
        for draft in itertools.product(range(VOCABULARY_SIZE), repeat=num_draft_tokens):
            rows = torch.stack([logits(expected[:start] + draft[:i]) for i in range(num_draft_tokens + 1)])
            outcome = verify_greedy(rows, draft)
            committed = (*draft[: outcome.num_accepted], outcome.next_token)
            assert committed == expected[start : start + len(committed)]
            assert outcome.num_accepted == num_draft_tokens or draft[outcome.num_accepted] != committed[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_ties_go_to_the_lowest_id(dtype: torch.dtype) -> None:
    rows = torch.tensor([[0, 5, 5, 1], [2, 2, 2, 2]], dtype=dtype)
    assert verify_greedy(rows, [1]) == Outcome(1, 1, 0)
    assert verify_greedy(rows, [2]) == Outcome(1, 0, 1)


def test_float64_logits_are_compared_as_float32() -> None:
    assert verify_greedy(torch.tensor([[1.0, 1.0 + 2**-40]], dtype=torch.float64), []).next_token == 0


@pytest.mark.parametrize(
    ("num_draft_tokens", "num_accepted", "origin"),
    [(0, 0, Origin.PLAIN), (2, 0, Origin.CORRECTION), (2, 1, Origin.CORRECTION), (2, 2, Origin.BONUS)],
)
def test_origin_of_the_next_token(num_draft_tokens: int, num_accepted: int, origin: Origin) -> None:
    assert Outcome(num_draft_tokens, num_accepted, 0).next_origin is origin


@pytest.mark.parametrize("num_accepted", [-1, 3])
def test_outcome_refuses_an_impossible_count(num_accepted: int) -> None:
    with pytest.raises(ValueError, match="of 2 draft tokens accepted"):
        Outcome(2, num_accepted, 0)
