-- What operators have ruled, for all gateways: each polls it, and posts what is ruled at it.
--
-- KEYS[1]  a hash: subject -> "ms until when, or 0" space value; '#id' tells this board from one that was lost, '#count' counts
--          how often it was written
-- ARGV  1 the state that this gateway has read   2 the most subjects
--       3.. triples (subject, ms until when, 0: no end, -1: take it back; value)
-- Reply the state, id-count, and where it is another than that: all that holds, subject after subject, value after value
local A = ARGV
local t = redis.call('TIME')
local now = t[1] * 1000 + t[2] / 1000
if #A > 2 then
  local all = redis.call('HGETALL', KEYS[1])
  for i = 1, #all, 2 do
    local till = tonumber(string.match(all[i + 1], '^(%d+) ') or 0)
    if till > 0 and till <= now then redis.call('HDEL', KEYS[1], all[i]) end
  end
  for i = 3, #A, 3 do
    if A[i + 1] == '-1' then
      redis.call('HDEL', KEYS[1], A[i])
    elseif redis.call('HEXISTS', KEYS[1], A[i]) == 1 or redis.call('HLEN', KEYS[1]) <= tonumber(A[2]) then
      redis.call('HSET', KEYS[1], A[i], A[i + 1] .. ' ' .. A[i + 2])
    end
  end
  redis.call('HSETNX', KEYS[1], '#id', t[1] .. '.' .. t[2])
  redis.call('HINCRBY', KEYS[1], '#count', 1)
end
local id = redis.call('HGET', KEYS[1], '#id') or ''
local state = id .. '-' .. (redis.call('HGET', KEYS[1], '#count') or '0')
local reply = { state }
if A[1] ~= state then
  local all = redis.call('HGETALL', KEYS[1])
  for i = 1, #all, 2 do
    local till, value = string.match(all[i + 1], '^(%d+) (.*)$')
    if value and (till == '0' or tonumber(till) > now) then
      reply[#reply + 1] = all[i]
      reply[#reply + 1] = value
    end
  end
end
return reply
