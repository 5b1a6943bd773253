-- HEARTBEAT: say that this worker lives, and how it is.
--
-- KEYS[1]  base
-- Reads and writes
--   w:<worker>   hash  the fields; expires after one lease
--   workers      zset  last seen ms -> worker
--   newest       string  "<version> <worker>" of the newest that lives; expires after one lease
--   lock:suspects  string  goes on where this worker isolates
-- ARGV
--   1 worker id   2 lease ms   3 its version   then two a field: name, value
-- Returns
--   {the server's time in ms, its run id}: another id after a restart or a failover, "" where INFO
--   is refused

local now = now_ms()
local me = key('w', ARGV[1])
-- else the fleet would take the workers of a full server for dead
write_although_full()
redis.call('HSET', me, 'seen', whole(now), 'version', ARGV[3])
for i = 4, #ARGV, 2 do
  redis.call('HSET', me, ARGV[i], ARGV[i + 1])
end
redis.call('PEXPIRE', me, ARGV[2])
redis.call('ZADD', key('workers'), whole(now), ARGV[1])
local newest = string.match(redis.call('GET', key('newest')) or '', '^%d+')
if tonumber(ARGV[3]) >= tonumber(newest or 0) then
  redis.call('SET', key('newest'), ARGV[3] .. ' ' .. ARGV[1], 'PX', ARGV[2])
end
if redis.call('GET', key('lock', 'suspects')) == ARGV[1] then
  redis.call('PEXPIRE', key('lock', 'suspects'), ARGV[2])
end

local info = redis.pcall('INFO', 'server')
return { whole(now), type(info) == 'string' and string.match(info, 'run_id:(%w+)') or '' }
