-- SETTLE_HOOK: note how the delivery of a webhook went.
--
-- KEYS[1]  base
-- Reads and writes
--   hooks       zset  due ms -> batch
--   b:<batch>   hash  hook_st delivered or failed, hook_err; expires with its own time once that is known
-- ARGV
--   1 batch   2 "delivered", "failed", or "again"   3 for "again": due after so many ms   4 why, or ""
-- Returns
--   the state: "delivered", "failed", "pending"; "" where the hook was settled before

local batch, word, why = ARGV[1], ARGV[2], ARGV[4]
local hash = key('b', batch)
local v = redis.call('HMGET', hash, 'ended', 'ttl')
if not v[1] or not redis.call('ZSCORE', key('hooks'), batch) then
  redis.call('ZREM', key('hooks'), batch)
  return ''
end

write_although_full()
local due = now_ms() + ARGV[3]
if word == 'again' and due < v[1] + HOOK_LIFE_MS then
  redis.call('ZADD', key('hooks'), whole(due), batch)
  redis.call('HSET', hash, 'hook_err', why)
  return 'pending'
end
local state = word == 'delivered' and word or 'failed'
redis.call('ZREM', key('hooks'), batch)
redis.call('HSET', hash, 'hook_st', state, 'hook_err', why)
redis.call('PEXPIRE', hash, whole(v[2] * 1000))
return state
