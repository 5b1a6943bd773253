-- How a job gets in; for the scripts whose first line asks for it. Their ARGV[1] is the most tokens
-- that may wait, and what they give for each job are the 15 arguments of submit.lua.

local FIELDS = 15
local LANE, TENANT, TOKENS, TIMEOUT, TTL, SEED, BATCH, VERSION = 5, 6, 7, 8, 9, 11, 13, 14

local limit = tonumber(ARGV[1])
local now = now_ms()
local accepted = whole(now)
local added = {}
-- jobs that join each batch
local joined = {}

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

local function known(job, id, print, idem)
  local first_print = redis.call('HGET', job, 'fp')
  if first_print == '' then
    refused[job] = true
  elseif first_print then
    return seen(id, first_print, print)
  end
  local record = idem ~= '' and redis.call('GET', key('idem', idem))
  if record then
    local first
    first, first_print = string.match(record, '^(%S+) (%S+)$')
    return seen(first, first_print, print)
  end
  return nil
end

-- a batch that does not take this job
local function closed(batch)
  if batch == '' or joined[batch] then
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

local function refuse(lane, tenant, tokens)
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

-- a tenant that wakes up starts at the lane's present, so that it cannot save up idle time
local function wake(lane, tenant)
  if not redis.call('ZSCORE', key('ring', lane), tenant) then
    local times = redis.call('HMGET', key('vt', lane), tenant, '!now')
    local start = math.max(tonumber(times[1] or 0), tonumber(times[2] or 0))
    redis.call('ZADD', key('ring', lane), vtime(start), tenant)
    redis.call('HDEL', key('vt', lane), tenant)
  end
end

local function add(job, id, print, idem, payload, ref, lane, tenant, tokens, timeout, ttl, streams, seed, metadata,
  batch, version)
  if refused[job] then
    redis.call('DEL', job, key('r', id))
  end
  local stream = base .. ':s:' .. lane .. ':' .. tenant
  local sum = added[stream]
  if not sum then
    open_stream(stream)
    wake(lane, tenant)
    sum = { lane, tenant, 0, 0 }
    added[stream] = sum
  end
  local entry = redis.call('XADD', stream, '*', 'j', id, 'tok', tokens)
  redis.call('HSET', job, 'st', 'queued', 'e', entry, 'ln', lane, 'tn', tenant, 'tok', tokens, 'acc', accepted,
    'ttl', ttl, 'seed', seed, 'fp', print)
  if ref ~= '' then
    redis.call('HSET', job, 'ref', ref)
  else
    -- apart from the hash, which stays small enough to be stored compactly
    redis.call('SET', key('d', id), payload)
  end
  -- what is the rule is left out: a short hash costs less to write and to keep
  if timeout ~= '0' then
    local deadline = whole(now + timeout)
    redis.call('HSET', job, 'dl', deadline)
    redis.call('ZADD', key('deadlines'), deadline, id)
  end
  if version ~= '1' then
    redis.call('HSET', job, 'v', version)
  end
  if streams == '1' then
    redis.call('HSET', job, 'stream', '1')
  end
  if metadata ~= '' then
    redis.call('HSET', job, 'md', metadata)
  end
  if batch ~= '' then
    redis.call('HSET', job, 'b', batch)
    redis.call('SADD', key('bj', batch), id)
    joined[batch] = joined[batch] + 1
  end
  if idem ~= '' then
    redis.call('HSET', job, 'idem', idem)
    redis.call('SET', key('idem', idem), id .. ' ' .. print)
  end
  for _, one in ipairs(limits_on(lane, tenant)) do
    one.waiting = one.waiting + tokens
  end
  sum[3], sum[4] = sum[3] + 1, sum[4] + tokens
  return 1
end

-- Whatever a producer sends: a number that a later script cannot count with would stop the whole
-- queue, not just this job.
local function bounded(text, least, most)
  local number = tonumber(text)
  -- NaN is not equal to itself
  if not number or number ~= number then
    number = least
  end
  return whole(math.max(least, math.min(number, most)))
end

-- Why the job whose arguments begin at ARGV[i] is not to be added: a reply, or nil; writes nothing of
-- the job.
local function refusal(i)
  ARGV[i + TOKENS] = bounded(ARGV[i + TOKENS], 0, 2 ^ 40)
  ARGV[i + TIMEOUT] = bounded(ARGV[i + TIMEOUT], 0, 2 ^ 40)
  ARGV[i + TTL] = bounded(ARGV[i + TTL], 1, 2 ^ 32)
  ARGV[i + VERSION] = bounded(ARGV[i + VERSION], 1, 2 ^ 31)
  -- seeds have 63 bits: too many for a Lua number
  if not string.find(ARGV[i + SEED], '^%d+$') or #ARGV[i + SEED] > 19 then
    ARGV[i + SEED] = '0'
  end
  return known(key('j', ARGV[i]), ARGV[i], ARGV[i + 1], ARGV[i + 2]) or closed(ARGV[i + BATCH])
    or refuse(ARGV[i + LANE], ARGV[i + TENANT], tonumber(ARGV[i + TOKENS]))
end

local function take_in(i)
  return add(key('j', ARGV[i]), unpack(ARGV, i, i + FIELDS - 1))
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
