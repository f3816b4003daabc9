-- Token bucket with leases: one key, one call, atomic. A strict limit calls with need=1, want=0.
--
-- A gateway receives tokens for waiting requests (need) and tokens ahead (want). Leased tokens stay
-- valid for this generation (a slice of time) and the next one. They count as content until they
-- are reported spent or two generations have passed. The bucket refills to its capacity less that
-- content, because leased tokens would otherwise be a second burst. The state stores what is spent,
-- not what is left, so it survives a changed capacity. Time is Redis's own; numbers of 16 digits
-- never pass through a string.
--
-- KEYS[1]  the bucket: one string of 58 bytes, see state.lua
--      [2]  its key in older versions, in the first call only
-- ARGV  1 capacity                 2 tokens per µs             3 generation length, µs
--       4 need: waiting requests   5 want: tokens ahead (both as requests.lua reads them)
--       6 part of the pool for `want`
--       7 arrivals since last call 8 this gateway's rate, req/s
--       9 µs since last call (0: first)                       10 memory of the demand, µs
--      11 this gateway's memory of the key, see state.lua
--      12.. triples (kind, generation, tokens): 0 spent, 1 returned, 2 debt to charge, 3 still
--         leased, but forgotten in a loss, 4 granted for `need` and not used: "tokens room moment",
--         where room is number 10 of the reply that granted them, and moment the µs of the
--         generation that had passed then, 5 reserved and not used, 6 to charge as far as tokens
--         are left
-- Reply 1 granted for need   2 granted for want   3 generation
--       4 µs for which `want` tokens stay valid
--       5 whole tokens left  6 µs until the first refused request fits, or until there is one token
--       7 incarnation, plus 65536 if gateways with other terms count the same key
--       8 demand of all gateways, requests per 1000 s   9 µs until it is full
--       10 if something is granted for need: its distance from full, leases counted as content, in
--       64ths (24 bits), and below it the count of what was returned unused (28 bits)
local A = ARGV
local cap, rate, tau = A[1] + 0, A[2] + 0, A[3] + 0
local want, unit = ahead(A[5])
local gen_now = now / tau
gen_now = gen_now - gen_now % 1
local g32 = gen_now % 4294967296
local knew, alive, run, memory_spent, _ = 0, 1, 0, -1, nil
if #A[11] >= 12 then knew, _, alive, run, memory_spent = struct.unpack('<HBBI4f', A[11]) end
-- o0, o1: tokens leased and not yet reported, of this generation and of the one before
-- since: granted, less what was returned, in this incarnation
local inc, of, told, doubt = 0, 0, 0, 0
-- unused: total returned from grants for `need`, in 64ths modulo 2^28
local spent, ts, gen, o0, o1, dem, since, unused = 0, now, g32, 0, 0, 0, 0, 0
local rare, found, elsewhere, returnable, beyond = nil, nil, 0, 0, 0
local s = redis.pcall('GET', KEYS[1])
local own = false
if s and #s == 58 then
  local form, c, r
  form, inc, of, told, doubt, c, r, _, spent, ts, unused, o0, o1, dem, since =
    struct.unpack('<c1HI4BHffI4ddI4I4I4ff', s)
  gen = generation(ts, tau)
  c, r = c / cap - 1, r / rate - 1
  own = form == 'B' and c < ALIKE and c > -ALIKE and r < ALIKE and r > -ALIKE
end
if not own then
  inc, of, told, doubt = 0, 0, 0, 0
  spent, ts, gen, o0, o1, dem, since, unused = 0, now, g32, 0, 0, 0, 0, 0
  if not s and KEYS[2] then s = redis.pcall('GET', KEYS[2]) end
  if s and #s == 32 then
    -- written by a gateway without sections
    spent, ts, gen, o0, o1, dem = struct.unpack('<ddI4I4I4f', s)
  elseif s then
    rare = rarely()
    local function mine(form, body)
      if form ~= 'B' then return false end
      local c, r = struct.unpack('<ff', body)
      c, r = c / cap - 1, r / rate - 1
      return c < ALIKE and c > -ALIKE and r < ALIKE and r > -ALIKE
    end
    found = rare.sections(s, mine)
    if found.head then _, inc, of, told, doubt = struct.unpack('<c1HI4BH', found.head) else s = false end
    if found.own then
      _, _, _, spent, ts, unused, o0, o1, dem, since = struct.unpack('<ffI4ddI4I4I4ff', found.own)
      gen = generation(ts, tau)
      returnable, beyond = found.returnable, found.beyond
    elseif found.before then
      spent = math.min(cap, found.before)
      returnable, beyond = spent, found.before - spent
    end
    elsewhere = found.elsewhere
  end
end
-- the least that was spent according to this gateway's memory, if data was lost since its last call
local least, doubt_left, doubt_units = 0, 0, 0
if inc == 0 or inc ~= knew or (run ~= of and run ~= 0) or doubt ~= 0 then
  rare = rare or rarely()
  if inc == 0 then
    inc, of, told = rare.incarnate(knew), run, 1
    if knew ~= 0 and memory_spent >= 0 then
      least = memory_spent
      if not s then doubt = rare.doubt_until(cap / rate, alive) end
    end
  elseif run ~= of and run ~= 0 and of ~= 0 then
    -- an earlier run of the server wrote this state, and may have written later changes that are
    -- lost
    inc, of, told, since = rare.incarnate(inc), run, 1, 0
    least, doubt = memory_spent, rare.doubt_until(cap / rate, alive)
  else
    if run ~= 0 then of = run end
    if inc ~= knew then
      if told < 255 then told = told + 1 end
      if knew ~= 0 and memory_spent > 0 then least = memory_spent + since end
    end
  end
  if least > cap then least = cap end
  doubt_left, doubt_units = rare.doubt_left(doubt, told, alive), rare.doubt_units(cap / rate)
  if doubt_left == 0 then doubt = 0 end
