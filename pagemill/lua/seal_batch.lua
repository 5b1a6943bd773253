-- with: ending
-- SEAL_BATCH: let no more jobs join; the batch ends with its last one.
--
-- KEYS[1]  base
-- Reads and writes
--   b:<batch>   hash  sealed; ended, where no job of it is open
--   bj:<batch>, cancelling, hooks, ev, channel chb:<batch>: as every end of a batch
-- ARGV
--   1 batch
-- Returns
--   its fields and their values by turns; {} where there is no such batch

local batch = ARGV[1]
local hash = key('b', batch)
local now = now_ms()
local f = read_batch(batch)
if f and not f.sealed then
  write_although_full()
  -- only now is it known what a percent is
  local total, ended = tonumber(f.total), f.done + f.failed + f.cancelled + f.expired
  f.sealed, f.pct = whole(now), total > 0 and whole(math.floor(100 * ended / total)) or '0'
  redis.call('HSET', hash, 'sealed', f.sealed, 'pct', f.pct)
  advance_batch(batch, f, now)
end
return redis.call('HGETALL', hash)
