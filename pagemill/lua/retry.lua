-- with: ending
-- RETRY: put a job off after a fault that may pass; one with a verdict ends instead.
--
-- KEYS[1]  base
-- Reads and writes
--   the entry   acked and deleted
--   j:<id>      hash  state delayed, the reason, and how often in a row it was put off for that kind of fault
--   delayed     zset  due ms -> id
--   b:<batch>   hash  read: is the job's batch cancelled
--   r:<id> and more   where it ends
--   st
-- ARGV
--   1 worker id   2 job id   3 stream   4 entry   5 delay ms   6 why   7 kind of fault
--   8 does the attempt count 0/1
-- Returns
--   "done" | "fenced" | "gone" | "duplicate"

local worker, id, stream, entry = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local job = key('j', id)
local v = redis.call('HMGET', job, 'st', 'e', 'own', 'rt', 'cancel', 'b', 'dl')
if not v[1] then
  return 'gone'
end
if not owned(v, entry, worker) then
  return (v[1] == 'delayed' or TERMINAL[v[1]]) and 'duplicate' or 'fenced'
end

local now = now_ms()
drop_entry(stream, entry)
count('running', -1)
if ended_by_verdict(id, { v[5], v[6], v[7] }, now) then
  return 'done'
end
local fault, times = string.match(v[4] or '', '^(%S+) (%d+)$')
times = fault == ARGV[7] and times + 1 or 1
redis.call('HSET', job, 'st', 'delayed', 'why', ARGV[6], 'own', '', 'e', '', 'rt', ARGV[7] .. ' ' .. whole(times))
if ARGV[8] == '0' then
  redis.call('HINCRBY', job, 'att', -1)
end
redis.call('ZADD', key('delayed'), whole(now + ARGV[5]), id)
count('retried', 1)
count('retried:' .. ARGV[7], 1)
return 'done'
