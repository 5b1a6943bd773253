-- How entries leave a worker and how jobs end; for the scripts whose first line asks for it.

local TERMINAL = { done = true, failed = true, cancelled = true, expired = true }

-- The fence. The hash is written with every claim and every way back, in the same script, so it
-- says what the pending list says at a third of the price; and who claims the entry behind our
-- back gains nothing by it.
--   v: the job's st, e and own
local function owned(v, entry, worker)
  return v[1] == 'running' and v[2] == entry and v[3] == worker
end

local function drop_entry(stream, entry)
  redis.call('XACK', stream, GROUP, entry)
  redis.call('XDEL', stream, entry)
end

-- Drop an entry that its worker is not to have any more, and return the job that it still was; nil where
-- that has ended, or went on by another entry, which a failover can forget.
local function take_entry(stream, entry)
  local body = redis.call('XRANGE', stream, entry, entry)[1]
  drop_entry(stream, entry)
  local id = body and body[2][2]
  local v = id and redis.call('HMGET', key('j', id), 'st', 'e') or {}
  return v[1] == 'running' and v[2] == entry and id or nil
end

-- Tell whoever waits for it, once: what names the reply and its context goes from the hash.
--   field: "j" of a job, "b" of a batch
local function reply(hash, field, id, status)
  local v = redis.call('HMGET', hash, 'reply', 'context')
  redis.call('XADD', key('reply', v[1]), '*', field, id, 'st', status, 'context', v[2] or '')
  redis.call('HDEL', hash, 'reply', 'context')
end

local function announce(batch, word, total, ended)
  redis.call('XADD', key('ev'), 'MAXLEN', '~', '100000', '*', 'b', batch, 'st', word, 'total', total, 'ended', ended)
  redis.call('PUBLISH', key('chb', batch), word)
end

-- what an end of a job reads of its batch, in one go
local BATCH_FIELDS = { 'total', 'done', 'failed', 'cancelled', 'expired', 'prompt_tokens', 'completion_tokens',
  'gpu_ms', 'sealed', 'ended', 'pct', 'ttl', 'hook', 'seen', 'reply', 'pace', 'pace_at', 'pace_from' }

local function read_batch(batch)
  local v, f = redis.call('HMGET', key('b', batch), unpack(BATCH_FIELDS)), {}
  for i, name in ipairs(BATCH_FIELDS) do
    f[name] = v[i]
  end
  -- it may have expired
  return f.total and f
end

local function end_batch(batch, f, now)
  local hash, life = key('b', batch), f.ttl * 1000
  redis.call('HSET', hash, 'ended', whole(now), 'pct', '100')
  redis.call('DEL', key('bj', batch))
  redis.call('SREM', key('cancelling'), batch)
  if f.hook then
    redis.call('HSET', hash, 'hook_st', 'pending')
    redis.call('ZADD', key('hooks'), whole(now), batch)
    redis.call('PEXPIRE', key('hooks'), whole(2 * HOOK_LIFE_MS))
    -- an hour more, to tell that it went wrong
    life = math.max(life, HOOK_LIFE_MS + 3600000)
  end
  if f.reply then
    reply(hash, 'b', batch, 'ended')
  end
  redis.call('PEXPIRE', hash, whole(life))
end

-- Note how far a batch is: an event for each percent, and one when a sealed batch has no open job left.
local function advance_batch(batch, f, now)
  local hash = key('b', batch)
  local total, ended = tonumber(f.total), f.done + f.failed + f.cancelled + f.expired
  local percent = total > 0 and math.floor(100 * ended / total) or 0
  if f.ended then
    return
  elseif f.sealed and ended >= total then
    end_batch(batch, f, now)
    return announce(batch, 'ended', whole(total), whole(ended))
  elseif percent > tonumber(f.pct) then
    redis.call('HSET', hash, 'pct', whole(percent))
    announce(batch, 'progress', whole(total), whole(ended))
  end
  -- not with each of its jobs: that it lives is written down once an hour
  if now - (f.seen or 0) > 3600000 then
    redis.call('HSET', hash, 'seen', whole(now))
    redis.call('PEXPIRE', hash, whole(BATCH_LIFE_MS))
    redis.call('PEXPIRE', key('bj', batch), whole(BATCH_LIFE_MS))
  end
end

