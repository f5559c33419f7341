"""Rounds with the service's own noise, over 800,000 seeds: what comes out is distributed as the target.

The enumeration takes streams to be uniform and independent; here they are those of CounterNoise. Chi-squared
over whole sequences, with a computed power: a bias of 0.5 % TV is seen with a probability above 95 %, and a
right sampler would have raised an alarm with a probability of 1e-4 when the seeds were fixed.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch

from draft_worker.drawing import DraftCounterNoise
from splitspec.sampling.randomness import CounterNoise, Purpose
from splitspec.types import Rule, Sampling
from tests.exactness import drafting, law, tables
from tests.exactness.drafting import chain, tree
from tests.exactness.enumeration import Stream, Streams, taken
from tests.exactness.law import Implementation, Law, decide_by
from tests.exactness.tables import Prefix
from tests.philox import philox_4x64_10

NUM_REQUESTS = 800_000
#: Of the seeds 0 to NUM_REQUESTS - 1, those that also run one by one.
ONE_BY_ONE = 300
LENGTH = 3
#: Trees have many more branches; two tokens are two rounds too.
LENGTH_OF_DRAWN_TREES = 2
FALSE_ALARM = 1e-4
BIAS = 0.005

P, Q = (tables.processed_model(3, seed, Sampling(temperature=1.5)) for seed in (8, 9))
IMPLEMENTATIONS = {
    "token": Implementation(chain(drafting.drawn), decide_by(Rule.TOKEN)),
    "block": Implementation(chain(drafting.drawn), decide_by(Rule.BLOCK)),
    "drawn tree": Implementation(tree(drafting.drawn_children(3), 2, 1), decide_by(Rule.BLOCK)),
    "certain tree": Implementation(tree(drafting.top_children, 2, 1), decide_by(Rule.BLOCK)),
}


@functools.cache
def words(stream: Stream) -> np.ndarray:
    """[NUM_REQUESTS] uint64: the raw integers of CounterNoise, for each seed."""
    counter = [1, 0, stream.index, stream.round_number]
    # In parts that stay in the cache, which is three times as fast.
    parts = np.array_split(np.arange(NUM_REQUESTS), NUM_REQUESTS // 16_000)
    return np.concatenate([philox_4x64_10(counter, [seeds, stream.purpose])[0] for seeds in parts])


def cumulated(statistic: float, degrees: int) -> float:
    """The distribution function of chi-squared."""
    return float(
        torch.special.gammainc(torch.tensor(degrees / 2).double(), torch.tensor(statistic / 2).double())
    )


def threshold(degrees: int) -> float:
    """What chi-squared exceeds with probability FALSE_ALARM."""
    low, high = 0.0, 1000.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if cumulated(middle, degrees) < 1 - FALSE_ALARM else (low, middle)
    return high


def power(degrees: int) -> float:
    """P(alarm) under a bias of BIAS: noncentral chi-squared, a Poisson mixture of central ones.

    Its parameter is N sum (d_i**2 / p_i) for a bias d, at least N (2 TV)**2 by Cauchy-Schwarz.
    """
    half = NUM_REQUESTS * (2 * BIAS) ** 2 / 2
    return 1 - math.fsum(
        math.exp(i * math.log(half) - half - math.lgamma(i + 1))
        * cumulated(threshold(degrees), degrees + 2 * i)
        for i in range(400)
    )


def chi_squared(found: dict[Prefix, int], target: Law) -> float:
    assert sum(found.values()) == NUM_REQUESTS
    assert found.keys() <= target.keys()
    return math.fsum(
        (found.get(tokens, 0) - NUM_REQUESTS * mass) ** 2 / (NUM_REQUESTS * mass)
        for tokens, mass in target.items()
    )


def test_a_bias_of_half_a_percent_would_be_seen() -> None:
    """The power as computed, and as found: in draws from a law with that bias, and from the right one."""
    target = law.target_law(P, LENGTH)
    degrees = len(target) - 1
    assert power(len(law.target_law(P, LENGTH_OF_DRAWN_TREES)) - 1) > 0.95
    assert min(target.values()) * NUM_REQUESTS > 50  # so that each count is close to normal
    assert power(degrees) > 0.95
    masses = np.array(list(target.values()))
    # The bias that is hardest to see: every token off by the same factor, half of the mass up, half down.
    order = np.cumsum(masses) <= 0.5
    up, down = masses[order].sum(), masses[~order].sum()
    biased = masses * np.where(order, 1 + BIAS / up, 1 - BIAS / down)
    assert np.abs(biased - masses).sum() / 2 == pytest.approx(BIAS)
    generator = np.random.default_rng(70)

    def alarms(drawn_from: np.ndarray) -> float:
        draws = generator.multinomial(NUM_REQUESTS, drawn_from, size=1000)
        return float(
            (
                ((draws / NUM_REQUESTS - masses) ** 2 / masses).sum(axis=1) * NUM_REQUESTS
                > threshold(degrees)
            ).mean()
        )

    assert alarms(biased) > 0.95
    assert alarms(masses) < 0.005


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_sequences_have_the_target_law(name: str) -> None:
    """Up to three rounds each, and the first requests again one by one: id for id the same."""
    implementation = IMPLEMENTATIONS[name]
    length = LENGTH_OF_DRAWN_TREES if name == "drawn tree" else LENGTH

    def run(streams: Streams) -> Prefix:
        return law.session(implementation, P, Q, length, 2, map(streams.round, range(1, length + 1)))

    found: dict[Prefix, int] = {}
    by_seed: dict[int, Prefix] = {}
    for tokens, seeds in taken(run, words, NUM_REQUESTS):
        found[tokens] = found.get(tokens, 0) + len(seeds)
        by_seed |= dict.fromkeys(seeds[seeds < ONE_BY_ONE].tolist(), tokens)
    for seed in range(ONE_BY_ONE):
        rounds = (DraftCounterNoise(seed, number) for number in range(1, length + 1))
        assert by_seed[seed] == law.session(implementation, P, Q, length, 2, rounds)
    target = law.target_law(P, length)
    assert chi_squared(found, target) < threshold(len(target) - 1)


def test_shared_noise_has_the_target_law() -> None:
    """Plain decoding by races, which test_shared_noise_rule.py shows to be what every draft comes to."""
    seeds = np.arange(NUM_REQUESTS)
    places = np.zeros(NUM_REQUESTS, np.int64)
    prefixes: list[Prefix] = [()]
    for position in range(LENGTH):
        noise = np.stack(philox_4x64_10([1, 0, position, 0], [seeds, Purpose.SHARED])[:3], axis=1)
        arrivals = -np.log(((noise >> np.uint64(12)) + 0.5) / 2**52)
        rows = np.stack([P(prefix, ((),)).probabilities(0).numpy() for prefix in prefixes])
        # The plain definition of the race.
        places = 3 * places + (arrivals / rows[places]).argmin(axis=1)
        prefixes = [(*prefix, token) for prefix in prefixes for token in range(3)]
    for seed in range(ONE_BY_ONE):
        tokens: Prefix = ()
        for position in range(LENGTH):
            row = P(tokens, ((),)).probabilities(0)
            tokens += (CounterNoise(seed, 1).race(position, row),)
        assert prefixes[places[seed]] == tokens
    found = dict(zip(prefixes, np.bincount(places, minlength=27).tolist(), strict=True))
    target = law.target_law(P, LENGTH)
    assert chi_squared(found, target) < threshold(len(target) - 1)
