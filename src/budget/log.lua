-- Sliding log: exact, asked for every request, never ahead.
--
-- Each unit is an entry, stamped with the moment it was granted; it counts for one window. What is granted and then not
-- used, because another limit refuses the request, is taken out again by the number of the call that granted it.
--
-- KEYS[1]  the log: a sorted set
-- ARGV  1 limit   2 window, µs   3 need: units wanted   4 this gateway's name, the same in none other
--       5 number of this call, modulo 2^32
--       6.. triples (kind, number of a call, units): 1 handed back, 2 debt to charge
-- Reply as bucket.lua: 1 granted, 3 number of the call, 5 units left, 6 µs until the next is possible; the rest is 0
local A = ARGV
local limit, win, need = A[1] + 0, A[2] + 0, A[3] + 0
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - win)
local debt = 0
for i = 6, #A, 3 do
  if A[i] == '1' then
    local left = A[i + 2] + 0
    local n = 1
    -- units of a call are numbered from 1 on without a gap; the last ones go
    while redis.call('ZSCORE', KEYS[1], A[4] .. ':' .. A[i + 1] .. ':' .. n) do n = n + 1 end
    while left > 0 and n > 1 do
      n, left = n - 1, left - 1
      redis.call('ZREM', KEYS[1], A[4] .. ':' .. A[i + 1] .. ':' .. n)
    end
  elseif A[i] == '2' then
    debt = debt + A[i + 2]
  end
end
local n = redis.call('ZCARD', KEYS[1])
-- a debt is charged as far as there is room: a log cannot owe
if debt > limit - n then debt = limit - n end
for i = 1, debt do redis.call('ZADD', KEYS[1], now, A[4] .. ':' .. A[5] .. ':d' .. i) end
if debt > 0 then n = n + debt end
local granted = need
if granted > limit - n then granted = limit - n end
if granted < 0 then granted = 0 end
for i = 1, granted do redis.call('ZADD', KEYS[1], now, A[4] .. ':' .. A[5] .. ':' .. i) end
n = n + granted
if n > 0 then redis.call('PEXPIRE', KEYS[1], math.ceil(win / 1000) + 1) end
local wait = 0
if n >= limit then
  -- the oldest that has to leave before one fits
  local o = redis.call('ZRANGE', KEYS[1], n - limit, n - limit, 'WITHSCORES')
  wait = math.max(1, o[2] + win - now)
end
local left = limit - n
if left < 0 then left = 0 end
return {granted, 0, A[5] + 0, 0, left, wait, 0, 0}
