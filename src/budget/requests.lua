-- Prepended to the scripts that count units: decides which waiting requests are granted.
--
-- A list of requests is "5", five of one unit each, or "20*2 1*5", two of 20 units and then five of
-- one unit.

-- Grants whole requests in order of arrival; one that does not fit leaves its units to those behind
-- it. Returns the units granted, and the cost of the first request that did not fit (0: all fit).
local function grant(requests, whole)
  local n = tonumber(requests)
  if n then
    if n <= whole then return n, 0 end
    return whole, 1
  end
  local granted, refused = 0, 0
  for cost, count in string.gmatch(requests, '(%d+)%*(%d+)') do
    cost, count = cost + 0, count + 0
    local fit = whole / cost
    fit = fit - fit % 1
    if fit >= count then
      fit = count
    elseif refused == 0 then
      refused = cost
    end
    whole, granted = whole - fit * cost, granted + fit * cost
  end
  return granted, refused
end

-- Tokens ahead: the most in all, and the cost of the cheapest request that they are for. Less than
-- that serves no request.
local function ahead(requests)
  local n = tonumber(requests)
  if n then return n, 1 end
  local cost, count = string.match(requests, '^(%d+)%*(%d+)$')
  return cost * count, cost + 0
end

