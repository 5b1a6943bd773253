-- How a job gets in; for the scripts whose first line asks for it. Their ARGV[1] is the most tokens
-- that may wait, and what they give for each job are the 17 arguments of submit.lua.

local FIELDS = 17

local limit = tonumber(ARGV[1])
local now = now_ms()
local accepted = whole(now)
local added = {}
-- jobs that join each batch
local joined = {}

-- Whatever a producer sends: a number that a later script cannot count with would stop the whole
-- queue, not just this job.
local function bounded(text, least, most)
  local number = tonumber(text)
  -- a few digits are as `whole` would write them, which costs more than all else here
  if number and number >= least and (text == '0' or string.find(text, '^[1-9]%d?%d?%d?%d?$')) then
    return text
  end
  -- NaN is not equal to itself
  if not number or number ~= number then
    number = least
  end
  return whole(math.max(least, math.min(number, most)))
end

local function given(text)
  return text ~= '' and text or nil
end

-- The job whose arguments begin at ARGV[i], with numbers that can be counted with. What is the rule is
-- left out: a short hash costs less to write and to keep.
local function read_job(i)
  local id, print, idem, payload, ref, lane, tenant, tokens, timeout, ttl, streams, seed, metadata, batch, version, reply, context =
    unpack(ARGV, i, i + FIELDS - 1)
  timeout, version = bounded(timeout, 0, 2 ^ 40), bounded(version, 1, 2 ^ 31)
  -- seeds have 63 bits: too many for a Lua number
  if not string.find(seed, '^%d+$') or #seed > 19 then
    seed = '0'
  end
  return {
    id = id, hash = key('j', id), print = print, payload = payload, lane = lane, tenant = tenant,
    tokens = bounded(tokens, 0, 2 ^ 40), ttl = bounded(ttl, 1, 2 ^ 32), seed = seed, idem = given(idem),
    ref = given(ref), dl = timeout ~= '0' and whole(now + timeout) or nil, stream = streams == '1' and '1' or nil,
    md = given(metadata), b = given(batch), v = version ~= '1' and version or nil, reply = given(reply),
    context = given(context),
  }
end

-- INFO costs more than a submit: one call a second looks, the others read what it saw
local function memory_full()
  local guard = redis.call('GET', key('guard'))
  if guard then
    return false
  end
  local info = redis.pcall('INFO', 'memory')
  local text = type(info) == 'string' and info or ''
  local used = tonumber(string.match(text, 'used_memory:(%d+)') or 0)
  local most = tonumber(string.match(text, 'maxmemory:(%d+)') or 0)
  if most > 0 and used > 0.8 * most then
    return true
  end
  redis.call('SET', key('guard'), 'ok', 'PX', 1000)
  return false
end

local full = memory_full()
local has_limits = redis.call('EXISTS', key('limits')) == 1

local function seen(first, first_print, print)
  if first_print ~= print then
    return { 'CONFLICT', first }
  end
  local v = redis.call('HMGET', key('j', first), 'st', 'ref')
  return { 'DUP', first, v[1] or 'queued', v[2] or '' }
end

-- jobs that are none: raw entries of these names were refused
local refused = {}

local function known(job)
  local first_print = redis.call('HGET', job.hash, 'fp')
  if first_print == '' then
    refused[job.hash] = true
  elseif first_print then
    return seen(job.id, first_print, job.print)
  end
  local record = job.idem and redis.call('GET', key('idem', job.idem))
  if record then
    local first
    first, first_print = string.match(record, '^(%S+) (%S+)$')
    return seen(first, first_print, job.print)
  end
  return nil
end

-- a batch that does not take this job
local function closed(batch)
  if not batch or joined[batch] then
    return nil
  end
  local v = redis.call('HMGET', key('b', batch), 'created', 'sealed')
  if v[1] and not v[2] then
    joined[batch] = 0
    return nil
  end
  return { v[1] and 'CLOSED' or 'NOBATCH', batch }
end

-- What waits under one limit, and what was refused for it: read once, then kept up.
local scopes = {}
local function scope(kind, name, most)
  local found = scopes[kind .. name]
  if found then
    return found
  end
  found = { why = kind, waiting = 0, refused = 0, most = most }
  if kind == 'tenant' then
    for _, lane in ipairs(LANES) do
      found.waiting = found.waiting + (redis.call('HGET', key('qt', lane), name) or 0)
    end
  else
    local sums = redis.call('HMGET', key('st'), 'queued_tokens:interactive', 'queued_tokens:standard',
      'queued_tokens:bulk')
    for i, lane in ipairs(LANES) do
      found.waiting = found.waiting + ((kind == 'tokens' or lane == name) and sums[i] or 0)
    end
  end
  scopes[kind .. name] = found
  return found
end

local function limit_of(kind, name)
  local own = redis.call('HGET', key('limits'), kind .. ':' .. name)
  if not own and kind == 'tenant' then
    own = redis.call('HGET', key('limits'), 'tenant:*')
  end
  return tonumber(own or 0) or 0
end

