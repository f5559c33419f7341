-- Stores what the next request of the session needs, and renews the lease.
-- KEYS: record, journal. ARGV: epoch, target, draft, revision, round.
-- Reply: {'ok'} | {'none'} | {'stale', epoch}.
local refused = refusal(KEYS[1], ARGV[1])
if refused then
  return refused
end
redis.call('HSET', KEYS[1], 'target', ARGV[2], 'draft', ARGV[3], 'revision', ARGV[4], 'round', ARGV[5])
renew(KEYS[1], KEYS[2], now_ms())
return {'ok'}
