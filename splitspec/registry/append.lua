-- Appends tokens where the journal ends; a repeated call finds its own tokens there and succeeds.
-- KEYS: record, journal. ARGV: epoch, offset in tokens, tokens (4 bytes each), last round number taken.
-- Reply: {'ok'} | {'none'} | {'stale', epoch} | {'out_of_sync', journal length in tokens}.
local record, journal = KEYS[1], KEYS[2]
local refused = refusal(record, ARGV[1])
if refused then
  return refused
end
local begun = redis.call('HGET', record, 'begun')
if begun and begun ~= ARGV[1] then
  return {'none'}  -- the server has lost how the request began: the journal is still the last one's
end
local start, tokens = ARGV[2] * 4, ARGV[3]
local length = redis.call('STRLEN', journal)
if start == length then
  redis.call('APPEND', journal, tokens)
elseif start + #tokens > length or redis.call('GETRANGE', journal, start, start + #tokens - 1) ~= tokens then
  return {'out_of_sync', length / 4}
end
raise_round(record, ARGV[4])
renew(record, journal, now_ms())
return {'ok'}
