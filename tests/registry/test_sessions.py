from __future__ import annotations

import asyncio

import pytest
from redis import Redis
from redis.crc import key_slot

from splitspec.errors import OutOfSyncError, SessionBusyError, StaleError
from splitspec.registry import Registry, SessionRecord, WorkerHandle

LEASE_MS = 60_000
TARGET = WorkerHandle("target-1", "kv-1")
DRAFT = WorkerHandle("draft-1", "kv-2", drafter="model")


async def open_session(registry: Registry, owner: str = "a", lease_ms: int = LEASE_MS) -> SessionRecord:
    return await registry.open_session("t", "s", owner, lease_ms)


def keys_of(client: Redis) -> list[bytes]:
    return list(client.scan_iter())


async def outlive(lease_ms: int) -> None:
    """Return when a lease that was taken before the call has run out."""
    await asyncio.sleep(lease_ms / 1000 + 0.005)


async def test_a_new_session_is_empty_and_of_epoch_1(registry: Registry) -> None:
    assert await open_session(registry) == SessionRecord("t", "s", epoch=1)


async def test_the_next_owner_finds_what_the_last_one_left(registry: Registry) -> None:
    await open_session(registry)
    await registry.append("t", "s", 1, 0, [0, 7, 2**32 - 1])
    await registry.save("t", "s", 1, target=TARGET, draft=DRAFT, revision=5, round_number=3)
    await registry.append("t", "s", 1, 3, [9])
    await registry.end("t", "s", 1, keep_ms=LEASE_MS)
    assert await open_session(registry, "b") == SessionRecord(
        "t", "s", 2, (0, 7, 2**32 - 1, 9), target=TARGET, draft=DRAFT, revision=5, round_number=3
    )


async def test_handles_can_be_unset(registry: Registry) -> None:
    await open_session(registry)
    await registry.save("t", "s", 1, target=TARGET, draft=DRAFT, revision=1, round_number=1)
    await registry.save("t", "s", 1, target=TARGET, draft=None, revision=2, round_number=2)
    record = await open_session(registry)
    assert (record.target, record.draft) == (TARGET, None)


async def test_of_racing_owners_exactly_one_wins(registry: Registry, redis_url: str) -> None:
    other = await Registry.connect(redis_url)
    attempts = [open_session(r, f"{i}-{n}") for n in range(10) for i, r in enumerate((registry, other))]
    outcomes = await asyncio.gather(*attempts, return_exceptions=True)
    await other.close()
    winners = [outcome for outcome in outcomes if isinstance(outcome, SessionRecord)]
    losers = [outcome for outcome in outcomes if isinstance(outcome, SessionBusyError)]
    assert [winner.epoch for winner in winners] == [1]
    assert len(losers) == 19


async def test_a_busy_session_is_named_and_says_when_to_come_again(registry: Registry) -> None:
    await open_session(registry, "a", lease_ms=LEASE_MS)
    with pytest.raises(SessionBusyError, match="'s'") as far:
        await open_session(registry, "b")
    assert far.value.retry_after_s == 1.0
    await registry.open_session("t", "short", "a", lease_ms=900)
    with pytest.raises(SessionBusyError) as near:
        await registry.open_session("t", "short", "b", LEASE_MS)
    assert 0 < near.value.retry_after_s <= 0.9


async def test_an_owner_whose_answer_was_lost_opens_again(registry: Registry) -> None:
    await open_session(registry, "a")
    assert (await open_session(registry, "a")).epoch == 2


async def test_an_expired_lease_frees_the_session_with_its_journal(registry: Registry) -> None:
    await open_session(registry, "a", lease_ms=1)
    await registry.append("t", "s", 1, 0, [1, 2])
    await outlive(1)
    record = await open_session(registry, "b")
    assert (record.epoch, record.token_ids) == (2, (1, 2))


async def test_an_owner_goes_on_after_its_lease_while_no_one_took_over(registry: Registry) -> None:
    await open_session(registry, "a", lease_ms=1)
    await outlive(1)
    await registry.append("t", "s", 1, 0, [1])
    await outlive(1)
    assert (await open_session(registry, "b")).token_ids == (1,)


@pytest.mark.parametrize("call", ["append", "renew", "save"])
async def test_each_call_of_the_owner_renews_the_lease(registry: Registry, client: Redis, call: str) -> None:
    await open_session(registry)
    (record,) = client.keys("*:record")
    client.hset(record, "lease_end", 0)
    client.pexpire(record, 1000)
    await {
        "append": lambda: registry.append("t", "s", 1, 0, [1]),
        "renew": lambda: registry.renew("t", "s", 1),
        "save": lambda: registry.save("t", "s", 1, target=None, draft=None, revision=1, round_number=1),
    }[call]()
    with pytest.raises(SessionBusyError):
        await open_session(registry, "b")
    assert client.pttl(record) > LEASE_MS


async def test_an_older_epoch_changes_nothing(registry: Registry) -> None:
    await open_session(registry, "a", lease_ms=1)
    await registry.append("t", "s", 1, 0, [1])
    await outlive(1)
    await open_session(registry, "b")
    with pytest.raises(StaleError, match="'s'"):
        await registry.append("t", "s", 1, 1, [2])
    with pytest.raises(StaleError):
        await registry.renew("t", "s", 1)
    with pytest.raises(StaleError):
        await registry.save("t", "s", 1, target=TARGET, draft=DRAFT, revision=1, round_number=1)
    for keep_ms in (0, LEASE_MS):
        with pytest.raises(StaleError):
            await registry.end("t", "s", 1, keep_ms)
    await registry.append("t", "s", 2, 1, [3])
    assert await open_session(registry, "b") == SessionRecord("t", "s", 3, (1, 3))


