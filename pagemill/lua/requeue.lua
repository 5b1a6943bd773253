-- with: ending
-- REQUEUE: run a dead letter's job anew, by its own id.
--
-- It begins as if it had just been accepted, with its attempts at none and its deadline as far off
-- as it was then, and comes before what waits in its lane. Its batch, which has counted its end,
-- takes that back and waits for it again, unless the batch itself has ended or was cancelled.
--
-- A call whose reply was lost comes again and finds no letter: for an hour it is known what became of it.
--
-- KEYS[1]  base
-- Reads and writes
--   dead                stream  the letter goes
--   rq:<entry>          string  the job that the letter became; expires
--   j:<id>, d:<id>      hash, string  made anew
--   r:<id>, t:<id>      deleted
--   idem:<name>         string  stands for the job again, where no other took the name
--   deadlines           zset    where a job has one
--   b:<batch>, bj:<batch>  hash, set  where a job was one of a batch
--   s:<lane>:!returned  stream
--   st, qt:<lane>, bell:<lane>
-- ARGV
--   1 entry id
-- Returns
--   {"OK", job, payload ref} | {"DUP", job, its state, its payload ref} where it has been submitted again
--   or requeued meanwhile | {"GONE"} | {"GARBAGE"} where it never was a job, nor could have been one

local letter = redis.call('XRANGE', key('dead'), ARGV[1], ARGV[1])[1]
if not letter then
  local known = redis.call('GET', key('rq', ARGV[1]))
  if not known then
    return { 'GONE' }
  end
  local v = redis.call('HMGET', key('j', known), 'st', 'ref', 'fp')
  -- without a fingerprint it is the refusal still: the entry that was put back waits to be adopted
  return { 'DUP', known, v[3] ~= '' and v[1] or 'queued', v[2] or '' }
end
local f = {}
for i = 1, #letter[2], 2 do
  f[letter[2][i]] = letter[2][i + 1]
end
local id = f.j

local function take_letter()
  redis.call('XDEL', key('dead'), letter[1])
  redis.call('SET', key('rq', letter[1]), id, 'PX', 3600000)
end

if f.raw and f.entry then
  -- a newer worker may know it, or its batch is there now; its name stays
  take_letter()
  redis.call('XADD', key('in'), '*', 'd', f.raw, 'id', id)
  count('requeued', 1)
  return { 'OK', id, '' }
end
if not id or not f.ln or not (f.d or f.ref) then
  return { 'GARBAGE' }
end
local job = key('j', id)
local there = redis.call('HMGET', job, 'st', 'ref')
if there[1] and there[1] ~= 'failed' then
  return { 'DUP', id, there[1], there[2] or '' }
end

local function rejoin(batch)
  local v = redis.call('HMGET', key('b', batch), 'created', 'ended', 'cancel')
  if not v[1] or v[2] or v[3] then
    return
  end
  redis.call('HSET', job, 'b', batch)
  redis.call('HINCRBY', key('b', batch), 'failed', -1)
  redis.call('SADD', key('bj', batch), id)
  redis.call('PEXPIRE', key('b', batch), whole(BATCH_LIFE_MS))
  redis.call('PEXPIRE', key('bj', batch), whole(BATCH_LIFE_MS))
end

-- Where another job has taken the name, this one has none any more: what becomes of it is no matter of
-- the other's.
local function reclaim_name(name)
  local first = string.match(redis.call('GET', key('idem', name)) or '', '^(%S+) ')
  if not first or first == id then
    redis.call('SET', key('idem', name), id .. ' ' .. f.fp)
    redis.call('HSET', job, 'idem', name)
  end
end

local now = now_ms()
take_letter()
redis.call('DEL', job, key('r', id), key('t', id))
-- cost: nothing has been charged for this run, and a hand-back is served without
redis.call('HSET', job, 'st', 'queued', 'ln', f.ln, 'tn', f.tn, 'tok', f.tok, 'acc', whole(now), 'ttl', f.ttl,
  'seed', f.seed, 'fp', f.fp, 'cost', '0')
for _, name in ipairs({ 'ref', 'md', 'stream', 'v', 'reply', 'context' }) do
  if f[name] then
    redis.call('HSET', job, name, f[name])
  end
end
if f.idem then
  reclaim_name(f.idem)
end
if f.b then
  rejoin(f.b)
end
if f.d then
  redis.call('SET', key('d', id), f.d)
end
if f.timeout then
  local deadline = whole(now + f.timeout)
  redis.call('HSET', job, 'dl', deadline)
  redis.call('ZADD', key('deadlines'), deadline, id)
end
count('accepted', 1)
count('requeued', 1)
hand_back(id, now)
return { 'OK', id, f.ref or '' }
