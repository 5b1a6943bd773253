-- with: ending
-- FINISH: publish the results of jobs that this worker still owns.
--
-- For each job, checks come first, then the entry goes, then all else is written: a server that
-- is out of memory refuses a script's first write when it would grow, and an ack never does.
--
-- KEYS[1]  base
-- Reads and writes
--   the entries        acked and deleted
--   j:<id>             hash    terminal state; expires with the result
--   r:<id>             string  the result, or its reference; expires
--   d:<id>, ck:<id>    string  deleted
--   t:<id>             stream  where the job streams: the end; expires
--   idem:<name>        string  expires with the result
--   ring:<lane>, vt:<lane>     the tenant pays for what it used, not for what PULL charged
--   streams            set     read: does COLLECT still keep the tenant
--   reply:<name>       stream  where the job asks for a reply
--   b:<batch>, bj:<batch>, hooks, channel chb:<batch>: where the job is one of a batch
--   minutes            hash    what ends in this minute
--   st, ev, deadlines, channel ch:<id>; st keeps how fast each lane drains too
-- ARGV
--   1 worker id; then eight a job: id, stream, entry, status, result, prompt tokens, completion tokens,
--   GPU ms
-- Returns
--   a word a job: "done" | "fenced" | "gone" | "duplicate"

local worker = ARGV[1]
local now = now_ms()
local fenced, ran, totals = 0, 0, { 0, 0, 0 }
local debts, drained = {}, {}

local function account(lane, tenant, estimated, charged, prompt, completion, gpu)
  ran = ran + 1
  totals[1], totals[2], totals[3] = totals[1] + prompt, totals[2] + completion, totals[3] + gpu
  local name = lane .. ' ' .. tenant
  local debt = debts[name] or { lane = lane, tenant = tenant, jobs = 0, used = 0, charged = 0, estimated = 0, gpu = 0 }
  debt.jobs, debt.used, debt.gpu = debt.jobs + 1, debt.used + prompt + completion, debt.gpu + gpu
  debt.charged, debt.estimated = debt.charged + charged, debt.estimated + estimated
  debts[name] = debt
  drained[lane] = (drained[lane] or 0) + estimated
end

-- In estimated tokens, as those that wait are counted in. Rates over `drain:from` to `drain:at`, what
-- is older fades: admission.lua reads them.
local function note_drain()
  local st = key('st')
  local v = redis.call('HMGET', st, 'drain:at', 'drain:from', 'drain:interactive', 'drain:standard', 'drain:bulk')
  local at = tonumber(v[1] or now)
  local fade = faded(at, now)
  -- after a long silence it begins anew
  local from = now - at < 5 * FADE_MS and whole(math.min(v[2] or now, now)) or whole(now)
  local fields = { 'drain:at', whole(now), 'drain:from', from }
  for i, lane in ipairs(LANES) do
    fields[#fields + 1] = 'drain:' .. lane
    fields[#fields + 1] = whole((v[i + 2] or 0) * fade + (drained[lane] or 0))
  end
  redis.call('HSET', st, unpack(fields))
end

-- For plots of the last hour. Each minute has a field of a ring; what stands there from an earlier hour is
-- begun anew. Jobs of one call count together: two commands a FINISH.
local function note_minute()
  local minute = math.floor(now / 60000)
  local minutes, field, name = key('minutes'), whole(minute % MINUTES), whole(minute)
  local at, jobs, prompt, completion =
    string.match(redis.call('HGET', minutes, field) or '', '^(%d+) (%d+) (%d+) (%d+)$')
  local is_new = at ~= name
  if is_new then
    jobs, prompt, completion = 0, 0, 0
  end
  redis.call('HSET', minutes, field, table.concat({ name, whole(jobs + ran), whole(prompt + totals[1]),
    whole(completion + totals[2]) }, ' '))
  if is_new then
    redis.call('PEXPIRE', minutes, whole(MINUTES_LIFE_MS))
  end
end

-- The tenant pays for what its jobs used, and PULL learns what its estimates are worth: of each sum a
-- 64th fades with every job.
local function true_up(debt)
  local vt, tenant = key('vt', debt.lane), debt.tenant
  local owed = vtime((debt.used - debt.charged) / weight_of(tenant))
  if not redis.call('ZADD', key('ring', debt.lane), 'XX', 'INCR', owed, tenant) then
    -- a tenant that COLLECT has forgotten begins anew: nobody would remove what is written of it now
    if redis.call('SISMEMBER', key('streams'), key('s', debt.lane, tenant)) == 0 then
      return
    end
    redis.call('HINCRBYFLOAT', vt, tenant, owed)
  end
  local sums = redis.call('HMGET', vt, tenant .. '!used', tenant .. '!est')
  local fade = (1 - 1 / 64) ^ debt.jobs
  redis.call('HSET', vt, tenant .. '!used', vtime((sums[1] or 0) * fade + debt.used), tenant .. '!est',
    vtime((sums[2] or 0) * fade + debt.estimated))
end

local function finish(id, stream, entry, status, result, prompt, completion, gpu)
  local v = redis.call('HMGET', key('j', id), 'st', 'e', 'own', 'ttl', 'dl', 'stream', 'idem', 'ln', 'tn', 'tok',
    'cost', 'b', 'reply')
  if not v[1] or TERMINAL[v[1]] then
    return v[1] and 'duplicate' or 'gone'
  end
  if not owned(v, entry, worker) then
    fenced = fenced + 1
    return 'fenced'
  end
  drop_entry(stream, entry)
  settle(id, status, result, now, { ttl = v[4], dl = v[5], stream = v[6], idem = v[7], batch = v[12],
    reply = v[13], usage = { prompt, completion, gpu } })
  account(v[8], v[9], v[10], v[11] or v[10], prompt, completion, gpu)
  return 'done'
end

local outcomes = {}
for i = 2, #ARGV, 8 do
  outcomes[#outcomes + 1] = finish(unpack(ARGV, i, i + 7))
end

if fenced > 0 then
  count('fenced', fenced)
end
if ran > 0 then
  count('running', -ran)
  count('prompt_tokens', whole(totals[1]))
  count('completion_tokens', whole(totals[2]))
  count('gpu_ms', whole(totals[3]))
  note_drain()
  note_minute()
end
for _, debt in pairs(debts) do
  count('tenant_tokens:' .. debt.tenant, whole(debt.used))
  count('tenant_gpu_ms:' .. debt.tenant, whole(debt.gpu))
  true_up(debt)
end
return outcomes
