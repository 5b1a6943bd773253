-- HEARTBEAT: say that this worker lives, and how it is.
--
-- KEYS[1]  base
-- Reads and writes
--   w:<worker>   hash  the fields; expires after one lease
--   workers      zset  last seen ms -> worker
--   lock:suspects  string  goes on where this worker isolates
-- ARGV
--   1 worker id   2 lease ms   then two a field: name, value
-- Returns
--   {the server's time in ms, its run id}: another id after a restart or a failover, "" where INFO
--   is refused

local now = now_ms()
local me = key('w', ARGV[1])
-- else the fleet would take the workers of a full server for dead
write_although_full()
redis.call('HSET', me, 'seen', whole(now))
for i = 3, #ARGV, 2 do
  redis.call('HSET', me, ARGV[i], ARGV[i + 1])
end
redis.call('PEXPIRE', me, ARGV[2])
redis.call('ZADD', key('workers'), whole(now), ARGV[1])
if redis.call('GET', key('lock', 'suspects')) == ARGV[1] then
  redis.call('PEXPIRE', key('lock', 'suspects'), ARGV[2])
end

local info = redis.pcall('INFO', 'server')
return { whole(now), type(info) == 'string' and string.match(info, 'run_id:(%w+)') or '' }