end
local level = cap - spent
if gen ~= g32 then
  local age = (g32 - gen) % 4294967296
  if age == 1 then
    o1, o0 = o0, 0
  elseif age < 2147483648 then
    o0, o1 = 0, 0
  else
    -- the clock went back: gateways still hold these leases, so they count for the present
    -- generation
    o0, o1 = o0 + o1, 0
  end
end
local dt = now - ts
if dt < 0 then dt = 0 end -- the clock went back: no refill; continue from here
-- refill before applying reports: the time of the reported spending is unknown, and the bucket may
-- have been full until just now
local top = cap - o0 - o1 - elsewhere
if level < top then
  level = level + dt * rate
  if level > top then level = top end
end
if level > cap - least then level = cap - least end
local level_before = level
-- whatever raises the level is added to `back`, and to `returned` for other terms (see `charge`)
local back, refund, out, returned = 0, 0, o0 + o1 + elsewhere, {}
if found then
  returnable = math.min(returnable, cap - level)
  if returnable <= 0 then returnable, beyond = 0, 0 end
end
for i = 12, #A, 3 do
  local kind, g, n = A[i], A[i + 1] + 0, tonumber(A[i + 2])
  if kind == '2' then
    level = level - n
    if level < -cap then level = -cap end
  elseif kind == '5' then
    refund = refund + n
  elseif kind == '6' then
    if level > 0 then level = math.max(0, level - n) end
  elseif kind == '3' then
    -- a loss erased it
    if g == g32 then o0 = o0 + n elseif (g32 - g) % 4294967296 == 1 then o1 = o1 + n end
  elseif kind == '4' then
    rare = rare or rarely()
    n = rare.not_used(A[i + 2], rate, tau, g32 - g, unused)
    unused = (unused + math.ceil(n * 64)) % 268435456
    back = back + n
    returned[#returned + 1] = { n, now - now % tau - (g32 - g) % 4294967296 * tau }
  else
    -- never more than is recorded as leased
    if g == g32 then
      if n > o0 then n = o0 end
      o0 = o0 - n
    elseif (g32 - g) % 4294967296 == 1 then
      if n > o1 then n = o1 end
      o1 = o1 - n
    else
      n = 0
    end
    if kind == '1' then
      back = back + n
      returned[#returned + 1] = { n, now - now % tau - (g32 - g) % 4294967296 * tau }
    end
  end
end
level = level + back
if level > cap then level = cap end
-- the bucket may have refilled behind what was reserved, and leased tokens are content
if refund > 0 then
  top = cap - o0 - o1 - elsewhere
  if level < top then
    local n = math.min(top - level, refund)
    level, back = level + n, back + n
    returned[#returned + 1] = { n, 0 }
  end
end
-- grant little while gateways may remember more spending
local held = 0
if doubt_left > 0 then
  local few = cap * FEW
  if few < 1 then few = 1 end
  few = few - few % 1 + rate * (doubt_units - doubt_left) * 65536 - since - level_before + level
  if few < level then level, held = few, level - few end
end
local memory = A[10] + 0
dem = dem * math.exp(-dt / memory) + A[7] * 1000000 / memory
local spec, whole = 0, level - level % 1
if whole < 0 then whole = 0 end
local a, refused = grant(A[4], whole)
if whole > 0 then
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
    spec = spec - spec % unit
  end
  level = level - a - spec
  o0 = o0 + spec
  whole = whole - a - spec
end
local wait = 0
if refused == 0 then refused = 1 end
if level < refused then wait = (refused - level) / rate + 1 end
if held > 0 then
  level = level + held
  if wait > doubt_left * 65536 then wait = doubt_left * 65536 end
end
local room = 0
if a > 0 then
  room = (cap - level - o0 - o1 - elsewhere) * 64
  if room < 0 then room = 0 elseif room > 16777215 then room = 16777215 end
  room = (room - room % 1) * 268435456 + unused
end
local granted = level_before - level
-- expires when it is full and every lease has ended: a missing key then means the same
local ttl = (cap - level) / rate / 1000 + tau / 500
ttl = ttl - ttl % 1 + GRACE
local state = struct.pack('<c1HI4BHffI4ddI4I4I4ff', 'B', inc, of, told, doubt, cap, rate, tau, cap - level, now, unused, o0, o1, dem, since + granted)
if found then
  local call = { charged = granted + back, back = returned, out = out }
  for _, section in ipairs(found.others) do rare.charge(section, call) end
  rare.write(state, found, ttl, returnable, beyond)
else
  redis.call('SET', KEYS[1], state, 'PX', ttl)
end
return {a, spec, g32, (gen_now + 2) * tau - now, whole, wait, inc + 65536 * (found and found.disagree or 0), dem * 1000, (cap - level) / rate + 1, room}
