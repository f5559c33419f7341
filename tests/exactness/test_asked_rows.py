"""Rows behind a rejection aren't asked for: on a real model each costs its processing."""

from __future__ import annotations

import pytest
import torch

from splitspec.sampling.rows import Rows
from splitspec.types import Rule
from splitspec.verification.outcome import Outcome
from tests.exactness import drafting, tables
from tests.exactness.drafting import Propose, chain, tree
from tests.exactness.enumeration import SERVICE, Streams, outcomes
from tests.exactness.law import Implementation, decide_by
from tests.exactness.tables import Model, Prefix

MODELS = (tables.random_model(4, 16), tables.random_model(4, 17))


class AskedRows:
    """Rows that note which of them were asked for."""

    def __init__(self, rows: Rows) -> None:
        self.asked: set[int] = set()
        self._rows = rows

    def probabilities(self, row: int) -> torch.Tensor:
        self.asked.add(row)
        return self._rows.probabilities(row)

    def argmax(self, row: int) -> int:
        self.asked.add(row)
        return self._rows.argmax(row)


def asked(rule: Rule, propose: Propose) -> list[tuple[AskedRows, Prefix, Outcome]]:
    """The rows that were asked for in each branch of a round, with its committed tokens and its outcome."""
    found: list[tuple[AskedRows, Prefix, Outcome]] = []

    def run(streams: Streams) -> None:
        read: list[AskedRows] = []

        def rows(p: Model, prefix: Prefix, paths: tuple[Prefix, ...]) -> Rows:
            read.append(AskedRows(p(prefix, paths)))
            return read[-1]

        implementation = Implementation(propose, decide_by(rule), rows=rows)
        tokens, outcome = implementation.round(streams.round(1), *MODELS, (), 3, [])
        found.append((read[0], tokens, outcome))

    for _ in outcomes(run, SERVICE):
        pass
    return found


@pytest.mark.parametrize(
    ("rule", "propose"),
    [
        (Rule.GREEDY, chain(drafting.certain)),
        (Rule.GREEDY, tree(drafting.top_children, 2, 2)),
        (Rule.TOKEN, chain(drafting.drawn)),
        (Rule.TOKEN, tree(drafting.top_children, 2, 2)),
        (Rule.TOKEN, tree(drafting.drawn_children(3), 2, 1)),
    ],
    ids=["greedy chain", "greedy tree", "token", "top m", "recursive"],
)
def test_only_the_rows_of_what_is_emitted(rule: Rule, propose: Propose) -> None:
    for rows, _, outcome in asked(rule, propose):
        assert rows.asked == {0, *(node + 1 for node in outcome.path)}


def test_the_block_rule_stops_at_a_token_that_cannot_come() -> None:
    """It looks past rejections, but behind a token of probability 0 no test passes."""
    stopped = 0
    for rows, _, outcome in asked(Rule.BLOCK, chain(drafting.drawn)):
        assert (3 in rows.asked) == (outcome.num_accepted == 3)
        assert rows.asked == set(range(len(rows.asked)))
        ahead = sorted(rows.asked)[:-1]
        stopped += len(ahead) < 2
    assert stopped > 0
