-- Puts a request's prompt behind the tokens that it keeps, in the place of what the journal had there, and
-- stores the request. Once under an epoch: a repeated call changes nothing.
-- KEYS: record, journal. ARGV: epoch, tokens kept, prompt's tokens (4 bytes each), last round number taken,
-- request ('' leaves the last one).
-- Reply: {'ok'} | {'none'} | {'stale', epoch} | {'out_of_sync', journal length in tokens}.
local record, journal = KEYS[1], KEYS[2]
local refused = refusal(record, ARGV[1])
if refused then
  return refused
end
if redis.call('HGET', record, 'begun') ~= ARGV[1] then
  local kept, length = ARGV[2] * 4, redis.call('STRLEN', journal)
  if kept > length then
    return {'out_of_sync', length / 4}
  end
  if kept < length then
    redis.call('SET', journal, kept > 0 and redis.call('GETRANGE', journal, 0, kept - 1) or '')
  end
  redis.call('APPEND', journal, ARGV[3])
  redis.call('HSET', record, 'begun', ARGV[1])
  if ARGV[5] ~= '' then
    redis.call('HSET', record, 'request', ARGV[5])
  end
end
raise_round(record, ARGV[4])
renew(record, journal, now_ms())
return {'ok'}
