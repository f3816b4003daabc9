-- The state of a key and its format; prepended to bucket.lua, window.lua and log.lua.
--
-- One string: a header of 10 bytes, the section of the terms of the last call, and the sections of
-- other terms that still count (after a reload, or during a rollout). A grant of one is charged to
-- all. While one of them is a log, the key is a sorted set of the log's entries, and the string is
-- its last member, with the score +inf.
--
--   header  c1 form of the first section, H incarnation, I4 run, B gateways that have reported,
--           H end of the doubt (65.5 ms; 0: none)
--   B       f capacity, f tokens per µs, I4 generation length, d spent, d moment, I4 returned unused,
--           I4 leased, I4 leased before, f demand, f granted in this incarnation
--   F, S    I6 window length, f limit, I6 window, d count, d count before, I4 moment (1.024 ms),
--           f demand, f granted in this incarnation in this window, f in the one before
--   L       I6 window length, f limit, f granted in this incarnation
--   others  c1 form, I4 the second of its last call, and the section
--   R       after the others, for each section: f returnable, f beyond (see `charge`)
--
-- An incarnation is the life of a key from creation to loss. A gateway remembers the state after
-- its last call, and its incarnation. If the stored state has another incarnation, data was lost in
-- between, and the gateway's memory is merged. The last caller of all gateways knows exactly what
-- was spent.
--
-- memory (an argument): H incarnation (0: none), B window modulo 256, B gateways alive, I4 run, f
-- spent or count (negative: the key may have expired), f count before
local ALIKE = 1e-6
-- duration of the doubt after a loss, and the part granted until all gateways have reported their
-- memory
local DOUBT, FEW = 46, 0.02
-- how long the section of unused terms is kept, and the most of such sections
local KEEP, MOST = 120, 3
-- ms for which a key outlives its use, so that a late call does not mistake an expired key for a
-- lost one
local GRACE = 1000

local now
do
  local t = redis.call('TIME')
  now = t[1] * 1000000 + t[2]
end

-- The number of the generation of this moment, modulo 2^32.
local function generation(moment, tau)
  local g = moment / tau
  return (g - g % 1) % 4294967296
end

