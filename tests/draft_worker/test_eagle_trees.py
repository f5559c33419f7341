"""Shapes of grown trees: bounds, the best nodes, and as few passes as there are levels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest

from draft_worker.drawing import DraftCounterNoise
from draft_worker.eagle import trees
from draft_worker.eagle.trees import Growth, Path, Round, best_tree, dynamic_tree, fixed_ranks, fixed_tree
from splitspec.types import Rule, Sampling
from splitspec.wire import Draft
from tests.exactness import tables
from tests.exactness.tables import Model

SIZES = list(itertools.product([1, 2, 3, 5, 8, 16], [1, 2, 3, 5], [1, 2, 4]))


def grow(growth: Growth, q: Model) -> tuple[Draft, list[list[Path]]]:
    """The draft, and the paths that each pass was asked for."""
    passes = [next(growth)]
    while True:
        try:
            passes.append(growth.send(q((), tuple(passes[-1]))))
        except StopIteration as end:
            return end.value, passes


def round_of(rule: Rule = Rule.GREEDY) -> Round:
    return Round(rule, 9, DraftCounterNoise(3, 1))


def most_nodes(depth: int, width: int) -> int:
    return sum(width**level for level in range(1, depth + 1))


def products(nodes: Sequence[Path]) -> list[float]:
    return [math.prod(trees._ACCEPTANCE[rank] for rank in node) for node in nodes]


class TestFixed:
    @pytest.mark.parametrize(("count", "depth", "width"), SIZES)
    def test_bounds(self, count: int, depth: int, width: int) -> None:
        nodes = fixed_ranks(count, depth, width)
        assert len(nodes) == len(set(nodes)) == min(count, most_nodes(depth, width))
        for index, node in enumerate(nodes):
            assert 1 <= len(node) <= depth
            assert max(node) < width
            before = {(), *nodes[:index]}
            assert node[:-1] in before
            assert not node[-1] or (*node[:-1], node[-1] - 1) in before

    def test_more_nodes_only_add(self) -> None:
        for count in range(1, 16):
            assert fixed_ranks(count + 1, 4, 4)[:count] == fixed_ranks(count, 4, 4)

    @pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
    def test_no_tree_of_as_many_nodes_has_more_accepted(self, count: int) -> None:
        """Of all trees of depth 3 and width 3, if a rank's child is accepted as often everywhere."""

        def every_tree(nodes: tuple[Path, ...]) -> set[tuple[Path, ...]]:
            if len(nodes) == count:
                return {nodes}
            grown = set()
            for parent in ((), *nodes):
                rank = sum(node[:-1] == parent and len(node) > 0 for node in nodes)
                if len(parent) < 3 and rank < 3:
                    grown |= every_tree(tuple(sorted((*nodes, (*parent, rank)))))
            return grown

        best = max(math.fsum(products(nodes)) for nodes in every_tree(()))
        assert math.fsum(products(fixed_ranks(count, 3, 3))) == pytest.approx(best)

    @pytest.mark.parametrize("rule", [Rule.GREEDY, Rule.SHARED_NOISE, Rule.BLOCK])
    @pytest.mark.parametrize(("count", "depth", "width"), SIZES)
    def test_the_draft_has_that_shape(self, count: int, depth: int, width: int, rule: Rule) -> None:
        q = tables.processed_model(6, 1, Sampling())
        draft, passes = grow(fixed_tree(round_of(rule), count, depth, width), q)
        ranks: list[Path] = [()]
        seen: dict[int, int] = {}
        for parent in draft.parents:
            ranks.append((*ranks[parent], seen.get(parent, 0)))
            seen[parent] = seen.get(parent, 0) + 1
        assert sorted(ranks[1:]) == sorted(fixed_ranks(count, depth, width))
        assert len(passes) <= depth

    def test_where_q_has_fewer_tokens_the_tree_has_fewer_nodes(self) -> None:
        q = tables.random_model(5, 1, allowed=[2, 4])
        for rule in (Rule.GREEDY, Rule.BLOCK):
            draft, _ = grow(fixed_tree(round_of(rule), 16, 3, 4), q)
            assert set(draft.token_ids) <= {2, 4}
            assert max(len(children) for children in draft.children) <= 2


