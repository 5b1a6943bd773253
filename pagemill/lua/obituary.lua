-- with: ending, dead, suspects
-- OBITUARY: take all from a worker that is known to have died, and of what.
--
-- A lapse says nothing of its jobs: they go back as they are. After a crash they are suspects, as
-- one of them may have caused it; only a job that was alone is to blame, and the second time it
-- goes to the dead letters. No attempt and no lapse counts: innocents may be suspects many times.
--
-- KEYS[1]  base
-- Reads and writes
--   w:<worker>, hold:<worker>, workers, lock:suspects   what the worker had
--   turn:<worker>       string  a call that is still on its way claims nothing
--   pending             set     which streams to look at
--   the entries         acked and deleted
--   j:<id>              hash    state queued or suspect, crash, why
--   g:<group>, sus      list    the suspects
--   dead                stream  with the end of the job: r:<id>, d:<id>, ck:<id>, ev, deadlines
--   s:<lane>:!returned  stream
--   st, qt:<lane>, bell:<lane>
-- ARGV
--   1 worker id   2 "lapse" or "crash"   3 how it died   4 most entries
-- Returns
--   {more 0/1, jobs handed back or ended by a verdict, suspects, dead letters}

local worker, crashed, why, most = ARGV[1], ARGV[2] == 'crash', ARGV[3], tonumber(ARGV[4])
local now = now_ms()

redis.call('DEL', key('w', worker), key('hold', worker))
redis.call('ZREM', key('workers'), worker)
if redis.call('GET', key('lock', 'suspects')) == worker then
  redis.call('DEL', key('lock', 'suspects'))
end
redis.call('SET', key('turn', worker), whole(2 ^ 53), 'PX', 3600000)

local found = {}
for _, stream in ipairs(redis.call('SMEMBERS', key('pending'))) do
  if #found <= most then
    local mine = redis.pcall('XPENDING', stream, GROUP, '-', '+', most + 1 - #found, worker)
    for _, row in ipairs(mine.err and {} or mine) do
      found[#found + 1] = { stream, row[1] }
    end
  end
end
local more = #found > most
-- two stay at least: the last call must not take one that is left for a job that was alone
local num_taken = more and most - 1 or #found

local held = {}
for i = 1, num_taken do
  held[#held + 1] = take_entry(unpack(found[i]))
end

local alone = #held == 1 and not more
local suspects, dead = {}, 0

local function suspect(id)
  local crashes = alone and redis.call('HINCRBY', key('j', id), 'crash', 1) or 0
  if crashes >= 2 then
    bury(id, 'poison', 'poison', 'twice the job ran alone and its worker died, the second time by: ' .. why, worker, now)
    dead = 1
  else
    redis.call('HINCRBY', key('j', id), 'att', -1)
    redis.call('HSET', key('j', id), 'why', why)
    suspects[#suspects + 1] = id
  end
end

for _, id in ipairs(held) do
  if not crashed then
    redis.call('HINCRBY', key('j', id), 'att', -1)
    hand_back(id, now)
  elseif not ended_by_verdict(id, redis.call('HMGET', key('j', id), 'cancel', 'b', 'dl'), now) then
    suspect(id)
  end
end
if #suspects > 0 then
  split(suspects)
end
if #held > 0 then
  count('running', -#held)
  if not crashed then
    count('reclaimed', #held)
  end
end
return { more and 1 or 0, #held - #suspects - dead, #suspects, dead }
