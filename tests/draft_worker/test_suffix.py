"""What the suffix drafter proposes: from the session itself, and from past answers of the same tenant."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_worker.drafters import DrafterSpec, Loading, build_drafter
from draft_worker.drafters.suffix import SuffixDrafter, SuffixState
from draft_worker.drawing import DraftCounterNoise
from draft_worker.past_answers import PastAnswers
from splitspec.engine.scheduler import run_alone
from splitspec.errors import ConfigError
from splitspec.types import Drawing, Output, Rule, Sampling
from splitspec.wire import Draft
from tests.draft_worker.test_automaton import STEPS, Steps, longest_suffix_in
from tests.drawings import drawing_of

GREEDY = drawing_of(Sampling(temperature=0.0))


def sampled(seed: int, start: int = 0, rule: Rule = Rule.BLOCK) -> Drawing:
    return drawing_of(Sampling(seed=seed), rule, Output(start))


def propose(
    drafter: SuffixDrafter,
    state: SuffixState,
    tokens: Sequence[int],
    count: int,
    drawing: Drawing = GREEDY,
) -> Draft:
    return run_alone(drafter.propose(state, tokens, count, drawing, DraftCounterNoise(7, len(tokens))))


class TestSession:
    @settings(max_examples=150, deadline=None)
    @given(STEPS, st.integers(1, 3), st.integers(1, 8))
    def test_a_proposal_is_as_long_as_its_match_allows(self, steps: Steps, reach: int, count: int) -> None:
        """Over any extensions and cuts; and whatever was proposed before has no say."""
        drafter = SuffixDrafter("suffix", reach)
        state, tokens = drafter.open(), list[int]()
        for cut, more in steps:
            tokens = tokens[: max(0, len(tokens) - cut)] + more
            draft = propose(drafter, state, tokens, count)
            length = longest_suffix_in(tokens, tokens[:-1])
            assert len(draft.token_ids) == min(count, reach * length)
            assert draft == Draft.certain(draft.token_ids)
            assert draft == propose(drafter, drafter.open(), tokens, count)
            assert drafter.held_tokens(state) == len(tokens)
            # Each proposed token followed the same tokens before, or a token proposed like it.
            extended = [*tokens, *draft.token_ids]
            for end in range(len(tokens), len(extended)):
                assert longest_suffix_in(extended[: end + 1], extended[:end]) > length

    def test_the_longest_match_wins(self) -> None:
        drafter = SuffixDrafter("suffix", 2)
        tokens = [1, 2, 3, 10, 2, 3, 11, 3, 12, 9, 2, 3]
        assert propose(drafter, drafter.open(), tokens, 4).token_ids == (11, 3, 12, 9)
        assert propose(drafter, drafter.open(), [*tokens, 9, 1, 2, 3], 2).token_ids == (10, 2)

    def test_nothing_repeated_proposes_nothing(self) -> None:
        drafter = SuffixDrafter("suffix", 2)
        assert propose(drafter, drafter.open(), [1, 2, 3], 4) == Draft.certain(())
        assert propose(drafter, drafter.open(), [], 4) == Draft.certain(())

    def test_a_proposal_depends_on_committed_tokens_alone(self) -> None:
        """Not on seed, round, rule or temperature: nothing drawn may shape a proposal."""
        drafter = SuffixDrafter("suffix", 2)
        tokens = [1, 2, 3, 4, 5, 1, 2, 3]
        for drawing in (
            GREEDY,
            *(sampled(seed, 2, rule) for seed in range(9) for rule in (Rule.TOKEN, Rule.BLOCK)),
        ):
            assert propose(drafter, drafter.open(), tokens, 3, drawing) == Draft.certain((4, 5, 1))

    def test_feeding_keeps_what_is_the_same(self) -> None:
        drafter = SuffixDrafter("suffix", 2)
        state = drafter.open()
        assert run_alone(drafter.feed(state, [1, 2, 3, 4])) == 0
        assert run_alone(drafter.feed(state, [1, 2, 5])) == 2
        assert state.automaton.tokens == [1, 2, 5]


class Answering:
    """A drafter with past answers, and requests that it has seen from start to end."""

    def __init__(self, max_tokens: int = 100_000) -> None:
        self.past = PastAnswers(max_tokens)
        self.drafter = SuffixDrafter("suffix", 2, self.past)

    def answered(self, answer: Sequence[int], *, tenant: str = "", seed: int = 1, prompt: int = 2) -> None:
        """A request with a prompt of the tokens 1000, 1001, ... that was given this answer, and its end."""
        state = self.drafter.open(tenant)
        tokens = [*range(1000, 1000 + prompt), *answer]
        propose(self.drafter, state, tokens, 4, sampled(seed, prompt))
        self.drafter.rest(state)
        self.drafter.free(state)

    def proposed(self, tokens: Sequence[int], *, tenant: str = "", drawing: Drawing = GREEDY) -> list[int]:
        """By a session that isn't over."""
        return list(propose(self.drafter, self.drafter.open(tenant), tokens, 4, drawing).token_ids)


