"""No session goes on from less than its client was given, whatever Redis has lost; on real servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from redis import Redis

from coordinator.claims import Claim, Left, LeftSessions
from coordinator.ownership import Owner, Ownership
from coordinator.retry import Note
from splitspec.config import CoordinatorSettings
from splitspec.errors import LostTokensError, StaleError, UnavailableError
from splitspec.registry import EmbeddedRedis, Registry
from splitspec.telemetry import NO_SPAN
from tests.registry.servers import full

#: So short that it has ended by the time that a server has been restarted.
LEASE_S = 0.05
CLAIM = Claim(length=0, request_id="next", digest="", resume_offset=0)
NOTE = Note("cut off", "", seed=1, start=0, num_prompt=2, room=9, eos_token_ids=())


@pytest.fixture(params=["with its data", "empty"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A server that comes back so when it is restarted."""
    with EmbeddedRedis(tmp_path if request.param == "with its data" else None) as server:
        yield server


@contextlib.asynccontextmanager
async def owner_of(url: str) -> AsyncIterator[Owner]:
    registry = await Registry.connect(url)
    try:
        yield Owner(registry, CoordinatorSettings(model="m", session_lease_s=LEASE_S))
    finally:
        await registry.close()


@pytest.fixture
async def owner(redis_url: str, registry: Registry) -> Owner:
    """One of a coordinator on the Redis that all tests share."""
    return Owner(registry, CoordinatorSettings(model="m", session_lease_s=60))


def own(owner: Owner, claim: Claim = CLAIM) -> AbstractAsyncContextManager[Ownership]:
    return owner.own("t", "s", 60, NO_SPAN, claim)


async def add(owned: Ownership, *token_ids: int) -> bool:
    """Give tokens to the client; whether they are in the journal."""
    if owned.note == owned.record.request:  # the request's first ones
        note = replace(NOTE, request_id=f"of epoch {owned.session.epoch}")
        owned.begin(len(owned.session.tokens), note.encode())
    owned.session.tokens.extend(token_ids)
    return await owned.journal.acknowledged(len(owned.session.tokens))


async def left_with(owner: Owner, *token_ids: int) -> None:
    async with own(owner) as owned:
        assert await add(owned, *token_ids)


async def held_by(owner: Owner, claim: Claim = CLAIM) -> tuple[int, ...]:
    async with own(owner, claim) as owned:
        return owned.record.token_ids


def key_of(client: Redis, kind: str) -> str:
    (key,) = client.scan_iter(f"*:{kind}")
    return str(key, "ascii")


def cut(client: Redis, length: int) -> None:
    """A server that was restarted, or failed over, without its last writes."""
    key = key_of(client, "journal")
    kept = client.getrange(key, 0, 4 * length - 1) if length else b""
    client.set(key, kept, keepttl=True)


async def test_what_came_while_redis_was_away_is_there_in_the_next_turn(server: EmbeddedRedis) -> None:
    async with owner_of(server.url) as owner:
        async with own(owner) as first:
            assert await add(first, 1, 2)
            server.stop()
            assert not await add(first, 3)
        with pytest.raises(UnavailableError):
            await held_by(owner)
        server.start()
        assert await held_by(owner) == (1, 2, 3)


async def test_redis_goes_away_as_the_last_tokens_are_in(server: EmbeddedRedis) -> None:
    async with owner_of(server.url) as owner:
        async with own(owner) as first:
            assert await add(first, 1, 2)
            server.stop()
        server.start()
        assert await held_by(owner) == (1, 2)


async def test_a_full_redis_is_named_and_gets_the_tokens_when_it_has_room(tmp_path: Path) -> None:
    with EmbeddedRedis() as server:
        async with owner_of(server.url) as owner:
            with full(server):
                pass  # the first client of a server takes memory, too
            async with own(owner) as first:
                assert await add(first, 1)
                limited = full(server)
                limited.__enter__()
                assert not await add(first, 2)
            with pytest.raises(UnavailableError, match=r"last 1 tokens of session 's'.*is full"):
                await held_by(owner)
            with pytest.raises(UnavailableError, match="is full"):
                async with owner.own("t", "another", 60, NO_SPAN, CLAIM):
                    pass
            limited.__exit__(None, None, None)
            assert await held_by(owner) == (1, 2)


async def test_tokens_lost_before_the_end_are_written_again(owner: Owner, redis_url: str) -> None:
    with Redis.from_url(redis_url) as client:
        async with own(owner) as first:
            assert await add(first, 1, 2, 3)
            cut(client, 1)
        assert await held_by(owner) == (1, 2, 3)
        async with own(owner) as third:
            assert await add(third, 4)
            client.flushall()
        assert await held_by(owner) == (1, 2, 3, 4)


async def test_a_redis_that_went_back_to_an_earlier_turn(owner: Owner, redis_url: str) -> None:
    await left_with(owner, 1, 2)
    with Redis.from_url(redis_url) as client:
        record = key_of(client, "record")
        before = client.dump(record)
        async with own(owner) as second:
            assert await add(second, 3)
            client.restore(record, 60_000, before, replace=True)
            cut(client, 2)
            assert await add(second, 4)
        assert await held_by(owner) == (1, 2, 3, 4)


async def test_an_owner_that_was_replaced_still_writes_nothing(owner: Owner, redis_url: str) -> None:
    with Redis.from_url(redis_url) as client:
        async with own(owner) as first:
            client.hincrby(key_of(client, "record"), "epoch", 1)
            with pytest.raises(StaleError):
                await add(first, 1)


def lose_last(client: Redis) -> None:
    cut(client, 1)


def lose_all(client: Redis) -> None:
    client.flushall()


