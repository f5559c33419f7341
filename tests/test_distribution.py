"""Temperature, top-k, top-p and min-p against the transformers library; top-p against a full sort."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from splitspec.sampling.distribution import argmax, probabilities
from splitspec.types import Sampling
from tests.processors import warped

VOCABULARY_SIZE = 49152

#: Rows of logits as models give them, and as they give trouble.
SHAPES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "zipf": lambda g, n: -1.2 * np.log(1 + g.permutation(n)) + g.normal(scale=0.5, size=n),
    "flat": lambda g, n: g.normal(scale=0.3, size=n),
    "peaked": lambda g, n: g.normal(scale=4, size=n),
    "one sure": lambda g, n: g.normal(size=n) + 40 * (np.arange(n) == g.integers(n)),
    "half ruled out": lambda g, n: np.where(g.random(n) < 0.5, -np.inf, g.normal(size=n)),
}
TIED: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "tied": lambda g, n: g.normal(scale=3, size=n).round(),
    "all tied": lambda g, n: np.full(n, -7.25),
    "nearly all tied": lambda g, n: np.where(np.arange(n) == g.integers(n), 1.0, 0.0),
}


def random_sampling(g: np.random.Generator, vocabulary_size: int) -> Sampling:
    """Each parameter half of the time."""
    return Sampling(
        temperature=float(g.choice([1.0, g.uniform(0.05, 3)])),
        top_k=int(g.integers(1, vocabulary_size + 3)) if g.random() < 0.5 else 0,
        top_p=float(g.choice([1.0, g.uniform(0.01, 1)])),
        min_p=float(g.choice([0.0, g.uniform(0, 1)])),
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_without_ties_equal_those_of_transformers(shape: str, dtype: torch.dtype) -> None:
    g = np.random.default_rng(1)
    for _ in range(150):
        vocabulary_size = int(g.integers(1, 400))
        values = SHAPES[shape](g, vocabulary_size)
        values[g.integers(vocabulary_size)] = 5.0
        logits, sampling = torch.from_numpy(values).to(dtype), random_sampling(g, vocabulary_size)
        found, expected = probabilities(logits, sampling), warped(logits, sampling)
        assert found.dtype == torch.float64
        assert torch.equal(found > 0, expected > 0), (logits, sampling)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", TIED)
def test_rows_with_ties_equal_those_of_transformers_but_for_which_of_them(shape: str) -> None:
    """Top-p keeps as many of the tied: which ones the library's sort, not being stable, leaves open."""
    g = np.random.default_rng(2)
    for _ in range(150):
        vocabulary_size = int(g.integers(1, 400))
        logits = torch.from_numpy(TIED[shape](g, vocabulary_size))
        sampling = random_sampling(g, vocabulary_size)
        found, expected = probabilities(logits, sampling), warped(logits, sampling)
        torch.testing.assert_close(found.sort().values, expected.sort().values, rtol=1e-12, atol=0)
        by_logit = [logits[row > 0].sort().values for row in (found, expected)]
        assert torch.equal(*by_logit), (logits, sampling)


def nucleus_by_sort(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, float]:
    """[vocabulary] bool: what top-p keeps; and how close the decision was, as a share of the mass."""
    p = torch.softmax(logits.double() / sampling.temperature, dim=0)
    ascending = torch.sort(p, stable=True)
    below = torch.cumsum(ascending.values, dim=0)
    margin = float((below - (1 - sampling.top_p)).abs().min())
    kept = torch.zeros(len(p), dtype=torch.bool)
    kept[ascending.indices[below > 1 - sampling.top_p]] = True
    kept[ascending.indices[-1]] = True
    return kept & (p > 0), margin


def test_top_p_without_a_full_sort_keeps_what_a_full_sort_keeps() -> None:
    """Rows of the real size, ties included. Only decisions within 1e-6 of the bound may differ: few do."""
    g = np.random.default_rng(3)
    num_rows = num_close = num_different = 0
    for draw in (SHAPES | TIED).values():
        for top_p in (1e-9, 0.1, 0.5, 0.9, 0.99, 0.9999, *g.uniform(0, 1, 4)):
            sampling = Sampling(temperature=float(g.choice([0.3, 1.0, 8.0])), top_p=float(top_p))
            logits = torch.from_numpy(draw(g, VOCABULARY_SIZE).astype(np.float32))
            expected, margin = nucleus_by_sort(logits, sampling)
            different = not torch.equal(probabilities(logits, sampling) > 0, expected)
            assert not different or margin < 1e-6, (sampling, margin)
            num_rows, num_close = num_rows + 1, num_close + (margin < 1e-6)
            num_different += different
    assert num_rows == 80
    assert num_different <= 1, (num_different, num_close)
    assert num_close <= 20, num_close


