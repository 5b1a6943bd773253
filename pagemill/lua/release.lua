-- with: ending
-- RELEASE: hand jobs back at once; the attempt does not count.
--
-- KEYS[1]  base
-- Reads and writes
--   the entries         acked and deleted
--   j:<id>              hash    state queued, attempt taken back, its new entry
--   s:<lane>:!returned  stream
--   st, qt:<lane>, bell:<lane>
-- ARGV
--   1 worker id, then three a job: id, stream, entry
-- Returns
--   how many were this worker's

local worker = ARGV[1]
local now = now_ms()
local released = 0

for i = 2, #ARGV, 3 do
  local id, stream, entry = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local v = redis.call('HMGET', key('j', id), 'st', 'e', 'own')
  if owned(v, entry, worker) then
    drop_entry(stream, entry)
    redis.call('HINCRBY', key('j', id), 'att', -1)
    hand_back(id, now)
    released = released + 1
  end
end
if released > 0 then
  count('running', -released)
  count('released', released)
end
return released
