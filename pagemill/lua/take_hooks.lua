-- TAKE_HOOKS: give out the webhooks that are due.
--
-- One that is given out is due again after a while: should its deliverer die, another one delivers
-- it, and the receiver may hear of an end twice.
--
-- KEYS[1]  base
-- Reads and writes
--   hooks       zset  due ms -> batch; those of batches that have expired leave it
--   b:<batch>   hash  hook_n: tries
-- ARGV
--   1 most hooks   2 ms after which one is due again
-- Returns
--   a list a hook: the batch, then the fields of its hash and their values by turns

local now = now_ms()
local taken = {}
-- what could not be noted would be sent again and again
write_although_full()
for _, batch in ipairs(redis.call('ZRANGEBYSCORE', key('hooks'), '-inf', whole(now), 'LIMIT', 0, ARGV[1])) do
  if redis.call('EXISTS', key('b', batch)) == 0 then
    redis.call('ZREM', key('hooks'), batch)
  else
    redis.call('ZADD', key('hooks'), whole(now + ARGV[2]), batch)
    redis.call('HINCRBY', key('b', batch), 'hook_n', 1)
    taken[#taken + 1] = { batch, unpack(redis.call('HGETALL', key('b', batch))) }
  end
end
return taken
