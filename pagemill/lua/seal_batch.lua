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
local v = redis.call('HMGET', hash, 'created', 'sealed', 'total', 'done', 'failed', 'cancelled', 'expired')
if v[1] and not v[2] then
  -- only now is it known what a percent is
  local total, ended = tonumber(v[3]), v[4] + v[5] + v[6] + v[7]
  redis.call('HSET', hash, 'sealed', whole(now), 'pct', total > 0 and whole(math.floor(100 * ended / total)) or '0')
  advance_batch(batch, now)
end
return redis.call('HGETALL', hash)
