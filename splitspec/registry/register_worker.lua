-- Enters a worker in its directory, or renews its lease.
-- KEYS: leases, addresses, descriptions. ARGV: worker id, address, description, lease_ms.
-- A full server lets what follows a removal pass: its workers stay in the directory.
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[1], now_ms() + ARGV[4], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[3], ARGV[1], ARGV[3])
-- The directory ends with its last lease.
local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')[2]
for _, key in ipairs(KEYS) do
  redis.call('PEXPIREAT', key, last)
end
