"""What a run of spec_bench.py found: rows by temperature, category and way of decoding, and the last line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from library import GENERATE  # benchmarks/library.py
from paired import Speedup, Work, speedup, tokens_per_second  # benchmarks/paired.py

#: Our plain decoding, and the category that holds all answers.
PLAIN, ALL = "plain", "all"


@dataclass(frozen=True)
class Spent:
    """Where the rounds of one answer spent their time, in seconds, and how many went without a draft worker.

    draft, target: the workers' own time. overhead: the rest of the time after the prompt was fed.
    """

    draft: float
    target: float
    overhead: float
    missed_rounds: int


@dataclass(frozen=True)
class Sample:
    """One answer. arm: the way of decoding. seconds: of the whole request, the prompt's passes included.

    rounds: passes of the target that made tokens. proposals: rounds with one, which made `proposed_tokens`.
    spent: None for the library.
    """

    arm: str
    temperature: float
    category: str
    question: int
    token_ids: tuple[int, ...]
    seconds: float
    rounds: int
    proposals: int = 0
    proposed_tokens: int = 0
    spent: Spent | None = None

    @property
    def work(self) -> Work:
        return Work(len(self.token_ids), self.seconds)


@dataclass(frozen=True)
class Row:
    """One way of decoding on one category's answers at one temperature.

    over_plain, over_library: tokens per second over those of our plain decoding and of the library's
    `generate`. mean_acceptance_length: tokens of rounds with a proposal / such rounds; None without any.
    same_as_*: answers whose tokens equal those of the other, of `answers`; None where tokens are drawn.
    *_ms: milliseconds of a round; None for the library.
    """

    temperature: float
    category: str
    arm: str
    answers: int
    tokens_per_s: float
    over_plain: Speedup
    over_library: Speedup
    mean_acceptance_length: float | None
    tokens_per_round: float
    same_as_plain: int | None
    same_as_library: int | None
    draft_ms: float | None
    target_ms: float | None
    overhead_ms: float | None
    missed_rounds: int | None


def rows(samples: Sequence[Sample]) -> list[Row]:
    """For each temperature and category, then for all answers, a row of each arm, in order of appearance."""
    arms = list(dict.fromkeys(sample.arm for sample in samples))
    found = []
    for temperature in dict.fromkeys(sample.temperature for sample in samples):
        at = [sample for sample in samples if sample.temperature == temperature]
        for category in [*dict.fromkeys(sample.category for sample in at), ALL]:
            inside = [sample for sample in at if category in (ALL, sample.category)]
            of = {arm: [sample for sample in inside if sample.arm == arm] for arm in arms}
            found += [_row(category, of[arm], of[PLAIN], of[GENERATE]) for arm in arms]
    return found


def summary(table: Sequence[Row], arm: str) -> dict[str, float | int | None]:
    """The last line, of one drafter; `*_min_category` and `same_text` are of greedy decoding.

    The library's best is its fastest mode in each category, chosen after the fact.
    """
    at = {(row.temperature, row.category): row for row in table if row.arm == arm}
    categories = [category for temperature, category in at if temperature == 0 and category != ALL]
    over_best = {c: at[0, c].tokens_per_s / library_best(table, 0, c) for c in [*categories, ALL]}
    greedy, drawn = at[0, ALL], at[1, ALL]
    return {
        "speedup_greedy": round(greedy.over_plain.value, 3),
        "speedup_t1": round(drawn.over_plain.value, 3),
        "speedup_min_category": round(min(at[0, c].over_plain.value for c in categories), 3),
        "vs_library_best_greedy": round(over_best[ALL], 3),
        "vs_library_best_min_category": round(min(over_best[c] for c in categories), 3),
        "mean_acceptance_length": _rounded(greedy.mean_acceptance_length),
        "same_text": greedy.same_as_plain,
        "compared": greedy.answers,
    }


def library_best(table: Sequence[Row], temperature: float, category: str) -> float:
    """Tokens per second of the library's fastest mode."""
    at = [row for row in table if (row.temperature, row.category) == (temperature, category)]
    return max(row.tokens_per_s for row in at if row.arm.startswith(GENERATE))


