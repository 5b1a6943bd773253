-- How a job becomes a dead letter; for the scripts whose first line asks for it, behind ending.

-- what a letter keeps of the job's hash, by the same names; REQUEUE makes the job anew from them
local KEPT = { 'att', 'crash', 'lapses', 'ln', 'tn', 'tok', 'ttl', 'seed', 'fp', 'ref', 'md', 'stream', 'idem', 'b',
  'v', 'reply', 'context' }

-- The job ends as failed, and is kept with its reason until somebody requeues or purges it. Its
-- entry has been dropped before.
--   code: of the failure in its result
local function bury(id, why, code, message, worker, now)
  local letter = { 'j', id, 'why', why, 'msg', message, 'at', whole(now), 'worker', worker }
  local function note(name, value)
    if value then
      letter[#letter + 1], letter[#letter + 2] = name, value
    end
  end
  for i, value in ipairs(redis.call('HMGET', key('j', id), unpack(KEPT))) do
    note(KEPT[i], value)
  end
  -- a deadline would be over: what is kept is how long the job was given
  local times = redis.call('HMGET', key('j', id), 'dl', 'acc')
  note('timeout', times[1] and whole(times[1] - times[2]))
  note('d', redis.call('GET', key('d', id)))
  redis.call('XADD', key('dead'), '*', unpack(letter))
  count('buried', 1)
  if code == 'poison' and result_version(redis.call('HGET', key('j', id), 'v')) < 2 then
    -- whoever wrote the job knows no such code
    code = 'engine_error'
  end
  settle_here(id, 'failed', now, '{"code":"' .. code .. '","message":' .. cjson.encode(message) .. '}')
end