-- Count a job's end in its batch. Its place among the open jobs is the guard: it is counted once,
-- and a batch that has expired is not made anew.
local function leave_batch(id, batch, status, now, usage)
  local f = redis.call('SREM', key('bj', batch), id) == 1 and read_batch(batch)
  if not f then
    return
  end
  f[status] = f[status] + 1
  -- one write instead of seven: nobody comes in between. The pace is how many ended lately, as a sum that
  -- fades; after a long silence it begins anew. batches.py reads from it when the batch will end.
  local at = tonumber(f.pace_at or 0)
  local from = now - at < 5 * PACE_MS and f.pace_from or whole(now)
  local counts = { status, whole(f[status]), 'pace', vtime((f.pace or 0) * faded(at, now, PACE_MS) + 1),
    'pace_at', whole(now), 'pace_from', from }
  for i, name in ipairs({ 'prompt_tokens', 'completion_tokens', 'gpu_ms' }) do
    if usage and usage[i] ~= '0' then
      counts[#counts + 1], counts[#counts + 2] = name, whole(f[name] + usage[i])
    end
  end
  redis.call('HSET', key('b', batch), unpack(counts))
  advance_batch(batch, f, now)
end

-- asked once for each batch in a call
local verdict_of = {}
local function batch_cancelled(batch)
  if verdict_of[batch] == nil then
    verdict_of[batch] = redis.call('HEXISTS', key('b', batch), 'cancel') == 1
  end
  return verdict_of[batch]
end

-- The one place where a job ends. The entry has been dropped before, or is skipped later.
--   f: the job's ttl, and its dl, stream, idem, batch and reply where it has them; usage, where it ran:
--   prompt tokens, completion tokens, GPU ms
local function settle(id, status, result, now, f)
  local job, life = key('j', id), f.ttl * 1000
  redis.call('SET', key('r', id), result, 'PX', whole(life))
  if f.usage then
    redis.call('HSET', job, 'st', status, 'end', whole(now), 'pt', f.usage[1], 'ct', f.usage[2], 'gpu', f.usage[3])
  else
    redis.call('HSET', job, 'st', status, 'end', whole(now))
  end
  redis.call('PEXPIRE', job, whole(life))
  redis.call('DEL', key('d', id), key('ck', id))
  if f.stream then
    redis.call('XADD', key('t', id), '*', 'end', status)
    redis.call('PEXPIRE', key('t', id), whole(life))
  end
  if f.idem then
    redis.call('PEXPIRE', key('idem', f.idem), whole(life))
  end
  if f.dl then
    redis.call('ZREM', key('deadlines'), id)
  end
  count(status, 1)
  redis.call('XADD', key('ev'), 'MAXLEN', '~', '100000', '*', 'j', id, 'st', status)
  redis.call('PUBLISH', key('ch', id), status)
  if f.reply then
    reply(job, 'j', id, status)
  end
  if f.batch then
    leave_batch(id, f.batch, status, now, f.usage)
  end
end

-- nobody needs the object any more; scripts cannot reach the store: a worker that sweeps deletes it
local function orphan(ref)
  redis.call('RPUSH', key('orphans'), ref)
  redis.call('LTRIM', key('orphans'), -10000, -1)
  redis.call('PEXPIRE', key('orphans'), 604800000)
end

-- The version of a result that is made here: the job's, or the latest that we know (versions.py).
local function result_version(v)
  return math.max(1, math.min(tonumber(v or 1), 2))
end

-- settle a job that no worker answers for
--   failure: of a dead letter, as JSON; the letter keeps the payload
local function settle_here(id, status, now, failure)
  local v = redis.call('HMGET', key('j', id), 'ttl', 'dl', 'stream', 'idem', 'md', 'att', 'acc', 'run', 'ref', 'b', 'v',
    'reply')
  local is_kept = failure ~= nil
  failure = failure or 'null'
  if status == 'expired' then
    failure = '{"code":"deadline_passed","message":"the deadline passed before a worker had answered the job"}'
  end
  -- ids have no character that JSON escapes, md is JSON: no need to encode anything
  local result = '{"version":' .. result_version(v[11]) .. ',"job_id":"' .. id .. '","status":"' .. status .. '","failure":' .. failure
    .. ',"attempt":' .. (v[6] or 0) .. ',"accepted_ms":' .. v[7] .. ',"started_ms":' .. (v[8] or 0)
    .. ',"metadata":' .. (v[5] or '{}') .. '}'
  if status == 'cancelled' then
    count('cancelled:waiting', 1)
  end
  settle(id, status, result, now, { ttl = v[1], dl = v[2], stream = v[3], idem = v[4], batch = v[10], reply = v[12] })
  if v[9] and not is_kept then
    orphan(v[9])
  end
end

-- End a job that waits; its entry, where it has one, stays and is skipped at delivery (expire.lua
-- says why).
--   v: the job's st, ln, tok and tn
local function end_waiting(id, v, status, now)
  if v[1] == 'queued' then
    count_waiting(v[2], v[4], -1, -v[3])
  elseif v[1] == 'suspect' then
    -- its group may stay behind in `sus` without members: TAKE_SUSPECTS passes it over
    redis.call('LREM', key('g', redis.call('HGET', key('j', id), 'g')), 1, id)
    count('suspects', -1)
  else
    redis.call('ZREM', key('delayed'), id)
  end
  settle_here(id, status, now)
end

-- what a job that leaves a worker has to hear: it ends here instead of waiting again
--   v: the job's cancel, b and dl
local function ended_by_verdict(id, v, now)
  local cancelled = v[1] or (v[2] and batch_cancelled(v[2]))
  if not cancelled and not (v[3] and tonumber(v[3]) <= now) then
    return false
  end
  settle_here(id, cancelled and 'cancelled' or 'expired', now)
  return true
end

-- a suspect waits in its group and in no lane, for a worker that runs nothing beside it; a group
-- waits from its first member on
local function join_group(id, group)
  redis.call('HSET', key('j', id), 'st', 'suspect', 'g', group, 'e', '', 'own', '')
  if redis.call('RPUSH', key('g', group), id) == 1 then
    redis.call('RPUSH', key('sus'), group)
  end
  count('suspects', 1)
  -- the bell that workers hear who have nothing to do
  ring_bell('bulk')
end

-- back into its lane, before all that never ran; a job with a verdict ends instead, and a suspect
-- goes back to its group
local function hand_back(id, now)
  local job = key('j', id)
  local v = redis.call('HMGET', job, 'cancel', 'b', 'dl', 'g', 'ln', 'tok', 'tn')
  if ended_by_verdict(id, v, now) then
    return
  end
  if v[4] then
    return join_group(id, v[4])
  end
  local stream = key('s', v[5], '!returned')
  open_stream(stream)
  local entry = redis.call('XADD', stream, '*', 'j', id, 'tok', v[6])
  redis.call('HSET', job, 'st', 'queued', 'e', entry, 'own', '')
  count_waiting(v[5], v[7], 1, v[6])
  ring_bell(v[5])
end