-- The limits that a job of this lane and tenant is under, the widest first; most calls ask for one
-- lane and tenant alone.
local last_lane, last_tenant, last_limits
local function limits_on(lane, tenant)
  if lane == last_lane and tenant == last_tenant then
    return last_limits
  end
  last_lane, last_tenant, last_limits = lane, tenant, limit > 0 and { scope('tokens', '', limit) } or {}
  for _, one in ipairs(has_limits and { { 'lane', lane }, { 'tenant', tenant } } or {}) do
    local most = limit_of(unpack(one))
    if most > 0 then
      last_limits[#last_limits + 1] = scope(one[1], one[2], most)
    end
  end
  return last_limits
end

-- How long until so many tokens will have left the queue, as fast as jobs end now: of all lanes, of
-- one, or a tenant's even share of its lane.
local function retry_ms(why, lane, tokens)
  local v = redis.call('HMGET', key('st'), 'drain:at', 'drain:from', 'drain:interactive', 'drain:standard',
    'drain:bulk')
  local ended = why == 'tokens' and (v[3] or 0) + (v[4] or 0) + (v[5] or 0)
    or tonumber(redis.call('HGET', key('st'), 'drain:' .. lane) or 0)
  ended = ended * faded(v[1] or now, now)
  local span = FADE_MS * (1 - faded(v[2] or now, now))
  local rate = ended / math.max(span, 1000)
  if why == 'tenant' then
    rate = rate / math.max(1, redis.call('ZCARD', key('ring', lane)))
  end
  return whole(math.max(100, math.min(tokens / rate, 60000)))
end

local function busy(lane, tenant, tokens)
  if full then
    return { 'BUSY', 'memory', '5000' }
  end
  for _, one in ipairs(limits_on(lane, tenant)) do
    -- a job above the limit by itself is taken when nothing else waits
    if one.waiting > 0 and one.waiting + tokens > one.most then
      one.refused = one.refused + tokens
      return { 'BUSY', one.why, retry_ms(one.why, lane, one.waiting + one.refused - one.most) }
    end
  end
  return nil
end

-- why a job is not to be added: a reply, or nil
local function refusal(job)
  return known(job) or closed(job.b) or busy(job.lane, job.tenant, job.tokens)
end

-- a tenant that wakes up starts at the lane's present, so that it cannot save up idle time
local function wake(lane, tenant)
  if not redis.call('ZSCORE', key('ring', lane), tenant) then
    local times = redis.call('HMGET', key('vt', lane), tenant, '!now')
    local start = math.max(tonumber(times[1] or 0), tonumber(times[2] or 0))
    redis.call('ZADD', key('ring', lane), vtime(start), tenant)
    redis.call('HDEL', key('vt', lane), tenant)
  end
end

-- its sums in this call; what is the first of its stream opens that
local function sum_of(job)
  local stream = base .. ':s:' .. job.lane .. ':' .. job.tenant
  local sum = added[stream]
  if not sum then
    open_stream(stream)
    wake(job.lane, job.tenant)
    sum = { job.lane, job.tenant, 0, 0, stream = stream }
    added[stream] = sum
  end
  return sum
end

-- fields that a job has or has not, under the same names in the hash
local OPTIONAL = { 'ref', 'dl', 'v', 'stream', 'md', 'b', 'idem', 'reply', 'context' }

local function write_hash(job, entry)
  local fields = { 'st', 'queued', 'e', entry, 'ln', job.lane, 'tn', job.tenant, 'tok', job.tokens, 'acc', accepted,
    'ttl', job.ttl, 'seed', job.seed, 'fp', job.print }
  local last = #fields
  for _, name in ipairs(OPTIONAL) do
    if job[name] then
      fields[last + 1], fields[last + 2] = name, job[name]
      last = last + 2
    end
  end
  redis.call('HSET', job.hash, unpack(fields))
end

local function join_batch(id, batch)
  redis.call('SADD', key('bj', batch), id)
  joined[batch] = joined[batch] + 1
end

local function take_name(id, print, idem)
  redis.call('SET', key('idem', idem), id .. ' ' .. print)
end

local function take_in(job)
  if refused[job.hash] then
    redis.call('DEL', job.hash, key('r', job.id))
  end
  local sum = sum_of(job)
  write_hash(job, redis.call('XADD', sum.stream, '*', 'j', job.id, 'tok', job.tokens))
  if not job.ref then
    -- apart from the hash, which stays small enough to be stored compactly
    redis.call('SET', key('d', job.id), job.payload)
  end
  if job.dl then
    redis.call('ZADD', key('deadlines'), job.dl, job.id)
  end
  if job.b then
    join_batch(job.id, job.b)
  end
  if job.idem then
    take_name(job.id, job.print, job.idem)
  end
  for _, one in ipairs(limits_on(job.lane, job.tenant)) do
    one.waiting = one.waiting + job.tokens
  end
  sum[3], sum[4] = sum[3] + 1, sum[4] + job.tokens
  return 1
end

-- once, after all jobs: what several of them change together
local function close_books()
  local num_added = 0
  for _, sum in pairs(added) do
    count_waiting(unpack(sum))
    ring_bell(sum[1])
    num_added = num_added + sum[3]
  end
  for batch, number in pairs(joined) do
    if number > 0 then
      redis.call('HINCRBY', key('b', batch), 'total', number)
      redis.call('PEXPIRE', key('b', batch), whole(BATCH_LIFE_MS))
      redis.call('PEXPIRE', key('bj', batch), whole(BATCH_LIFE_MS))
      redis.call('PEXPIRE', key('batches'), whole(NAMES_LIFE_MS))
    end
  end
  if num_added > 0 then
    count('accepted', num_added)
  end
end
