-- with: ending
-- EXPIRE: end the jobs whose deadline passed while they waited.
--
-- A running job is left to its worker, which hears of it at the next RENEW. The entry of a
-- waiting one stays in its stream and is skipped at delivery: deleting an entry that nobody
-- has read makes the group's lag unknown, and autoscalers take that for an empty queue.
--
-- KEYS[1]  base
-- Reads and writes
--   deadlines   zset  deadline ms -> id
--   delayed     zset  an expired job leaves it
--   g:<group>   list  an expired suspect leaves it
--   j:<id>, r:<id>, st, qt:<lane>, ev: as every end of a job
-- ARGV
--   1 most jobs
-- Returns
--   how many ended

local now = now_ms()
local ended = 0
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('deadlines'), '-inf', whole(now), 'LIMIT', 0, ARGV[1])) do
  redis.call('ZREM', key('deadlines'), id)
  local v = redis.call('HMGET', key('j', id), 'st', 'ln', 'tok', 'tn')
  if v[1] == 'queued' or v[1] == 'delayed' or v[1] == 'suspect' then
    end_waiting(id, v, 'expired', now)
    ended = ended + 1
  end
end
return ended