class TestPastAnswers:
    def test_the_longest_match_of_session_and_answers_counts(self) -> None:
        service = Answering()
        service.answered([5, 6, 7, 8, 9])
        assert service.proposed([5, 6]) == [7, 8, 9]
        # A match in the session itself that is as long, and a longer one.
        assert service.proposed([6, 2, 3, 6]) == [2, 3]
        assert service.proposed([5, 6, 1, 5, 6]) == [1, 5, 6, 1]
        assert service.proposed([6, 3, 1, 5, 6]) == [7, 8, 9]

    def test_the_latest_answer_counts(self) -> None:
        service = Answering()
        service.answered([5, 6, 7])
        service.answered([5, 6, 8])
        assert service.proposed([5, 6]) == [8]

    def test_off_by_default(self) -> None:
        drafter = build_drafter(DrafterSpec.parse("suffix"), Loading("float32", "cpu"))
        for _ in range(2):
            state = drafter.open()
            draft = run_alone(drafter.propose(state, [5, 6, 7], 4, GREEDY, DraftCounterNoise(7, 1)))
            assert draft.token_ids == ()
            drafter.rest(state)
            drafter.free(state)

    @pytest.mark.parametrize(("a", "b"), [("a", "b"), ("", "a"), ("a", ""), ("a", "A")])
    def test_no_tenant_sees_anothers(self, a: str, b: str) -> None:
        service = Answering()
        service.answered([5, 6, 7], tenant=a)
        assert service.proposed([5, 6], tenant=b) == []
        assert service.proposed([5, 6], tenant=a) == [7]

    def test_answers_only_and_only_ended_ones(self) -> None:
        service = Answering()
        state = service.drafter.open()
        propose(service.drafter, state, [5, 6, 7, 8], 4, sampled(1, 2))
        assert service.proposed([7]) == []
        service.drafter.rest(state)
        assert service.proposed([7]) == [8]
        assert service.proposed([5]) == []
        # Its next request: the answer that was kept isn't kept again.
        propose(service.drafter, state, [5, 6, 7, 8, 5, 3, 4], 4, sampled(2, 6))
        service.drafter.free(state)
        assert service.proposed([3]) == []
        assert len(service.past) == len([7, 8]) + 1 + len([4]) + 1

    def test_no_match_and_no_proposal_spans_two_answers(self) -> None:
        service = Answering()
        service.answered([5, 6])
        service.answered([7, 8])
        assert service.proposed([5]) == [6]
        assert service.proposed([6, 7]) == [8]
        assert service.proposed([6]) == []
        # Nor does what stood before an answer count as its context.
        for answer in ([4], [4], [4, 9]):
            service.answered(answer)
        assert service.proposed([4]) == [9]

    def test_answers_drawn_with_the_requests_own_seed_are_not_proposed(self) -> None:
        """They depend on its noise. Where that can't change the tokens, they are as good as any."""
        service = Answering()
        service.answered([5, 6, 7], seed=3)
        for rule in (Rule.TOKEN, Rule.BLOCK):
            assert service.proposed([5, 6], drawing=sampled(3, rule=rule)) == []
            assert service.proposed([5, 6], drawing=sampled(4, rule=rule)) == [7]
        assert service.proposed([5, 6], drawing=sampled(3, rule=Rule.SHARED_NOISE)) == [7]
        assert service.proposed([5, 6]) == [7]

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 400)), max_size=40))
    def test_memory_is_bounded(self, answers: list[tuple[str, int]]) -> None:
        service = Answering(1000)
        for seed, (tenant, length) in enumerate(answers):
            first = 1000 * seed
            service.answered(range(first, first + length), tenant=tenant, seed=seed)
            books = [book for each in "abc" for book in service.past.books(each, GREEDY)]
            assert len(service.past) == sum(map(len, books)) <= 1000
            # The answer that has just ended is there, its last tokens at least.
            last = first + length - 1
            assert length == 1 or service.proposed([last - 1], tenant=tenant) == [last]

    def test_the_oldest_answers_go_first(self) -> None:
        service = Answering(1000)
        for number in range(12):
            service.answered(range(200 * number, 200 * number + 199), seed=number)
        known = [bool(service.proposed([200 * number + 5])) for number in range(12)]
        assert known == [False] * 7 + [True] * 5


class TestSpec:
    def test_every_option(self) -> None:
        spec = DrafterSpec.parse("suffix,reach=3,past_answers=50000,name=wide")
        assert spec == DrafterSpec("suffix", "", "wide", {"reach": 3, "past_answers": 50000})
        info = build_drafter(spec, Loading("float32", "cpu")).info
        assert (info.name, info.kind, info.HasField("model")) == ("wide", "suffix", False)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("suffix=x", "suffix without a checkpoint"),
            ("suffix,reach=0", "reach to be a whole number, at least 1"),
            ("suffix,past_answers=999", "past_answers to be a whole number of tokens, at least 1000"),
            ("suffix,past_answers=many", "past_answers to be a whole number of tokens, at least 1000"),
            ("suffix,min_match=2", "suffix with options of: name, reach, past_answers"),
        ],
    )
    def test_wrong_ones_are_named(self, text: str, expected: str) -> None:
        with pytest.raises(ConfigError) as caught:
            DrafterSpec.parse(text)
        assert str(caught.value) == f"drafters has {text!r}, expected {expected}"
