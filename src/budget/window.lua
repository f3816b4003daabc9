-- Fixed and sliding window with leases: one key, one call, atomic. A lease ends with its window.
--
-- The estimate of the sliding window is the count of this window, and of the one before it the part that still lies within
-- the last window's length. Nothing refills behind a lease, so what is spent need not be reported; what is handed back is
-- taken off the window that it belongs to.
--
-- KEYS[1]  the counter: one string of 36 bytes
-- ARGV  1 limit                    2 window, µs                3 1: sliding, 0: fixed
--       4 need: requests waiting   5 want: tokens ahead        6 part of the pool for `want`
--       7 arrivals since last call 8 this gateway's rate, req/s
--       9 µs since last call (0: first)                       10 memory of the demand, µs
--      11 count of a counter that does not exist: what the gateway remembers
--      12.. triples (kind, window, tokens): 1 handed back, 2 debt to charge
-- Reply as bucket.lua; 3 is the window's number modulo 2^32, 4 the µs to its end
local A = ARGV
local limit, win, slide = A[1] + 0, A[2] + 0, A[3] == '1'
local need, want = A[4] + 0, A[5] + 0
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local w = now / win
w = w - w % 1
local wid, cur, prev, dem, ts, fresh = w, 0, 0, 0, now, 0
local s = redis.call('GET', KEYS[1])
if s and #s == 36 then
  wid, cur, prev, ts, dem = struct.unpack('<ddddf', s)
  if w > wid then
    if w == wid + 1 then prev = cur else prev = 0 end
    cur, wid = 0, w
  elseif w < wid - 1 then
    -- the clock went back by more than a window: start over
    wid, cur, prev = w, 0, 0
  end
  -- w == wid - 1: a small step back; stay in the window that was already open
else
  cur, fresh = A[11] + 0, 1
end
local into = now - wid * win
if into < 0 then into = 0 end
local w32 = wid % 4294967296
for i = 12, #A, 3 do
  local kind, g, n = A[i], A[i + 1] + 0, A[i + 2] + 0
  if kind == '2' then
    cur = cur + n
    if cur > 2 * limit then cur = 2 * limit end
  elseif kind == '1' then
    if g == w32 then
      cur = cur - n
      if cur < 0 then cur = 0 end
    elseif (w32 - g) % 4294967296 == 1 then
      prev = prev - n
      if prev < 0 then prev = 0 end
    end
  end
end
local room = limit - cur
if slide then room = room - prev * (1 - into / win) end
local dt = now - ts
if dt < 0 then dt = 0 end
local memory = A[10] + 0
dem = dem * math.exp(-dt / memory) + A[7] * 1000000 / memory
local a, spec, whole = 0, 0, room - room % 1
if whole > 0 then
  a = need
  if a > whole then a = whole end
  local rest = whole - a
  if want > 0 and rest > 0 then
    local x, share = A[8] + 0, 1
    if dem > x then share = x / dem end
    spec = A[6] * rest
    if slide then
      local since = A[9] + 0
      if since > win then since = win end
      since = since * prev / win
      if since > spec then spec = since end
    end
    spec = spec * share
    if spec > want then spec = want end
    if spec > rest then spec = rest end
    spec = spec - spec % 1
  end
  cur = cur + a + spec
  whole = whole - a - spec
  room = room - a - spec
else
  whole = 0
end
local left = win - into
-- a sliding window is remembered for one more
local ttl = (slide and left + win or left) / 1000
redis.call('SET', KEYS[1], struct.pack('<ddddf', wid, cur, prev, now, dem), 'PX', ttl - ttl % 1 + 1)
local wait = 0
if room < 1 then
  wait = left
  if slide then
    local free = limit - 1 - cur
    if free >= 0 then
      -- in this window, when enough of the previous one has left
      wait = (1 - free / prev) * win - into
    else
      -- in the next window, where this one is the previous
      wait = left + (1 - (limit - 1) / cur) * win
    end
    if wait < 1 then wait = 1 end
  end
  wait = wait - wait % 1 + 1
end
return {a, spec, w32, left, whole, wait, fresh, dem * 1000}
