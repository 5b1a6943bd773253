-- with: ending
-- DISOWN: hand back what this worker owns without knowing.
--
-- A reply that was lost on its way leaves entries claimed and in nobody's hands; their owner's
-- heartbeat would keep them there for ever. The call itself may even arrive after this one, from
-- a connection that was closed: a new turn begins here, and PULL refuses calls of earlier ones.
--
-- KEYS[1]  base
-- Reads and writes
--   pending             set     which streams to look at
--   turn:<worker>       string  expires when no packet can be on its way any more
--   the entries, j:<id>, s:<lane>:!returned, st, qt:<lane>, bell:<lane>: as RELEASE
-- ARGV
--   1 worker id   2 new turn   then the entries it knows: "<stream> <entry>"
-- Returns
--   how many were handed back

local PAGE = 1000

local worker = ARGV[1]
local known = {}
for i = 3, #ARGV do
  known[ARGV[i]] = true
end

-- a worker that cannot begin a turn pulls no more, and a full server would stay full
write_although_full()
redis.call('SET', key('turn', worker), ARGV[2], 'PX', 3600000)

local now = now_ms()
local returned = 0

local function take_back(stream, entry)
  local id = take_entry(stream, entry)
  if id then
    redis.call('HINCRBY', key('j', id), 'att', -1)
    hand_back(id, now)
    returned = returned + 1
  end
end

for _, stream in ipairs(redis.call('SMEMBERS', key('pending'))) do
  -- to the last one: what a lost reply claimed is the newest, behind all that the worker knows
  local from = '-'
  while from do
    local mine = redis.pcall('XPENDING', stream, GROUP, from, '+', PAGE, worker)
    for _, row in ipairs(mine.err and {} or mine) do
      if not known[stream .. ' ' .. row[1]] then
        take_back(stream, row[1])
      end
    end
    from = #mine == PAGE and '(' .. mine[PAGE][1] or nil
  end
end
if returned > 0 then
  count('running', -returned)
  count('released', returned)
end
return returned
