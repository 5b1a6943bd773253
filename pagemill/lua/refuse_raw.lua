-- with: ending, raw
-- REFUSE_RAW: put raw entries that cannot become jobs to the dead letters.
--
-- Where it is only their version that is not known here, and a worker that knows it lives, that one
-- gets them: what is pending for it is what it takes next.
--
-- KEYS[1]  base
-- Reads and writes
--   in     stream  the entry goes, or becomes another worker's
--   newest string  read: the newest worker that lives
--   dead   stream  the entry's bytes, and why
--   j:<id>, r:<id>, st, ev, channel ch:<id>: as every end of a job
-- ARGV
--   1 worker id; then five an entry: entry, the job that it names, code and message of the failure,
--   version of the worker that might know it, 0 for none
-- Returns
--   how many went to the dead letters; the others are another worker's, or have been dealt with

local worker = ARGV[1]
local now = now_ms()
local refused = 0

local newest, taker = string.match(redis.call('GET', key('newest')) or '', '^(%d+) (.+)$')

for i = 2, #ARGV, 5 do
  local entry, id, code, message, version = unpack(ARGV, i, i + 4)
  local body = reader_of(entry) and redis.call('XRANGE', RAW, entry, entry)[1]
  if body then
    if version ~= '0' and tonumber(newest or 0) >= tonumber(version) and taker ~= worker then
      redis.call('XCLAIM', RAW, GROUP, taker, 0, entry, 'JUSTID')
    else
      bury_raw(entry, body[2], id, code, message, worker, now)
      refused = refused + 1
    end
  end
end
return refused
