from __future__ import annotations

import pytest
from redis import Redis

from splitspec.errors import NotFoundError, OutOfSyncError, SessionBusyError, StaleError
from splitspec.registry import Registry, SessionRecord
from tests.registry.owner import CALLS, DRAFT, LEASE_MS, REQUEST, TARGET, call_as_owner, keys_of, open_session


@pytest.mark.parametrize("call", [*(call for call in CALLS if call != "restore"), "end and keep"])
async def test_a_session_that_redis_lost_is_not_found(registry: Registry, client: Redis, call: str) -> None:
    epoch = (await open_session(registry)).epoch
    client.flushall()
    with pytest.raises(NotFoundError, match=f"Redis has no session 's'.*{epoch}"):
        await call_as_owner(registry, call, epoch)
    assert keys_of(client) == []
    await registry.end("t", "s", epoch, keep_ms=0)


async def test_a_lost_session_is_restored(registry: Registry, client: Redis) -> None:
    epoch = (await open_session(registry)).epoch
    client.flushall()
    await registry.restore("t", "s", epoch, "a", LEASE_MS, [0, 2**32 - 1], 5)
    assert all(client.pttl(key) > LEASE_MS for key in keys_of(client))
    with pytest.raises(SessionBusyError):
        await open_session(registry, "b")
    await registry.append("t", "s", epoch, 2, [3])
    await registry.end("t", "s", epoch, keep_ms=LEASE_MS)
    record = await open_session(registry, "b")
    assert record == SessionRecord("t", "s", record.epoch, (0, 2**32 - 1, 3), round_number=5)
    assert record.epoch > epoch


async def test_a_repeated_restore_keeps_what_was_saved(registry: Registry, client: Redis) -> None:
    epoch = (await open_session(registry)).epoch
    client.flushall()
    await registry.restore("t", "s", epoch, "a", LEASE_MS, [1])
    await registry.save("t", "s", epoch, target=TARGET, draft=DRAFT, revision=4, round_number=2, length=1)
    await registry.save_request("t", "s", epoch, REQUEST)
    await registry.restore("t", "s", epoch, "a", LEASE_MS, [1])
    await registry.restore("t", "s", epoch, "a", LEASE_MS, [1, 2, 3])
    assert len(keys_of(client)) == 2
    assert all(client.pttl(key) > LEASE_MS for key in keys_of(client))
    record = await open_session(registry)
    assert record == SessionRecord("t", "s", record.epoch, (1, 2, 3), TARGET, DRAFT, 4, 2, REQUEST)


@pytest.mark.parametrize(
    "token_ids",
    [
        pytest.param([], id="none"),
        pytest.param([1], id="fewer"),
        pytest.param([1, 3], id="others"),
        pytest.param([2, 1, 2], id="others that are more"),
    ],
)
async def test_a_restore_takes_no_token_back(registry: Registry, token_ids: list[int]) -> None:
    epoch = (await open_session(registry)).epoch
    await registry.begin("t", "s", epoch, 0, [1, 2], 0, b"")
    with pytest.raises(OutOfSyncError, match=f"holds 2 tokens.* {len(token_ids)} to be restored"):
        await registry.restore("t", "s", epoch, "a", LEASE_MS, token_ids)
    assert (await open_session(registry)).token_ids == (1, 2)


async def test_a_restore_under_another_owner_or_epoch_is_stale(registry: Registry) -> None:
    first = (await open_session(registry, "a")).epoch
    second = (await open_session(registry, "a")).epoch
    for epoch, owner in ((second, "b"), (first, "a")):
        with pytest.raises(StaleError):
            await registry.restore("t", "s", epoch, owner, LEASE_MS, [1])
    assert (await open_session(registry, "a")).token_ids == ()


async def test_a_restore_drops_tokens_without_a_record(registry: Registry, client: Redis) -> None:
    epoch = (await open_session(registry)).epoch
    await registry.append("t", "s", epoch, 0, [7, 8, 9])
    client.delete(*client.keys("*:record"))
    await registry.restore("t", "s", epoch, "a", LEASE_MS, [1])
    assert (await open_session(registry)).token_ids == (1,)
