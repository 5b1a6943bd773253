-- with: ending
-- PURGE: delete dead letters for good.
--
-- KEYS[1]  base
-- Reads and writes
--   dead      stream  the letters go
--   orphans   list    the objects of their payloads, for a worker that sweeps
-- ARGV
--   1 end of the range of entry ids that go, or ""   2 most of them   then single entry ids
-- Returns
--   how many went

local purged = 0

local function purge(entry)
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'ref' then
      orphan(entry[2][i + 1])
    end
  end
  purged = purged + redis.call('XDEL', key('dead'), entry[1])
end

if ARGV[1] ~= '' then
  for _, entry in ipairs(redis.call('XRANGE', key('dead'), '-', ARGV[1], 'COUNT', ARGV[2])) do
    purge(entry)
  end
end
for i = 3, #ARGV do
  for _, entry in ipairs(redis.call('XRANGE', key('dead'), ARGV[i], ARGV[i])) do
    purge(entry)
  end
end
return purged
