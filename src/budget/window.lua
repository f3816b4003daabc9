-- Fixed and sliding window with leases: one key, one call, atomic. A lease ends with its window.
--
-- The sliding window's estimate is the count of this window, plus the part of the previous one that
-- still lies within one window length. Nothing refills behind a lease, so spending need not be
-- reported; returned tokens are subtracted from the window that they belong to.
--
-- KEYS[1]  the counter: one string of 58 bytes, see state.lua
--      [2]  its key in older versions, in the first call only
-- ARGV  1 limit                    2 window, µs                3 1: sliding, 0: fixed
--       4 need: waiting requests   5 want: tokens ahead (both as requests.lua reads them)
--       6 part of the pool for `want`
--       7 arrivals since last call 8 this gateway's rate, req/s
--       9 µs since last call (0: first)                       10 memory of the demand, µs
--      11 this gateway's memory, see state.lua
--      12.. triples (kind, window, tokens): 1 returned, 2 debt to charge, 6 to charge as far as
--         tokens are left
-- Reply as bucket.lua; 3 is the window's number modulo 2^32, 4 the µs to its end, 9 its count,
-- 10 that of the one before
local A = ARGV
local limit, win, slide = A[1] + 0, A[2] + 0, A[3] == '1'
local want, unit = ahead(A[5])
local form = slide and 'S' or 'F'
local w = (now - now % win) / win
local knew, knew_window, alive, run, memory_cur, memory_prev = 0, 0, 1, 0, -1, 0
if #A[11] >= 16 then knew, knew_window, alive, run, memory_cur, memory_prev = struct.unpack('<HBBI4ff', A[11]) end
-- since, since_prev: granted, less what was returned, in this incarnation, in this window and the
-- one before
local inc, of, told, doubt = 0, 0, 0, 0
local wid, cur, prev, ts, dem, since, since_prev = w, 0, 0, 0, 0, 0, 0
local rare, found, returnable, beyond, _ = nil, nil, 0, 0, nil
local millis = (now - now % 1024) / 1024 % 4294967296
ts = millis
local s = redis.pcall('GET', KEYS[1])
local own = false
if s and #s == 58 then
  local f, length, most
  f, inc, of, told, doubt, length, most, wid, cur, prev, ts, dem, since, since_prev =
    struct.unpack('<c1HI4BHI6fI6ddI4fff', s)
  most = most / limit - 1
  own = f == form and length == win and most < ALIKE and most > -ALIKE
end
if not own then
  inc, of, told, doubt = 0, 0, 0, 0
  wid, cur, prev, ts, dem, since, since_prev = w, 0, 0, millis, 0, 0, 0
  if not s and KEYS[2] then s = redis.pcall('GET', KEYS[2]) end
  if s and #s == 36 then
    -- written by a gateway without sections
    wid, cur, prev, _, dem = struct.unpack('<ddddf', s)
  elseif s then
    rare = rarely()
    local function mine(f, body)
      if f ~= form then return false end
      local length, most = struct.unpack('<I6f', body)
      most = most / limit - 1
      return length == win and most < ALIKE and most > -ALIKE
    end
    found = rare.sections(s, mine)
    local first, before = found.first, found.before
    if found.head then _, inc, of, told, doubt = struct.unpack('<c1HI4BH', found.head) else s = false end
    if found.own then
      _, _, wid, cur, prev, ts, dem, since, since_prev = struct.unpack('<I6fI6ddI4fff', found.own)
      returnable, beyond = found.returnable, found.beyond
    elseif before and first[1] == form and struct.unpack('<I6', first[3]) == win then
      -- the same window with another amount
      local _, _, window, count, count_before = struct.unpack('<I6fI6dd', first[3])
      wid, cur, prev, beyond = window, math.min(limit, count), math.min(limit, count_before), math.max(0, count - limit)
    elseif before then
      -- whole units, at most the limit
      cur = math.min(limit, math.ceil(before - ALIKE))
      returnable, beyond = cur, math.max(0, before - limit)
    end
  end
end
if w > wid then
  if w == wid + 1 then prev, since_prev = cur, since else prev, since_prev = 0, 0 end
  cur, since, wid, returnable, beyond = 0, 0, w, 0, 0
  -- a loss in a past window does not matter
  if not slide then doubt = 0 end
elseif w < wid - 1 then
  -- the clock went back by more than a window: count everything as of just now
  wid = w
