-- CREATE_BATCH: open a batch, once.
--
-- KEYS[1]  base
-- Reads and writes
--   b:<batch>   hash  the batch; its existence is the idempotency record of its id
--   batches     zset  created ms -> batch; some that have expired leave it
-- ARGV
--   1 batch   2 fingerprint   3 tenant   4 ttl s   5 metadata JSON or ""   6 webhook or ""
--   7 stream of replies or ""   8 context of the reply or ""
-- Returns
--   its fields and their values by turns; {} where the id is another batch's

local batch, print = ARGV[1], ARGV[2]
local hash = key('b', batch)
local first_print = redis.call('HGET', hash, 'fp')
if first_print and first_print ~= print then
  return {}
end
if not first_print then
  local now = now_ms()
  redis.call('HSET', hash, 'fp', print, 'tn', ARGV[3], 'ttl', ARGV[4], 'created', whole(now), 'total', '0', 'done', '0',
    'failed', '0', 'cancelled', '0', 'expired', '0', 'prompt_tokens', '0', 'completion_tokens', '0', 'gpu_ms', '0',
    'pct', '0')
  if ARGV[5] ~= '' then
    redis.call('HSET', hash, 'md', ARGV[5])
  end
  if ARGV[6] ~= '' then
    redis.call('HSET', hash, 'hook', ARGV[6])
  end
  if ARGV[7] ~= '' then
    redis.call('HSET', hash, 'reply', ARGV[7], 'context', ARGV[8])
  end
  -- as with each job that joins
  redis.call('PEXPIRE', hash, whole(BATCH_LIFE_MS))
  -- expired batches leave the list by and by: a few looks for each new one keep up
  for _, one in ipairs(redis.call('ZRANDMEMBER', key('batches'), 8)) do
    if redis.call('EXISTS', key('b', one)) == 0 then
      redis.call('ZREM', key('batches'), one)
    end
  end
  redis.call('ZADD', key('batches'), whole(now), batch)
  redis.call('PEXPIRE', key('batches'), whole(NAMES_LIFE_MS))
end
return redis.call('HGETALL', hash)
