-- LETTERS: the newest dead letters without what they hold: a payload may have megabytes.
--
-- KEYS[1]  base
-- Reads
--   dead   stream  one letter at a time
-- ARGV
--   1 most letters
-- Returns
--   a list a letter, newest first: its entry id, then job, why, message, at ms, worker, lane, tenant, batch,
--   attempts; "" for what it lacks

local FIELDS = { 'j', 'why', 'msg', 'at', 'worker', 'ln', 'tn', 'b', 'att' }

local letters, last = {}, '+'
while #letters < tonumber(ARGV[1]) do
  local entry = redis.call('XREVRANGE', key('dead'), last, '-', 'COUNT', 1)[1]
  if not entry then
    break
  end
  local body, letter = {}, { entry[1] }
  for i = 1, #entry[2], 2 do
    body[entry[2][i]] = entry[2][i + 1]
  end
  for _, name in ipairs(FIELDS) do
    letter[#letter + 1] = body[name] or ''
  end
  letters[#letters + 1] = letter
  last = '(' .. entry[1]
end
return letters
