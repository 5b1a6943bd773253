-- LEASE: be the only one who does a thing, for a while; for programs beside the queue, as bulk runs.
--
-- KEYS[1]  base
-- Reads and writes
--   lease:<name>  string  the holder; expires, so that one who died blocks nobody for long
-- ARGV
--   1 name   2 who asks   3 for how long ms; 0 gives it back
-- Returns
--   {the holder after that, or "" where there is none; ms that it has left}

local lease = key('lease', ARGV[1])
local holder = redis.call('GET', lease)
if holder and holder ~= ARGV[2] then
  return { holder, redis.call('PTTL', lease) }
end
if ARGV[3] == '0' then
  redis.call('DEL', lease)
  return { '', 0 }
end
redis.call('SET', lease, ARGV[2], 'PX', ARGV[3])
return { ARGV[2], tonumber(ARGV[3]) }
