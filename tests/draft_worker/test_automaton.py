"""The suffix automaton against a search through the whole text."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_worker.automaton import Match, SuffixAutomaton

Steps = list[tuple[int, list[int]]]
#: Cuts and what is appended after each, over few tokens, so that there are matches of every length.
STEPS = st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 2), max_size=10)), max_size=8)


def longest_suffix_in(suffixed: Sequence[int], text: Sequence[int]) -> int:
    """Length of the longest suffix of one that occurs in the other."""

    def occurs(length: int) -> bool:
        wanted = list(suffixed[len(suffixed) - length :])
        return any(list(text[i : i + length]) == wanted for i in range(len(text) - length + 1))

    return max(length for length in range(len(suffixed) + 1) if occurs(length))


def last_longest_match(tokens: Sequence[int]) -> Match | None:
    """By definition: where this very suffix was the longest match last time; None if it never was."""
    length = longest_suffix_in(tokens, tokens[:-1])
    for end in range(len(tokens) - 1, 0, -1):
        same = length and list(tokens[end - length : end]) == list(tokens[-length:])
        if same and longest_suffix_in(tokens[:end], tokens[: end - 1]) == length:
            return Match(length, end)
    return None


def assert_right(automaton: SuffixAutomaton, tokens: list[int]) -> None:
    assert automaton.tokens == tokens
    match = automaton.match
    if not tokens:
        assert match.length == 0
        return
    assert match.length == longest_suffix_in(tokens, tokens[:-1])
    if match.length:
        assert match.end < len(tokens)
        assert tokens[match.end - match.length : match.end] == tokens[-match.length :]
        assert match == (last_longest_match(tokens) or match)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_the_longest_match_over_any_appends_and_cuts(steps: Steps) -> None:
    automaton = SuffixAutomaton()
    tokens: list[int] = []
    for cut, more in steps:
        tokens = tokens[: max(0, len(tokens) - cut)]
        automaton.truncate(len(tokens))
        assert_right(automaton, tokens)
        for token in more:
            tokens = [*tokens, token]
            automaton.extend([token])
            assert_right(automaton, tokens)
        # All of it, so that nothing of what was cut has a say later.
        assert vars(automaton) == vars(SuffixAutomaton(tokens))


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 3), max_size=12))
def test_the_longest_suffix_of_other_tokens(text: list[int], other: list[int]) -> None:
    match = SuffixAutomaton(text).find(other)
    assert match.length == longest_suffix_in(other, text)
    assert text[match.end - match.length : match.end] == other[len(other) - match.length :]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(0, 20), st.data())
def test_what_followed_goes_on_into_itself(tokens: list[int], count: int, data: st.DataObject) -> None:
    end = data.draw(st.integers(0, len(tokens) - 1))
    extended = list(tokens)
    for i in range(count):
        extended.append(extended[end + i])
    assert SuffixAutomaton(tokens).continued(end, count) == extended[len(tokens) :]


def test_of_two_places_the_one_of_the_same_context_is_taken() -> None:
    """2 3 came last behind 1, and was a longer match there; as a match of two tokens it was followed by 7."""
    tokens = [1, 2, 3, 6, 0, 2, 3, 7, 1, 2, 3, 6, 5, 2, 3]
    automaton = SuffixAutomaton(tokens)
    assert automaton.match == Match(2, 7)
    assert automaton.continued(7, 1) == [7]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 50000])
def test_size_grows_with_the_text_alone(num_tokens: int) -> None:
    """At most two states and three transitions a token, whatever the text."""
    generator = random.Random(1)
    texts = [
        [generator.randrange(num_tokens) for _ in range(min(num_tokens, 2000))],
        [generator.randrange(2) for _ in range(min(num_tokens, 2000))],
        [0] * num_tokens,
        [0] * (num_tokens - 1) + [1],
    ]
    for tokens in texts:
        automaton = SuffixAutomaton(tokens)
        following = automaton._next
        assert len(following) <= 2 * len(tokens)
        assert sum(map(len, following)) <= 3 * len(tokens)
