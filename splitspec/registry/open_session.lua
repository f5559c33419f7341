-- Gives a session a new owner under a newer epoch, unless another owner's lease still runs.
-- KEYS: record, journal. ARGV: owner, lease_ms.
-- Reply: {'ok', snapshot} | {'busy', remaining ms}.
local record, journal = KEYS[1], KEYS[2]
local now = now_ms()
local held = redis.call('HMGET', record, 'epoch', 'owner')
local remaining = remaining_ms(record, now)
if remaining > 0 and held[2] ~= ARGV[1] then
  return {'busy', remaining}
end
-- The clock goes on where a record was deleted or lost, so that no epoch comes twice. Lua's own way to write
-- a number keeps 14 digits, of 16.
local epoch = string.format('%.0f', math.max((held[1] or 0) + 1, now_us()))
redis.call('HSET', record, 'epoch', epoch, 'owner', ARGV[1], 'lease_ms', ARGV[2])
if not held[1] then
  -- A server that evicts may have dropped the record alone: tokens without a record belong to no one.
  redis.call('DEL', journal)
end
renew(record, journal, now)
return {'ok', snapshot(record, journal)}
