"""Philox 4x64-10, written from the definition in the paper that splitspec/sampling/randomness.py names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_LOW = np.uint64(2**32 - 1)
_HALF = np.uint64(32)


def _multiply(a: int, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """High and low 64 bits of a product of 64-bit integers, by halves."""
    factor = np.uint64(a)
    a0, a1, b0, b1 = factor & _LOW, factor >> _HALF, b & _LOW, b >> _HALF
    low, middle, other = a0 * b0, a1 * b0, a0 * b1
    carry = (low >> _HALF) + (middle & _LOW) + (other & _LOW)
    return a1 * b1 + (middle >> _HALF) + (other >> _HALF) + (carry >> _HALF), factor * b


def philox_4x64_10(counter: Sequence[np.ndarray | int], key: Sequence[np.ndarray | int]) -> list[np.ndarray]:
    """The words of a block, 4 of [n] uint64. counter: 4 and key: 2 integers, or arrays [n] of them."""
    c0, c1, c2, c3 = (np.atleast_1d(np.array(word, np.uint64)) for word in counter)
    k0, k1 = (np.atleast_1d(np.array(word, np.uint64)) for word in key)
    for _ in range(10):
        high0, low0 = _multiply(0xD2E7470EE14C6C93, c0)
        high1, low1 = _multiply(0xCA5A826395121157, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + np.uint64(0x9E3779B97F4A7C15), k1 + np.uint64(0xBB67AE8584CAA73B)
    return [c0, c1, c2, c3]
