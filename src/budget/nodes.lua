-- Who is alive: each gateway says so every few seconds and learns how many have.
--
-- KEYS[1]  a sorted set of gateways by the ms when they last spoke
-- ARGV  1 this gateway's name   2 ms after which one is taken for gone   3 1: says good-bye
-- Reply how many are alive, and 1 where this one was not known to be
local t = redis.call('TIME')
local now = t[1] * 1000 + t[2] / 1000
local new = 0
-- the clock went back: whoever lives says so again soon
redis.call('ZREMRANGEBYSCORE', KEYS[1], '(' .. string.format('%.3f', now), '+inf')
if ARGV[3] == '1' then
  redis.call('ZREM', KEYS[1], ARGV[1])
else
  new = redis.call('ZADD', KEYS[1], now, ARGV[1])
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[2] * 2)
return { redis.call('ZCARD', KEYS[1]), new }
