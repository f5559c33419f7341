-- Fails where nothing can be written: on a replica, or where the data can't be saved. KEYS: any key, none's.
redis.call('DEL', KEYS[1])
return {'ok'}
