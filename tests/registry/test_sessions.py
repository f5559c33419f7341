from __future__ import annotations

import pytest
from redis import Redis
from redis.crc import key_slot

from splitspec.errors import NotFoundError, OutOfSyncError, SessionBusyError, StaleError
from splitspec.registry import Registry, SessionRecord
from tests.registry.owner import DRAFT, LEASE_MS, REQUEST, TARGET, keys_of, open_session


async def test_the_next_owner_finds_what_the_last_one_left(registry: Registry) -> None:
    epoch = (await open_session(registry)).epoch
    await registry.append("t", "s", epoch, 0, [0, 7, 2**32 - 1])
    await registry.save("t", "s", epoch, target=TARGET, draft=DRAFT, revision=5, round_number=3, length=3)
    await registry.save_request("t", "s", epoch, REQUEST)
    await registry.append("t", "s", epoch, 3, [9])
    await registry.end("t", "s", epoch, keep_ms=LEASE_MS)
    record = await open_session(registry, "b")
    assert record.epoch > epoch
    assert record == SessionRecord(
        "t",
        "s",
        record.epoch,
        (0, 7, 2**32 - 1, 9),
        target=TARGET,
        draft=DRAFT,
        revision=5,
        round_number=3,
        request=REQUEST,
    )


async def test_a_request_is_kept_until_the_next_one(registry: Registry) -> None:
    epoch = (await open_session(registry)).epoch
    await registry.save_request("t", "s", epoch, b"first")
    epoch = (await open_session(registry)).epoch
    await registry.save("t", "s", epoch, target=TARGET, draft=DRAFT, revision=1, round_number=1, length=0)
    record = await open_session(registry)
    assert record.request == b"first"
    await registry.save_request("t", "s", record.epoch, b"second")
    await registry.save_request("t", "s", record.epoch, b"second")
    assert (await open_session(registry)).request == b"second"


async def test_a_request_begins_in_the_place_of_what_it_doesn_t_keep(registry: Registry) -> None:
    first = await open_session(registry)
    await registry.begin("t", "s", first.epoch, 0, [1, 2, 3], 1, b"first")
    await registry.append("t", "s", first.epoch, 3, [4, 5], 2)
    second = await open_session(registry)
    assert (second.token_ids, second.request) == ((1, 2, 3, 4, 5), b"first")
    await registry.begin("t", "s", second.epoch, 2, [7], 3, b"second")
    await registry.append("t", "s", second.epoch, 3, [8, 9], 4)
    await registry.begin("t", "s", second.epoch, 2, [7], 3, b"second")  # takes nothing of what came since
    third = await open_session(registry)
    assert (third.token_ids, third.request, third.round_number) == ((1, 2, 7, 8, 9), b"second", 4)
    await registry.begin("t", "s", third.epoch, 0, [6], 5, b"")
    fourth = await open_session(registry)
    assert (fourth.token_ids, fourth.request) == ((6,), b"second")
    with pytest.raises(OutOfSyncError, match="holds 1 tokens, expected at least 2"):
        await registry.begin("t", "s", fourth.epoch, 2, [7], 6, b"")


async def test_handles_can_be_unset(registry: Registry) -> None:
    epoch = (await open_session(registry)).epoch
    await registry.save("t", "s", epoch, target=TARGET, draft=DRAFT, revision=1, round_number=1, length=0)
    await registry.save("t", "s", epoch, target=TARGET, draft=None, revision=2, round_number=2, length=0)
    record = await open_session(registry)
    assert (record.target, record.draft) == (TARGET, None)


async def test_a_repeated_append_succeeds_once(registry: Registry) -> None:
    epoch = (await open_session(registry)).epoch
    await registry.append("t", "s", epoch, 0, [1, 2])
    await registry.append("t", "s", epoch, 0, [1, 2])
    await registry.append("t", "s", epoch, 2, [3])
    await registry.append("t", "s", epoch, 0, [1, 2])
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
    epoch = (await open_session(registry)).epoch
    await registry.append("t", "s", epoch, 0, [1, 2])
    with pytest.raises(OutOfSyncError, match=f"holds 2 tokens.*at {offset}"):
        await registry.append("t", "s", epoch, offset, token_ids)
    assert (await open_session(registry)).token_ids == (1, 2)


