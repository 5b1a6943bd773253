-- COLLECT: remove idle consumers, and streams that nobody uses.
--
-- A consumer goes only with an empty pending list: deleting one drops its entries for good. Its
-- worker may live: the next read makes it again.
-- A stream goes when it is empty and has no consumer left; SUBMIT makes it again.
--
-- KEYS[1]  base
-- Reads and writes
--   streams      set     where the scan stands is kept by the caller
--   the streams and their groups, and those of `in`
--   w:<worker>   hash    read: does the worker live
--   pending      set     a removed stream leaves it
--   ring:<lane>, vt:<lane>   a removed tenant leaves them
--   workers      zset    the dead leave it
-- ARGV
--   1 cursor   2 streams to look at   3 lease ms
-- Returns
--   {next cursor, how many were removed}

local removed = 0
local now, lease = now_ms(), tonumber(ARGV[3])

local function forget_stream(stream)
  redis.call('DEL', stream)
  redis.call('SREM', key('streams'), stream)
  redis.call('SREM', key('pending'), stream)
  local lane, tenant = string.match(string.sub(stream, #base + 1), '^:s:([^:]+):(.+)$')
  redis.call('ZREM', key('ring', lane), tenant)
  redis.call('HDEL', key('vt', lane), tenant, tenant .. '!used', tenant .. '!est')
  removed = removed + 1
end

-- how many consumers stay, nil where there is no group
local function remove_consumers(stream)
  local consumers = redis.pcall('XINFO', 'CONSUMERS', stream, GROUP)
  if consumers.err then
    return nil
  end
  local staying = 0
  for _, consumer in ipairs(consumers) do
    local f = {}
    for i = 1, #consumer, 2 do
      f[consumer[i]] = consumer[i + 1]
    end
    if f['pending'] == 0 and f['idle'] >= lease then
      redis.call('XGROUP', 'DELCONSUMER', stream, GROUP, f['name'])
      removed = removed + 1
    else
      staying = staying + 1
    end
  end
  return staying
end

local page = redis.call('SSCAN', key('streams'), ARGV[1], 'COUNT', ARGV[2])
for _, stream in ipairs(page[2]) do
  if remove_consumers(stream) == 0 and redis.call('XLEN', stream) == 0 then
    forget_stream(stream)
  end
end
-- who read raw entries last stays a consumer there; the stream stays in any case
remove_consumers(key('in'))
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', key('workers'), '-inf', whole(now - lease), 'LIMIT', 0, 64)) do
  if redis.call('EXISTS', key('w', worker)) == 0 then
    redis.call('ZREM', key('workers'), worker)
  end
end
return { page[1], removed }
