-- How jobs become suspects; for the scripts whose first line asks for it, behind ending.

-- Jobs that were lost together, in the order of their entries, become two groups: if one of them
-- takes a worker along again, only its half is suspected further.
local function split(ids)
  local half = math.ceil(#ids / 2)
  for first = 1, #ids, half do
    local group = redis.call('HINCRBY', key('st'), 'groups', 1)
    for i = first, math.min(first + half - 1, #ids) do
      join_group(ids[i], group)
    end
  end
  count('suspected', #ids)
end
