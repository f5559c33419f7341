-- Gives a session a new owner under a newer epoch, unless another owner's lease still runs.
-- KEYS: record, journal. ARGV: owner, lease_ms, tokens that the journal should hold, epoch that the record should
-- have reached, epoch of a record that the caller has looked at and takes as it is ('' for none, 0 for no record).
-- Reply: {'ok', snapshot} | {'busy', remaining ms} | {'doubtful', snapshot, abandoned}: the journal holds fewer
-- tokens, or the record is an older one, or (1) the last owner's lease ended within a request; nothing was changed.
local record, journal = KEYS[1], KEYS[2]
local now = now_ms()
local held = redis.call('HMGET', record, 'epoch', 'owner', 'begun')
local another = held[2] and held[2] ~= ARGV[1]
local remaining = remaining_ms(record, now)
if remaining > 0 and another then
  return {'busy', remaining}
end
local abandoned = another and held[3] == held[1]
local length = held[1] and redis.call('STRLEN', journal) / 4 or 0
local lost = length < tonumber(ARGV[3]) or tonumber(held[1] or 0) < tonumber(ARGV[4])
if (abandoned or lost) and (held[1] or '0') ~= ARGV[5] then
  return {'doubtful', snapshot(record, journal), abandoned and 1 or 0}
end
redis.call('HSET', record, 'epoch', newer_epoch(held[1]), 'owner', ARGV[1], 'lease_ms', ARGV[2])
redis.call('HDEL', record, 'closed')
if not held[1] then
  -- A server that evicts may have dropped the record alone: tokens without a record belong to no one.
  redis.call('DEL', journal)
end
renew(record, journal, now)
return {'ok', snapshot(record, journal)}
