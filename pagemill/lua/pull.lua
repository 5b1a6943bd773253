-- with: ending, claim
-- PULL: claim the jobs that fit, and nothing else.
--
-- Each lane has a room of its own, and what a lane takes is taken from the rooms of the lanes behind
-- it too: urgent work may have what preemption would free, the others only what is free.
--
-- KEYS[1]  base
-- Reads and writes
--   s:<lane>:!returned  stream  what came back; first within its lane
--   s:<lane>:<tenant>   stream  what never ran
--   ring:<lane>, vt:<lane>      virtual time of the tenants
--   tenants             hash    <tenant>:weight, set by the operator; 1 where it is not
--   hold:<worker>       string  a job that this worker saves its room for, since when, its lane's rank
--   newest              string  read: does a worker of a later version live
--   turn:<worker>       string  read: a call of an earlier turn was given up, and claims nothing
--   j:<id>, d:<id>      hash, string  the job: state, owner, attempt; its payload
--   b:<batch>           hash    read: is the job's batch cancelled
--   r:<id> and more             where a claimed entry turns out to be cancelled or expired
--   pending             set     streams with entries in workers' hands
--   st, qt:<lane>       hash    what waits
--   bell:<lane>         list    rung where something stays behind
-- ARGV
--   1 worker id   2 tokens that one job counts at most, 0 for no limit   3 lease ms
--   4 most entries to look at   5 turn   6 the worker's version   then two a lane, the most urgent
--   first: most jobs, most tokens
-- Returns
--   {again 0/1, behind, job, job, ...}: again where another call may claim more at once; behind has a
--   bit a lane, the most urgent first, set where jobs wait that this call left; a job is
--   {id, lane, tenant, stream, entry, attempt, payload, ref, tokens, seed, accepted ms, started ms,
--   deadline ms, ttl s, stream 0/1, checkpoint, checkpoint meta, lapses, faults, version}

local worker = ARGV[1]
local cap, lease, looks = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local MAX_TENANTS = 8

if tonumber(redis.call('GET', key('turn', worker)) or 0) > tonumber(ARGV[5]) then
  return { 0, 0 }
end

local rooms = {}
for rank = 1, #LANES do
  rooms[rank] = { jobs = tonumber(ARGV[5 + 2 * rank]), tokens = tonumber(ARGV[6 + 2 * rank]) }
end
-- without pulls a full server would stay full
write_although_full()

local now = now_ms()
-- again: there is more to look at; stopped: nothing more is taken in this call
local jobs, again, stopped = {}, 0, false
-- left the queue: sums by lane and tenant; cleared: lanes in which nothing is left, by rank
local gone, cleared = {}, {}

local function forget_queued(lane, tenant, tokens)
  local name = lane .. ' ' .. tenant
  local sum = gone[name] or { lane, tenant, 0, 0 }
  sum[3], sum[4] = sum[3] - 1, sum[4] - tokens
  gone[name] = sum
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

local function source(rank, tenant, most)
  local lane = LANES[rank]
  local stream = key('s', lane, tenant)
  local entries = peek(stream, most)
  return {
    stream = stream, lane = lane, rank = rank, tenant = tenant, entries = entries, taken = 0,
    drained = #entries < most, ratio = 1,
  }
end

local function capped(tokens)
  return cap > 0 and math.min(tokens, cap) or tokens
end

-- what it takes of a room
local function cost_of(fields)
  return capped(tonumber(fields[4]))
end

-- What its tenant is charged until FINISH knows better: the estimate, corrected by what those of its
-- jobs that ended lately took. Without that, who estimates four times too much would pay four times
-- for all that runs.
local function charge_of(from, fields)
  return math.max(1, capped(fields[4] * from.ratio))
end

local held_for, held_since, held_rank =
  string.match(redis.call('GET', key('hold', worker)) or '', '^(%S+) (%d+) (%d)$')

-- A head that does not fit keeps the rest waiting: for one lease it does, so that freed room adds up
-- for it; for the next it does not, so that others are not held up by it. One clock for all heads:
-- with one each, several would hold up the others by turns for ever. But the clock of a less urgent
-- lane is none for a more urgent one.
local function hold_room(id, rank)
  if not held_for or rank < tonumber(held_rank) then
    held_for, held_since, held_rank = id, now, rank
    redis.call('SET', key('hold', worker), id .. ' ' .. whole(now) .. ' ' .. rank, 'PX', whole(2 * lease))
  end
end

local function holds_room()
  return now - held_since < lease
end

-- the job that was waited for has its place: the next large one gets its own lease
local function release_hold(id)
  if held_for == id then
    held_for = nil
    redis.call('DEL', key('hold', worker))
  end
end

-- A job of a later version is left to a worker that knows it, as long as one lives. Where none
-- does it is taken, and put off: what is behind it must not wait for ever.
local version = tonumber(ARGV[6])
local newest = tonumber(string.match(redis.call('GET', key('newest')) or '', '^%d+') or 0)
local function is_for_newer(id)
  return newest > version and tonumber(redis.call('HGET', key('j', id), 'v') or 1) > version
end

-- the fields of the head of `from`, if it may be taken
local function try_take(from)
  local entry = from.entries[from.taken + 1]
  if is_for_newer(entry[2][2]) then
    cleared[from.rank] = false
    return nil
  end
  local cost = cost_of(entry[2])
  if cost > rooms[from.rank].tokens then
    cleared[from.rank] = false
    hold_room(entry[2][2], from.rank)
    stopped = holds_room()
    return nil
  end
  release_hold(entry[2][2])
  from.taken, looks = from.taken + 1, looks - 1
  for rank = from.rank, #LANES do
    local room = rooms[rank]
    room.jobs, room.tokens = room.jobs - 1, room.tokens - cost
  end
  return entry[2]