-- Rarely needed functions: new keys, lost states, changed terms.
local function rarely()
  local function doubt_left(doubt, told, alive)
    if doubt == 0 or told >= alive then return 0 end
    local left = (doubt - (now - now % 65536) / 65536) % 65536
    if left > DOUBT then left = 0 end
    return left
  end

  -- Duration of a doubt: at most the time to recover from having spent everything.
  local function doubt_units(span)
    local units = (span - span % 65536) / 65536 + 1
    if units > DOUBT then units = DOUBT end
    return units
  end

  local function doubt_until(span, alive)
    if alive < 2 then return 0 end
    local till = ((now - now % 65536) / 65536 + doubt_units(span)) % 65536
    if till == 0 then till = 1 end
    return till
  end

  -- An incarnation that differs from the one before.
  local function incarnate(before)
    local inc = (now - now % 64) / 64 % 65535 + 1
    if inc == before then inc = inc % 65535 + 1 end
    return inc
  end

  -- Tokens of a bucket's section that are still leased.
  local function leased(form, body)
    if form ~= 'B' then return 0 end
    local _, _, tau, _, ts, _, o0, o1 = struct.unpack('<ffI4ddI4I4I4', body)
    local age = (generation(now, tau) - generation(ts, tau)) % 4294967296
    if age == 1 then return o0 end
    -- after a step back of the clock, gateways still hold them
    if age == 0 or age >= 2147483648 then return o0 + o1 end
    return 0
  end

  -- Units that a section counts as spent now. A bucket does not refill behind the tokens `out`,
  -- which are leased under any terms.
  local function used(form, body, out)
    if form == 'B' then
      local _, rate, _, spent, ts = struct.unpack('<ffI4dd', body)
      local least = math.min(spent, out)
      if now > ts then spent = math.max(least, spent - (now - ts) * rate) end
      return spent
    elseif form == 'L' then
      local win = struct.unpack('<I6', body)
      return redis.call('ZCOUNT', KEYS[1], '(' .. string.format('%.0f', now - win), '(inf')
    end
    local win, _, wid, cur, prev = struct.unpack('<I6fI6dd', body)
    local w = (now - now % win) / win
    if w > wid then
      if w == wid + 1 then prev = cur else prev = 0 end
      cur, wid = 0, w
    end
    if form == 'F' then return cur end
    local into = now - wid * win
    if into < 0 then into = 0 end
    return cur + prev * (1 - into / win)
  end

  -- Reads a state that is not just one section of the caller's own terms:
  --   head      the header
  --   own       the caller's section (nil: none yet)
  --   returnable, beyond  of that section
  --   first     the section of the previous terms, and `before`, what it had counted (nil: unknown)
  --   others    all sections but the caller's: form, second of the last call, body, returnable, beyond
  --   elsewhere tokens leased under other terms
  --   set       whether the key is a sorted set, and `member`, its state
  --   disagree  1 if gateways disagree
  local function sections(s, mine)
    local SIZE = { B = 48, F = 48, S = 48, L = 14 }
    local found = { others = {}, set = false, returnable = 0, beyond = 0, elsewhere = 0, disagree = 0 }
    if type(s) == 'table' then
      local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')
      found.set, s = true, false
      if last[2] == 'inf' then s, found.member = last[1], last[1] end
    end
    local all = {}
    if s and SIZE[string.sub(s, 1, 1)] and #s >= 10 + SIZE[string.sub(s, 1, 1)] then
      local form, at = string.sub(s, 1, 1), 11
      found.head = string.sub(s, 1, 10)
      all[1] = { form, false, string.sub(s, at, at + SIZE[form] - 1), 0, 0 }
      at = at + SIZE[form]
      while #s > at + 5 do
        form = string.sub(s, at, at)
        if not SIZE[form] then break end
        local asked = struct.unpack('<I4', s, at + 1)
        all[#all + 1] = { form, asked, string.sub(s, at + 5, at + 4 + SIZE[form]), 0, 0 }
        at = at + 5 + SIZE[form]
      end
      if string.sub(s, at, at) == 'R' and #s == at + 8 * #all then
        for i, section in ipairs(all) do
          section[4], section[5] = struct.unpack('<ff', s, at - 7 + 8 * i)
        end
      end
    end
    local second, out = (now - now % 1000000) / 1000000, 0
    for i, section in ipairs(all) do
      if mine(section[1], section[3]) then
        found.own, found.returnable, found.beyond = section[3], section[4], section[5]
        -- these terms were in use before others and are again: two gateways disagree
        if i > 1 then found.disagree = 1 end
        out = out + leased(section[1], section[3])
      elseif not section[2] or (section[2] + KEEP >= second and #found.others < MOST) then
        section[2] = section[2] or second
        found.others[#found.others + 1] = section
        found.elsewhere = found.elsewhere + leased(section[1], section[3])
      end
    end
    found.first = all[1]
    if all[1] and not found.own then
      found.before = math.max(found.elsewhere, used(all[1][1], all[1][3], found.elsewhere))
    end
    return found
  end

  -- Of units of a bucket granted to a request and not used, the number to return. The bucket has
  -- refilled since, partly into room that existed only because these units were missing. So at most
  -- the room at the grant returns, less everything that has come in since. `unused` counts what
  -- other requests returned.
  local function not_used(report, rate, tau, age, counted)
    local tokens, packed, moment = string.match(report, '^(%d+) (%d+) (%d+)$')
    age = age % 4294967296
    local passed = now % tau + age * tau - moment
    -- the clock went back, or the grant is too old
    if age >= 2147483648 or passed < 0 then return 0 end
    local before = packed % 268435456
    local room = (packed - before) / 268435456 - passed * rate * 64 - (counted - before) % 268435456
    return math.max(0, math.min(tokens, room / 64))
  end

  -- Charges a section of other terms with what a call was granted, less what it returned.
  --
  --   call.charged  units granted by this call, and debts
  --   call.back     units returned by this call: { units, the earliest moment of their grant }
  --   call.out      tokens leased under any terms before this call
  --
  -- Returned units come back only as far as they are still counted here:
  --   beyond      units charged when there was no room to count them; returned units are those first
  --   returnable  bucket: what other terms charged and the bucket has not refilled since. Window: what
  --               other terms had spent when these terms came into use in this window; units granted
  --               since the window began are counted here anyway
  local function charge(section, call)
    local form, body, returnable, beyond = section[1], section[3], section[4], section[5]
    if form == 'B' then
      local cap, rate, tau, _, ts, unused, o0, o1, dem, since = struct.unpack('<ffI4ddI4I4I4ff', body)
      local age = (generation(now, tau) - generation(ts, tau)) % 4294967296
      if age == 1 then
        o0, o1 = 0, o0
      elseif age ~= 0 and age < 2147483648 then
        o0, o1 = 0, 0
      end
      local spent = used(form, body, call.out)
      returnable = math.min(returnable, spent)
      if returnable <= 0 then returnable, beyond = 0, 0 end
      for _, units in ipairs(call.back) do
        local n = math.max(0, units[1] - beyond)
        beyond = beyond - units[1] + n
        n = math.min(n, returnable)
        spent, returnable = spent - n, returnable - n
      end
      local counted = math.max(0, math.min(call.charged, cap - spent))
      spent, returnable, beyond = spent + counted, returnable + counted, beyond + call.charged - counted
      section[3] = struct.pack('<ffI4ddI4I4I4ff', cap, rate, tau, spent, now, unused, o0, o1, dem, since)
    elseif form == 'L' then
      -- entries of returned units stay until their window has passed
      for i = 1, call.charged do
        redis.call('ZADD', KEYS[1], now, 'x:' .. string.format('%.0f', now) .. ':' .. i)
      end
    else
      local win, limit, wid, cur, prev, ts, dem, s0, s1 = struct.unpack('<I6fI6ddI4fff', body)
      local w = (now - now % win) / win
      if w > wid then
        if w == wid + 1 then prev, s1 = cur, s0 else prev, s1 = 0, 0 end
        wid, cur, s0, returnable, beyond = w, 0, 0, 0, 0
      end
      for _, units in ipairs(call.back) do
        local n = math.max(0, units[1] - beyond)
        beyond = beyond - units[1] + n
        if units[2] < wid * win then
          n = math.min(n, returnable)
          returnable = returnable - n
        end
        -- what these terms granted in this window stays counted
        cur = cur - math.max(0, math.min(n, cur - s0))
        returnable = math.max(0, math.min(returnable, cur - s0))
      end
      -- the wait is never longer than after spending all of these terms
      local counted = math.max(0, math.min(call.charged, limit - cur))
      cur, beyond = cur + counted, beyond + call.charged - counted
      section[3] = struct.pack('<I6fI6ddI4fff', win, limit, wid, cur, prev, ts, dem, s0, s1)
    end
    section[4], section[5] = returnable, beyond
  end

  -- Writes a state of several sections, or one that is or was a log's.
  local function write(first, found, ttl, returnable, beyond)
    local set, member = found.set, found.member
    local parts, log = { first }, string.sub(first, 1, 1) == 'L'
    local rest = { 'R', struct.pack('<ff', returnable, beyond) }
    for _, section in ipairs(found.others) do
      parts[#parts + 1] = section[1] .. struct.pack('<I4', section[2]) .. section[3]
      rest[#rest + 1] = struct.pack('<ff', section[4], section[5])
      log = log or section[1] == 'L'
    end
    if #found.others > 0 then
      parts[#parts + 1] = table.concat(rest)
      if ttl < KEEP * 1000 then ttl = KEEP * 1000 end
    end
    local state = table.concat(parts)
    if log ~= set then redis.call('DEL', KEYS[1]) end
    if log then
      if member and member ~= state then redis.call('ZREM', KEYS[1], member) end
      redis.call('ZADD', KEYS[1], '+inf', state)
      redis.call('PEXPIRE', KEYS[1], ttl)
    else
      redis.call('SET', KEYS[1], state, 'PX', ttl)
    end
  end

  return {
    doubt_left = doubt_left, doubt_units = doubt_units, doubt_until = doubt_until, incarnate = incarnate, sections = sections,
    charge = charge, write = write, not_used = not_used,
  }
end
