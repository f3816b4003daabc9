-- Slots: limits a key's requests in flight over all gateways.
--
-- A gateway declares the slots that it holds (in use, and kept for the next request) and how many
-- more it wants. A declaration is absolute: repeating it changes nothing, and the next one frees
-- what a lost reply granted. It has a lifetime, after which a dead gateway's slots are free. Calls
-- of a gateway are numbered, and one that arrives after a later one changes nothing. A waiting
-- request gets all of its slots or none; what does not fit is left to those behind it. Declarations
-- are scanned only when one of them may have expired.
--
-- KEYS[1]  a hash: gateway -> slots held, expiry, call number; the empty name -> the sum, a moment
--          before which no declaration expires, and until when freed slots are wanted at once
-- ARGV  1 this gateway's name   2 limit   3 held
--       4 need: waiting requests, as requests.lua reads them   5 lifetime, µs   6 number of this call
-- Reply as bucket.lua: 1 granted, 5 slots left, 6 µs for which other gateways want freed slots,
--       8 held by all; the rest is 0
local A = ARGV
local me, limit, held, life, number = A[1], A[2] + 0, A[3] + 0, A[5] + 0, A[6] + 0
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local sum, first, wanted = 0, 0, 0
local s = redis.call('HGET', KEYS[1], '')
if s and #s == 24 then sum, first, wanted = struct.unpack('<ddd', s) end
if wanted > now + life then wanted = now + life end -- the clock went back
if now >= first or first > now + life then
  sum, first = 0, now + life
  local all = redis.call('HGETALL', KEYS[1])
  for i = 1, #all, 2 do
    if all[i] ~= '' then
      local n, over, of = struct.unpack('<ddd', all[i + 1])
      if over > now + life then
        over = now + life
        redis.call('HSET', KEYS[1], all[i], struct.pack('<ddd', n, over, of))
      end
      if over <= now then
        redis.call('HDEL', KEYS[1], all[i])
      else
        sum = sum + n
        if over < first then first = over end
      end
    end
  end
end
local before, of = 0, 0
s = redis.call('HGET', KEYS[1], me)
if s then
  local _
  before, _, of = struct.unpack('<ddd', s)
end
local granted = 0
if number >= of then
  sum = sum - before + held
  local left, refused = limit - sum, 0
  if left < 0 then left = 0 end
  granted, refused = grant(A[4], left)
  if refused > 0 then wanted = now + life end
  sum = sum + granted
  if held + granted > 0 then
    redis.call('HSET', KEYS[1], me, struct.pack('<ddd', held + granted, now + life, number))
  else
    redis.call('HDEL', KEYS[1], me)
  end
end
redis.call('HSET', KEYS[1], '', struct.pack('<ddd', sum, first, wanted))
redis.call('PEXPIRE', KEYS[1], 2 * life / 1000)
local left = limit - sum
if left < 0 then left = 0 end
wanted = wanted - now
if wanted < 0 then wanted = 0 end
return {granted, 0, 0, 0, left, wanted, 0, sum, 0, 0}
