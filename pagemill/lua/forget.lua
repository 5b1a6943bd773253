-- with: ending
-- FORGET: drop all that is kept of a job that has ended.
--
-- KEYS[1]  base
-- Deletes
--   j:<id>, r:<id>, t:<id>, idem:<name>
-- ARGV
--   1 job id
-- Returns
--   the state that the job was in, or "" where there is no such job; one that has not ended is
--   left alone

local id = ARGV[1]
local v = redis.call('HMGET', key('j', id), 'st', 'idem')
if v[1] and TERMINAL[v[1]] then
  redis.call('DEL', key('j', id), key('r', id), key('t', id))
  if v[2] then
    redis.call('DEL', key('idem', v[2]))
  end
end
return v[1] or ''
