"""The greedy rule emits the target's argmax decoding, whatever is proposed."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch

from splitspec.sampling.rows import ProcessedRows
from splitspec.types import Drawing, Origin, Output, Rule, Sampling
from splitspec.verification.greedy import verify_greedy
from splitspec.verification.outcome import Outcome
from splitspec.wire import Draft
from tests.exactness import drafting, law, tables
from tests.exactness.law import Implementation, decide_by

VOCABULARY_SIZE = 3
GREEDY = Drawing(Sampling(temperature=0, seed=0), Rule.GREEDY, Output(0))


def logits(prefix: tuple[int, ...]) -> torch.Tensor:
    """[vocabulary] float32 on a coarse grid, so that about half of the rows have a tie at the top."""
    generator = np.random.default_rng((40, len(prefix), *prefix))
    return torch.from_numpy(generator.integers(2, size=VOCABULARY_SIZE).astype(np.float32))


@functools.cache
def plain_decoding(length: int) -> tuple[int, ...]:
    tokens: tuple[int, ...] = ()
    for _ in range(length):
        row = logits(tokens).tolist()
        tokens += (row.index(max(row)),)  # the lowest id of those that tie
    return tokens


def verified(prefix: tuple[int, ...], draft: Draft) -> tuple[Outcome, tuple[int, ...]]:
    """The outcome after a prefix, and what it commits."""
    rows = torch.stack([logits(prefix + path) for path in draft.paths])
    outcome = verify_greedy(ProcessedRows(rows, GREEDY, prefix, draft.paths), draft)
    return outcome, (*(draft.token_ids[node] for node in outcome.path), outcome.next_token)


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 3])
def test_equals_plain_decoding_for_every_draft(num_draft_tokens: int) -> None:
    expected = plain_decoding(8)
    for start in range(8 - num_draft_tokens):
        for tokens in itertools.product(range(VOCABULARY_SIZE), repeat=num_draft_tokens):
            outcome, committed = verified(expected[:start], Draft.certain(tokens))
            assert committed == expected[start : start + len(committed)]
            assert outcome.num_accepted == num_draft_tokens or tokens[outcome.num_accepted] != committed[-1]


def test_equals_plain_decoding_for_trees() -> None:
    expected = plain_decoding(8)
    generator = np.random.default_rng(41)
    lengths = set()
    for _ in range(300):
        edges: list[tuple[int, int]] = []
        for node in range(int(generator.integers(1, 9))):
            edge = int(generator.integers(node + 1)), int(generator.integers(VOCABULARY_SIZE))
            # A parent that isn't there yet is the last node.
            edge = (min(edge[0], len(edges)), edge[1])
            if edge not in edges:
                edges.append(edge)
        draft = Draft.certain([token for _, token in edges], [parent for parent, _ in edges])
        outcome, committed = verified(expected[:2], draft)
        assert committed == expected[2 : 2 + len(committed)]
        last = outcome.path[-1] + 1 if outcome.path else 0
        under = [draft.token_ids[node] for node in draft.children[last]]
        assert committed[-1] not in under
        assert outcome.complete == (not under)
        lengths.add(len(committed))
    assert lengths >= {1, 2, 3}


def test_law_is_the_argmax_also_when_distributions_come_along() -> None:
    """Temperature 0 through the service's processing, with drafts that were drawn."""
    p = tables.processed_model(3, 24, Sampling(temperature=0))
    q = tables.random_model(3, 25)
    for propose in (drafting.chain(drafting.drawn), drafting.tree(drafting.drawn_children(3), 2, 1)):
        implementation = Implementation(propose, decide_by(Rule.GREEDY))
        law.assert_exact(law.emitted_law(implementation, p, q, 3, 2), law.target_law(p, 3))


@pytest.mark.parametrize(
    ("num_draft_tokens", "num_accepted", "origin"),
    [(0, 0, Origin.PLAIN), (2, 0, Origin.CORRECTION), (2, 1, Origin.CORRECTION), (2, 2, Origin.BONUS)],
)
def test_origin_of_the_next_token(num_draft_tokens: int, num_accepted: int, origin: Origin) -> None:
    assert Outcome.of_chain(num_draft_tokens, num_accepted, 0).next_origin is origin


@pytest.mark.parametrize("path", [(-1,), (0, 2)])
def test_outcome_refuses_an_impossible_path(path: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected indices of 2 draft tokens"):
        Outcome(2, path, 0, complete=False)
