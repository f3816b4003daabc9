-- Sliding log: exact, called for every request, no leases.
--
-- Each unit is an entry, stamped with the moment of its grant; it counts for one window. If another
-- limit refuses the request, the unit is removed again by the number of the call that granted it.
--
-- KEYS[1]  the log: a sorted set, whose last member is its state, see state.lua
--      [2]  its key in older versions
-- ARGV  1 limit   2 window, µs   3 need: waiting requests, as requests.lua reads them
--       4 this gateway's unique name   5 number of this call, modulo 2^32
--       6 this gateway's memory, see state.lua: f is the number of its own units; after a loss they
--         follow, each I4 number of the call, H units, I6 µs since then
--       7.. triples (kind, number of a call, units): 1 returned, 2 or 6 to charge
-- Reply as bucket.lua: 1 granted, 3 number of the call, 5 units left, 6 µs until the first refused
-- request fits, or until one unit does, 7; the rest is 0
local A = ARGV
local limit, win = A[1] + 0, A[2] + 0
local knew, alive, run, own_units, _ = 0, 1, 0, -1, nil
if #A[6] >= 12 then knew, _, alive, run, own_units = struct.unpack('<HBBI4f', A[6]) end
local rare, found, others, member = nil, nil, nil, nil
local inc, of, told, doubt, since = 0, 0, 0, 0, 0
local own, s = false, redis.pcall('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')
local was = s
if s[2] == 'inf' and #s[1] == 24 then
  local form, length
  form, inc, of, told, doubt, length, _, since = struct.unpack('<c1HI4BHI6ff', s[1])
  own, member = form == 'L' and length == win, s[1]
end
if not own then
  rare = rare or rarely()
  inc, of, told, doubt, since, member = 0, 0, 0, 0, 0, nil
  if not s.err and #s == 0 and KEYS[2] then
    -- written by a gateway without sections
    redis.call('ZUNIONSTORE', KEYS[1], 1, KEYS[2])
  end
  if s.err then s = redis.call('GET', KEYS[1]) end
  local function mine(form, body) return form == 'L' and struct.unpack('<I6', body) == win end
  found = rare.sections(s, mine)
  member = found.member
  if found.head then _, inc, of, told, doubt = struct.unpack('<c1HI4BH', found.head) end
  if found.own then
    _, _, since = struct.unpack('<I6ff', found.own)
  elseif found.before then
    if type(s) == 'string' then redis.call('DEL', KEYS[1]) end
    -- what the previous terms had counted is spent now, except what these terms count anyway
    found.set = true
    local has = redis.call('ZCOUNT', KEYS[1], '(' .. string.format('%.0f', now - win), '(inf')
    for i = 1, math.min(limit, math.ceil(found.before - ALIKE)) - has do
      redis.call('ZADD', KEYS[1], now, 'x:' .. string.format('%.0f', now) .. ':' .. i)
    end
  end
  if #found.others > 0 then others = found.others end
end
local longest = win
if others then
  for _, section in ipairs(others) do
    if section[1] == 'L' then longest = math.max(longest, (struct.unpack('<I6', section[3]))) end
  end
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - longest)
-- the clock went back: entries in the future count as of just now, and block for one window at most
local at = -1
while true do
  local o = redis.call('ZRANGE', KEYS[1], at, at, 'WITHSCORES')
  if o[2] == 'inf' then
    at = at - 1
  elseif not o[2] or o[2] + 0 <= now then
    break
  else
    redis.call('ZADD', KEYS[1], now, o[1])
  end
