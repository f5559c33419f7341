-- Deletes a session on which no request runs. A newer epoch than any that it had stays for a while, also where
-- Redis has lost the session: whoever remembers it can tell that it was deleted and not lost, and its last owner
-- can't write it again.
-- KEYS: record, journal. ARGV: how long in ms. Reply: {'ok', snapshot} | {'none'} | {'busy', remaining ms}.
local record, journal = KEYS[1], KEYS[2]
local remaining = remaining_ms(record, now_ms())
if remaining > 0 then
  return {'busy', remaining}
end
local held = redis.call('HMGET', record, 'epoch', 'closed')
if held[2] then
  return {'none'}
end
local fields = snapshot(record, journal)
redis.call('DEL', record, journal)
redis.call('HSET', record, 'epoch', newer_epoch(held[1]), 'closed', 1)
redis.call('PEXPIRE', record, ARGV[1])
return held[1] and {'ok', fields} or {'none'}
