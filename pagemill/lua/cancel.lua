-- with: ending
-- CANCEL: end a job that waits, ask for the end of one that runs.
--
-- KEYS[1]  base
-- Reads and writes
--   j:<id>    hash  the state; cancel=1 where it runs
--   delayed   zset  a cancelled job leaves it
--   g:<group> list  a cancelled suspect leaves it
--   r:<id>, st, qt:<lane>, ev: as every end of a job, where it waited
-- ARGV
--   1 job id
-- Returns
--   the state after the call, or "" where there is no such job; "running" ends at the
--   worker's next RENEW, and a terminal state stays as it is

local id = ARGV[1]
local job = key('j', id)
local v = redis.call('HMGET', job, 'st', 'ln', 'tok', 'tn')
if not v[1] then
  return ''
end
-- a cancelled job gives its payload's memory back
write_although_full()
if v[1] == 'running' then
  redis.call('HSET', job, 'cancel', '1')
elseif not TERMINAL[v[1]] then
  end_waiting(id, v, 'cancelled', now_ms())
  return 'cancelled'
end
return v[1]
