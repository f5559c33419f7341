"""Randomness against its published definition."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from splitspec.sampling.randomness import (
    CounterNoise,
    Purpose,
    accepts,
    below,
    invert,
    race,
    raw64,
    shared_words,
    uniform,
    unit,
)
from tests.philox import philox_4x64_10

LARGEST_UNIFORM = 1 - 2.0**-53


def test_the_definition_gives_the_published_block() -> None:
    """Known answer for a counter and a key of 0, from Random123's kat_vectors."""
    assert [int(word[0]) for word in philox_4x64_10([0] * 4, [0] * 2)] == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
@pytest.mark.parametrize("round_number", [0, 1, 2**40])
@pytest.mark.parametrize("index", [0, 16])
@pytest.mark.parametrize("purpose", Purpose)
def test_raw_integers_are_the_documented_philox_block(
    seed: int, round_number: int, index: int, purpose: Purpose
) -> None:
    block = philox_4x64_10([1, 0, index, round_number], [seed, purpose])
    assert raw64(seed, round_number, index, purpose) == block[0][0]


def test_streams_reach_as_far_as_requests_do() -> None:
    """Every seventh round up to 20,000 and position up to 100,000, and any numbers far beyond: each has the
    block of its own counter, and no two have the same.
    """
    rounds, positions = np.arange(0, 20_000, 7), np.arange(0, 100_001, 7)
    by_round = np.array([raw64(3, number, 15, Purpose.ACCEPTANCE) for number in rounds.tolist()])
    assert np.array_equal(by_round, philox_4x64_10([1, 0, 15, rounds], [3, Purpose.ACCEPTANCE])[0])
    shared = np.array([shared_words(3, position, 1)[0] for position in positions.tolist()])
    assert np.array_equal(shared, philox_4x64_10([1, 0, positions, 0], [3, Purpose.SHARED])[0])
    generator = np.random.default_rng(12)
    seeds, far = generator.integers(0, 2**64, 2000, dtype=np.uint64) >> generator.integers(
        0, 50, (2, 2000), np.uint64
    )
    indices, purposes = generator.integers(0, 4096, 2000), generator.integers(1, 5, 2000)
    addresses = zip(*(numbers.tolist() for numbers in (seeds, far, indices, purposes)), strict=True)
    beyond = np.array([raw64(seed, number, index, Purpose(kind)) for seed, number, index, kind in addresses])
    assert np.array_equal(beyond, philox_4x64_10([1, 0, indices, far], [seeds, purposes])[0])
    together = np.concatenate([by_round, shared, beyond])
    assert len(np.unique(together)) == len(together)


def test_raw_integers_stay_what_they_are() -> None:
    """A contract between processes and versions: a resumed request must draw the same tokens."""
    assert raw64(0, 1, 0, Purpose.DRAFT) == 0x22D607C8D31A9786
    assert raw64(2**64 - 1, 42, 3, Purpose.RESIDUAL) == 0x476DFF712934C597
    assert [int(purpose) for purpose in Purpose] == [1, 2, 3, 4, 5]


def test_randomness_neither_reads_nor_moves_global_generators() -> None:
    np.random.seed(1)
    torch.manual_seed(1)
    first = [raw64(5, 1, 0, purpose) for purpose in Purpose]
    numpy_next, torch_next = np.random.random(), torch.rand(1).item()
    np.random.seed(1)
    torch.manual_seed(1)
    assert (np.random.random(), torch.rand(1).item()) == (numpy_next, torch_next)
    assert [raw64(5, 1, 0, purpose) for purpose in Purpose] == first


def test_counter_noise_takes_each_value_from_the_stream_of_its_purpose() -> None:
    weights = torch.ones(1000, dtype=torch.float64)
    for number, index in itertools.product([9, 1023, 1024, 5000, 2**33], range(17)):
        noise = CounterNoise(seed=3, round_number=number)
        u = uniform(3, number, index, Purpose.ACCEPTANCE)
        assert noise.accepts(index, math.nextafter(u, 2), 1.0)
        assert not noise.accepts(index, u, 1.0)
        for purpose in (Purpose.RESIDUAL, Purpose.NEXT):
            assert noise.draw(index, purpose, weights) == int(1000 * uniform(3, number, index, purpose))
        expected = 1000 * raw64(3, number, index, Purpose.DRAFT) // 2**64
        assert noise.below(index, Purpose.DRAFT, 1000) == expected


