-- ACK_REPLIES: delete replies that have been dealt with.
--
-- KEYS[1]  base
-- Writes
--   reply:<name>  stream  the entries go
-- ARGV
--   1 name; then entries
-- Returns
--   how many were there

local stream = key('reply', ARGV[1])
-- a flush takes the group with it
redis.pcall('XACK', stream, GROUP, unpack(ARGV, 2))
return redis.call('XDEL', stream, unpack(ARGV, 2))
