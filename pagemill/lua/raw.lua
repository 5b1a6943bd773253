-- Entries of the stream `in`, which any program may write; for the scripts whose first line asks for it.

local RAW = key('in')

-- Whose it is, nil where it has been dealt with. Nobody asks for more: two workers may adopt an
-- entry, and it goes with the first.
local function reader_of(entry)
  local rows = redis.pcall('XPENDING', RAW, GROUP, entry, entry, 1)
  return not rows.err and rows[1] and rows[1][2]
end

-- To the dead letters, with its bytes: those of `d`, or names and values a line each where it has
-- other fields; only the first can be put back, and note their entry. What goes comes first: the
-- server may be full.
--
-- The job that it names ends as failed, so that whoever waits for it hears of it; a job that the
-- queue has already is left alone. Without a fingerprint it is none that a submit could repeat: its
-- id can be used again (admission.lua).
local function bury_raw(entry, fields, id, code, message, worker, now)
  drop_entry(RAW, entry)
  local letter = { 'j', id, 'why', 'garbage', 'msg', message, 'at', whole(now), 'worker', worker }
  if fields[1] == 'd' and (#fields == 2 or (#fields == 4 and fields[3] == 'id')) then
    redis.call('XADD', key('dead'), '*', 'raw', fields[2], 'entry', entry, unpack(letter))
  else
    redis.call('XADD', key('dead'), '*', 'raw', table.concat(fields, '\n'), unpack(letter))
  end
  count('buried', 1)
  local job = key('j', id)
  if redis.call('EXISTS', job) == 0 then
    redis.call('HSET', job, 'ln', 'standard', 'tn', 'default', 'tok', 0, 'acc', whole(now), 'ttl', 86400, 'fp', '')
    count('accepted', 1)
    settle_here(id, 'failed', now, '{"code":"' .. code .. '","message":' .. cjson.encode(message) .. '}')
  end
end
