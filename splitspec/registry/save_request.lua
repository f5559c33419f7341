-- Stores the session's last request, and renews the lease.
-- KEYS: record, journal. ARGV: epoch, request. Reply: {'ok'} | {'none'} | {'stale', epoch}.
local refused = refusal(KEYS[1], ARGV[1])
if refused then
  return refused
end
redis.call('HSET', KEYS[1], 'request', ARGV[2])
renew(KEYS[1], KEYS[2], now_ms())
return {'ok'}