class TestDynamic:
    @pytest.mark.parametrize("rule", [Rule.GREEDY, Rule.SHARED_NOISE, Rule.BLOCK])
    @pytest.mark.parametrize(("count", "depth", "width"), SIZES)
    def test_bounds(self, count: int, depth: int, width: int, rule: Rule) -> None:
        q = tables.processed_model(6, 1, Sampling())
        draft, passes = grow(dynamic_tree(round_of(rule), count, depth, width), q)
        assert not any(draft.distributions)
        assert len(draft.token_ids) <= count
        assert len(set(zip(draft.parents, draft.token_ids, strict=True))) == len(draft.token_ids)
        assert all(parent <= node for node, parent in enumerate(draft.parents))
        assert max(len(path) for path in draft.paths) <= depth
        assert max(len(children) for children in draft.children) <= width
        assert len(passes) == depth
        assert all(len(paths) <= width for paths in passes)

    @pytest.mark.parametrize("count", [1, 3, 6, 12])
    @pytest.mark.parametrize("seed", range(4))
    def test_the_best_of_all_paths(self, count: int, seed: int) -> None:
        """When nothing is cut on the way, those of the largest product."""
        q = tables.random_model(4, seed)

        def confidence(path: Path) -> float:
            rows = [float(q((), (path[:end],)).probabilities(0)[token]) for end, token in enumerate(path)]
            return math.prod(rows)

        every = [path for length in (1, 2, 3) for path in itertools.product(range(4), repeat=length)]
        best = sorted((confidence(path) for path in every if confidence(path)), reverse=True)[:count]
        draft, _ = grow(dynamic_tree(round_of(), count, 3, 64), q)
        assert sorted(map(confidence, draft.paths[1:]), reverse=True) == pytest.approx(best)

    @pytest.mark.parametrize("seed", range(4))
    def test_a_level_goes_on_from_its_surest_nodes(self, seed: int) -> None:
        """Of those that the level before has given."""
        q = tables.random_model(5, seed)
        _, passes = grow(dynamic_tree(round_of(), 8, 4, 2), q)

        def row(path: Path) -> list[float]:
            weights: list[float] = q((), (path,)).probabilities(0).tolist()
            return weights

        sure: dict[Path, float] = {(): 1.0}
        for paths in passes:
            assert set(paths) == set(sorted(sure, key=lambda path: -sure[path])[:2])
            sure = {
                (*path, token): sure[path] * weight
                for path in paths
                for token, weight in sorted(enumerate(row(path)), key=lambda each: -each[1])[:2]
                if weight
            }

    def test_the_surest_path_has_the_first_rows(self) -> None:
        """As in a chain, so that it has the very bits that it would have there."""
        q = tables.processed_model(6, 1, Sampling(temperature=0.5))
        draft, _ = grow(dynamic_tree(round_of(), 12, 4, 3), q)
        path: list[int] = []
        row = 0
        while draft.children[row]:
            path.append(draft.children[row][0])
            row = path[-1] + 1
        assert path == list(range(len(path)))
        assert len(path) > 1

    def test_noise_counts_where_it_is_shared(self) -> None:
        """The surest child is the race's winner, not the most probable token."""
        q = tables.processed_model(6, 1, Sampling())
        weights, differ = q((), ((),)).probabilities(0), 0
        for seed in range(40):
            noise = DraftCounterNoise(seed, 1)
            draft, _ = grow(dynamic_tree(Round(Rule.SHARED_NOISE, 9, noise), 4, 2, 3), q)
            assert draft.token_ids[0] == noise.race(9, weights)
            differ += draft.token_ids[0] != int(weights.argmax())
        assert differ


@pytest.mark.parametrize("rule", [Rule.GREEDY, Rule.SHARED_NOISE, Rule.BLOCK, Rule.TOKEN])
def test_the_best_tree_is_drawn_where_tokens_are(rule: Rule) -> None:
    q = tables.processed_model(6, 1, Sampling())
    chosen = fixed_tree if rule in (Rule.BLOCK, Rule.TOKEN) else dynamic_tree
    expected, _ = grow(chosen(round_of(rule), 7, 3, 3), q)
    assert grow(best_tree(round_of(rule), 7, 3, 3), q)[0] == expected
