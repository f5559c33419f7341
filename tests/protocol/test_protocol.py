"""The protocol holds in every state within the bounds, and each of its rules is needed for that."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest

from tests.protocol.explore import explore
from tests.protocol.values import Bounds, Rules

ONE = ((("a",),),)
#: A request and the one that takes over while the first may go on.
TWO = ((("a",), ("b",)),)
#: What an earlier request left at the target, its verdict not journaled.
LEFT = ("x", "y")

_SESSIONS = (*ONE, (("b",),))

#: Bounds, with the number of states within them.
SHORT = {
    "three rounds": (Bounds(ONE, ("vdv",)), 6786),
    "draft worker": (Bounds(ONE, ("v",), draft=True), 3675),
    "takeover": (Bounds(TWO, ("",), provisional=LEFT), 12961),
    "takeover in a round": (Bounds(TWO, ("d",), ordered=True), 32919),
    "target replaced": (Bounds(ONE, ("v",), ordered=True, replaces=True, targets=2), 21685),
    "stream retried": (Bounds(ONE, ("vd",), ordered=True, retries=True), 8015),
    "session closed": (Bounds(TWO, ("",), journal=(), ordered=True, deletes=True), 28668),
    "Redis and leases": (
        Bounds(ONE, ("",), ordered=True, doubled=True, deletes=True, evicts=True, targets=2),
        15552,
    ),
    "two sessions": (Bounds(_SESSIONS, ("", "")), 17089),
}
FULL = {
    "three rounds of any kind": (Bounds(ONE, ("xxx",)), 40071),
    "draft worker, target replaced": (Bounds(ONE, ("d",), ordered=True, draft=True, replaces=True), 18272),
    "takeover in a round, any order": (Bounds(TWO, ("v",)), 344115),
    "takeover in a round, two targets": (
        Bounds(TWO, ("v",), provisional=LEFT, ordered=True, targets=2),
        438048,
    ),
    "takeover in two rounds": (Bounds(TWO, ("vd",), ordered=True), 348438),
    "target replaced in two rounds": (Bounds(ONE, ("vd",), ordered=True, replaces=True, targets=2), 58869),
    "stream retried, any order": (Bounds(ONE, ("vd",), retries=True), 37435),
    "Redis and leases in a round": (
        Bounds(ONE, ("v",), ordered=True, doubled=True, deletes=True, evicts=True, targets=2),
        85304,
    ),
    "two sessions in a round": (Bounds(_SESSIONS, ("d", "d")), 95961),
}


@pytest.mark.parametrize("name", SHORT)
def test_holds(name: str) -> None:
    bounds, num_states = SHORT[name]
    result = explore(Rules(), bounds)
    assert not result.violation, str(result)
    assert result.num_states == num_states


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FULL)
def test_holds_within_wider_bounds(name: str) -> None:
    bounds, num_states = FULL[name]
    result = explore(Rules(), bounds)
    assert not result.violation, str(result)
    assert result.num_states == num_states


@dataclass(frozen=True)
class Planted:
    """A bug: rules that are left out, where that shows, and how: a property after the fewest steps."""

    rules: tuple[str, ...]
    bounds: Bounds
    breaks: str
    num_steps: int

    def __str__(self) -> str:
        return " and ".join(self.rules)


_ORDERED = Bounds(TWO, ("v",), ordered=True)
_RETRIED = Bounds(ONE, ("vd",), ordered=True, retries=True)
_LEFT = Bounds(((("a", "c"),) * 2,), ("v",), provisional=LEFT, ordered=True)
PLANTED = [
    Planted(("append_checks_epoch",), _ORDERED, "S3", 11),
    Planted(("append_checks_offset",), Bounds(ONE, ("v",), ordered=True, doubled=True), "S1", 9),
    Planted(("chunk_after_append",), _ORDERED, "S1", 7),
    Planted(("worker_checks_epoch",), _ORDERED, "S3", 9),
    Planted(("open_checks_hash",), _LEFT, "S2", 5),
    Planted(("stale_round_dropped",), Bounds(ONE, ("dd",)), "S5", 17),
    Planted(("verdict_kept", "stale_round_dropped"), Bounds(ONE, ("vd",)), "S4", 17),
    Planted(("verdict_kept",), _RETRIED, "L", 12),
    Planted(("verdict_kept_by_handle",), _RETRIED, "L", 12),
    Planted(("round_journaled",), Bounds(TWO, ("d",), ordered=True), "S4", 27),
    Planted(("epoch_outlives_record",), Bounds(TWO, ("",), journal=(), ordered=True, deletes=True), "S3", 8),
    Planted(("truncate_before_tokens",), _LEFT, "S2", 11),
    Planted(("verdict_matched",), Bounds(ONE, ("vv",)), "S1", 16),
    Planted(("verdict_of_epoch",), Bounds(TWO, ("v",)), "S2", 24),
    Planted(("open_once_per_epoch",), Bounds(ONE, ("vd",)), "S5", 13),
    Planted(("session_checked",), Bounds(_SESSIONS, ("", "v")), "S3", 21),
]


@pytest.mark.parametrize("bug", PLANTED, ids=str)
def test_finds_a_planted_bug(bug: Planted) -> None:
    result = explore(Rules().without(*bug.rules), bug.bounds, dead_ends=bug.breaks == "L")
    assert result.violation.startswith(f"{bug.breaks}:"), str(result)
    assert len(result.trace) == bug.num_steps, str(result)


def test_leaves_out_every_rule() -> None:
    assert {rule for bug in PLANTED for rule in bug.rules} == {field.name for field in fields(Rules)}