def test_units_and_bounded_integers_at_the_ends() -> None:
    assert unit(0) == 0
    assert unit(2**64 - 1) == LARGEST_UNIFORM
    assert unit(2**11) == 2.0**-53
    for bound in (1, 3, 65535 * 64, 2**64):
        assert below(0, bound) == 0
        assert below(2**64 - 1, bound) == bound - 1


@settings(deadline=None)
@given(st.floats(2**-30, 1), st.floats(0, 1))
def test_acceptance_is_strict_and_never_refuses_a_ratio_of_one(p: float, q_over_p: float) -> None:
    assert not accepts(0.0, 0.0, p)
    assert accepts(LARGEST_UNIFORM, p, p)
    assert accepts(LARGEST_UNIFORM, p, p * q_over_p)
    assert accepts(0.0, p, 1.0)


WEIGHTS = st.lists(st.one_of(st.just(0.0), st.floats(1e-300, 1e3)), min_size=1, max_size=8).filter(any)
UNIFORMS = st.one_of(
    st.sampled_from([0.0, 2.0**-53, LARGEST_UNIFORM]), st.integers(0, 2**53 - 1).map(lambda k: k * 2.0**-53)
)


@settings(deadline=None)
@given(WEIGHTS, UNIFORMS)
@example([0.0, 0.0, 1.0], 0.0)
@example([1.0, 0.0, 0.0], LARGEST_UNIFORM)
@example([0.5, 0.0, 0.5], 0.5)
@example([1e-300, 0.0, 1e-300], LARGEST_UNIFORM)
@example([0.1] * 7 + [0.0], LARGEST_UNIFORM)
@example([0.0, 5e-324, 0.0], LARGEST_UNIFORM)
def test_invert_finds_the_share_that_holds_u(weights: list[float], u: float) -> None:
    index = invert(u, torch.tensor(weights, dtype=torch.float64))
    assert weights[index] > 0
    # Exact shares, but for the rounding of eight sums.
    total, slack = math.fsum(weights), 1e-15 * math.fsum(weights)
    assert math.fsum(weights[:index]) <= u * total + slack
    assert u * total - slack <= math.fsum(weights[: index + 1])


@pytest.mark.parametrize(
    ("u", "index"), [(0.0, 1), (0.25 - 2.0**-53, 1), (0.25, 3), (LARGEST_UNIFORM, 3), (0.5, 3)]
)
def test_invert_at_the_borders_of_shares(u: float, index: int) -> None:
    assert invert(u, torch.tensor([0, 1, 0, 3, 0], dtype=torch.float64)) == index


