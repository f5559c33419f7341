"""Attention's sums: the same bits whatever stands behind the keys that a row sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from splitspec.engine import attention
from tests.engine import tiny

#: More than any product of the matrix library sums up at once.
MOST_KEYS = 4480


@pytest.mark.parametrize("num_rows", [8, 9, 33])
@pytest.mark.parametrize("size", [16, 64, 128])
def test_masked_keys_leave_the_bits_of_a_row(size: int, num_rows: int) -> None:
    """In float32: a row sees the keys up to its own, and with it in the pass are rows that see more.

    In half precision the product is the library's; where it has another order, nothing is promised.
    """
    chance = torch.Generator().manual_seed(size)
    query, keys, values = (
        torch.randn((2, count, size), generator=chance) for count in (num_rows, MOST_KEYS, MOST_KEYS)
    )

    def attended(num_keys: int, num_seen: int) -> torch.Tensor:
        bias = torch.zeros((num_rows, num_keys))
        bias[:, num_seen:] = -torch.inf
        seen = keys[:, :num_keys], values[:, :num_keys]
        return attention.product(query.clone(), *seen, bias, size**-0.5, None)

    for seen in (64, 128, 192, 256, 320, 384, 448, 640, 1024, 1984, 4160):
        alone = attended(seen, seen)
        for more in (64, 128, 320):
            assert torch.equal(attended(seen + more, seen), alone), (seen, more)


def test_what_depends_on_the_number_of_keys_promises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the text that the self-test feeds, too."""
    directory = tiny.checkpoint(tmp_path, tiny.CONFIGS["llama"])
    assert tiny.load(directory).info.deterministic
    product = attention.product

    def by_length(query: torch.Tensor, keys: torch.Tensor, *args: Any) -> torch.Tensor:
        return product(query, keys, *args) * (1 + 1e-6 * (keys.shape[1] > 256))

    monkeypatch.setattr(attention, "product", by_length)
    assert not tiny.load(directory).info.deterministic
