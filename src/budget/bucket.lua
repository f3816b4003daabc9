-- Token bucket with leases: one key, one call, atomic. Asking for each request is need=1, want=0.
--
-- A gateway gets tokens for requests that wait (need) and tokens ahead (want), which stay good for this generation (a
-- slice of time) and the next one. What is out on lease counts as content until it is reported spent or two generations
-- have passed: the bucket refills to its capacity less that, or leased tokens would be a second burst.
-- The state is what is spent, not what is left, so a changed capacity keeps it. Time is Redis's own; numbers that need 16
-- digits never pass through a string.
--
-- KEYS[1]  the bucket: one string of 32 bytes
-- ARGV  1 capacity                 2 tokens per µs             3 generation length, µs
--       4 need: requests waiting   5 want: tokens ahead        6 part of the pool for `want`
--       7 arrivals since last call 8 this gateway's rate, req/s
--       9 µs since last call (0: first)                       10 memory of the demand, µs
--      11 level of a bucket that does not exist: what the gateway remembers
--      12.. triples (kind, generation, tokens): 0 spent, 1 handed back, 2 debt to charge
-- Reply 1 granted for need   2 granted for want   3 generation   4 µs `want` tokens stay good
--       5 whole tokens left  6 µs until one token, 0 if there is one   7 1: the key was new
--       8 demand of all gateways, requests per 1000 s
local A = ARGV
local cap, rate, tau = A[1] + 0, A[2] + 0, A[3] + 0
local need, want = A[4] + 0, A[5] + 0
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local gen_now = now / tau
gen_now = gen_now - gen_now % 1
local g32 = gen_now % 4294967296
-- o0, o1: tokens leased and not yet reported, of this generation and of the one before
local level, ts, gen, o0, o1, dem, fresh = 0, now, g32, 0, 0, 0, 0
local s = redis.call('GET', KEYS[1])
if s and #s == 32 then
  level, ts, gen, o0, o1, dem = struct.unpack('<ddI4I4I4f', s)
  level = cap - level
  if gen ~= g32 then
    if (g32 - gen) % 4294967296 == 1 then o1, o0 = o0, 0 else o0, o1 = 0, 0 end
  end
else
  level, fresh = A[11] + 0, 1
  if level > cap then level = cap end
end
local dt = now - ts
if dt < 0 then dt = 0 end -- the clock went back: no refill, and count on from here
-- before the reports: nobody knows when what they say was spent, and the bucket may have been full until just now
local top = cap - o0 - o1
if level < top then
  level = level + dt * rate
  if level > top then level = top end
end
local back = 0
for i = 12, #A, 3 do
  local kind, g, n = A[i], A[i + 1] + 0, A[i + 2] + 0
  if kind == '2' then
    level = level - n
    if level < -cap then level = -cap end
  else
    -- never more than is known to be out
    if g == g32 then
      if n > o0 then n = o0 end
      o0 = o0 - n
    elseif (g32 - g) % 4294967296 == 1 then
      if n > o1 then n = o1 end
      o1 = o1 - n
    else
      n = 0
    end
    if kind == '1' then back = back + n end
  end
end
level = level + back
if level > cap then level = cap end
local memory = A[10] + 0
dem = dem * math.exp(-dt / memory) + A[7] * 1000000 / memory
local a, spec, whole = 0, 0, level - level % 1
if whole > 0 then
  a = need
  if a > whole then a = whole end
  local rest = whole - a
  if want > 0 and rest > 0 then
    local x, share = A[8] + 0, 1
    if dem > x then share = x / dem end
    local since = A[9] * rate
    if since > cap then since = cap end
    spec = A[6] * rest
    if since > spec then spec = since end
    spec = spec * share
    if spec > want then spec = want end
    if spec > rest then spec = rest end
    spec = spec - spec % 1
  end
  level = level - a - spec
  o0 = o0 + spec
  whole = whole - a - spec
else
  whole = 0
end
-- lives until it is full and every lease is dead: then a missing key means the same
local ttl = (cap - level) / rate / 1000 + tau / 500
redis.call('SET', KEYS[1], struct.pack('<ddI4I4I4f', cap - level, now, g32, o0, o1, dem), 'PX', ttl - ttl % 1 + 1)
local wait = 0
if level < 1 then wait = (1 - level) / rate + 1 end
return {a, spec, g32, (gen_now + 2) * tau - now, whole, wait, fresh, dem * 1000}
