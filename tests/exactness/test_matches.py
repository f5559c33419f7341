"""The drafters that look for matches emit the target's law; what only looks like them doesn't."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest

from draft_worker.drafters.hybrid import HybridDrafter
from draft_worker.drafters.lookup import LookupDrafter, LookupState
from draft_worker.drafters.suffix import SuffixDrafter
from draft_worker.drawing import DraftCounterNoise
from draft_worker.past_answers import PastAnswers
from splitspec.engine.scheduler import Steps, run_alone
from splitspec.types import Drawing, Output, Rule, Sampling
from splitspec.wire import Draft
from tests.drawings import drawing_of
from tests.exactness import drafting, law, tables
from tests.exactness.drafting import Propose, RoundNoise, chain
from tests.exactness.enumeration import SERVICE, Streams, outcomes
from tests.exactness.law import Implementation, Law, decide_by
from tests.exactness.tables import Model, Prefix

RULES = [Rule.TOKEN, Rule.BLOCK]
#: The match behind it has two tokens, and with a 1 or a 2 behind it three.
PROMPT = (0, 1, 2, 0, 1, 1, 2, 1, 0, 1)
P, Q = tables.random_model(3, 1), tables.random_model(3, 2)
DENSE = tables.processed_model(3, 8, Sampling(temperature=0.7))


class TableDrafter(LookupDrafter):
    """Draws its tokens from a table, as a model does from its logits."""

    def __init__(self, noise: RoundNoise, q: Model, prefix: Prefix) -> None:
        super().__init__("table", 1, 1)
        self._table = noise, q, prefix

    def propose(
        self,
        state: LookupState,
        token_ids: Sequence[int],
        num_draft_tokens: int,
        drawing: Drawing,
        noise: DraftCounterNoise,
    ) -> Steps[Draft]:
        yield from ()
        return chain(drafting.drawn)(*self._table, num_draft_tokens)


def drafted(drafter: SuffixDrafter | HybridDrafter, prefix: Prefix, num_draft_tokens: int) -> Draft:
    """The service's own proposal, behind the prompt."""
    drawing = drawing_of(Sampling(seed=1), output=Output(len(PROMPT)))
    state = drafter.open()
    steps = drafter.propose(state, PROMPT + prefix, num_draft_tokens, drawing, DraftCounterNoise(1, 1))  # type: ignore[arg-type]
    return run_alone(steps)


def suffix(noise: RoundNoise, q: Model, prefix: Prefix, num_draft_tokens: int) -> Draft:
    return drafted(SuffixDrafter("suffix", 2), prefix, num_draft_tokens)


def hybrid(min_match: int) -> Propose:
    def propose(noise: RoundNoise, q: Model, prefix: Prefix, num_draft_tokens: int) -> Draft:
        other = TableDrafter(noise, q, prefix)
        drafter = HybridDrafter("hybrid", SuffixDrafter("suffix", 2), other, min_match)
        return drafted(drafter, prefix, num_draft_tokens)

    return propose


def certain_where_they_agree(noise: RoundNoise, q: Model, prefix: Prefix, num_draft_tokens: int) -> Draft:
    """Wrong: which of the two proposes depends on what was drawn."""
    match = suffix(noise, q, prefix, num_draft_tokens)
    draft = chain(drafting.drawn)(noise, q, prefix, num_draft_tokens)
    return match if draft.token_ids[:1] == match.token_ids[:1] else draft


DRAFTERS = {"suffix": suffix, **{f"hybrid, {length} tokens": hybrid(length) for length in (1, 2, 3)}}


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rule", RULES)
def test_matches_are_exact(rule: Rule, drafter: str, num_draft_tokens: int) -> None:
    implementation = Implementation(DRAFTERS[drafter], decide_by(rule))
    for p in (P, DENSE):
        emitted = law.emitted_law(implementation, p, Q, 3, num_draft_tokens)
        law.assert_exact(emitted, law.target_law(p, 3))


@pytest.mark.parametrize(("prefix", "matched"), [((), False), ((0,), False), ((1,), True), ((2,), True)])
def test_both_drafters_have_their_turn(prefix: Prefix, matched: bool) -> None:
    """Else the law of a hybrid says nothing about the choice; whatever is drawn, it is the same one."""

    def run(streams: Streams) -> Draft:
        return hybrid(3)(streams.round(0), Q, prefix, 2)

    drafts = [draft for draft, _ in outcomes(run, SERVICE)]
    assert {draft == Draft.certain(draft.token_ids) for draft in drafts} == {matched}


@pytest.mark.parametrize("rule", RULES)
def test_a_choice_by_drawn_values_is_rejected(rule: Rule) -> None:
    implementation = Implementation(certain_where_they_agree, decide_by(rule))
    emitted = law.emitted_law(implementation, DENSE, Q, 3, 2)
    assert law.total_variation(emitted, law.target_law(DENSE, 3)) > 1e-3
    with pytest.raises(AssertionError):
        law.assert_exact(emitted, law.target_law(DENSE, 3))


def law_after_an_answer(rule: Rule, own_noise: bool) -> Law:
    """Law of what a request emits that proposes from the answer of one before, on the same prompt.

    own_noise: both draw with the same seed, and so with the same noise in rounds of the same number.
    """
    length, num_draft_tokens = 2, 2
    first = Implementation(suffix, decide_by(rule))

    def run(streams: Streams) -> Prefix:
        answer = law.session(first, DENSE, Q, length, num_draft_tokens, map(streams.round, (1, 2)))

        def propose(noise: RoundNoise, q: Model, prefix: Prefix, num_draft_tokens: int) -> Draft:
            going_on = answer[: len(prefix)] == prefix
            return Draft.certain(answer[len(prefix) :][:num_draft_tokens] if going_on else ())

        second = Implementation(propose, decide_by(rule))
        rounds = (1, 2) if own_noise else (3, 4)
        return law.session(second, DENSE, Q, length, num_draft_tokens, map(streams.round, rounds))

    emitted: Law = defaultdict(float)
    for tokens, probability in outcomes(run, SERVICE):
        emitted[tokens] += probability
    return emitted


@pytest.mark.parametrize("rule", RULES)
def test_an_answer_drawn_with_other_noise_may_be_proposed(rule: Rule) -> None:
    law.assert_exact(law_after_an_answer(rule, own_noise=False), law.target_law(DENSE, 2))


@pytest.mark.parametrize("rule", RULES)
def test_an_answer_drawn_with_the_same_noise_may_not(rule: Rule) -> None:
    """Why past answers of a request's own seed are left out."""
    emitted = law_after_an_answer(rule, own_noise=True)
    assert law.total_variation(emitted, law.target_law(DENSE, 2)) > 1e-3
    past = PastAnswers(1000)
    past.add("", [1, 2], seed=5)
    assert not past.books("", drawing_of(Sampling(seed=5), rule))
    assert past.books("", drawing_of(Sampling(seed=6), rule))