async def test_an_ended_session_is_kept_for_its_time(registry: Registry, client: Redis) -> None:
    epoch = (await open_session(registry)).epoch
    await registry.append("t", "s", epoch, 0, [1])
    await registry.end("t", "s", epoch, keep_ms=5000)
    await registry.end("t", "s", epoch, keep_ms=5000)
    assert len(keys_of(client)) == 2
    assert all(0 < client.pttl(key) <= 5000 for key in keys_of(client))


async def test_a_session_that_is_not_kept_leaves_no_key(registry: Registry, client: Redis) -> None:
    epoch = (await open_session(registry)).epoch
    await registry.append("t", "s", epoch, 0, [1])
    await registry.end("t", "s", epoch, keep_ms=0)
    await registry.end("t", "s", epoch, keep_ms=0)
    assert keys_of(client) == []
    with pytest.raises(NotFoundError):
        await registry.append("t", "s", epoch, 0, [1])
    assert keys_of(client) == []


async def test_deletion_returns_what_was_there(registry: Registry, client: Redis) -> None:
    assert await registry.delete_session("t", "s") is None
    epoch = (await open_session(registry)).epoch
    await registry.append("t", "s", epoch, 0, [1, 2])
    await registry.save("t", "s", epoch, target=TARGET, draft=DRAFT, revision=4, round_number=2, length=2)
    await registry.save_request("t", "s", epoch, REQUEST)
    with pytest.raises(SessionBusyError, match="'s'"):
        await registry.delete_session("t", "s")
    await registry.end("t", "s", epoch, keep_ms=LEASE_MS)
    assert await registry.delete_session("t", "s") == SessionRecord(
        "t", "s", epoch, (1, 2), TARGET, DRAFT, 4, 2, REQUEST
    )
    assert await registry.delete_session("t", "s", remember_ms=1) is None
    with pytest.raises(StaleError):
        await registry.restore("t", "s", epoch, "a", LEASE_MS, [1, 2, 3])


async def test_a_deletion_is_remembered_for_a_while(registry: Registry, client: Redis) -> None:
    epoch = (await open_session(registry)).epoch
    await registry.append("t", "s", epoch, 0, [1, 2])
    await registry.end("t", "s", epoch, keep_ms=LEASE_MS)
    await registry.delete_session("t", "s", remember_ms=LEASE_MS)
    (key,) = keys_of(client)
    assert 0 < client.pttl(key) <= LEASE_MS
    found: list[SessionRecord] = []
    opened = await registry.open_session("t", "s", "b", LEASE_MS, at_least=1, accept=found.append)
    assert [record.token_ids for record in found] == [()]
    assert epoch < found[0].epoch < opened.epoch
    assert (opened.token_ids, opened.request) == ((), b"")
    await registry.end("t", "s", opened.epoch, keep_ms=LEASE_MS)
    assert await registry.delete_session("t", "s") is not None


async def test_a_crash_leaves_no_key_for_ever(registry: Registry, client: Redis) -> None:
    epoch = (await open_session(registry)).epoch
    await registry.append("t", "s", epoch, 0, [1])
    await registry.save("t", "s", epoch, target=TARGET, draft=DRAFT, revision=1, round_number=1, length=1)
    expiries = [client.pttl(key) for key in keys_of(client)]
    assert len(expiries) == 2
    assert all(LEASE_MS < expiry < LEASE_MS + 3_600_000 for expiry in expiries)


async def test_tokens_without_a_record_belong_to_no_one(registry: Registry, client: Redis) -> None:
    epoch = (await open_session(registry)).epoch
    await registry.append("t", "s", epoch, 0, [1])
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
    epoch = (await registry.open_session("a/b", "c", "x", LEASE_MS)).epoch
    await registry.append("a/b", "c", epoch, 0, [1])
    assert (await registry.open_session("a", "b/c", "y", LEASE_MS)).token_ids == ()
    assert (await registry.open_session("a%2Fb", "c", "z", LEASE_MS)).token_ids == ()
