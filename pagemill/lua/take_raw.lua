-- with: ending, raw
-- TAKE_RAW: the raw entries that this worker is to adopt: those in its hands, those of dead
-- readers, and new ones.
--
-- The pending list alone says what is in whose hands: a reply that is lost loses no entry, and a
-- worker need not know what it held. An entry that is too large, or was in the hands of too many
-- readers that died, goes to the dead letters and to no worker.
--
-- What waits in this worker's hands for room is looked at in pages, by turns, and takes half a call at
-- most: what a tenant has too much of must not stand in the way of what is behind it.
--
-- KEYS[1]  base
-- Reads and writes
--   in           stream  what is returned is this worker's
--   w:<worker>   hash    read: does a reader live
--   dead         stream  what no worker should read
--   j:<id>, r:<id>, st, ev, channel ch:<id>: as every end of a job, for these
-- ARGV
--   1 worker id   2 most entries to look at   3 bytes after which to stop   4 most bytes of one entry
--   5 most readers of one entry   6 where the page begins: "-", or "(<entry>" behind that   7 new ones 0/1
-- Returns
--   {where the next page begins, how many are new, {entry, {field, value, ...}}, {entry, ...}, ...}

local worker, looks, room = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local most_bytes, most_readers = tonumber(ARGV[4]), tonumber(ARGV[5])
local now = now_ms()
local page = math.ceil(looks / 2)
local found = { '-', 0 }

local function offer(entry, fields, readers)
  looks = looks - 1
  if not fields then
    -- deleted behind our back: 6.2 keeps it pending
    return drop_entry(RAW, entry)
  end
  local bytes = 0
  for _, text in ipairs(fields) do
    bytes = bytes + #text
  end
  if bytes > most_bytes then
    local message = 'the entry has ' .. bytes .. ' bytes: want no more than ' .. most_bytes
    return bury_raw(entry, fields, 'raw-' .. entry, 'payload_too_large', message, worker, now)
  end
  if readers > most_readers then
    local message = readers - 1 .. ' workers died with the entry, and it is given up'
    return bury_raw(entry, fields, 'raw-' .. entry, 'invalid_job', message, worker, now)
  end
  room = room - bytes
  found[#found + 1] = { entry, fields }
end

local function wants_more()
  return looks > 0 and room > 0
end

local function offer_own()
  local mine = redis.pcall('XPENDING', RAW, GROUP, ARGV[6], '+', page, worker)
  if mine.err then
    -- a flush or a restore took the group away, or this is the first reader
    return make_group(RAW)
  end
  for i, row in ipairs(mine) do
    if not wants_more() then
      break
    end
    local body = redis.call('XRANGE', RAW, row[1], row[1])[1]
    offer(row[1], body and body[2], row[4])
    found[1] = i < page and i == #mine and '-' or '(' .. row[1]
  end
end

local function offer_of_the_dead()
  for _, reader in ipairs(redis.call('XPENDING', RAW, GROUP)[4] or {}) do
    if reader[1] ~= worker and wants_more() and redis.call('EXISTS', key('w', reader[1])) == 0 then
      for _, row in ipairs(redis.call('XPENDING', RAW, GROUP, '-', '+', looks, reader[1])) do
        if wants_more() then
          local claimed = redis.call('XCLAIM', RAW, GROUP, worker, 0, row[1])[1]
          offer(row[1], claimed and claimed[2], row[4] + 1)
        end
      end
    end
  end
end

local function offer_new()
  while wants_more() do
    local read = redis.call('XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', 1, 'STREAMS', RAW, '>')
    if not read then
      return
    end
    local entry = read[1][2][1]
    offer(entry[1], entry[2], 1)
    found[2] = found[2] + 1
  end
end

offer_own()
offer_of_the_dead()
if ARGV[7] == '1' then
  offer_new()
end
return found
