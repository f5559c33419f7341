-- Put before every other script. Times are Redis TIME in milliseconds; all calls of one script see each
-- key either alive or expired throughout.

-- How long a crashed owner's session stays after its lease, for another coordinator to take it over.
local ABANDONED_MS = 600000

local function now_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

local function now_ms()
  return math.floor(now_us() / 1000)
end

-- The epoch that follows the one that a record holds, if any. The clock goes on where a record was deleted or
-- lost, so that none comes twice. Lua's own way to write a number keeps 14 digits, of 16.
local function newer_epoch(held)
  return string.format('%.0f', math.max((held or 0) + 1, now_us()))
end

-- The reply to a caller whose epoch isn't the owner's; nil when it may go on. An older record is what a server
-- has that lost its last writes: the caller's session isn't there.
local function refusal(record, epoch)
  local held = redis.call('HMGET', record, 'epoch', 'owner')
  if not held[1] or tonumber(held[1]) < tonumber(epoch) then
    return {'none'}
  end
  if held[1] ~= epoch or not held[2] then
    return {'stale', held[1]}
  end
  return nil
end

-- Milliseconds that the owner's lease still runs; 0 without an owner.
local function remaining_ms(record, now)
  return math.max(0, tonumber(redis.call('HGET', record, 'lease_end') or 0) - now)
end

-- One absolute time for both keys, so that neither outlives the other.
local function expire_at(record, journal, time)
  redis.call('PEXPIREAT', record, time)
  redis.call('PEXPIREAT', journal, time)
end

-- A full server refuses a script only at its first write, and only where that may take memory. Expiry comes
-- first here, so that a lease is renewed all the same.
local function renew(record, journal, now)
  local lease_end = now + redis.call('HGET', record, 'lease_ms')
  expire_at(record, journal, lease_end + ABANDONED_MS)
  redis.call('HSET', record, 'lease_end', lease_end)
end

-- Store the last round taken; it never falls.
local function raise_round(record, round)
  if tonumber(round) > tonumber(redis.call('HGET', record, 'round') or 0) then
    redis.call('HSET', record, 'round', round)
  end
end

local function snapshot(record, journal)
  local fields = redis.call('HMGET', record, 'epoch', 'target', 'draft', 'revision', 'round', 'request')
  fields[7] = redis.call('GET', journal)
  return fields
end
