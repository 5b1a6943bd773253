-- SURVEY: what the counters do not tell: who has waited for longest, and when deadlines fall due.
--
-- KEYS[1]  base
-- Reads
--   ring:<lane>        zset    who has something waiting: the next to be served, and the last
--   s:<lane>:<tenant>  stream  the first entry that no worker has got
--   j:<id>             hash    when that job was accepted
--   qt:<lane>          hash    read: has a tenant anything that waits
--   deadlines          zset    of all jobs that have not ended
-- ARGV
--   horizons in ms
-- Returns
--   {now, {a lane: when its oldest waiting job was accepted, or 0}, the nearest deadline or 0,
--   {a horizon: deadlines up to it, those that have passed too}}

-- of a lane; with more of them, those between are passed over
local MAX_TENANTS = 32
-- entries of jobs that ended while they waited are skipped, up to so many: what waits behind them came later
-- than the last of them, which stands for it
local MAX_ENTRIES = 4

local now = now_ms()

local function oldest_of(lane, tenant)
  local stream = key('s', lane, tenant)
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  if groups.err or not groups[1] then
    return 0
  end
  local read
  for i = 1, #groups[1], 2 do
    if groups[1][i] == 'last-delivered-id' then
      read = groups[1][i + 1]
    end
  end
  local entries = redis.call('XRANGE', stream, '(' .. read, '+', 'COUNT', MAX_ENTRIES)
  for _, entry in ipairs(entries) do
    local v = redis.call('HMGET', key('j', entry[2][2]), 'st', 'e', 'acc')
    if v[1] == 'queued' and v[2] == entry[1] then
      return tonumber(v[3])
    end
  end
  if #entries == MAX_ENTRIES and redis.call('HEXISTS', key('qt', lane), tenant) == 1 then
    return tonumber(string.match(entries[MAX_ENTRIES][1], '^%d+'))
  end
  return 0
end

local function oldest_in(lane)
  local ring, half = key('ring', lane), MAX_TENANTS / 2
  local tenants = { '!returned', unpack(redis.call('ZRANGE', ring, 0, half - 1)) }
  for _, tenant in ipairs(redis.call('ZRANGE', ring, math.max(half, redis.call('ZCARD', ring) - half), -1)) do
    tenants[#tenants + 1] = tenant
  end
  local oldest = 0
  for _, tenant in ipairs(tenants) do
    local accepted = oldest_of(lane, tenant)
    if accepted > 0 and (oldest == 0 or accepted < oldest) then
      oldest = accepted
    end
  end
  return oldest
end

local oldest, due = {}, {}
for i, lane in ipairs(LANES) do
  oldest[i] = oldest_in(lane)
end
for i, horizon in ipairs(ARGV) do
  due[i] = redis.call('ZCOUNT', key('deadlines'), '-inf', whole(now + horizon))
end
local nearest = redis.call('ZRANGE', key('deadlines'), 0, 0, 'WITHSCORES')
return { now, oldest, tonumber(nearest[2] or 0), due }
