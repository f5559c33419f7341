-- Gives up ownership; keeps record and journal for a while, or deletes them. A repeated call succeeds.
-- KEYS: record, journal. ARGV: epoch, keep_ms. Reply: {'ok'} | {'none'} | {'stale', epoch}.
local record, journal, keep_ms = KEYS[1], KEYS[2], tonumber(ARGV[2])
local epoch = redis.call('HGET', record, 'epoch')
if epoch and tonumber(epoch) > tonumber(ARGV[1]) then
  return {'stale', epoch}
end
if epoch ~= ARGV[1] and keep_ms > 0 then
  return {'none'}
end
if keep_ms > 0 then
  redis.call('HDEL', record, 'owner', 'lease_end')
  expire_at(record, journal, now_ms() + keep_ms)
else
  redis.call('DEL', record, journal)
end
return {'ok'}
