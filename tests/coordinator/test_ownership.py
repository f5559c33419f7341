"""What one owner of a session leaves to the next, on a real Redis."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from redis import Redis

from coordinator.ownership import Owner, Ownership
from splitspec.config import CoordinatorSettings
from splitspec.errors import InvalidRequestError, SessionBusyError, StaleError
from splitspec.registry import Registry, WorkerHandle
from splitspec.registry.scripts import Scripts
from splitspec.telemetry import NO_SPAN
from tests.waiting import until

TARGET = WorkerHandle("t1", "h1")
DRAFT = WorkerHandle("d1", "h2", "lookup")


def own(registry: Registry) -> AbstractAsyncContextManager[Ownership]:
    return Owner(registry, CoordinatorSettings(model="m")).own("t", "s", 60, NO_SPAN)


def journal_key(client: Redis) -> str:
    (key,) = client.scan_iter("*:journal")
    return str(key, "ascii")


async def test_a_request_that_fails_leaves_what_it_found(registry: Registry) -> None:
    async with own(registry) as first:
        first.target, first.draft, first.note = TARGET, DRAFT, b"note"
    with pytest.raises(InvalidRequestError):
        async with own(registry):
            raise InvalidRequestError.of("resume_offset", 9, "at most 3")
    async with own(registry) as third:
        assert (third.record.target, third.record.draft) == (TARGET, DRAFT)
        assert third.record.request == b"note"


async def test_rounds_go_on_behind_an_owner_that_crashed(registry: Registry, redis_url: str) -> None:
    """With each append, as a crash leaves no time to save more."""
    with Redis.from_url(redis_url) as client:
        async with own(registry) as first:
            for token, number in [(5, 3), (6, 8)]:
                first.session.tokens.extend([token])
                first.session.round = number
                assert await first.journal.acknowledged(len(first.session.tokens))
                record = journal_key(client).replace("journal", "record")
                assert client.hget(record, "round") == str(number).encode()
        async with own(registry) as second:
            assert second.session.round == second.record.round_number == 8
            assert second.session.next_round(4).round == 9
            second.session.revision = 4
        async with own(registry) as third:
            assert (third.session.round, third.session.revision) == (12, 4)


async def test_tokens_that_nobody_waited_for_are_not_left(registry: Registry) -> None:
    async with own(registry) as first:
        first.session.tokens.extend([1, 2])
        assert await first.journal.acknowledged(2)
        first.session.tokens.extend([3])  # such as the prompt of a request that is refused then
    async with own(registry) as second:
        assert second.record.token_ids == (1, 2)


async def test_a_request_that_goes_on_from_another_text(registry: Registry) -> None:
    """Nothing is given up before the request begins; then its note and its tokens are there together."""
    async with own(registry) as first:
        first.session.tokens.extend([1, 2, 3, 4])
        first.begin(0, b"first")
        assert await first.journal.acknowledged(4)
    async with own(registry) as refused:
        refused.put(2, [7])  # and no worker takes it
    async with own(registry) as second:
        assert second.record.token_ids == (1, 2, 3, 4)
        second.put(2, [7])
        assert (list(second.session.tokens), second.kept) == ([1, 2, 7], 2)
        second.begin(2, b"second")
        assert await second.journal.acknowledged(3)
        second.session.tokens.extend([8])
        assert await second.journal.acknowledged(4)
    async with own(registry) as third:
        assert (third.record.token_ids, third.record.request) == ((1, 2, 7, 8), b"second")


async def test_a_request_begins_on_a_redis_that_lost_the_session(registry: Registry, redis_url: str) -> None:
    with Redis.from_url(redis_url) as client:
        async with own(registry) as first:
            first.session.tokens.extend([1, 2, 3])
            assert await first.journal.acknowledged(3)
        async with own(registry) as second:
            second.put(2, [7])
            client.flushall()
            second.begin(2, b"second")
            assert await second.journal.acknowledged(3)
        async with own(registry) as third:
            assert (third.record.token_ids, third.record.request) == ((1, 2, 7), b"second")


async def test_a_redis_that_forgets_how_a_request_began(registry: Registry, redis_url: str) -> None:
    """What the request gave up is there again, as long as what it put in its place."""
    async with own(registry) as first:
        first.session.tokens.extend([1, 2, 3, 4])
        first.begin(0, b"first")
        assert await first.journal.acknowledged(4)
    async with own(registry) as second:
        with Redis.from_url(redis_url) as client:
            states = {key: client.dump(key) for key in client.scan_iter()}
            second.put(2, [7, 8])
            second.begin(2, b"second")
            assert await second.journal.acknowledged(4)
            for key, state in states.items():
                client.restore(key, 60_000, state, replace=True)
        second.session.tokens.extend([9])
        assert await second.journal.acknowledged(5)
    async with own(registry) as third:
        assert (third.record.token_ids, third.record.request) == ((1, 2, 7, 8, 9), b"second")


class SlowAppends(Registry):
    """A connection on which an append takes longer than a chunk waits for it: until it is told to go on."""

    go_on: asyncio.Event

    async def append(self, *args: Any, **kwargs: Any) -> None:
        await self.go_on.wait()
        await super().append(*args, **kwargs)


async def test_a_session_is_left_with_the_whole_journal(registry: Registry, redis_url: str) -> None:
    slow = await SlowAppends.connect(redis_url)
    assert isinstance(slow, SlowAppends)
    slow.go_on = asyncio.Event()
    async with own(slow) as first:
        first.session.tokens.extend([1, 2])
        assert not await first.journal.acknowledged(2)
        slow.go_on.set()
    await slow.close()
    async with own(registry) as second:
        assert second.record.token_ids == (1, 2)


async def test_tokens_that_redis_lost_are_written_again(registry: Registry, redis_url: str) -> None:
    with Redis.from_url(redis_url) as client:
        async with own(registry) as first:
            first.session.tokens.extend([1, 2, 3])
            assert await first.journal.acknowledged(3)
            # A Redis that syncs its file once a second comes back without the last of them.
            client.set(journal_key(client), client.getrange(journal_key(client), 0, 3), keepttl=True)
            first.session.tokens.extend([4])
            assert await first.journal.acknowledged(4)
        async with own(registry) as second:
            assert second.record.token_ids == (1, 2, 3, 4)


async def test_rounds_go_on_after_redis_lost_the_session(registry: Registry, redis_url: str) -> None:
    with Redis.from_url(redis_url) as client:
        async with own(registry) as first:
            client.flushall()
            first.session.tokens.extend([1])
            first.session.round = 7
            assert await first.journal.acknowledged(1)
            assert client.hget(journal_key(client).replace("journal", "record"), "round") == b"7"


async def test_another_s_tokens_end_the_session(registry: Registry, redis_url: str) -> None:
    with Redis.from_url(redis_url) as client:
        async with own(registry) as first:
            first.session.tokens.extend([1, 2])
            first.begin(0, b"")
            assert await first.journal.acknowledged(2)
            client.set(journal_key(client), b"\x09\x00\x00\x00", keepttl=True)
            first.session.tokens.extend([3])
            with pytest.raises(StaleError, match="expected one that they lengthen"):
                await first.journal.acknowledged(3)


class HeldUp(Registry):
    """A connection on which one script is held up, before or after Redis has run it."""

    def __init__(self, scripts: Scripts, script: str, *, after: bool) -> None:
        super().__init__(scripts)
        self._script, self._after = script, after
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()

    async def _run(self, script: str, *args: Any) -> list[Any]:
        reply = await super()._run(script, *args) if self._after or script != self._script else []
        if script == self._script:
            self.reached.set()
            await self.go_on.wait()
        return reply or await super()._run(script, *args)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("script", ["open_session", "end_session"])
async def test_a_request_cancelled_at_its_begin_or_end_leaves_the_session(
    registry: Registry, redis_url: str, script: str, after: bool
) -> None:
    held_up = HeldUp(await Scripts.connect(redis_url), script, after=after)

    async def request() -> None:
        async with own(held_up):
            pass

    running = asyncio.create_task(request())
    await held_up.reached.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    held_up.go_on.set()

    async def left() -> bool:
        try:
            async with own(registry):
                return True
        except SessionBusyError:
            return False

    await until(left)
    await held_up.close()


class Refusing(HeldUp):
    """Tells when a request has been refused because another one runs on the session."""

    def __init__(self, scripts: Scripts) -> None:
        super().__init__(scripts, "end_session", after=False)
        self.refused = asyncio.Event()

    async def _run(self, script: str, *args: Any) -> list[Any]:
        reply = await super()._run(script, *args)
        if reply[0] == b"busy":
            self.refused.set()
        return reply


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("next_is", ["request", "deletion"])
async def test_the_next_request_waits_for_one_that_is_ending(
    redis_url: str, cancelled: bool, next_is: str
) -> None:
    registry = Refusing(await Scripts.connect(redis_url))
    owner = Owner(registry, CoordinatorSettings(model="m"))
    begun = asyncio.Event()

    async def first() -> None:
        async with owner.own("t", "s", 60, NO_SPAN):
            begun.set()
            if cancelled:
                await asyncio.Event().wait()

    async def following() -> None:
        if next_is == "deletion":
            assert await owner.when_left("t", "s", lambda: registry.delete_session("t", "s"))
            return
        async with owner.own("t", "s", 60, NO_SPAN):
            pass

    running = asyncio.create_task(first())
    await begun.wait()
    if cancelled:
        running.cancel()
    await registry.reached.wait()
    after = asyncio.create_task(following())
    await registry.refused.wait()
    registry.go_on.set()
    await after
    await asyncio.wait({running})
    await registry.close()


async def test_an_end_that_fails_lets_the_next_request_go(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Refusing(await Scripts.connect(redis_url))
    owner = Owner(registry, CoordinatorSettings(model="m"))

    async def first() -> None:
        async with owner.own("t", "s", 60, NO_SPAN):
            pass

    async def broken(*args: Any) -> None:
        registry.reached.set()
        await registry.go_on.wait()
        raise RuntimeError("broken")

    monkeypatch.setattr(registry, "end", broken)
    running = asyncio.create_task(first())
    await registry.reached.wait()
    after = asyncio.create_task(first())
    await registry.refused.wait()
    registry.go_on.set()
    with pytest.raises(RuntimeError, match="broken"):
        await running
    with pytest.raises(SessionBusyError):
        await asyncio.wait_for(after, 60)
    await registry.close()


async def test_a_request_that_goes_on_is_not_waited_for(registry: Registry) -> None:
    owner = Owner(registry, CoordinatorSettings(model="m"))
    async with owner.own("t", "s", 60, NO_SPAN):
        with pytest.raises(SessionBusyError, match="another request runs"):
            async with owner.own("t", "s", 60, NO_SPAN):
                pass
        with pytest.raises(SessionBusyError):
            await owner.when_left("t", "s", lambda: registry.delete_session("t", "s"))
