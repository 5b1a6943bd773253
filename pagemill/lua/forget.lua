-- with: ending
-- FORGET: drop all that is kept of a job that has ended.
--
-- KEYS[1]  base
-- Deletes
--   j:<id>, r:<id>, t:<id>, idem:<name>
-- ARGV
--   1 job id
-- Returns
--   {"", ""} where there is no such job, else {its state, its result or ""}; a job that has
--   not ended is left alone

local id = ARGV[1]
local v = redis.call('HMGET', key('j', id), 'st', 'idem')
if not v[1] then
  return { '', '' }
end
if not TERMINAL[v[1]] then
  return { v[1], '' }
end
local result = redis.call('GET', key('r', id)) or ''
redis.call('DEL', key('j', id), key('r', id), key('t', id))
if v[2] ~= '' then
  redis.call('DEL', key('idem', v[2]))
end
return { v[1], result }