def markdown(table: Sequence[Row]) -> str:
    """The table for people: speeds of each category, then where a round's time goes."""
    lines = [
        "| temperature | category | decoding | tokens/s | / plain | / `generate` | acceptance length "
        "| tokens a round | same as plain | same as `generate` |",
        "|" + "---|" * 10,
    ]
    lines += [_speed_line(row) for row in table]
    lines += [
        "",
        "| temperature | decoding | a round, ms | draft | target | overhead | rounds that missed the draft |",
        "|" + "---|" * 7,
    ]
    lines += [_time_line(row) for row in table if row.category == ALL and row.target_ms is not None]
    return "\n".join(lines) + "\n"


def _row(category: str, own: Sequence[Sample], plain: Sequence[Sample], library: Sequence[Sample]) -> Row:
    proposals, rounds = sum(s.proposals for s in own), sum(s.rounds for s in own)
    spent = [sample.spent for sample in own if sample.spent is not None]
    greedy = own[0].temperature == 0
    return Row(
        temperature=own[0].temperature,
        category=category,
        arm=own[0].arm,
        answers=len(own),
        tokens_per_s=tokens_per_second([sample.work for sample in own]),
        over_plain=speedup(_by_question(own), _by_question(plain)),
        over_library=speedup(_by_question(own), _by_question(library)),
        mean_acceptance_length=sum(s.proposed_tokens for s in own) / proposals if proposals else None,
        tokens_per_round=sum(len(sample.token_ids) for sample in own) / rounds,
        same_as_plain=_same(own, plain) if greedy else None,
        same_as_library=_same(own, library) if greedy else None,
        draft_ms=1e3 * sum(entry.draft for entry in spent) / rounds if spent else None,
        target_ms=1e3 * sum(entry.target for entry in spent) / rounds if spent else None,
        overhead_ms=1e3 * sum(entry.overhead for entry in spent) / rounds if spent else None,
        missed_rounds=sum(entry.missed_rounds for entry in spent) if spent else None,
    )


def _by_question(samples: Iterable[Sample]) -> list[Work]:
    """One work for each question: the turns of a conversation are drawn together."""
    works: dict[int, Work] = {}
    for sample in samples:
        works[sample.question] = works.get(sample.question, Work(0, 0.0)) + sample.work
    return [works[question] for question in sorted(works)]


def _same(ours: Sequence[Sample], theirs: Sequence[Sample]) -> int:
    texts = {(sample.category, sample.question): sample.token_ids for sample in theirs}
    return sum(texts[sample.category, sample.question] == sample.token_ids for sample in ours)


def _speed_line(row: Row) -> str:
    cells = [
        f"{row.temperature:g}",
        row.category,
        row.arm,
        f"{row.tokens_per_s:.1f}",
        _shown(row.over_plain),
        _shown(row.over_library),
        "" if row.mean_acceptance_length is None else f"{row.mean_acceptance_length:.2f}",
        f"{row.tokens_per_round:.2f}",
        "" if row.same_as_plain is None else f"{row.same_as_plain} of {row.answers}",
        "" if row.same_as_library is None else f"{row.same_as_library} of {row.answers}",
    ]
    return f"| {' | '.join(cells)} |"


def _time_line(row: Row) -> str:
    times = [row.draft_ms or 0.0, row.target_ms or 0.0, row.overhead_ms or 0.0]
    shown = [f"{value:.1f}" for value in (sum(times), *times)]
    return f"| {' | '.join([f'{row.temperature:g}', row.arm, *shown, str(row.missed_rounds)])} |"


def _shown(ratio: Speedup) -> str:
    interval = "" if ratio.low is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
    return f"{ratio.value:.2f}{interval}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
