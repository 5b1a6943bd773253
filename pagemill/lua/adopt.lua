-- with: ending, raw, admission
-- ADOPT: make jobs of raw entries, each once.
--
-- Its own entry goes with the script that adds the job, so it is the job or the entry that exists.
-- A job that is there already, by its id or its key, swallows the entry.
--
-- KEYS[1]  base
-- Reads and writes
--   in   stream  an adopted entry goes; one that is refused stays pending
--   all that SUBMIT writes
-- ARGV
--   1 most tokens that may wait, 0 for no limit; then 18 a job: its entry, and what SUBMIT gets
-- Returns
--   one a job: as SUBMIT, or "GONE" where the entry was adopted before; the entry stays on
--   {"CONFLICT", ...} and {"BUSY", ...}

local function adopt(entry, job)
  local reader = reader_of(entry)
  if not reader then
    return 'GONE'
  end
  local answer = refusal(job)
  if answer and answer[1] ~= 'DUP' then
    -- whoever came so far did not die of it: TAKE_RAW counts from here
    redis.call('XCLAIM', RAW, GROUP, reader, 0, entry, 'RETRYCOUNT', 1, 'JUSTID')
    return answer
  end
  drop_entry(RAW, entry)
  return answer or take_in(job)
end

local replies = {}
for i = 2, #ARGV, FIELDS + 1 do
  replies[#replies + 1] = adopt(ARGV[i], read_job(i + 1))
end
close_books()
return replies
