"""Drawings for tests that have a Sampling only."""

from __future__ import annotations

from dataclasses import replace

from splitspec.types import Drawing, Output, Rule, Sampling


def drawing_of(sampling: Sampling, rule: Rule = Rule.BLOCK, output: Output = Output(0)) -> Drawing:  # noqa: B008
    """By `rule` above temperature 0, and with a seed in any case."""
    seed = 7 if sampling.seed is None else sampling.seed
    return Drawing(replace(sampling, seed=seed), Rule.GREEDY if sampling.greedy else rule, output)