@pytest.mark.parametrize("lose", [lose_last, lose_all])
async def test_a_session_that_lost_tokens_since_is_refused(
    owner: Owner, registry: Registry, redis_url: str, lose: Callable[[Redis], None]
) -> None:
    await left_with(owner, 1, 2)
    another = Owner(registry, CoordinatorSettings(model="m"))
    assert await held_by(another, replace(CLAIM, length=2)) == (1, 2)
    with Redis.from_url(redis_url) as client:
        lose(client)
        before = [client.dump(key) for key in client.scan_iter()]
        for _ in range(2):
            # This coordinator knows what it left; another one only what the client says.
            for asked, claim in ((another, CLAIM), (owner, replace(CLAIM, length=2))):
                with pytest.raises(LostTokensError, match=r"tokens of session 's', expected the 2 that"):
                    await held_by(asked, claim)
        assert [client.dump(key) for key in client.scan_iter()] == before
    assert (await registry.delete_session("t", "s") is None) == (lose is lose_all)
    assert await held_by(another) == await held_by(owner) == ()  # closed: the whole conversation can come


async def shorten(owner: Owner, claim: Claim = CLAIM) -> None:
    """A turn whose template changes earlier text, and whose client hears nothing of it."""
    async with own(owner, claim) as owned:
        owned.put(1, [8])
        owned.begin(1, replace(NOTE, request_id="unheard of").encode())
        await owned.journal.prompted(3)


async def test_a_turn_shortens_the_session_before_its_client_hears_of_it(
    owner: Owner, registry: Registry, redis_url: str
) -> None:
    await left_with(owner, 1, 2, 3, 4)
    claim = replace(CLAIM, length=4)
    await shorten(owner, claim)
    assert await held_by(owner, claim) == await held_by(owner, claim) == (1, 8)
    with pytest.raises(LostTokensError, match="expected the 5 that its client has seen"):
        await held_by(owner, replace(CLAIM, length=5))
    with Redis.from_url(redis_url) as client:
        cut(client, 1)
    with pytest.raises(LostTokensError, match="expected the 2 that its last request left"):
        await held_by(owner, claim)


async def test_redis_goes_back_to_longer_text_that_was_given_up(owner: Owner, redis_url: str) -> None:
    await left_with(owner, 1, 2, 3, 4)
    with Redis.from_url(redis_url) as client:
        states = {key: client.dump(key) for key in client.scan_iter()}
        await shorten(owner)
        assert await held_by(owner) == (1, 8)
        for key, state in states.items():
            client.restore(key, 60_000, state, replace=True)
        with pytest.raises(LostTokensError, match="an earlier state of session 's'"):
            await held_by(owner, replace(CLAIM, length=2))


async def test_a_session_that_was_closed_begins_anew(owner: Owner, registry: Registry) -> None:
    await left_with(owner, 1, 2)
    await registry.delete_session("t", "s")
    assert await held_by(owner) == ()
    with pytest.raises(LostTokensError, match=r"holds 0 tokens .* expected the 2 that its client has seen"):
        await held_by(owner, replace(CLAIM, length=2))


async def test_what_another_coordinator_made_of_it_counts(owner: Owner, registry: Registry) -> None:
    await left_with(owner, 1, 2)
    another = Owner(registry, CoordinatorSettings(model="m"))
    await registry.delete_session("t", "s")
    await left_with(another, 7)
    assert await held_by(owner) == (7,)


async def abandon(registry: Registry, note: Note = NOTE) -> int:
    """A coordinator dies in a request: the epoch of its record."""
    epoch = (await registry.open_session("t", "s", "dead", 1)).epoch
    await registry.begin("t", "s", epoch, 0, [1, 2, 3], 0, note.encode())
    await asyncio.sleep(0.005)
    return epoch


async def test_a_request_cut_off_with_its_coordinator(owner: Owner, registry: Registry) -> None:
    """Redis may have been away, and the tokens have gone with the coordinator."""
    epoch = await abandon(registry)
    with pytest.raises(LostTokensError, match=r"cut off with its coordinator.*expected session_length"):
        await held_by(owner)
    await registry.renew("t", "s", epoch)  # nothing was changed: an owner that lives on is still the owner
    await asyncio.sleep(0.005)
    with pytest.raises(LostTokensError, match=r"holds 3 tokens.*expected the 4 that its client has seen"):
        await held_by(owner, replace(CLAIM, length=4))
    assert await held_by(owner, replace(CLAIM, length=3)) == (1, 2, 3)


async def test_a_request_cut_off_is_repeated(owner: Owner, registry: Registry) -> None:
    await abandon(registry)
    with pytest.raises(LostTokensError, match=r"expected the 4 that the request goes on from"):
        await held_by(owner, Claim(0, "cut off", "", resume_offset=2))
    assert await held_by(owner, Claim(0, "cut off", "", resume_offset=1)) == (1, 2, 3)


async def test_a_coordinator_that_dies_once_the_journal_has_everything(
    owner: Owner, registry: Registry
) -> None:
    await abandon(registry, replace(NOTE, finished="AA=="))
    assert await held_by(owner) == (1, 2, 3)


async def test_a_coordinator_that_dies_before_the_request_has_begun(owner: Owner, registry: Registry) -> None:
    await left_with(owner, 1, 2, 3)
    await registry.open_session("t", "s", "dead", 1)
    await asyncio.sleep(0.005)
    assert await held_by(owner) == (1, 2, 3)


def test_what_was_left_is_remembered_for_its_time() -> None:
    left = LeftSessions(keep_s=60)
    left["t", "s"] = Left(1, 2)
    left["t", "s"] = Left(3, 4)
    assert left.get(("t", "s")) == Left(3, 4)
    assert left.get(("t", "other")) is None
    short = LeftSessions(keep_s=-1)
    short["t", "s"] = Left(1, 2)
    assert short.get(("t", "s")) is None
