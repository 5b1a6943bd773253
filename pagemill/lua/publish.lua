-- PUBLISH: add new text to a running job's token stream.
--
-- Only its owner may: a worker that was paused would otherwise bring back a stream that has
-- expired, and nothing would remove it.
--
-- KEYS[1]  base
-- Reads and writes
--   j:<id>   hash    read: owner and entry
--   t:<id>   stream  i, o, n, x: answer, offset, tokens so far, text
-- ARGV
--   1 worker id   2 job id   3 entry   then four a delta: index, offset, tokens, text
-- Returns
--   1 when it was published, 0 when the job is not this worker's

local v = redis.call('HMGET', key('j', ARGV[2]), 'st', 'own', 'e')
if v[1] ~= 'running' or v[2] ~= ARGV[1] or v[3] ~= ARGV[3] then
  return 0
end
for i = 4, #ARGV, 4 do
  redis.call('XADD', key('t', ARGV[2]), 'MAXLEN', '~', '4096', '*', 'i', ARGV[i], 'o', ARGV[i + 1], 'n', ARGV[i + 2],
    'x', ARGV[i + 3])
end
return 1
