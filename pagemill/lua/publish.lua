-- PUBLISH: add new text to a running job's token stream.
--
-- Only its owner may: a worker that was paused would otherwise bring back a stream that has
-- expired, and nothing would remove it. Who takes a job over brings its text from the beginning:
-- what was published before is left out.
--
-- KEYS[1]  base
-- Reads and writes
--   j:<id>   hash    read: owner and entry; x<answer>, the characters of an answer that are published
--   t:<id>   stream  i, o, n, x: answer, offset, tokens so far, text
-- ARGV
--   1 worker id   2 job id   3 entry   then four a delta: index, offset, tokens, text
-- Returns
--   1 when it was published, 0 when the job is not this worker's

local job = key('j', ARGV[2])
local v = redis.call('HMGET', job, 'st', 'own', 'e')
if v[1] ~= 'running' or v[2] ~= ARGV[1] or v[3] ~= ARGV[3] then
  return 0
end

local CHARACTER = '[^\128-\191][\128-\191]*'

local function publish(index, offset, tokens, text)
  local _, length = string.gsub(text, CHARACTER, '')
  local known = math.max(0, (redis.call('HGET', job, 'x' .. index) or 0) - offset)
  if known >= length then
    return
  end
  text = string.gsub(text, CHARACTER, '', known)
  redis.call('XADD', key('t', ARGV[2]), 'MAXLEN', '~', '4096', '*', 'i', index, 'o', whole(offset + known), 'n', tokens,
    'x', text)
  redis.call('HSET', job, 'x' .. index, whole(offset + length))
end

for i = 4, #ARGV, 4 do
  publish(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3])
end
return 1
