-- Live gateways: each sends a heartbeat every few seconds and receives the number of live ones.
--
-- KEYS[1]  a sorted set of gateways by the ms of their last heartbeat
-- ARGV  1 this gateway's name   2 ms of silence after which a gateway counts as gone   3 1: goodbye
-- Reply the number of live gateways, and 1 if this one was not known
local t = redis.call('TIME')
local now = t[1] * 1000 + t[2] / 1000
local new = 0
-- the clock went back: live gateways send heartbeats soon
redis.call('ZREMRANGEBYSCORE', KEYS[1], '(' .. string.format('%.3f', now), '+inf')
if ARGV[3] == '1' then
  redis.call('ZREM', KEYS[1], ARGV[1])
else
  new = redis.call('ZADD', KEYS[1], now, ARGV[1])
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[2] * 2)
return { redis.call('ZCARD', KEYS[1]), new }
