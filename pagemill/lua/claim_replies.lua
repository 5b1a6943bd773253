-- CLAIM_REPLIES: take over the replies that readers have had for too long, and forget those readers.
--
-- KEYS[1]  base
-- Reads and writes
--   reply:<name>  stream  made where it is not there, with its group; what is idle becomes this reader's
-- ARGV
--   1 name   2 reader   3 most replies   4 ms after which one may be taken over   5 ms after which a reader
--   that holds none is forgotten
-- Returns
--   a list a reply: its entry, its fields and their values by turns

local stream, reader, idle_ms = key('reply', ARGV[1]), ARGV[2], ARGV[4]
local taken = {}
make_group(stream)
for _, row in ipairs(redis.call('XPENDING', stream, GROUP, 'IDLE', idle_ms, '-', '+', ARGV[3])) do
  local claimed = redis.call('XCLAIM', stream, GROUP, reader, 0, row[1])[1]
  if claimed then
    taken[#taken + 1] = { claimed[1], unpack(claimed[2]) }
  else
    -- deleted behind our back: 6.2 keeps it pending
    redis.call('XACK', stream, GROUP, row[1])
  end
end
-- with its pending list a consumer would take replies with it: only where that is empty
for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', stream, GROUP)) do
  local f = {}
  for i = 1, #info, 2 do
    f[info[i]] = info[i + 1]
  end
  if f.pending == 0 and f.idle > tonumber(ARGV[5]) and f.name ~= reader then
    redis.call('XGROUP', 'DELCONSUMER', stream, GROUP, f.name)
  end
end
return taken
