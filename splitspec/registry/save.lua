-- Stores what the next request of the session needs, and renews the lease.
-- KEYS: record, journal. ARGV: epoch, target, draft, revision, round, tokens that the journal holds.
-- Reply: {'ok'} | {'none'} | {'stale', epoch} | {'out_of_sync', journal length in tokens}.
local refused = refusal(KEYS[1], ARGV[1])
if refused then
  return refused
end
local length = redis.call('STRLEN', KEYS[2]) / 4
if length ~= tonumber(ARGV[6]) then
  return {'out_of_sync', length}
end
redis.call('HSET', KEYS[1], 'target', ARGV[2], 'draft', ARGV[3], 'revision', ARGV[4], 'round', ARGV[5])
renew(KEYS[1], KEYS[2], now_ms())
return {'ok'}
