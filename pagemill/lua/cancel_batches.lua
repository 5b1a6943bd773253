-- with: ending
-- CANCEL_BATCHES: end the jobs of cancelled batches that wait, and ask for the end of those that run.
--
-- A call looks at one page of a batch's open jobs; the batch's hash says where the next one goes on.
-- Until then PULL ends what it meets, and RENEW tells the workers.
--
-- KEYS[1]  base
-- Reads and writes
--   b:<batch>    hash  cancel, sealed; scan: where the next page begins
--   bj:<batch>   set   its open jobs
--   cancelling   set   batches whose jobs have not all been looked at
--   j:<id>, r:<id>, st, ev and more: as CANCEL does for each job
-- ARGV
--   1 most jobs   2 a batch to cancel now, or ""
-- Returns
--   {how many ended, 1 where there is more to do, the batch's fields and their values by turns}

local most, asked = ARGV[1], ARGV[2]
local now = now_ms()

local function mark(batch)
  local hash, f = key('b', batch), read_batch(batch)
  if not f or f.ended or batch_cancelled(batch) then
    return
  end
  f.sealed = f.sealed or whole(now)
  redis.call('HSET', hash, 'cancel', '1', 'sealed', f.sealed)
  redis.call('SADD', key('cancelling'), batch)
  -- goes with its last member; a server without workers forgets it after the batches
  redis.call('PEXPIRE', key('cancelling'), whole(NAMES_LIFE_MS))
  advance_batch(batch, f, now)
end

local function cancel_job(id, batch)
  local v = redis.call('HMGET', key('j', id), 'st', 'ln', 'tok', 'tn')
  if v[1] == 'running' then
    redis.call('HSET', key('j', id), 'cancel', '1')
  elseif not v[1] or TERMINAL[v[1]] then
    -- nothing says any more how it ended; without this the batch would never end
    leave_batch(id, batch, v[1] or 'cancelled', now)
  else
    end_waiting(id, v, 'cancelled', now)
    return 1
  end
  return 0
end

local function cancel_page(batch)
  local hash, num_ended = key('b', batch), 0
  if redis.call('EXISTS', hash) == 0 then
    redis.call('SREM', key('cancelling'), batch)
    return 0
  end
  local page = redis.call('SSCAN', key('bj', batch), redis.call('HGET', hash, 'scan') or '0', 'COUNT', most)
  for _, id in ipairs(page[2]) do
    num_ended = num_ended + cancel_job(id, batch)
  end
  if page[1] == '0' then
    -- nothing joins a sealed batch: all that was open has been looked at
    redis.call('SREM', key('cancelling'), batch)
    redis.call('HDEL', hash, 'scan')
  else
    redis.call('HSET', hash, 'scan', page[1])
  end
  return num_ended
end

-- cancelled jobs give their payloads' memory back
write_although_full()
if asked ~= '' then
  mark(asked)
end
local batch = asked ~= '' and asked or redis.call('SRANDMEMBER', key('cancelling'))
local num_ended = batch and redis.call('SISMEMBER', key('cancelling'), batch) == 1 and cancel_page(batch) or 0
local more = redis.call('EXISTS', key('cancelling'))
return { num_ended, more, asked ~= '' and redis.call('HGETALL', key('b', asked)) or {} }
