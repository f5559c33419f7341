-- Deletes a session on which no request runs.
-- KEYS: record, journal. Reply: {'ok', snapshot} | {'none'} | {'busy', remaining ms}.
local record, journal = KEYS[1], KEYS[2]
local remaining = remaining_ms(record, now_ms())
if remaining > 0 then
  return {'busy', remaining}
end
if redis.call('EXISTS', record) == 0 then
  return {'none'}
end
local fields = snapshot(record, journal)
redis.call('DEL', record, journal)
return {'ok', fields}
