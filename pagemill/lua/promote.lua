-- with: ending
-- PROMOTE: bring delayed jobs that came due back into their lanes.
--
-- KEYS[1]  base
-- Reads and writes
--   delayed             zset    due ms -> id
--   j:<id>              hash    state queued, its new entry
--   s:<lane>:!returned  stream
--   st, qt:<lane>, bell:<lane>
-- ARGV
--   1 most jobs
-- Returns
--   how many came due

local now = now_ms()
local due = redis.call('ZRANGEBYSCORE', key('delayed'), '-inf', whole(now), 'LIMIT', 0, ARGV[1])
for _, id in ipairs(due) do
  redis.call('ZREM', key('delayed'), id)
  if redis.call('HGET', key('j', id), 'st') == 'delayed' then
    hand_back(id, now)
  end
end
return #due
