-- with: ending, suspects
-- RECLAIM: take jobs back from workers that are gone; a lapse counts, not the attempt.
--
-- What became of the worker is not known here. The first time a job is lost like that it goes back
-- as it is; the second time it is a suspect, with the others that this worker has lost so often.
--
-- An entry is taken when it has been idle for a lease and its owner's heartbeat has run out.
-- After a restart, or a failover to a replica, every lease looks old, so nothing is taken before
-- this incarnation of the server was seen for one lease: the owners had no chance to renew.
--
-- A call can lie in the buffers of a server that is frozen: it comes to pass when that wakes, before
-- the owners' renewals perhaps. So nothing is taken either where the caller knew it in reach too long ago.
--
-- KEYS[1]  base
-- Reads and writes
--   pending             set     streams with entries in workers' hands; idle ones leave it
--   w:<worker>          hash    read: does the owner live
--   server              hash    run_id of the incarnation that was seen last, and since when
--   the entries         acked and deleted
--   j:<id>              hash    state queued or suspect, attempt taken back, one lapse more, why
--   g:<group>, sus      list    the suspects
--   s:<lane>:!returned  stream
--   st, qt:<lane>, bell:<lane>
-- ARGV
--   1 lease ms   2 most entries   3 cursor, "0" to begin with   4 the time of LOCK's reply
-- Returns
--   {next cursor, how many were taken back}

local lease, most = tonumber(ARGV[1]), tonumber(ARGV[2])
local now = now_ms()

local function info(section)
  local text = redis.pcall('INFO', section)
  return type(text) == 'string' and text or ''
end

-- whether the server was a replica once: its second id is that of the master whose place it took
local function was_promoted()
  return string.match(info('replication'), 'master_replid2:0*[1-9a-f]') ~= nil
end

-- since when this incarnation is seen; 0 where the server does not tell which it is
local function seen_since()
  local text = info('server')
  local run_id = string.match(text, 'run_id:(%w+)')
  if not run_id then
    return 0
  end
  local seen = redis.call('HMGET', key('server'), 'run_id', 'since')
  if seen[1] == run_id then
    return tonumber(seen[2])
  end
  -- a queue that is new here has no leases from before; a replica may not have heard that it was noted
  local fresh = not seen[1] and not was_promoted()
  local uptime = fresh and tonumber(string.match(text, 'uptime_in_seconds:(%d+)') or 0) or 0
  write_although_full()
  redis.call('HSET', key('server'), 'run_id', run_id, 'since', whole(now - 1000 * uptime))
  return now - 1000 * uptime
end

if now - seen_since() < lease or now - tonumber(ARGV[4]) > math.max(100, lease / 2) then
  return { '0', 0 }
end

local alive, taken = {}, 0
-- jobs that were lost again, by the worker that had them
local lost = {}

local function lives(worker)
  if alive[worker] == nil then
    alive[worker] = redis.call('EXISTS', key('w', worker)) == 1
  end
  return alive[worker]
end

local function suspect(ids, worker)
  local suspects = {}
  for _, id in ipairs(ids) do
    if not ended_by_verdict(id, redis.call('HMGET', key('j', id), 'cancel', 'b', 'dl'), now) then
      redis.call('HSET', key('j', id), 'why', 'it was lost with its worker again, now with ' .. worker)
      suspects[#suspects + 1] = id
    end
  end
  if #suspects > 0 then
    split(suspects)
  end
end

local function take_back(stream, entry, worker)
  local id = take_entry(stream, entry)
  if not id then
    return
  end
  redis.call('HINCRBY', key('j', id), 'att', -1)
  local lapses = redis.call('HINCRBY', key('j', id), 'lapses', 1)
  if lapses == 1 then
    hand_back(id, now)
  else
    lost[worker] = lost[worker] or {}
    table.insert(lost[worker], id)
  end
  taken = taken + 1
end

-- by owner: to look for idle ones among all that is pending takes long where that is much
local page = redis.call('SSCAN', key('pending'), ARGV[3], 'COUNT', 256)
for _, stream in ipairs(page[2]) do
  local summary = redis.pcall('XPENDING', stream, GROUP)
  if summary.err or summary[1] == 0 then
    redis.call('SREM', key('pending'), stream)
  end
  for _, owner in ipairs(not summary.err and summary[4] or {}) do
    if taken < most and not lives(owner[1]) then
      for _, row in ipairs(redis.call('XPENDING', stream, GROUP, 'IDLE', lease, '-', '+', most - taken, owner[1])) do
        take_back(stream, row[1], owner[1])
      end
    end
  end
end
for worker, ids in pairs(lost) do
  suspect(ids, worker)
end
if taken > 0 then
  count('running', -taken)
  count('reclaimed', taken)
end
return { page[1], taken }
