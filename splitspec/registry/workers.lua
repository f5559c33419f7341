-- Reaps the workers whose lease has run out and lists the others.
-- KEYS: leases, addresses, descriptions. Reply: {worker id, address, description} for each, in order of id.
local now = now_ms()
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now)) do
  redis.call('HDEL', KEYS[2], id)
  redis.call('HDEL', KEYS[3], id)
end
-- A write each time: a replica must not answer, whose directory may be an old one.
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local ids = redis.call('ZRANGE', KEYS[1], 0, -1)
table.sort(ids)
local entries = {}
for i, id in ipairs(ids) do
  entries[i] = {id, redis.call('HGET', KEYS[2], id), redis.call('HGET', KEYS[3], id)}
end
return entries
