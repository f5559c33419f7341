"""The token log and its hash."""

from __future__ import annotations

import pytest

from splitspec.tokens import TokenLog


def test_hash_of_known_tokens() -> None:
    """A contract between processes: FNV-1a over ids plus one, as the module's docstring defines it."""
    expected = 0xCBF29CE484222325
    for token in (0, 1, 151935):
        expected = ((expected ^ (token + 1)) * 0x100000001B3) % 2**64
    assert TokenLog([0, 1, 151935]).prefix_hash() == expected == 0xD2DBE3186AE713DE
    assert TokenLog().prefix_hash() == 0xCBF29CE484222325


def test_each_prefix_has_the_hash_of_its_own_log() -> None:
    ids = [5, 0, 0, 7, 2**32 - 1, 5]
    log = TokenLog(ids)
    for length in range(len(ids) + 1):
        assert log.prefix_hash(length) == TokenLog(ids[:length]).prefix_hash()
    assert log.prefix_hash(len(ids)) == log.prefix_hash()


def test_hash_tells_order_length_and_zeros_apart() -> None:
    logs = [(), (0,), (0, 0), (0, 1), (1, 0), (1,), (1, 1), (2,)]
    assert len({TokenLog(ids).prefix_hash() for ids in logs}) == len(logs)


def test_truncate_then_extend_equals_a_new_log() -> None:
    log = TokenLog([1, 2, 3, 4])
    log.truncate(2)
    log.extend([9, 8])
    fresh = TokenLog([1, 2, 9, 8])
    assert list(log) == list(fresh)
    assert [log.prefix_hash(n) for n in range(5)] == [fresh.prefix_hash(n) for n in range(5)]


@pytest.mark.parametrize("length", [-1, 3])
def test_truncate_refuses_a_length_it_does_not_have(length: int) -> None:
    log = TokenLog([1, 2])
    with pytest.raises(ValueError, match=f"can't truncate 2 tokens to {length}"):
        log.truncate(length)
    assert list(log) == [1, 2]


@pytest.mark.parametrize("length", [-1, 3])
def test_prefix_hash_refuses_a_length_it_does_not_have(length: int) -> None:
    with pytest.raises(ValueError, match=f"no prefix of {length} tokens"):
        TokenLog([1, 2]).prefix_hash(length)


def test_is_a_sequence() -> None:
    log = TokenLog([4, 5, 6])
    assert (len(log), log[0], log[-1], log[1:], list(log), 5 in log) == (3, 4, 6, [5, 6], [4, 5, 6], True)
