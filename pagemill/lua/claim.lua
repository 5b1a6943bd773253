-- How a job gets into a worker's hands; for the scripts whose first line asks for it.

-- what `claimed` reads of a job's hash
local CLAIMED = { 'st', 'e', 'tn', 'ref', 'seed', 'acc', 'dl', 'ttl', 'stream', 'att', 'cancel', 'ckm', 'run', 'lapses',
  'cost', 'ln', 'tok', 'b', 'rt', 'v' }

-- Note who has the job, and return it as calls.py reads it; its entry is the worker's already.
--   v: the values of CLAIMED
local function claimed(id, v, stream, entry, worker, now)
  local attempt = whole((v[10] or 0) + 1)
  local started = v[13] or whole(now)
  redis.call('HSET', key('j', id), 'st', 'running', 'e', entry, 'own', worker, 'att', attempt, 'run', started)
  return {
    id, v[16], v[3], stream, entry, attempt, not v[4] and redis.call('GET', key('d', id)) or '', v[4] or '',
    v[17], v[5], v[6], started, v[7] or '0', v[8], v[9] or '0', v[12] and redis.call('GET', key('ck', id)) or '',
    v[12] or '', v[14] or '0', v[19] or '', v[20] or '1',
  }
end

-- A group that was lost, and made anew, delivers again what workers hold: the lease goes back to
-- whom the job's hash names. False where the entry is no running job's.
local function try_give_lease_back(id, stream, entry)
  local v = redis.call('HMGET', key('j', id), 'st', 'e', 'own')
  if v[1] ~= 'running' or v[2] ~= entry then
    return false
  end
  redis.call('XCLAIM', stream, GROUP, v[3], 0, entry, 'JUSTID')
  return true
end
