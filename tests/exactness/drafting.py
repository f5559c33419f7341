"""Drafters of every kind, as a draft worker could have them: chains and trees, drawn, certain and mixed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from draft_worker.drawing import DraftNoise, draw
from splitspec.sampling.randomness import Noise
from splitspec.sampling.rows import Rows
from splitspec.types import Rule
from splitspec.wire import Draft, SparseDistribution
from tests.exactness.tables import Model, Prefix


class RoundNoise(Noise, DraftNoise, Protocol):
    """What both sides of a round ask for."""


#: A drafter: (noise, q, emitted tokens, number of draft tokens, or depth of a tree) to a draft.
Propose = Callable[[RoundNoise, Model, Prefix, int], Draft]
#: One draft token: (noise, index, q whose row 0 it is drawn from) to it and the distribution to send.
Step = Callable[[RoundNoise, int, Rows], tuple[int, SparseDistribution | None]]
#: The children of a tree's row: (noise, their nodes, q whose row 0 it is) to them and what to send.
Branch = Callable[[RoundNoise, Sequence[int], Rows], tuple[list[int], SparseDistribution | None]]


def chain(step: Step) -> Propose:
    """A drafter that makes all of its tokens by one step."""

    def propose(noise: RoundNoise, q: Model, prefix: Prefix, num_draft_tokens: int) -> Draft:
        tokens: Prefix = ()
        distributions: tuple[SparseDistribution | None, ...] = ()
        for i in range(num_draft_tokens):
            token, distribution = step(noise, i, q(prefix, (tokens,)))
            tokens, distributions = (*tokens, token), (*distributions, distribution)
        return Draft(tokens, distributions)

    return propose


def top(row: torch.Tensor, size: int) -> SparseDistribution:
    """The `size` most probable tokens of a row, quantised."""
    ids = torch.argsort(row, descending=True, stable=True)[:size]
    return SparseDistribution.quantised(ids.numpy(), row[ids].numpy())


def drawn(noise: RoundNoise, index: int, q: Rows) -> tuple[int, SparseDistribution | None]:
    """The draft worker's own step."""
    return draw(Rule.TOKEN, q, 0, index, 0, noise)


def drawn_from_top(size: int) -> Step:
    """Truncate and quantise first, then draw, and send what was drawn from."""

    def step(noise: RoundNoise, index: int, q: Rows) -> tuple[int, SparseDistribution]:
        sent = top(q.probabilities(0), size)
        return noise.draft_token(index, sent), sent

    return step


def certain(noise: RoundNoise, index: int, q: Rows) -> tuple[int, None]:
    return q.argmax(0), None


def lost(noise: RoundNoise, index: int, q: Rows) -> tuple[int, None]:
    """Drawn from q, but q doesn't arrive."""
    return drawn(noise, index, q)[0], None


def mixed(noise: RoundNoise, index: int, q: Rows) -> tuple[int, SparseDistribution | None]:
    return (lost if index % 2 else drawn)(noise, index, q)


def up_to_unlikely(noise: RoundNoise, q: Model, prefix: Prefix, num_draft_tokens: int) -> Draft:
    """End the chain at the first token of low q, which is kept."""
    draft = chain(drawn)(noise, q, prefix, num_draft_tokens)
    for i, (token, row) in enumerate(zip(draft.token_ids, draft.distributions, strict=True)):
        if row is not None and row.probability(token) < 0.4:
            return Draft(draft.token_ids[: i + 1], draft.distributions[: i + 1])
    return draft


def without(q: SparseDistribution, token: int) -> SparseDistribution:
    kept = q.ids != token
    return SparseDistribution(q.ids[kept], q.weights[kept])


def drawn_children(size: int) -> Branch:
    """Children drawn without replacement from the `size` most probable tokens, as many as these allow."""

    def branch(
        noise: RoundNoise, nodes: Sequence[int], q: Rows
    ) -> tuple[list[int], SparseDistribution | None]:
        sent = left = top(q.probabilities(0), size)
        tokens: list[int] = []
        for node in nodes[: len(sent.ids)]:
            tokens.append(noise.draft_token(node, left))
            left = without(left, tokens[-1])
        return tokens, sent

    return branch


def top_children(noise: RoundNoise, nodes: Sequence[int], q: Rows) -> tuple[list[int], None]:
    """The most probable tokens of q, for certain."""
    return top(q.probabilities(0), len(nodes)).ids.tolist(), None


def alternating(
    noise: RoundNoise, nodes: Sequence[int], q: Rows
) -> tuple[list[int], SparseDistribution | None]:
    """Drawn children for some rows of a tree, certain ones for others."""
    return (top_children if nodes[0] % 2 else drawn_children(4))(noise, nodes, q)


def tree(branch: Branch, *widths: int) -> Propose:
    """A drafter of trees with up to widths[d] children for each row of depth d, breadth first.

    The number that it is asked for caps the depth.
    """

    def propose(noise: RoundNoise, q: Model, prefix: Prefix, depth: int) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        paths: list[Prefix] = [()]
        sent: list[SparseDistribution | None] = []
        level = [0]
        for width in widths[:depth]:
            below: list[int] = []
            for row in level:
                nodes = range(len(tokens), len(tokens) + width)
                children, distribution = branch(noise, nodes, q(prefix, (paths[row],)))
                sent += [None] * (row - len(sent)) + [distribution]
                for token in children:
                    tokens.append(token)
                    parents.append(row)
                    paths.append((*paths[row], token))
                    below.append(len(tokens))
            level = below
        return Draft(tuple(tokens), (*sent, *[None] * (len(tokens) + 1 - len(sent))), tuple(parents))

    return propose
