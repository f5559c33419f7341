-- Writes a session that Redis lost again. A repeated call succeeds, and lengthens the journal to its tokens.
-- KEYS: record, journal. ARGV: epoch, owner, lease_ms, tokens (4 bytes each), last round number taken.
-- Reply: {'ok'} | {'stale', epoch} | {'out_of_sync', journal length in tokens}.
local record, journal, tokens = KEYS[1], KEYS[2], ARGV[4]
local held = redis.call('HMGET', record, 'epoch', 'owner', 'begun')
local same = held[1] == ARGV[1]
if held[1] and (tonumber(held[1]) > tonumber(ARGV[1]) or same and held[2] ~= ARGV[2]) then
  return {'stale', held[1]}
end
local begun = same and held[3] == ARGV[1]
if begun then
  local found = redis.call('GET', journal) or ''
  if found ~= tokens:sub(1, #found) then
    return {'out_of_sync', #found / 4}
  end
end
redis.call('HSET', record, 'epoch', ARGV[1], 'begun', ARGV[1], 'owner', ARGV[2], 'lease_ms', ARGV[3])
if not begun then
  -- Of an earlier request, whose text this one may have given up.
  redis.call('HDEL', record, 'target', 'draft', 'revision', 'request')
end
redis.call('SET', journal, tokens)
raise_round(record, ARGV[5])
renew(record, journal, now_ms())
return {'ok'}
