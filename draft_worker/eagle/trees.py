"""What a draft network's rows are grown into: a chain, a tree of fixed shape, or one that confidence shapes.

A growth is a generator, so that it knows nothing of models: it yields the paths of draft tokens that it wants
to go on from, first that of no token, gets their rows of q in the same order, and returns the draft.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from draft_worker.drawing import DraftNoise, draw, draw_children
from splitspec.sampling.rows import Rows
from splitspec.types import Rule
from splitspec.wire import Draft, SparseDistribution

#: Draft tokens from the committed ones on.
Path: TypeAlias = tuple[int, ...]
Growth: TypeAlias = Generator[list[Path], Rows, Draft]

#: How often the child of each rank is the target's token, by `benchmarks/trees.py` on the demo model's draft,
#: greedy and sampled together: what fixed trees are shaped for. With few nodes their order decides.
_ACCEPTANCE = (0.49, 0.10, 0.05, 0.03, 0.02, 0.02, 0.01, 0.01)


@dataclass(frozen=True, slots=True)
class Round:
    """What a draft is made for: the rule that it is verified by, and how many committed tokens it follows."""

    rule: Rule
    base_length: int
    noise: DraftNoise

    @property
    def drawn(self) -> bool:
        """Whether tokens are drawn and sent with their distribution, instead of chosen for certain."""
        return self.rule not in (Rule.GREEDY, Rule.SHARED_NOISE)


@dataclass
class _Tree:
    """Nodes by their paths, siblings in their order, with what drawn ones were drawn from."""

    children: dict[Path, list[int]] = field(default_factory=dict)
    sent: dict[Path, SparseDistribution] = field(default_factory=dict)

    def draft(self) -> Draft:
        """Depth first, so that the path of first children has the rows that it would have as a chain."""
        token_ids: list[int] = []
        parents: list[int] = []
        distributions = [self.sent.get(())]

        def add(path: Path, row: int) -> None:
            for token in self.children.get(path, ()):
                token_ids.append(token)
                parents.append(row)
                distributions.append(self.sent.get((*path, token)))
                add((*path, token), len(token_ids))

        add((), 0)
        return (
            Draft(tuple(token_ids), tuple(distributions), tuple(parents)) if token_ids else Draft.certain(())
        )


def chain(round_: Round, num_tokens: int) -> Growth:
    """Token by token (Leviathan et al., 2211.17192, section 2.1)."""
    path: Path = ()
    distributions: list[SparseDistribution | None] = []
    for index in range(num_tokens):
        rows = yield [path]
        token, q = draw(round_.rule, rows, 0, index, round_.base_length + index, round_.noise)
        path = (*path, token)
        distributions.append(q)
    return Draft(path, tuple(distributions))


def fixed_tree(round_: Round, num_tokens: int, depth: int, width: int) -> Growth:
    """A tree whose shape depends on the numbers alone; level by level.

    Under a rule of equality the children of a row are those that the rule most probably chooses, else they
    are drawn without replacement, as many as the shape says: fewer only where q has no more.
    """
    tree = _Tree()
    shape = _counts(fixed_ranks(num_tokens, depth, width))
    # Each node's ranks from the committed tokens on, beside its path.
    level: list[tuple[Path, Path]] = [((), ())] if num_tokens else []
    drawn = 0
    while level:
        rows = yield [path for _, path in level]
        below = []
        for row, (ranks, path) in enumerate(level):
            count = shape[ranks]
            if round_.drawn:
                children, tree.sent[path] = draw_children(rows, row, drawn, count, round_.noise)
                drawn += count
            else:
                children, _ = _surest(_confidence(round_, rows, row, len(path)), count)
            tree.children[path] = children
            below += [((*ranks, rank), (*path, token)) for rank, token in enumerate(children)]
        level = [node for node in below if node[0] in shape]
    return tree.draft()


def fixed_ranks(num_tokens: int, depth: int, width: int) -> list[Path]:
    """The nodes of a fixed tree, as the rank of each token among its siblings from the committed tokens on.

    Those with the largest product of `_ACCEPTANCE`: if each rank's were the same everywhere, no other tree of
    num_tokens nodes had as many accepted (Chen et al., 2402.12374, section 3.1). depth: tokens of a path at
    most. width: children at most.
    """
    taken: list[Path] = []
    open_: list[tuple[float, Path]] = [(-1.0, ())]
    rates = _ACCEPTANCE[:width]
    while open_ and len(taken) <= num_tokens:
        open_.sort()
        value, ranks = open_.pop(0)
        taken.append(ranks)
        if len(ranks) < depth:
            open_ += [(value * rate, (*ranks, rank)) for rank, rate in enumerate(rates)]
    return taken[1:]


def _counts(nodes: Sequence[Path]) -> dict[Path, int]:
    """The number of children of each node that has some."""
    counts: dict[Path, int] = {}
    for ranks in nodes:
        counts[ranks[:-1]] = counts.get(ranks[:-1], 0) + 1
    return counts


def dynamic_tree(round_: Round, num_tokens: int, depth: int, width: int) -> Growth:
    """Expand by confidence, then keep the best nodes (EAGLE-2: Li et al., 2406.16858, section 4).

    At each level the `width` nodes of it whose paths are surest get `width` children each; of all, the
    num_tokens surest stay. A path's confidence is the product of its tokens' (see `_confidence`). Children
    are certain, and which ones stay is no function of a draw: so it is exact.
    """
    found: list[tuple[float, Path]] = []
    level: list[tuple[float, Path]] = [(1.0, ())]
    for _ in range(depth if num_tokens else 0):
        rows = yield [path for _, path in level]
        below = []
        for row, (confidence, path) in enumerate(level):
            weights = _confidence(round_, rows, row, len(path))
            below += [
                (confidence * weight, (*path, token))
                for token, weight in zip(*_surest(weights, width), strict=True)
            ]
        found += below
        level = sorted(below, key=_falling)[:width]
    tree = _Tree()
    for _, path in sorted(found, key=_falling)[:num_tokens]:
        tree.children.setdefault(path[:-1], []).append(path[-1])
    return tree.draft()


def best_tree(round_: Round, num_tokens: int, depth: int, width: int) -> Growth:
    """A dynamic tree under a rule of equality, else a fixed one: where the target draws, drawn children are
    accepted more often than as many certain ones.
    """
    grown = fixed_tree if round_.drawn else dynamic_tree
    return grown(round_, num_tokens, depth, width)


def _falling(node: tuple[float, Path]) -> tuple[float, int]:
    """Surest first; a parent, which is as sure as its child at least, before it."""
    return -node[0], len(node[1])


def _confidence(round_: Round, rows: Rows, row: int, depth: int) -> torch.Tensor:
    """[vocabulary] float64 that sums to 1: how probable each token is to be chosen behind a path.

    That is q. Under shared noise, where the choice is the first to arrive, what the noise favours is as much
    likelier: q over its delays. That would be exact if the target's logits were q's with noise of a unit
    Gumbel's size added.
    """
    q = rows.probabilities(row)
    if round_.rule is not Rule.SHARED_NOISE:
        return q
    delays = torch.from_numpy(round_.noise.delays(round_.base_length + depth, len(q))).to(q.device)
    weights = q / delays
    return weights / weights.sum()


def _surest(confidence: torch.Tensor, count: int) -> tuple[list[int], list[float]]:
    """The `count` tokens of the largest confidence, and theirs; fewer when no more have any."""
    top = torch.topk(confidence, min(count, len(confidence)))
    weights = np.asarray(top.values.cpu())
    kept = int(np.count_nonzero(weights))
    return top.indices[:kept].tolist(), weights[:kept].tolist()
