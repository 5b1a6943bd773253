-- with: ending, claim
-- TAKE_SUSPECTS: claim the jobs of one group, for a worker that holds nothing else.
--
-- One worker of the fleet isolates: each crash of it halves what is suspected, while the others go on.
--
-- KEYS[1]  base
-- Reads and writes
--   lock:suspects         string  the worker that isolates; RENEW and HEARTBEAT keep it
--   sus, g:<group>        list    the groups that wait, and their jobs
--   turn:<worker>         string  read: a call of an earlier turn was given up, and claims nothing
--   j:<id>, d:<id>        hash, string  the job: state, owner, attempt; its payload
--   s:<lane>:!suspects    stream  an entry for each, claimed at once
--   r:<id> and more               where a suspect turns out to be past its deadline
--   streams, pending, st
-- ARGV
--   1 worker id   2 lease ms   3 most jobs   4 turn
-- Returns
--   {again 0/1, job, job, ...} as PULL

local worker, most = ARGV[1], tonumber(ARGV[3])
local lock = key('lock', 'suspects')
local holder = redis.call('GET', lock)

if (holder and holder ~= worker) or tonumber(redis.call('GET', key('turn', worker)) or 0) > tonumber(ARGV[4]) then
  return { 0 }
end

local now = now_ms()
local num_waited = 0

-- entries in the streams of their lanes, read in the same script: nobody else ever sees them unread
local function claim(ids, group)
  local streams, jobs = {}, {}
  for _, id in ipairs(ids) do
    local v = redis.call('HMGET', key('j', id), 'st', 'g', 'ln', 'tok', 'cancel', 'b', 'dl')
    if v[1] == 'suspect' and v[2] == group then
      num_waited = num_waited + 1
      if not ended_by_verdict(id, { v[5], v[6], v[7] }, now) then
        local stream = key('s', v[3], '!suspects')
        streams[stream] = streams[stream] or {}
        streams[stream][redis.call('XADD', stream, '*', 'j', id, 'tok', v[4])] = id
      end
    end
  end
  for stream, mine in pairs(streams) do
    open_stream(stream)
    make_group(stream)
    redis.call('SADD', key('pending'), stream)
    -- a restore may have brought others back: their jobs wait elsewhere, or have ended
    local read = redis.call('XREADGROUP', 'GROUP', GROUP, worker, 'STREAMS', stream, '>')
    for _, entry in ipairs(read[1][2]) do
      local id = mine[entry[1]]
      if id then
        local v = redis.call('HMGET', key('j', id), unpack(CLAIMED))
        jobs[#jobs + 1] = claimed(id, v, stream, entry[1], worker, now)
      elseif not try_give_lease_back(entry[2][2], stream, entry[1]) then
        drop_entry(stream, entry[1])
      end
    end
  end
  return jobs
end

-- first: a full server refuses a first write that grows
redis.call('DEL', lock)
local group = redis.call('LINDEX', key('sus'), 0)
if not group then
  return { 0 }
end
local ids = redis.call('LPOP', key('g', group), most) or {}
if redis.call('EXISTS', key('g', group)) == 0 then
  redis.call('LPOP', key('sus'))
end
redis.call('SET', lock, worker, 'PX', ARGV[2])

local jobs = claim(ids, group)
count('suspects', whole(-num_waited))
count('running', #jobs)
-- all of them had ended: the next group
return { #jobs == 0 and 1 or 0, unpack(jobs) }
