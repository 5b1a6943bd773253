-- LEAVE: say that this worker is gone, so that peers need not wait for its lease.
--
-- KEYS[1]  base
-- Reads and writes
--   w:<worker>, hold:<worker>   deleted
--   workers                     zset  last seen ms -> worker
--   lock:suspects               string  deleted where it is this worker's
--   newest                      string  deleted where it names this worker: another one's next heartbeat sets it
-- ARGV
--   1 worker id
-- Returns
--   1 when it was known

redis.call('DEL', key('w', ARGV[1]), key('hold', ARGV[1]))
if redis.call('GET', key('lock', 'suspects')) == ARGV[1] then
  redis.call('DEL', key('lock', 'suspects'))
end
if string.match(redis.call('GET', key('newest')) or '', ' (.+)$') == ARGV[1] then
  redis.call('DEL', key('newest'))
end
return redis.call('ZREM', key('workers'), ARGV[1])
