-- Renews the owner's lease.
-- KEYS: record, journal. ARGV: epoch. Reply: {'ok'} | {'none'} | {'stale', epoch}.
local refused = refusal(KEYS[1], ARGV[1])
if refused then
  return refused
end
renew(KEYS[1], KEYS[2], now_ms())
return {'ok'}