end
local doubt_left = 0
if inc == 0 or inc ~= knew or (run ~= of and run ~= 0) or doubt ~= 0 or #A[6] > 12 then
  rare = rare or rarely()
  local tells = knew == 0 or own_units <= 0 or #A[6] > 12
  if inc == 0 then
    inc, of = rare.incarnate(knew), run
    told = tells and 1 or 0
    if knew ~= 0 and own_units >= 0 and not was.err and #was == 0 then doubt = rare.doubt_until(win, alive) end
  elseif run ~= of and run ~= 0 and of ~= 0 then
    -- an earlier run of the server wrote this state, and may have written later changes that are
    -- lost
    inc, of, since = rare.incarnate(inc), run, 0
    told = tells and 1 or 0
    doubt = rare.doubt_until(win, alive)
  else
    if run ~= 0 then of = run end
    if tells and (inc ~= knew or #A[6] > 12) and told < 255 then told = told + 1 end
  end
  -- this gateway's entries, restored unchanged
  for at = 13, #A[6] - 11, 12 do
    local call, units, age = struct.unpack('<I4HI6', A[6], at)
    if age < win then
      for i = 1, units do
        redis.call('ZADD', KEYS[1], 'NX', now - age, A[4] .. ':' .. call .. ':' .. i)
      end
    end
  end
  doubt_left = rare.doubt_left(doubt, told, alive)
  if doubt_left == 0 then doubt = 0 end
end
local before = 0
local debt, returned = 0, {}
for i = 7, #A, 3 do
  if A[i] == '1' then
    local left = A[i + 2] + 0
    local n = 1
    -- units of a call are numbered from 1 without gaps; the last ones are removed
    while redis.call('ZSCORE', KEYS[1], A[4] .. ':' .. A[i + 1] .. ':' .. n) do n = n + 1 end
    while left > 0 and n > 1 do
      n, left = n - 1, left - 1
      local entry = A[4] .. ':' .. A[i + 1] .. ':' .. n
      returned[#returned + 1] = { 1, redis.call('ZSCORE', KEYS[1], entry) + 0 }
      redis.call('ZREM', KEYS[1], entry)
      before = before + 1
    end
  elseif A[i] == '2' or A[i] == '6' then
    debt = debt + A[i + 2]
  end
end
local n
if others then
  n = redis.call('ZCOUNT', KEYS[1], '(' .. string.format('%.0f', now - win), '(inf')
else
  n = redis.call('ZCARD', KEYS[1])
  if member then n = n - 1 end
end
before = before + n
-- a debt is charged as far as there is room: a log cannot go into debt
if debt > limit - n then debt = limit - n end
for i = 1, debt do redis.call('ZADD', KEYS[1], now, A[4] .. ':' .. A[5] .. ':d' .. i) end
if debt > 0 then n = n + debt end
-- grant little while gateways may remember more spending
local held = 0
if doubt_left > 0 then
  local few = limit * FEW
  if few < 1 then few = 1 end
  few = few - few % 1 - since - n + before
  if limit - few > n then held = limit - few - n end
end
local whole = limit - n - held
if whole < 0 then whole = 0 end
local granted, refused = grant(A[3], whole)
for i = 1, granted do redis.call('ZADD', KEYS[1], now, A[4] .. ':' .. A[5] .. ':' .. i) end
n = n + granted
local wait = 0
if refused == 0 then refused = 1 end
if n + refused > limit then
  -- the last entry that must leave before it fits
  local place = -(limit - refused + (member and 2 or 1))
  local o = redis.call('ZRANGE', KEYS[1], place, place, 'WITHSCORES')
  wait = win
  if o[2] and o[2] ~= 'inf' then wait = math.max(1, o[2] + win - now) end
elseif n + held + refused > limit then
  wait = doubt_left * 65536
end
local left = limit - n - held
if left < 0 then left = 0 end
local life = math.ceil(win / 1000) + GRACE
local delta = n - before
local state = struct.pack('<c1HI4BHI6ff', 'L', inc, of, told, doubt, win, limit, doubt > 0 and since + delta or 0)
if others then
  local call = { charged = granted + math.max(0, debt), back = returned, out = found.elsewhere }
  for _, section in ipairs(others) do
    if section[1] ~= 'L' then rare.charge(section, call) end
  end
  rare.write(state, found, life, 0, 0)
else
  if state ~= member then
    if member then redis.call('ZREM', KEYS[1], member) end
    redis.call('ZADD', KEYS[1], '+inf', state)
  end
  redis.call('PEXPIRE', KEYS[1], life)
end
return {granted, 0, A[5] + 0, 0, left, wait, inc + 65536 * (found and found.disagree or 0), 0, 0, 0}