end

-- true where the job is the worker's now
local function admit(from, entry, fields)
  local id = fields[2]
  local job = key('j', id)
  local v = redis.call('HMGET', job, unpack(CLAIMED))
  if v[1] == 'running' and try_give_lease_back(id, from.stream, entry) then
    again = 1
    return false
  end
  -- ended while it waited, or an older pointer that a failover brought back
  if not v[1] or v[1] ~= 'queued' or v[2] ~= entry then
    again = 1
    drop_entry(from.stream, entry)
    return false
  end
  forget_queued(from.lane, v[3], fields[4])
  local cancelled = v[11] or (v[18] and batch_cancelled(v[18]))
  if cancelled or (v[7] and tonumber(v[7]) <= now) then
    again = 1
    drop_entry(from.stream, entry)
    settle_here(id, cancelled and 'cancelled' or 'expired', now)
    return false
  end
  if not v[15] then
    -- once: a job that came back is not charged again, and FINISH gives back just this
    redis.call('HSET', job, 'cost', vtime(charge_of(from, fields)))
  end
  jobs[#jobs + 1] = claimed(id, v, from.stream, entry, worker, now)
  return true
end

local function claim(from)
  if from.taken == 0 then
    return
  end
  local read = redis.call('XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', from.taken, 'STREAMS', from.stream, '>')
  redis.call('SADD', key('pending'), from.stream)
  for _, entry in ipairs(read[1][2]) do
    if not admit(from, entry[1], entry[2]) and from.vtime then
      -- nothing of it runs: its tenant does not pay
      from.vtime = from.vtime - charge_of(from, entry[2]) / from.weight
    end
  end
end

local function has_room(rank)
  return rooms[rank].jobs > 0 and rooms[rank].tokens > 0
end

-- more of it comes before all others: they wait for the next call
local function stop_here(rank)
  cleared[rank], stopped = false, true
  if has_room(rank) then
    again = 1
  end
end

local function serve_returned(rank)
  local room = rooms[rank]
  local from = source(rank, '!returned', math.min(room.jobs, looks))
  while not stopped and room.jobs > 0 and from.taken < #from.entries do
    if not try_take(from) then
      break
    end
  end
  if from.taken == #from.entries and not from.drained then
    stop_here(rank)
  end
  claim(from)
end

local function ratio_of(lane, tenant)
  local sums = redis.call('HMGET', key('vt', lane), tenant .. '!used', tenant .. '!est')
  local ratio = sums[2] and sums[1] / math.max(1, sums[2]) or 1
  return math.min(ratio, 4)
end

local function tenants_of(rank)
  local flat = redis.call('ZRANGE', key('ring', LANES[rank]), 0, MAX_TENANTS - 1, 'WITHSCORES')
  local found = {}
  local share = math.max(1, math.min(rooms[rank].jobs, math.floor(2 * looks / #flat)))
  for i = 1, #flat, 2 do
    local from = source(rank, flat[i], share)
    from.vtime = tonumber(flat[i + 1])
    from.weight, from.ratio = weight_of(flat[i]), ratio_of(LANES[rank], flat[i])
    found[#found + 1] = from
  end
  return found
end

-- the smallest virtual time is served next
local function serve_by_turns(rank, open)
  local served_at = nil
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
        stop_here(rank)
      end
      table.remove(open, best)
    elseif rooms[rank].jobs <= 0 or looks == 0 then
      stop_here(rank)
    else
      local start, fields = from.vtime, try_take(from)
      if fields then
        served_at = start
        from.vtime = start + charge_of(from, fields) / from.weight
      else
        table.remove(open, best)
      end
    end
  end
  return served_at
end

local function serve_tenants(rank)
  local lane, all = LANES[rank], tenants_of(rank)
  local served_at = serve_by_turns(rank, { unpack(all) })
  local num_left = 0
  for _, from in ipairs(all) do
    claim(from)
    if from.drained and from.taken == #from.entries then
      redis.call('ZREM', key('ring', lane), from.tenant)
      redis.call('HSET', key('vt', lane), from.tenant, vtime(from.vtime))
      num_left = num_left + 1
    elseif from.taken > 0 then
      redis.call('ZADD', key('ring', lane), vtime(from.vtime), from.tenant)
    end
  end
  if served_at then
    redis.call('HSET', key('vt', lane), '!now', vtime(served_at))
  end
  if #all == MAX_TENANTS then
    -- there may be more of them; they are looked at when one of these has made place
    cleared[rank] = false
    if num_left > 0 and not stopped then
      again = 1
    end
  end
end

local function serve(rank)
  cleared[rank] = true
  for _, part in ipairs({ serve_returned, serve_tenants }) do
    if stopped or looks == 0 or not has_room(rank) then
      cleared[rank] = false
      if looks == 0 and has_room(rank) then
        again = 1
      end
      return
    end
    part(rank)
  end
end

for rank = 1, #LANES do
  serve(rank)
end
for _, sum in pairs(gone) do
  count_waiting(unpack(sum))
end
if #jobs > 0 then
  count('running', #jobs)
end

-- a ring wakes one worker, and was perhaps meant for what we leave: another one may have room
local behind = 0
for rank, lane in ipairs(LANES) do
  if not cleared[rank] and tonumber(redis.call('HGET', key('st'), 'queued:' .. lane) or 0) > 0 then
    behind = behind + 2 ^ (rank - 1)
    ring_bell(lane)
  end
end
return { again, behind, unpack(jobs) }