end
-- w == wid - 1: a small step back; stay in the window that was already open
local doubt_left = 0
if inc == 0 or inc ~= knew or (run ~= of and run ~= 0) or doubt ~= 0 then
  rare = rare or rarely()
  local before, is_lost = inc, false
  -- the memory counts in the window that it belongs to
  local age = (wid - knew_window) % 256
  local remembers = knew ~= 0 and memory_cur >= 0 and (age == 0 or slide and age == 1)
  if inc == 0 then
    inc, of, told, is_lost = rare.incarnate(knew), run, 1, remembers and not s
  elseif run ~= of and run ~= 0 and of ~= 0 then
    -- an earlier run of the server wrote this state, and may have written later changes that are
    -- lost
    inc, of, told, since, since_prev, is_lost = rare.incarnate(inc), run, 1, 0, 0, true
  else
    if run ~= 0 then of = run end
    if inc ~= knew and told < 255 then told = told + 1 end
  end
  if is_lost then doubt = rare.doubt_until(win, alive) end
  if remembers and before ~= knew or remembers and inc ~= before then
    if age == 1 then memory_cur, memory_prev = -since, memory_cur end
    cur = math.max(cur, math.min(limit, memory_cur + since))
    prev = math.max(prev, math.min(limit, memory_prev + since_prev))
  end
  doubt_left = rare.doubt_left(doubt, told, alive)
  if doubt_left == 0 then doubt = 0 end
end
local cur_before, prev_before = cur, prev
-- after a step back the window has not begun, and its end is further away
local left = (wid + 1) * win - now
local into = win - left
if into < 0 then into = 0 end
local w32 = wid % 4294967296
local returned, back = {}, 0
for i = 12, #A, 3 do
  local kind, g, n = A[i], A[i + 1] + 0, A[i + 2] + 0
  if kind == '2' then
    -- a debt of a past window lapses; -1 means an unknown window
    if g == -1 or g == w32 then
      cur = cur + n
      if cur > 2 * limit then cur = 2 * limit end
    elseif slide and (w32 - g) % 4294967296 == 1 then
      prev = prev + n
      if prev > 2 * limit then prev = 2 * limit end
    end
  elseif kind == '6' then
    if cur < limit then cur = math.min(limit, cur + n) end
  elseif kind == '1' then
    if g == w32 then
      if n > cur then n = cur end
      cur, back = cur - n, back + n
      returned[#returned + 1] = { n, wid * win }
    elseif (w32 - g) % 4294967296 == 1 then
      if n > prev then n = prev end
      prev, back = prev - n, back + n
    end
  end
end
since_prev = since_prev + prev - prev_before
local room = limit - cur
if slide then room = room - prev * (1 - into / win) end
-- grant little while gateways may remember more spending
local held = 0
if doubt_left > 0 then
  local few = limit * FEW
  if few < 1 then few = 1 end
  few = few - few % 1 - since - (slide and since_prev or 0) - (cur - cur_before)
  if few < room then room, held = few, room - few end
end
local dt = (millis - ts) % 4294967296 * 1024
if dt > 4e12 then dt = 0 end
local memory = A[10] + 0
dem = dem * math.exp(-dt / memory) + A[7] * 1000000 / memory
local spec, whole = 0, room - room % 1
if whole < 0 then whole = 0 end
local a, refused = grant(A[4], whole)
if whole > 0 then
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
    spec = spec - spec % unit
  end
  cur = cur + a + spec
  whole = whole - a - spec
  room = room - a - spec
end
-- a sliding window is needed for one more window
local ttl = (slide and left + win or left) / 1000
ttl = ttl - ttl % 1 + 1
local wait = 0
if refused == 0 then refused = 1 end
if room < refused then
  wait = left
  if slide then
    local free = limit - refused - cur
    if free >= 0 then
      -- in this window, when enough of the previous one has left
      wait = prev > 0 and left - free / prev * win or 0
    else
      -- in the next window, where this one is the previous
      wait = left + (1 - (limit - refused) / cur) * win
    end
    if wait < 1 then wait = 1 end
  end
  wait = wait - wait % 1 + 1
  if held > 0 then wait = math.min(left, doubt_left * 65536) end
end
local granted = cur - cur_before
local state = struct.pack('<c1HI4BHI6fI6ddI4fff', form, inc, of, told, doubt, win, limit, wid, cur, prev, millis, dem, since + granted, since_prev)
if found then
  -- returned units of the window before are not counted by other terms any more
  local call = { charged = granted + prev - prev_before + back, back = returned, out = found.elsewhere }
  for _, section in ipairs(found.others) do rare.charge(section, call) end
  rare.write(state, found, ttl, returnable, beyond)
else
  redis.call('SET', KEYS[1], state, 'PX', ttl)
end
return {a, spec, w32, left, whole, wait, inc + 65536 * (found and found.disagree or 0), dem * 1000, math.ceil(cur), math.ceil(prev)}
