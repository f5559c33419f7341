"""What drafters without a model prepare for: tokens that followed a match, and what comes behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_worker.drafters.lookup import LookupDrafter, LookupIndex
from draft_worker.drafters.suffix import SuffixDrafter
from draft_worker.drawing import DraftCounterNoise
from splitspec.engine.scheduler import run_alone
from splitspec.types import Sampling
from splitspec.wire import Draft
from tests.draft_worker.test_automaton import STEPS, Steps
from tests.drawings import drawing_of

Matching: TypeAlias = LookupDrafter | SuffixDrafter

GREEDY = drawing_of(Sampling(temperature=0.0))
NOISE = DraftCounterNoise(7, 1)
K = 3


@pytest.fixture(params=["lookup", "suffix"])
def drafter(request: pytest.FixtureRequest) -> Matching:
    return LookupDrafter("lookup", 4, 1) if request.param == "lookup" else SuffixDrafter("suffix", 3)


def propose(drafter: Matching, state: Any, tokens: Sequence[int]) -> Draft:
    return run_alone(drafter.propose(state, tokens, K, GREEDY, NOISE))


def guess(
    drafter: Matching, state: Any, tokens: Sequence[int], draft: Draft, count: int
) -> list[list[tuple[int, Any]]]:
    counts = [count] * (len(draft.token_ids) + 1)
    return run_alone(drafter.guess(state, tokens, draft, GREEDY, NOISE, counts))


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_an_index_after_any_appends_and_cuts_is_that_of_its_text(steps: Steps) -> None:
    index, tokens = LookupIndex(range(3, 0, -1)), list[int]()
    for cut, more in steps:
        tokens = tokens[: max(0, len(tokens) - cut)] + more
        index.read(tokens)
        fresh = LookupIndex(range(3, 0, -1))
        fresh.read(tokens)
        assert vars(index) == vars(fresh)


def test_behind_all_of_a_proposal_comes_what_followed_it(drafter: Matching) -> None:
    tokens, state = [5, 1, 2, 3, 4, 8, 9, 5, 1], drafter.open()
    draft = propose(drafter, state, tokens)
    assert draft.token_ids == (2, 3, 4)
    last = guess(drafter, state, tokens, draft, 2)[-1]
    assert [token for token, _ in last] == [8]
    (_, behind) = last[0]
    assert propose(drafter, behind, [*tokens, 2, 3, 4, 8]).token_ids == (9, 5, 1)


def test_instead_of_a_draft_token_comes_what_followed_a_shorter_match(drafter: Matching) -> None:
    tokens, state = [1, 2, 7, 6, 3, 1, 2, 9, 5, 2, 8, 3, 1, 2], drafter.open()
    draft = propose(drafter, state, tokens)
    assert draft.token_ids[0] == 9
    assert [token for token, _ in guess(drafter, state, tokens, draft, 2)[0]] == [8]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.sampled_from(["lookup", "suffix"]))
def test_a_prepared_proposal_is_the_fresh_one(tokens: list[int], kind: str) -> None:
    """In any order, whatever else was prepared; and no draft token is guessed in its own place."""
    drafter = LookupDrafter("lookup", 4, 1) if kind == "lookup" else SuffixDrafter("suffix", 3)
    state: Any = drafter.open()
    draft = propose(drafter, state, tokens)
    guesses = guess(drafter, state, tokens, draft, 3)
    assert drafter.held_tokens(state) == len(tokens)
    assert len(guesses) == len(draft.token_ids) + 1
    behind = []
    for place, after in enumerate(guesses):
        guessed = [token for token, _ in after]
        assert len(set(guessed)) == len(guessed) <= 3
        assert not {*draft.token_ids[place : place + 1]} & {*guessed}
        behind += [([*tokens, *draft.token_ids[:place], token], other) for token, other in after]
    for text, other in reversed(behind):
        assert propose(drafter, other, text) == propose(drafter, drafter.open(), text)
    assert propose(drafter, state, tokens) == draft
