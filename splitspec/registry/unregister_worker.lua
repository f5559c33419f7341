-- Removes a worker from its directory.
-- KEYS: leases, addresses, descriptions. ARGV: worker id.
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
