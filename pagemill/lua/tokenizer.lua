-- TOKENIZER: show producers the tokenizer of the model that this queue serves.
--
-- KEYS[1]  base
-- Reads and writes
--   tok   hash  print, its digest; z, tokenizer.json as zlib has compressed it
-- ARGV
--   1 digest   2 how long it is to be seen ms   3 the compressed JSON, or "" to keep up what is there
-- Returns
--   1 where it is seen now, 0 where another one or none is there and the JSON has to come

local tok = key('tok')
if ARGV[3] == '' and redis.call('HGET', tok, 'print') ~= ARGV[1] then
  return 0
end
if ARGV[3] ~= '' then
  redis.call('HSET', tok, 'print', ARGV[1], 'z', ARGV[3])
end
redis.call('PEXPIRE', tok, ARGV[2])
return 1
