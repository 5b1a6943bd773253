-- LIMITS: let a caller's request pass, or say when it may come again; and put in place what it took.
--
-- Buckets fill by the server's clock, up to a minute's worth. A request takes one request and its estimated
-- tokens; one that is estimated at more than the bucket holds passes when it is full. What was used is put in
-- place of the estimate at the request's end. The day's tokens are those since midnight in UTC.
--
-- KEYS[1]  {pagemill:gateway:limits}:<key>, hash: rq, tk what the buckets hold, at their time, day, used; expires after
--          two days
-- ARGV     1 "take" or "settle"   2 requests a minute   3 tokens a minute   4 tokens a day; 0 for no limit
--          5 tokens of the day   6 tokens of the bucket: what to take, or for "settle" what was used less that
--          7 for "settle" the day that was charged: what is left of the estimate is given back to no other
-- Returns  {1, 0, "", today} where it passes, else {0, milliseconds to wait, what ran out, today}

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local today = math.floor(now / 86400000)
local rpm, tpm, tpd = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local of_day, of_bucket = tonumber(ARGV[5]), tonumber(ARGV[6])

local v = redis.call('HMGET', KEYS[1], 'rq', 'tk', 'at', 'day', 'used')
local since = math.max(0, now - (v[3] or now))
local rq = math.min(rpm, (v[1] or rpm) + rpm * since / 60000)
local tk = math.min(tpm, (v[2] or tpm) + tpm * since / 60000)
local used = tonumber(v[4]) == today and tonumber(v[5]) or 0

local function keep()
  redis.call('HSET', KEYS[1], 'rq', string.format('%.6f', rq), 'tk', string.format('%.6f', tk), 'at',
    string.format('%.0f', now), 'day', today, 'used', string.format('%.0f', used))
  redis.call('PEXPIRE', KEYS[1], 172800000)
end

if ARGV[1] == 'settle' then
  -- a debt of a minute at most: an estimate that was far too small does not shut a caller out
  tk = math.max(-tpm, math.min(tpm, tk - of_bucket))
  if tonumber(ARGV[7]) == today then
    used = math.max(0, used + of_day)
  end
  keep()
  return { 1, 0, '', today }
end

if tpd > 0 and used >= tpd then
  return { 0, (today + 1) * 86400000 - now, 'tokens_per_day', today }
elseif rpm > 0 and rq < 1 then
  return { 0, math.ceil((1 - rq) * 60000 / rpm), 'requests_per_minute', today }
elseif tpm > 0 and tk < of_bucket then
  return { 0, math.ceil((of_bucket - tk) * 60000 / tpm), 'tokens_per_minute', today }
end
rq, used = math.max(0, rq - 1), used + of_day
tk = tpm > 0 and tk - of_bucket or 0
keep()
return { 1, 0, '', today }
