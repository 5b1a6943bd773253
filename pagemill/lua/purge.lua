-- with: ending
-- PURGE: delete dead letters for good.
--
-- A letter has its payload, which may be large: they are read one after the other.
--
-- KEYS[1]  base
-- Reads and writes
--   dead      stream  the letters go
--   orphans   list    the objects of their payloads, for a worker that sweeps
-- ARGV
--   1 end of the range of entry ids that go, or ""   2 most of them   then single entry ids
-- Returns
--   how many went

local function purge(from, to)
  local letter = redis.call('XRANGE', key('dead'), from, to, 'COUNT', 1)[1]
  if not letter then
    return 0
  end
  for i = 1, #letter[2], 2 do
    if letter[2][i] == 'ref' then
      orphan(letter[2][i + 1])
    end
  end
  return redis.call('XDEL', key('dead'), letter[1])
end

local purged = 0
if ARGV[1] ~= '' then
  while purged < tonumber(ARGV[2]) and purge('-', ARGV[1]) == 1 do
    purged = purged + 1
  end
end
for i = 3, #ARGV do
  purged = purged + purge(ARGV[i], ARGV[i])
end
return purged
