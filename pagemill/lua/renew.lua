-- with: ending
-- RENEW: keep the leases that are still ours, save what was generated, bring back verdicts.
--
-- KEYS[1]  base
-- Reads and writes
--   the entries' pending state  idle time back to 0, only where the job is this worker's; made
--                               anew, with the group, where that was lost
--   streams, pending            the stream, where its group was lost
--   j:<id>   hash    reads the fence, cancel and dl; writes ckm
--   b:<batch> hash   read: is the job's batch cancelled
--   ck:<id>  string  the checkpoint, appended where it is exactly at the offset
--   lock:suspects  string  goes on while this worker runs suspects
-- ARGV
--   1 worker id   2 lease ms
--   then six a job: id, stream, entry, offset or "" for no checkpoint, bytes, meta
-- Returns
--   a word a job: "ok", "lost", "cancelled", "expired"; with "+stale" behind where the
--   checkpoint was not at that offset

local worker = ARGV[1]
local now = now_ms()
local verdicts, isolates = {}, false

-- An operator or a restore can take the group away, and with it the list that peers look into for
-- what a dead worker held. The hash says that the job is ours: it goes back into that list.
local function extend(stream, entry)
  local extended = redis.pcall('XCLAIM', stream, GROUP, worker, 0, entry, 'JUSTID')
  if extended.err or #extended == 0 then
    make_group(stream)
    redis.call('XCLAIM', stream, GROUP, worker, 0, entry, 'FORCE', 'JUSTID')
    redis.call('SADD', key('streams'), stream)
    redis.call('SADD', key('pending'), stream)
  end
end

-- saves what lies at `offset`; a call whose reply was lost comes again, and may bring more than before
local function save(id, offset, bytes, meta)
  local ck = key('ck', id)
  local known = redis.call('STRLEN', ck) - offset
  if offset == 0 then
    redis.call('SET', ck, bytes)
  elseif known < 0 or redis.call('GETRANGE', ck, offset, -1) ~= string.sub(bytes, 1, known) then
    return false
  else
    redis.call('APPEND', ck, string.sub(bytes, known + 1))
  end
  redis.call('HSET', key('j', id), 'ckm', meta)
  return true
end

for i = 3, #ARGV, 6 do
  local id, stream, entry = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local v = redis.call('HMGET', key('j', id), 'st', 'e', 'own', 'cancel', 'dl', 'g', 'b')
  local verdict = 'lost'
  if owned(v, entry, worker) then
    extend(stream, entry)
    verdict = 'ok'
    isolates = isolates or v[6]
    if v[4] or (v[7] and batch_cancelled(v[7])) then
      verdict = 'cancelled'
    elseif v[5] and tonumber(v[5]) <= now then
      verdict = 'expired'
    end
    if ARGV[i + 3] ~= '' and not save(id, tonumber(ARGV[i + 3]), ARGV[i + 4], ARGV[i + 5]) then
      verdict = verdict .. '+stale'
    end
  end
  verdicts[#verdicts + 1] = verdict
end
if isolates and redis.call('GET', key('lock', 'suspects')) == worker then
  redis.call('PEXPIRE', key('lock', 'suspects'), ARGV[2])
end
return verdicts
