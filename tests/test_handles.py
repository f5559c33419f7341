from __future__ import annotations

import pytest

from protos.v1 import common_pb2
from splitspec.errors import (
    InvalidRequestError,
    NotFoundError,
    OutOfSyncError,
    OverloadedError,
    SplitspecError,
    StaleError,
)
from splitspec.handles import HandleStore, Held, Offered, offered_tokens
from splitspec.tokens import TokenLog


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> HandleStore[list[int]]:
    return HandleStore(2, clock)


def stamp(epoch: int = 1, session_id: str = "s", tokens: list[int] | None = None) -> common_pb2.Stamp:
    log = TokenLog(tokens or [])
    return common_pb2.Stamp(
        session_id=session_id, epoch=epoch, base_length=len(log), prefix_hash=log.prefix_hash()
    )


def attach(
    store: HandleStore[list[int]], epoch: int = 1, session: str = "s", handle: str = ""
) -> Held[list[int]]:
    return store.attach(stamp(epoch, session), handle, "t", list)


def test_handles_are_long_and_never_the_same(store: HandleStore[list[int]]) -> None:
    first, second = attach(store), attach(store, session="u")
    assert first.handle != second.handle
    assert len(first.handle) >= 24


def test_a_detached_handle_lives_for_its_lease(store: HandleStore[list[int]], clock: Clock) -> None:
    held = attach(store)
    store.detach(held, 10)
    clock.now = 9.9
    again = attach(store, 2, handle=held.handle)
    assert again.state is held.state
    assert again.handle == held.handle
    store.detach(again, 10)
    clock.now = 19.9
    other = attach(store, 3, handle=held.handle)
    assert other.state is not held.state
    assert len(store) == 1


def test_without_a_lease_nothing_stays(store: HandleStore[list[int]]) -> None:
    store.detach(attach(store), 0)
    assert len(store) == 0


def test_the_least_recently_used_idle_session_makes_room(store: HandleStore[list[int]]) -> None:
    old, new = attach(store, session="old"), attach(store, session="new")
    store.detach(new, 100)
    store.detach(old, 100)
    attach(store, session="third")
    assert [held.session_id for held in store.held] == ["old", "third"]


def test_when_all_are_running_the_next_is_refused(store: HandleStore[list[int]]) -> None:
    attach(store, session="a")
    attach(store, session="b")
    with pytest.raises(OverloadedError, match="all 2 sessions of this worker") as caught:
        attach(store, session="c")
    assert caught.value.retry_after_s > 0


def test_a_new_epoch_fences_the_old_stream_off(store: HandleStore[list[int]]) -> None:
    old = attach(store, 5)
    new = attach(store, 6, handle=old.handle)
    assert new.state is old.state
    with pytest.raises(StaleError):
        old.check_epoch(stamp(5))
    store.detach(old, 0)  # its end changes nothing any more
    assert store.held == [new]
    new.check_epoch(stamp(6))
    with pytest.raises(InvalidRequestError, match=r"stamp\.session_id is 'u'"):
        new.check_epoch(stamp(6, "u"))
    for epoch in (5, 7):
        with pytest.raises(StaleError):
            new.check_epoch(stamp(epoch))


@pytest.mark.parametrize(
    ("epoch", "session", "error"), [(4, "s", StaleError), (5, "s", StaleError), (6, "u", NotFoundError)]
)
def test_a_handle_is_refused_to(
    store: HandleStore[list[int]], epoch: int, session: str, error: type[SplitspecError]
) -> None:
    held = attach(store, 5)
    with pytest.raises(error):
        attach(store, epoch, session, held.handle)
    assert not held.fenced


def test_a_handle_is_refused_to_another_tenant(store: HandleStore[list[int]]) -> None:
    held = attach(store, 5)
    with pytest.raises(NotFoundError):
        store.attach(stamp(6), held.handle, "another", list)


