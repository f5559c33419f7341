"""Which proposals hold that were drafted before their parent's verdict."""

from __future__ import annotations

import itertools

import pytest

from protos.v1 import common_pb2
from splitspec.overlap import begins_with, holds
from splitspec.tokens import TokenLog
from splitspec.types import Rule
from splitspec.wire import Draft

TEXT = [3, 1, 4]
EQUALITY = (Rule.GREEDY, Rule.SHARED_NOISE)


def proposal(text: list[int], draft: Draft) -> common_pb2.Proposal:
    log = TokenLog(text)
    stamp = common_pb2.Stamp(base_length=len(log), prefix_hash=log.prefix_hash())
    return common_pb2.Proposal(stamp=stamp, num_draft_tokens=len(draft.token_ids), body=draft.encode(b""))


@pytest.mark.parametrize("rule", Rule)
def test_what_a_proposal_must_begin_with(rule: Rule) -> None:
    """Under the rules of equality one token more may have come than it builds on, under all others none."""
    committed = TokenLog([*TEXT, 7, 8])
    found = {
        behind: begins_with(
            proposal([*TEXT, 7, 8, 9][: 5 - behind], Draft.certain([1])).stamp, committed, rule
        )
        for behind in (-1, 0, 1, 2)
    }
    assert found == {-1: None, 0: (), 1: (8,) if rule in EQUALITY else None, 2: None}
    other = proposal([*TEXT, 6, 8], Draft.certain([1])).stamp
    assert begins_with(other, committed, rule) is None
    assert begins_with(proposal([*TEXT, 6], Draft.certain([8])).stamp, committed, rule) is None


@pytest.mark.parametrize("rule", Rule)
def test_whether_a_proposal_holds(rule: Rule) -> None:
    committed = TokenLog([*TEXT, 7])
    for first, second in itertools.product([7, 8], repeat=2):
        chain = Draft.certain([first, second])
        assert holds(proposal([*TEXT, 7], chain), committed, rule)
        assert holds(proposal(TEXT, chain), committed, rule) is (rule in EQUALITY and first == 7)
    # What else hangs on a tree's root was drafted for another token than the one that came.
    tree = Draft.certain([7, 8], [0, 0])
    assert holds(proposal([*TEXT, 7], tree), committed, rule)
    assert not holds(proposal(TEXT, tree), committed, rule)
    assert not holds(proposal(TEXT, Draft.certain([])), committed, rule)
    broken = proposal(TEXT, Draft.certain([7]))
    broken.body = b"\xff"
    assert not holds(broken, committed, rule)
