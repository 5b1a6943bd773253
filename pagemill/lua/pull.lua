-- with: ending, claim
-- PULL: claim the jobs that fit, and nothing else.
--
-- KEYS[1]  base
-- Reads and writes
--   s:<lane>:!returned  stream  what came back; first within its lane
--   s:<lane>:<tenant>   stream  what never ran
--   ring:<lane>, vt:<lane>      virtual time of the tenants
--   tenants             hash    <tenant>:weight, set by the operator; 1 where it is not
--   hold:<worker>       string  a job that this worker saves its budget for, and since when
--   turn:<worker>       string  read: a call of an earlier turn was given up, and claims nothing
--   j:<id>, d:<id>      hash, string  the job: state, owner, attempt; its payload
--   b:<batch>           hash    read: is the job's batch cancelled
--   r:<id> and more             where a claimed entry turns out to be cancelled or expired
--   pending             set     streams with entries in workers' hands
-- ARGV
--   1 worker id   2 most jobs   3 most tokens   4 tokens that one job counts at most, 0 for no limit
--   5 lease ms    6 most entries to look at   7 turn
-- Returns
--   {again 0/1, job, job, ...}: again where another call may claim more at once; a job is
--   {id, lane, tenant, stream, entry, attempt, payload, ref, tokens, seed, accepted ms, started ms,
--   deadline ms, ttl s, stream 0/1, checkpoint, checkpoint meta, lapses, faults}

local worker = ARGV[1]
local seats, budget = tonumber(ARGV[2]), tonumber(ARGV[3])
local cap, lease, looks = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local MAX_TENANTS = 8

if tonumber(redis.call('GET', key('turn', worker)) or 0) > tonumber(ARGV[7]) then
  return { 0 }
end
-- without pulls a full server would stay full
write_although_full()

local now = now_ms()
-- again: there is more to look at; behind: something that another worker could take stays here
local jobs, again, behind, stopped = {}, 0, false, false
local left = {}

local function forget_queued(lane, tokens)
  local sum = left[lane] or { 0, 0 }
  left[lane] = { sum[1] + 1, sum[2] + tokens }
end

-- undelivered entries from the head of a stream: claimed in the same script, so it stays true
local function peek(stream, most)
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  local last = nil
  if not groups.err then
    for _, group in ipairs(groups) do
      local fields = {}
      for i = 1, #group, 2 do
        fields[group[i]] = group[i + 1]
      end
      if fields['name'] == GROUP then
        last = fields['last-delivered-id']
      end
    end
  end
  if not last then
    if redis.call('SISMEMBER', key('streams'), stream) == 0 then
      return {}
    end
    -- a flush or a restore took the group away
    make_group(stream)
    last = '0-0'
  end
  return redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', most)
end

