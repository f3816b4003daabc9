-- Runtime overrides shared by all gateways: each gateway polls this hash and posts its own
-- overrides to it.
--
-- KEYS[1]  a hash: subject -> "expiry in ms, or 0" space value; '#id' distinguishes this hash
--          from a lost one, '#count' counts its writes
-- ARGV  1 the state that this gateway has read   2 the largest number of subjects
--       3.. triples (subject, expiry in ms, 0: no end, -1: delete; value)
-- Reply the state, id-count; if it differs from ARGV[1], then every valid entry as subject, value
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