def test_release(store: HandleStore[list[int]]) -> None:
    held = attach(store, 5)
    assert not store.release("unknown", stamp(5))
    assert not store.release(held.handle, stamp(5, "another"))
    with pytest.raises(StaleError):
        store.release(held.handle, stamp(4))
    assert store.release(held.handle, stamp(5))
    assert held.fenced
    assert len(store) == 0


def offer(held: list[int], tokens: list[int], start: int, vocabulary: int = 100) -> Offered:
    message = common_pb2.Open(start=start, token_ids=tokens[start:])
    return offered_tokens(TokenLog(held), stamp(tokens=tokens), message, vocabulary)


@pytest.mark.parametrize(
    ("before", "tokens", "start", "same"),
    [
        ([], [1, 2, 3], 0, 0),
        ([1, 2, 3], [1, 2, 3, 4], 3, 3),
        ([1, 2, 3], [1, 2, 3, 4], 0, 3),
        ([1, 2, 3, 9], [1, 2, 3, 4], 3, 3),
        ([1, 2, 3, 9], [1, 2], 1, 2),
        ([5, 6], [1, 2], 0, 0),
    ],
)
def test_an_open_offers_tokens(before: list[int], tokens: list[int], start: int, same: int) -> None:
    offered = offer(before, tokens, start)
    assert (list(offered.tokens), offered.same, offered.complete) == (tokens, same, True)


def test_an_open_may_leave_tokens_out_that_are_missing() -> None:
    offered = offer([1, 2], [1, 2, 3, 4], 3)
    assert (list(offered.tokens), offered.same, offered.complete) == ([1, 2], 2, False)
    # Other tokens of the same length: none of them can be trusted.
    offered = offer([1, 2], [1, 7, 3], 2)
    assert (list(offered.tokens), offered.same, offered.complete) == ([], 0, False)


def test_bad_opens() -> None:
    with pytest.raises(InvalidRequestError, match=r"open\.token_ids is 100, expected an id below 100"):
        offer([], [1, 100], 0)
    with pytest.raises(InvalidRequestError, match="to reach 2"):
        offered_tokens(TokenLog(), stamp(tokens=[1, 2]), common_pb2.Open(token_ids=[1]), 100)
    with pytest.raises(InvalidRequestError, match=r"stamp\.prefix_hash"):
        offered_tokens(TokenLog(), stamp(tokens=[1, 2]), common_pb2.Open(token_ids=[1, 3]), 100)


def test_other_tokens_of_the_same_length_are_noticed(store: HandleStore[list[int]]) -> None:
    held = attach(store)
    held.tokens.extend([1, 2])
    held.check_prefix(stamp(tokens=[1, 2]))
    for tokens in ([1, 3], [1], [1, 2, 3]):
        with pytest.raises(OutOfSyncError, match=f"base_length is {len(tokens)}"):
            held.check_prefix(stamp(tokens=tokens))


def test_every_state_is_let_go_of_once(clock: Clock) -> None:
    gone: list[list[int]] = []
    store: HandleStore[list[int]] = HandleStore(2, clock, let_go=gone.append)

    def attach(name: str, epoch: int = 1, handle: str = "") -> Held[list[int]]:
        stamp = common_pb2.Stamp(session_id=name, epoch=epoch)
        return store.attach(stamp, handle, "t", lambda: [len(name)])

    without_lease, released = attach("a"), attach("bb")
    store.detach(without_lease, 0)
    assert gone == [[1]]
    assert store.release(released.handle, common_pb2.Stamp(session_id="bb", epoch=1))
    store.detach(released, 5)
    assert gone == [[1], [2]]
    expiring, taken_over = attach("ccc"), attach("dddd")
    store.detach(expiring, 5)
    newer = attach("dddd", 2, taken_over.handle)
    store.detach(taken_over, 0)
    assert gone == [[1], [2]]
    attach("eeeee")  # makes room
    assert gone == [[1], [2], [3]]
    store.detach(newer, 5)
    clock.now += 10
    store.reap()
    assert gone == [[1], [2], [3], [4]]
