-- with: ending, raw
-- REFUSE_RAW: put raw entries that cannot become jobs to the dead letters.
--
-- KEYS[1]  base
-- Reads and writes
--   in     stream  the entry goes
--   dead   stream  the entry's bytes, and why
--   j:<id>, r:<id>, st, ev, channel ch:<id>: as every end of a job
-- ARGV
--   1 worker id; then four an entry: entry, the job that it names, code and message of the failure
-- Returns
--   how many were refused; others have been dealt with before

local worker = ARGV[1]
local now = now_ms()
local refused = 0

for i = 2, #ARGV, 4 do
  local entry, id, code, message = unpack(ARGV, i, i + 3)
  local body = reader_of(entry) and redis.call('XRANGE', RAW, entry, entry)[1]
  if body then
    bury_raw(entry, body[2], id, code, message, worker, now)
    refused = refused + 1
  end
end
return refused