async def test_a_request_that_ended_can_not_write_any_more(registry: Registry) -> None:
    await open_session(registry)
    await registry.end("t", "s", 1, keep_ms=LEASE_MS)
    with pytest.raises(StaleError):
        await registry.append("t", "s", 1, 0, [1])
    with pytest.raises(StaleError):
        await registry.renew("t", "s", 1)
    assert (await open_session(registry, "b")).token_ids == ()


async def test_a_repeated_append_succeeds_once(registry: Registry) -> None:
    await open_session(registry)
    await registry.append("t", "s", 1, 0, [1, 2])
    await registry.append("t", "s", 1, 0, [1, 2])
    await registry.append("t", "s", 1, 2, [3])
    await registry.append("t", "s", 1, 0, [1, 2])
    assert (await open_session(registry)).token_ids == (1, 2, 3)


@pytest.mark.parametrize(
    ("offset", "token_ids"),
    [
        pytest.param(3, [9], id="beyond the end"),
        pytest.param(0, [1, 3], id="other tokens"),
        pytest.param(1, [2, 3], id="repeats the last token and goes on"),
        pytest.param(1, [1], id="tokens of another offset"),
    ],
)
async def test_an_append_elsewhere_than_at_the_end_is_refused(
    registry: Registry, offset: int, token_ids: list[int]
) -> None:
    await open_session(registry)
    await registry.append("t", "s", 1, 0, [1, 2])
    with pytest.raises(OutOfSyncError, match=f"holds 2 tokens.*at {offset}"):
        await registry.append("t", "s", 1, offset, token_ids)
    assert (await open_session(registry)).token_ids == (1, 2)


async def test_an_ended_session_is_kept_for_its_time(registry: Registry, client: Redis) -> None:
    await open_session(registry)
    await registry.append("t", "s", 1, 0, [1])
    await registry.end("t", "s", 1, keep_ms=5000)
    await registry.end("t", "s", 1, keep_ms=5000)
    assert len(keys_of(client)) == 2
    assert all(0 < client.pttl(key) <= 5000 for key in keys_of(client))


async def test_a_session_that_is_not_kept_leaves_no_key(registry: Registry, client: Redis) -> None:
    await open_session(registry)
    await registry.append("t", "s", 1, 0, [1])
    await registry.end("t", "s", 1, keep_ms=0)
    await registry.end("t", "s", 1, keep_ms=0)
    assert keys_of(client) == []
    with pytest.raises(StaleError):
        await registry.append("t", "s", 1, 0, [1])
    assert keys_of(client) == []


async def test_deletion_returns_what_was_there(registry: Registry, client: Redis) -> None:
    assert await registry.delete_session("t", "s") is None
    await open_session(registry)
    await registry.append("t", "s", 1, 0, [1, 2])
    await registry.save("t", "s", 1, target=TARGET, draft=DRAFT, revision=4, round_number=2)
    with pytest.raises(SessionBusyError, match="'s'"):
        await registry.delete_session("t", "s")
    await registry.end("t", "s", 1, keep_ms=LEASE_MS)
    assert await registry.delete_session("t", "s") == SessionRecord("t", "s", 1, (1, 2), TARGET, DRAFT, 4, 2)
    assert keys_of(client) == []


async def test_a_crash_leaves_no_key_for_ever(registry: Registry, client: Redis) -> None:
    await open_session(registry)
    await registry.append("t", "s", 1, 0, [1])
    await registry.save("t", "s", 1, target=TARGET, draft=DRAFT, revision=1, round_number=1)
    expiries = [client.pttl(key) for key in keys_of(client)]
    assert len(expiries) == 2
    assert all(LEASE_MS < expiry < LEASE_MS + 3_600_000 for expiry in expiries)


async def test_tokens_without_a_record_belong_to_no_one(registry: Registry, client: Redis) -> None:
    await open_session(registry)
    await registry.append("t", "s", 1, 0, [1])
    client.delete(*client.keys("*:record"))
    assert (await open_session(registry)).token_ids == ()


@pytest.mark.parametrize(("tenant", "session_id"), [("t", "s"), ("", ""), ("a}{b", "}"), ("{", "é/{x}")])
async def test_all_keys_of_a_session_share_a_slot(
    registry: Registry, client: Redis, tenant: str, session_id: str
) -> None:
    record = await registry.open_session(tenant, session_id, "a", LEASE_MS)
    await registry.append(tenant, session_id, record.epoch, 0, [1])
    keys = keys_of(client)
    assert len(keys) == 2
    assert len({key_slot(key) for key in keys}) == 1


async def test_sessions_are_spread_over_slots(registry: Registry, client: Redis) -> None:
    for n in range(8):
        await registry.open_session("t", str(n), "a", LEASE_MS)
    assert len({key_slot(key) for key in keys_of(client)}) == 8


async def test_no_name_reaches_into_another_tenant(registry: Registry) -> None:
    await registry.open_session("a/b", "c", "x", LEASE_MS)
    assert (await registry.open_session("a", "b/c", "y", LEASE_MS)).epoch == 1
    assert (await registry.open_session("a%2Fb", "c", "z", LEASE_MS)).epoch == 1
