from __future__ import annotations

import asyncio
import uuid

import pytest
from redis import Redis

from splitspec.errors import SessionBusyError, StaleError
from splitspec.registry import Registry, SessionRecord
from tests.registry.owner import CALLS, LEASE_MS, call_as_owner, contents, open_session, outlive


def microseconds(time: tuple[int, int]) -> int:
    return time[0] * 1_000_000 + time[1]


async def test_a_new_session_is_empty_and_of_an_epoch_that_is_the_time(
    registry: Registry, client: Redis
) -> None:
    before, record, after = client.time(), await open_session(registry), client.time()
    assert record == SessionRecord("t", "s", epoch=record.epoch)
    assert microseconds(before) <= record.epoch <= microseconds(after)


@pytest.mark.parametrize("last", [2**52 + 1, 2**53 - 2])
async def test_an_epoch_rises_by_1_where_the_clock_was_set_back(
    registry: Registry, client: Redis, last: int
) -> None:
    await open_session(registry)
    client.hset(client.keys("*:record")[0], "epoch", last)
    assert (await open_session(registry)).epoch == last + 1
    await registry.renew("t", "s", last + 1)


async def test_an_epoch_never_comes_twice(registry: Registry, client: Redis) -> None:
    epochs = [(await open_session(registry)).epoch]
    epochs.append((await open_session(registry)).epoch)
    await registry.end("t", "s", epochs[-1], keep_ms=LEASE_MS)
    await registry.delete_session("t", "s")
    epochs.append((await open_session(registry)).epoch)
    await registry.end("t", "s", epochs[-1], keep_ms=0)
    epochs.append((await open_session(registry)).epoch)
    client.flushall()
    epochs.append((await open_session(registry)).epoch)
    assert epochs == sorted(set(epochs))


async def test_of_racing_owners_exactly_one_wins(registry: Registry, redis_url: str) -> None:
    other = await Registry.connect(redis_url)
    attempts = [open_session(r, f"{i}-{n}") for n in range(10) for i, r in enumerate((registry, other))]
    outcomes = await asyncio.gather(*attempts, return_exceptions=True)
    await other.close()
    winners = [outcome for outcome in outcomes if isinstance(outcome, SessionRecord)]
    losers = [outcome for outcome in outcomes if isinstance(outcome, SessionBusyError)]
    assert (len(winners), len(losers)) == (1, 19)


async def test_a_busy_session_is_named_and_says_when_to_come_again(registry: Registry) -> None:
    await open_session(registry, "a", lease_ms=LEASE_MS)
    with pytest.raises(SessionBusyError, match="'s'") as far:
        await open_session(registry, "b")
    assert far.value.retry_after_s == 1.0
    near = None
    while near is None:  # the second has to come within the first one's lease
        session = uuid.uuid4().hex
        await registry.open_session("t", session, "a", lease_ms=900)
        try:
            await registry.open_session("t", session, "b", LEASE_MS)
        except SessionBusyError as error:
            near = error
    assert near.retry_after_s is not None
    assert 0 < near.retry_after_s <= 0.9


async def test_an_owner_whose_answer_was_lost_opens_again(registry: Registry) -> None:
    lost = await open_session(registry, "a")
    assert (await open_session(registry, "a")).epoch > lost.epoch


async def test_an_expired_lease_frees_the_session_with_its_journal(registry: Registry) -> None:
    epoch = (await open_session(registry, "a", lease_ms=1)).epoch
    await registry.append("t", "s", epoch, 0, [1, 2])
    await outlive(1)
    assert (await open_session(registry, "b")).token_ids == (1, 2)


async def test_an_owner_goes_on_after_its_lease_while_no_one_took_over(registry: Registry) -> None:
    epoch = (await open_session(registry, "a", lease_ms=1)).epoch
    await outlive(1)
    await registry.append("t", "s", epoch, 0, [1])
    await outlive(1)
    assert (await open_session(registry, "b")).token_ids == (1,)


@pytest.mark.parametrize("call", CALLS)
async def test_each_call_of_the_owner_renews_the_lease(registry: Registry, client: Redis, call: str) -> None:
    epoch = (await open_session(registry)).epoch
    (record,) = client.keys("*:record")
    client.hset(record, "lease_end", 0)
    client.pexpire(record, 1000)
    await call_as_owner(registry, call, epoch)
    with pytest.raises(SessionBusyError):
        await open_session(registry, "b")
    assert client.pttl(record) > LEASE_MS


@pytest.mark.parametrize("call", [*CALLS, "end and keep", "end"])
async def test_an_older_epoch_changes_nothing(registry: Registry, client: Redis, call: str) -> None:
    older = (await open_session(registry, "a", lease_ms=1)).epoch
    await outlive(1)
    newer = (await open_session(registry, "b")).epoch
    await registry.append("t", "s", newer, 0, [3])
    before = contents(client)
    with pytest.raises(StaleError, match=f"'s'.*{older}.*{newer}"):
        await call_as_owner(registry, call, older)
    assert contents(client) == before
    await registry.append("t", "s", newer, 1, [4])


@pytest.mark.parametrize("call", CALLS)
async def test_a_request_that_ended_can_not_write_any_more(
    registry: Registry, client: Redis, call: str
) -> None:
    epoch = (await open_session(registry, "a")).epoch
    await registry.end("t", "s", epoch, keep_ms=LEASE_MS)
    before = contents(client)
    with pytest.raises(StaleError):
        await call_as_owner(registry, call, epoch)
    assert contents(client) == before


async def test_an_append_stores_the_round_that_a_later_owner_goes_on_from(registry: Registry) -> None:
    record = await registry.open_session("t", "s", "a", 50)
    await registry.append("t", "s", record.epoch, 0, [1, 2], 7)
    await registry.append("t", "s", record.epoch, 2, [3], 6)
    await asyncio.sleep(0.06)
    assert (await registry.open_session("t", "s", "b", 50)).round_number == 7
