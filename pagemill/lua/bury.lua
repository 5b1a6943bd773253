-- with: ending, dead
-- BURY: give a job up: it ends as failed, and stays among the dead letters with its reason.
--
-- KEYS[1]  base
-- Reads and writes
--   the entry   acked and deleted
--   j:<id>      hash    terminal state; expires with the result
--   dead        stream  the job with its payload and its history
--   r:<id>, d:<id>, ck:<id>, t:<id>, idem:<name>, st, ev, deadlines: as every end of a job
-- ARGV
--   1 worker id   2 job id   3 stream   4 entry   5 why   6 message
-- Returns
--   "done" | "fenced" | "gone" | "duplicate"

local worker, id, stream, entry = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local v = redis.call('HMGET', key('j', id), 'st', 'e', 'own')
if not v[1] or TERMINAL[v[1]] then
  return v[1] and 'duplicate' or 'gone'
end
if not owned(v, entry, worker) then
  count('fenced', 1)
  return 'fenced'
end
drop_entry(stream, entry)
count('running', -1)
bury(id, ARGV[5], 'engine_error', ARGV[6], worker, now_ms())
return 'done'
