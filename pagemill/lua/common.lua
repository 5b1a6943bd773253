-- What all scripts share; scripts.py puts it before each of them.
--
-- Every script gets one key, the queue's base (keys.py): it carries the hash tag, so that all
-- the names built from it live in one slot. A value `stream` is a whole key, `job` a job's hash.
-- Time is the server's alone. Commands are those of Redis 6.2.

local base = KEYS[1]
local GROUP = 'workers'
-- the most urgent first
local LANES = { 'interactive', 'standard', 'bulk' }
-- how fast the queue drains is a sum that fades: what ended so long ago counts a third
local FADE_MS = 30000
-- as slowly for a batch, whose jobs may take minutes each
local PACE_MS = 300000
-- fields of the ring of minutes: an hour of them, and the running one; it is forgotten when nothing ends for long
local MINUTES, MINUTES_LIFE_MS = 64, 7200000
-- an open batch lives for 30 days after its last activity, the names of batches for a day more; a webhook
-- is tried for 3 days
local DAY_MS = 86400000
local BATCH_LIFE_MS, NAMES_LIFE_MS, HOOK_LIFE_MS = 30 * DAY_MS, 31 * DAY_MS, 3 * DAY_MS

local function key(kind, a, b)
  if b then
    return base .. ':' .. kind .. ':' .. a .. ':' .. b
  end
  return a and base .. ':' .. kind .. ':' .. a or base .. ':' .. kind
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function count(name, by)
  redis.call('HINCRBY', key('st'), name, by)
end

-- what is left at `now` of a sum from `at`; all of it where the clock was set back meanwhile: beyond that
-- it would grow without bound
local function faded(at, now, span)
  return math.exp(-math.max(0, now - at) / (span or FADE_MS))
end

-- a whole number as text: Lua would write a large one with an exponent, and zero as "-0"
local function whole(number)
  return string.format('%.0f', math.floor(number + 0.5))
end

-- a virtual time: a heavy tenant's small job moves it by less than 1
local function vtime(number)
  return string.format('%.3f', number)
end

-- what the operator set, if it can be counted with: a nonsense must not stop the queue
local function weight_of(tenant)
  local weight = tonumber(redis.call('HGET', key('tenants'), tenant .. ':weight') or 1)
  return weight and weight >= 0.001 and weight <= 1000 and weight or 1
end

-- A full server refuses a script's first write where it would grow, and none after it. What frees
-- memory in the end, or keeps the queue going, begins with this one, which never grows.
local function write_although_full()
  redis.call('DEL', base)
end

-- one push wakes one worker; who pulls and leaves something behind pushes again
local function ring_bell(lane)
  local bell = key('bell', lane)
  if redis.call('LLEN', bell) == 0 then
    redis.call('RPUSH', bell, '1')
    redis.call('PEXPIRE', bell, 60000)
  end
end

-- jobs that begin to wait in a lane, or, as negative numbers, cease to
local function count_waiting(lane, tenant, jobs, tokens)
  count('queued:' .. lane, jobs)
  count('queued_tokens:' .. lane, whole(tokens))
  if redis.call('HINCRBY', key('qt', lane), tenant, whole(tokens)) <= 0 then
    redis.call('HDEL', key('qt', lane), tenant)
  end
end

local function make_group(stream)
  -- from 0, not from the end: what was added before the group was lost is still delivered
  local made = redis.pcall('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
  if type(made) == 'table' and made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then
    error(made.err)
  end
end

local function open_stream(stream)
  if redis.call('SADD', key('streams'), stream) == 1 then
    make_group(stream)
  end
end
