-- LOCK: be the fleet's one sweeper for a while.
--
-- KEYS[1]  base
-- Reads and writes
--   lock:sweep   string  the holder; expires, so that a dead sweeper blocks nobody
-- ARGV
--   1 worker id   2 how long ms
-- Returns
--   the server's time in ms when this worker holds it, else 0

local lock = key('lock', 'sweep')
local holder = redis.call('GET', lock)
if holder and holder ~= ARGV[1] then
  return 0
end
-- without a sweeper the jobs of dead workers would fill a full server for ever
write_although_full()
redis.call('SET', lock, ARGV[1], 'PX', ARGV[2])
return now_ms()
