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
--   b:<batch>, bj:<batch>, hooks, channel chb:<batch>: where the job is one of a batch
--   st, ev, deadlines, channel ch:<id>
-- ARGV
--   1 worker id; then eight a job: id, stream, entry, status, result, prompt tokens, completion tokens,
--   GPU ms
-- Returns
--   a word a job: "done" | "fenced" | "gone" | "duplicate"

local worker = ARGV[1]
local now = now_ms()
local fenced, ran, totals = 0, 0, { 0, 0, 0 }
local debts = {}

local function account(lane, tenant, charged, prompt, completion, gpu)
  ran = ran + 1
  totals[1], totals[2], totals[3] = totals[1] + prompt, totals[2] + completion, totals[3] + gpu
  local name = lane .. ' ' .. tenant
  local debt = debts[name] or { lane, tenant, 0, 0, 0 }
  debt[3], debt[4], debt[5] = debt[3] + prompt + completion, debt[4] + charged, debt[5] + gpu
  debts[name] = debt
end

local function finish(id, stream, entry, status, result, prompt, completion, gpu)
  local v = redis.call('HMGET', key('j', id), 'st', 'e', 'own', 'ttl', 'dl', 'stream', 'idem', 'ln', 'tn', 'tok',
    'cost', 'b')
  if not v[1] or TERMINAL[v[1]] then
    return v[1] and 'duplicate' or 'gone'
  end
  if not owned(v, entry, worker) then
    fenced = fenced + 1
    return 'fenced'
  end
  drop_entry(stream, entry)
  settle(id, status, result, now, { ttl = v[4], dl = v[5], stream = v[6], idem = v[7], batch = v[12],
    usage = { prompt, completion, gpu } })
  account(v[8], v[9], v[11] or v[10], prompt, completion, gpu)
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
end
for _, debt in pairs(debts) do
  local lane, tenant, used, charged, gpu = unpack(debt)
  count('tenant_tokens:' .. tenant, whole(used))
  count('tenant_gpu_ms:' .. tenant, whole(gpu))
  local weight = tonumber(redis.call('HGET', key('tenants'), tenant .. ':weight') or 1)
  local owed = whole((used - charged) / weight)
  if not redis.call('ZADD', key('ring', lane), 'XX', 'INCR', owed, tenant) then
    redis.call('HINCRBY', key('vt', lane), tenant, owed)
  end
end
return outcomes