def test_top_k_keeps_every_token_as_probable_as_the_kth() -> None:
    found = probabilities(torch.tensor([1.0, 3.0, 1.0, 0.0, 1.0]), Sampling(top_k=2))
    assert (found > 0).tolist() == [True, True, True, False, True]


def test_top_p_keeps_the_token_that_reaches_it_and_at_least_one() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert (probabilities(logits, Sampling(top_p=0.6)) > 0).tolist() == [True, True, False, False]
    assert probabilities(logits, Sampling(top_p=1e-300)).tolist() == [1, 0, 0, 0]


def test_top_p_keeps_the_highest_ids_of_those_tied_at_its_bound() -> None:
    assert probabilities(torch.zeros(4), Sampling(top_p=0.5)).tolist() == [0, 0, 0.5, 0.5]
    tied = torch.zeros(1000)
    tied[7] = 3
    kept = torch.nonzero(probabilities(tied, Sampling(top_p=0.5))).flatten().tolist()
    assert kept == [7, *range(1000 - (len(kept) - 1), 1000)]


def test_top_p_takes_its_share_of_what_top_k_leaves() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert (probabilities(logits, Sampling(top_p=0.75)) > 0).tolist() == [True, True, True, False]
    assert (probabilities(logits, Sampling(top_k=3, top_p=0.75)) > 0).tolist() == [
        True,
        True,
        False,
        False,
    ]


def test_min_p_keeps_the_token_at_its_bound() -> None:
    found = probabilities(torch.tensor([0.0, 1.0, -1000.0, 1.0]), Sampling(min_p=1.0))
    assert found.tolist() == [0, 0.5, 0, 0.5]
    half = float(torch.exp(torch.tensor(-1.0, dtype=torch.float64)))
    assert (probabilities(torch.tensor([0.0, -1.0, -1.0001]), Sampling(min_p=half)) > 0).tolist() == [
        True,
        True,
        False,
    ]


def test_a_forbidden_token_has_probability_zero() -> None:
    found = probabilities(torch.tensor([-torch.inf, 0.0, 0.0]), Sampling(top_k=2, top_p=0.99))
    assert found.tolist() == [0, 0.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("row", "best"), [([0, 2, 2, 1], 1), ([3, 3, 3, 3], 0), ([-5, -4, -3, -2], 3)])
def test_temperature_0_is_one_hot_at_the_lowest_of_the_largest(
    row: list[float], best: int, dtype: torch.dtype
) -> None:
    logits = torch.tensor(row, dtype=dtype)
    found = probabilities(logits, Sampling(temperature=0, top_k=2, top_p=0.5))
    assert found.dtype == torch.float64
    assert found.tolist() == [float(token == best) for token in range(4)]
    assert argmax(logits) == best


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30])
def test_tiny_temperatures_share_the_mass_among_the_largest(temperature: float) -> None:
    found = probabilities(torch.tensor([20.0, 3.0, 20.0, -80.0]), Sampling(temperature=temperature))
    assert found.tolist() == [0.5, 0, 0.5, 0]


def test_a_huge_temperature_is_uniform() -> None:
    assert probabilities(torch.tensor([20.0, -80.0]), Sampling(temperature=1e308)).tolist() == [0.5, 0.5]


LOGITS = st.lists(
    st.one_of(st.just(-np.inf), st.floats(-(2.0**100), 2.0**100, width=32)), min_size=1, max_size=12
).filter(lambda row: max(row) > -np.inf)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.floats(0, 1e308),
    top_k=st.integers(0, 20),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
)


@given(LOGITS, SAMPLINGS)
@example([0.0, 0.0, 0.0], Sampling(top_p=1 - 2.0**-53))
@example([0.1] * 10, Sampling(top_p=1 - 2.0**-53))
@example([0.0, -50.0, -50.0], Sampling(top_p=1 - 2.0**-53))
@example([0.0, -40.0], Sampling(top_p=5e-324))
def test_any_row_under_any_parameters_is_a_distribution(row: list[float], sampling: Sampling) -> None:
    logits = torch.tensor(row)
    before = logits.clone()
    found = probabilities(logits, sampling)
    assert float(found.sum()) == pytest.approx(1, abs=1e-12)
    assert float(found.min()) >= 0
    assert float(found[argmax(logits)]) > 0 or sampling.top_p < 1
    assert not found[logits == -torch.inf].any()
    assert torch.equal(logits, before)