local function source(stream, lane, tenant, most)
  local entries = peek(stream, most)
  return { stream = stream, lane = lane, tenant = tenant, entries = entries, taken = 0, drained = #entries < most }
end

local function cost_of(fields)
  local tokens = tonumber(fields[4])
  return cap > 0 and math.min(tokens, cap) or tokens
end

local held_for, held_since = string.match(redis.call('GET', key('hold', worker)) or '', '^(%S+) (%d+)$')

-- Does a head that does not fit keep the rest waiting? For one lease it does, so that freed
-- budget adds up for it; for the next it does not, so that others are not held up by it. One
-- clock for all heads: with one each, several would hold up the others by turns for ever.
local function reserves(id)
  if not held_for then
    held_for, held_since = id, now
    redis.call('SET', key('hold', worker), id .. ' ' .. whole(now), 'PX', whole(2 * lease))
  end
  return now - held_since < lease
end

-- the job that was waited for has its place: the next large one gets its own lease
local function release_hold(id)
  if held_for == id then
    held_for = nil
    redis.call('DEL', key('hold', worker))
  end
end

-- the head of `from`, if it may be taken
local function try_take(from)
  local entry = from.entries[from.taken + 1]
  local cost = cost_of(entry[2])
  if cost > budget then
    behind = true
    if reserves(entry[2][2]) then
      stopped = true
    end
    return nil
  end
  release_hold(entry[2][2])
  from.taken = from.taken + 1
  seats, budget, looks = seats - 1, budget - cost, looks - 1
  return cost
end

local function admit(from, entry, fields)
  local id = fields[2]
  local job = key('j', id)
  local v = redis.call('HMGET', job, unpack(CLAIMED))
  if v[1] == 'running' and try_give_lease_back(id, from.stream, entry) then
    again = 1
    return
  end
  -- ended while it waited, or an older pointer that a failover brought back
  if not v[1] or v[1] ~= 'queued' or v[2] ~= entry then
    again = 1
    return drop_entry(from.stream, entry)
  end
  forget_queued(from.lane, fields[4])
  local cancelled = v[11] or (v[18] and batch_cancelled(v[18]))
  if cancelled or (v[7] and tonumber(v[7]) <= now) then
    again = 1
    drop_entry(from.stream, entry)
    return settle_here(id, cancelled and 'cancelled' or 'expired', now)
  end
  if not v[15] then
    -- once: a job that came back is not charged again, and FINISH gives back just this
    redis.call('HSET', job, 'cost', whole(cost_of(fields)))
  end
  jobs[#jobs + 1] = claimed(id, v, from.stream, entry, worker, now)
end

local function claim(from)
  if from.taken == 0 then
    return
  end
  local read = redis.call('XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', from.taken, 'STREAMS', from.stream, '>')
  redis.call('SADD', key('pending'), from.stream)
  for _, entry in ipairs(read[1][2]) do
    admit(from, entry[1], entry[2])
  end
end

local function serve_returned(lane)
  local most = math.min(seats, looks)
  local from = source(key('s', lane, '!returned'), lane, '', most)
  while not stopped and seats > 0 and from.taken < #from.entries do
    if not try_take(from) then
      break
    end
  end
  if from.taken == #from.entries and not from.drained then
    again, stopped = 1, true
  end
  claim(from)
end

local function tenants_of(lane)
  local flat = redis.call('ZRANGE', key('ring', lane), 0, MAX_TENANTS - 1, 'WITHSCORES')
  local found = {}
  local share = math.max(1, math.min(seats, math.floor(2 * looks / #flat)))
  for i = 1, #flat, 2 do
    local from = source(key('s', lane, flat[i]), lane, flat[i], share)
    from.vtime = tonumber(flat[i + 1])
    from.weight = tonumber(redis.call('HGET', key('tenants'), flat[i] .. ':weight') or 1)
    found[#found + 1] = from
  end
  return found
end

local function serve_tenants(lane)
  local all = tenants_of(lane)
  local open, served_at = { unpack(all) }, nil
  while not stopped and #open > 0 do
    local best = 1
    for i = 2, #open do
      if open[i].vtime < open[best].vtime then
        best = i
      end
    end
    local from = open[best]
    if from.taken == #from.entries then
      if not from.drained then
        -- what it has beyond comes before all others: they wait for the next call
        again, stopped = 1, true
      end
      table.remove(open, best)
    elseif seats == 0 or looks == 0 then
      again, stopped = 1, true
    else
      local start, cost = from.vtime, try_take(from)
      if cost then
        served_at = start
        from.vtime = start + cost / from.weight
      else
        table.remove(open, best)
      end
    end
  end
  for _, from in ipairs(all) do
    claim(from)
    if from.drained and from.taken == #from.entries then
      redis.call('ZREM', key('ring', lane), from.tenant)
      redis.call('HSET', key('vt', lane), from.tenant, whole(from.vtime))
    elseif from.taken > 0 then
      redis.call('ZADD', key('ring', lane), whole(from.vtime), from.tenant)
    end
  end
  if served_at then
    redis.call('HSET', key('vt', lane), '!now', whole(served_at))
  end
end

for _, lane in ipairs({ 'interactive', 'standard', 'bulk' }) do
  if not stopped and seats > 0 and looks > 0 then
    serve_returned(lane)
  end
  if not stopped and seats > 0 and looks > 0 then
    serve_tenants(lane)
  end
end

for lane, sum in pairs(left) do
  count('queued:' .. lane, -sum[1])
  count('queued_tokens:' .. lane, whole(-sum[2]))
end
if #jobs > 0 then
  count('running', #jobs)
  if behind or again == 1 or seats == 0 then
    ring_bell()
  end
end
return { again, unpack(jobs) }