def test_invert_leaves_zeros_out_where_a_parallel_sum_isnt_monotone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator, entries of weight 0 may seem to add a last bit."""
    cumsum = torch.cumsum

    def uneven(values: torch.Tensor, dim: int) -> torch.Tensor:
        return cumsum(values, dim) * (1 + 2.0**-52 * (torch.arange(len(values)) % 2))

    monkeypatch.setattr(torch, "cumsum", uneven)
    weights = torch.tensor([1, 0, 0, 0, 1], dtype=torch.float64)
    assert {invert(u, weights) for u in (0.0, 0.5 - 2.0**-53, 0.5, 0.5 + 2.0**-52, LARGEST_UNIFORM)} == {0, 4}


@pytest.mark.parametrize("weights", [[0.0], [0.0, 0.0], [math.nan, 1.0]])
def test_invert_refuses_weights_without_mass(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="expected more than 0"):
        invert(0.5, torch.tensor(weights, dtype=torch.float64))


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 2**40])
def test_shared_words_are_the_documented_philox_blocks(seed: int, position: int) -> None:
    blocks = philox_4x64_10([np.arange(1, 26), 0, position, 0], [seed, Purpose.SHARED])
    for count in (1, 4, 5, 99):
        expected = np.stack(blocks, axis=1).ravel()[:count]
        assert np.array_equal(shared_words(seed, position, count), expected)


def test_shared_words_stay_what_they_are() -> None:
    """A contract between processes and versions: a seed stands for its text."""
    assert shared_words(0, 0, 2).tolist() == [0x966BD67D71CF81D7, 0x8FC628DFE98B40BA]
    assert int(shared_words(2**64 - 1, 1000, 49152)[-1]) == 0x872C11D4B52EAB37


def plain_race(words: np.ndarray, weights: np.ndarray) -> int:
    """The definition, a logarithm for each token."""
    largest = weights.max()
    arrivals = {
        token: -math.log(((int(word) >> 12) + 0.5) / 2**52) / (weight / largest)
        for token, (word, weight) in enumerate(zip(words, weights.tolist(), strict=True))
        if weight > 0
    }
    return min(arrivals, key=lambda token: (arrivals[token], token))


WORDS = st.one_of(
    st.sampled_from([0, 2**12 - 1, 2**12, 2**63, 2**64 - 2**12, 2**64 - 1]), st.integers(0, 2**64 - 1)
)


@given(st.lists(st.tuples(WORDS, st.one_of(st.just(0.0), st.floats(1e-300, 1e3))), min_size=1, max_size=40))
@example([(2**64 - 1, 0.0), (0, 5e-324), (2**64 - 1, 0.0)])
@example([(2**63, 0.5), (2**63, 0.5)])
@example([(2**64 - 1, 1e-300), (0, 1.0)])
def test_the_race_equals_its_plain_definition(tokens: list[tuple[int, float]]) -> None:
    words = np.array([word for word, _ in tokens], np.uint64)
    weights = np.array([weight for _, weight in tokens])
    if weights.any():
        assert race(words, weights) == plain_race(words, weights)


@pytest.mark.parametrize("support", [1, 64, 49152])
def test_the_race_equals_its_plain_definition_on_a_whole_vocabulary(support: int) -> None:
    generator = np.random.default_rng(support)
    for position in [*range(8), 1024, 99_999]:
        weights = np.zeros(49152)
        ids = generator.choice(49152, support, replace=False)
        weights[ids] = np.exp(generator.normal(scale=3, size=support))
        expected = plain_race(shared_words(7, position, 49152), weights)
        assert CounterNoise(7, 1).race(position, torch.from_numpy(weights)) == expected


def test_the_race_depends_on_seed_and_position_alone() -> None:
    weights = torch.ones(50, dtype=torch.float64)
    winners = {
        (seed, position): {CounterNoise(seed, number).race(position, weights) for number in (1, 2, 900)}
        for seed in range(10)
        for position in range(10)
    }
    assert all(len(found) == 1 for found in winners.values())
    assert len(set.union(*winners.values())) > 30


def test_processing_never_shifts_the_noise() -> None:
    """A token keeps its noise when others are left out, or the vocabulary is padded."""
    generator = np.random.default_rng(11)
    for position in range(300):
        weights = torch.from_numpy(generator.gamma(0.5, size=30))
        winner = CounterNoise(3, 1).race(position, weights)
        fewer = torch.where(torch.from_numpy(generator.random(30) < 0.5), weights, 0.0)
        fewer[winner] = weights[winner]
        assert CounterNoise(3, 1).race(position, fewer) == winner
        assert CounterNoise(3, 1).race(position, torch.cat([weights, torch.zeros(9)])) == winner
        assert CounterNoise(3, 1).race(position, weights * 65535) == winner


@pytest.mark.parametrize("weights", [[0.0], [0.0, 0.0], [math.nan, 1.0]])
def test_the_race_refuses_weights_without_mass(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="expected more than 0"):
        CounterNoise(0, 1).race(0, torch.tensor(weights, dtype=torch.float64))
