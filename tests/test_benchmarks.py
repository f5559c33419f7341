"""What the benchmarks compute from what they measure."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
from library import GENERATE, LOOKUP  # benchmarks/library.py
from paired import Work, speedup, tokens_per_second  # benchmarks/paired.py
from spec_table import ALL, PLAIN, Row, Sample, Spent, library_best, markdown, rows, summary


def noisy(count: int, times: float, seed: int) -> tuple[list[Work], list[Work]]:
    """Questions that differ a hundredfold, answered twice; ours `times` as fast but for 10 % of noise."""
    draw = random.Random(seed)
    costs = [10 ** draw.uniform(-1, 1) for _ in range(count)]
    ours = [Work(10, cost / times * draw.lognormvariate(0, 0.1)) for cost in costs]
    return ours, [Work(10, cost * draw.lognormvariate(0, 0.1)) for cost in costs]


def test_a_speedup_is_of_all_tokens_over_all_seconds() -> None:
    ours = [Work(10, 1.0), Work(30, 1.0)]
    assert tokens_per_second(ours) == 20
    assert speedup(ours, [Work(20, 4.0), Work(10, 2.0)]).value == 4


def test_what_slows_both_does_not_widen_the_interval() -> None:
    """Unpaired, the questions' own spread would make it several times as wide."""
    ours, theirs = noisy(40, 1.5, seed=1)
    paired, unpaired = speedup(ours, theirs), speedup(ours, theirs[1:] + theirs[:1])
    assert paired.low is not None
    assert paired.high is not None
    assert unpaired.low is not None
    assert unpaired.high is not None
    assert 1.3 < paired.low < paired.value < paired.high < 1.7
    assert unpaired.high - unpaired.low > 3 * (paired.high - paired.low)


def test_nineteen_of_twenty_intervals_hold_the_true_speedup() -> None:
    """Of 400: with few questions a bootstrap's interval is a little too narrow, 92 to 95 %."""
    found = [speedup(*noisy(40, 1.5, seed), resamples=500) for seed in range(400)]
    held = statistics.fmean((one.low or 0) <= 1.5 <= (one.high or 0) for one in found)
    assert 0.88 < held < 0.98


def test_one_question_has_no_interval() -> None:
    one = speedup([Work(10, 1.0)], [Work(10, 2.0)])
    assert (one.value, one.low, one.high) == (2, None, None)


@pytest.mark.parametrize("theirs", [[], [Work(1, 1.0)] * 3])
def test_other_questions_are_refused(theirs: list[Work]) -> None:
    with pytest.raises(ValueError, match=r"2 and \d works, expected one of each"):
        speedup([Work(1, 1.0)] * 2, theirs)


TEXT = (5, 6, 7, 8)
SPENT = Spent(draft=0.25, target=0.5, overhead=0.25, missed_rounds=1)


def sample(arm: str, category: str, question: int, seconds: float, temperature: float = 0.0) -> Sample:
    """4 tokens in 2 rounds; ours with a proposal in one of them, which made 3."""
    found = Sample(arm, temperature, category, question, TEXT, seconds, rounds=2)
    return found if arm in (GENERATE, LOOKUP) else replace(found, proposals=1, proposed_tokens=3, spent=SPENT)


def samples() -> list[Sample]:
    """Plain takes 2 s for everything, the library 4 s and its lookup 3 s or 1 s; the drafter 1 s or 4 s."""
    found = []
    for temperature in (0.0, 1.0):
        for category, question in (("qa", 1), ("qa", 2), ("talk", 3), ("talk, turn 2", 3)):
            quoting = category == "qa"
            seconds = {PLAIN: 2, "hybrid": 1 if quoting else 4, GENERATE: 4, LOOKUP: 3 if quoting else 1}
            found += [sample(arm, category, question, took, temperature) for arm, took in seconds.items()]
    return found


def row(table: list[Row], temperature: float, category: str, arm: str) -> Row:
    (found,) = (r for r in table if (r.temperature, r.category, r.arm) == (temperature, category, arm))
    return found


def test_rows_of_each_temperature_category_and_arm() -> None:
    table = rows(samples())
    assert len(table) == 2 * 4 * 4
    quoting = row(table, 0, "qa", "hybrid")
    assert (quoting.answers, quoting.tokens_per_s) == (2, 4)
    assert (quoting.over_plain.value, quoting.over_library.value) == (2, 4)
    assert (quoting.mean_acceptance_length, quoting.tokens_per_round) == (3, 2)
    assert (quoting.draft_ms, quoting.target_ms, quoting.overhead_ms) == (125, 250, 125)
    assert quoting.missed_rounds == 2
    library = row(table, 0, "qa", GENERATE)
    assert library.over_plain.value == 0.5
    assert (library.mean_acceptance_length, library.target_ms, library.missed_rounds) == (None, None, None)
    everything = row(table, 1, ALL, "hybrid")
    assert (everything.answers, everything.over_plain.value) == (4, 0.8)


def test_turns_of_a_conversation_are_one_question() -> None:
    """So there is one unit to draw from, and no interval."""
    found = [one for one in samples() if one.question == 3]
    both = row(rows(found), 0, ALL, "hybrid")
    assert (both.answers, both.over_plain.value, both.over_plain.low) == (2, 0.5, None)


def test_the_order_of_answers_has_no_say() -> None:
    """Works are paired by question: one arm's answers, in another order, pair as before."""
    found = [replace(one, seconds=one.seconds * one.question**2) for one in samples()]
    others = [one for one in found if one.arm != "hybrid"]
    turned = rows([*others, *reversed([one for one in found if one.arm == "hybrid"])])
    straight = rows(found)
    for one in straight:
        assert row(turned, one.temperature, one.category, one.arm) == one


def test_greedy_text_is_compared_answer_by_answer() -> None:
    found = samples()
    at = next(i for i, one in enumerate(found) if (one.arm, one.category) == ("hybrid", "talk, turn 2"))
    found[at] = replace(found[at], token_ids=(5, 6, 9, 8))
    table = rows(found)
    assert row(table, 0, ALL, "hybrid").same_as_plain == 3
    assert row(table, 0, "talk", "hybrid").same_as_library == 1
    assert row(table, 0, "talk, turn 2", "hybrid").same_as_library == 0
    assert row(table, 1, ALL, "hybrid").same_as_plain is None


def test_the_last_line() -> None:
    table = rows(samples())
    assert library_best(table, 0, "qa") == pytest.approx(4 / 3)
    assert library_best(table, 0, "talk") == 4
    assert summary(table, "hybrid") == {
        "speedup_greedy": 0.8,
        "speedup_t1": 0.8,
        "speedup_min_category": 0.5,
        "vs_library_best_greedy": 0.8,
        "vs_library_best_min_category": 0.25,
        "mean_acceptance_length": 3.0,
        "same_text": 4,
        "compared": 4,
    }


def test_the_table_for_people_has_every_row() -> None:
    table = rows(samples())
    text = markdown(table)
    ratios = "2.00 (2.00 to 2.00) | 4.00 (4.00 to 4.00)"
    assert f"| 0 | qa | hybrid | 4.0 | {ratios} | 3.00 | 2.00 | 2 of 2 | 2 of 2 |" in text
    assert "| 1 | talk | library | 1.0 | 0.50 | 1.00 |  | 2.00 |  |  |" in text
    assert "| 0 | hybrid | 500.0 | 125.0 | 250.0 | 125.0 | 4 |" in text
    assert text.count("\n| ") == len(table) + 1 + 4
