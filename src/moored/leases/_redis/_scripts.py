"""The Lua scripts of the Redis store, one for each `Store` method; Redis runs them atomically.

All times are integer microseconds of the server's clock. A Lua number is a double: it holds such a
time exactly, but `..` formats only 14 digits of it, so numbers are formatted with `%.0f`.
"""

from __future__ import annotations

import hashlib

__all__ = ["ACQUIRE", "FENCED", "HELD", "RELEASE", "RENEW", "TAKE", "Script"]


class Script:
    """A Lua script, and its SHA-1, by which EVALSHA runs it."""

    __slots__ = ("sha", "text")

    def __init__(self, *parts: str) -> None:
        self.text = "".join(parts)
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


_CLOCK = """
local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end
local now = clock()
"""

# KEYS: live (sorted set: id -> expiry), who (hash: id -> fence, creation, ttl and holder).
# Redis expires both a minute after the last lease has expired.
_LEASES = """
local live, who = KEYS[1], KEYS[2]
local function forget_dead()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', live, '-inf', now)) do
    redis.call('ZREM', live, id)
    redis.call('HDEL', who, id)
  end
end
local function keep_until(last)
  local ms = math.ceil((last - now) / 1000) + 60000
  if redis.call('PTTL', live) < ms then
    redis.call('PEXPIRE', live, ms)
    redis.call('PEXPIRE', who, ms)
  end
end
"""

# KEYS: live, who, fence. ARGV: id, limit, ttl, holder, expiry of the fence key in ms.
# Returns the fence, or false.
#
# A fence is the time in microseconds, or the last fence plus one if that is greater. So it grows
# even if the last fence was lost: by a failover, a restore, an eviction or its expiry.
#
# A lease with more than its own ttl left was granted before the server's clock was set back. Its
# expiry is set to its ttl from now; otherwise it would stay for as long as the clock was set back.
ACQUIRE = Script(
    _CLOCK,
    _LEASES,
    """
local id, limit, ttl, holder = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
forget_dead()
local ends = now + ttl
local mine = redis.call('ZSCORE', live, id)
if mine then
  if ends > tonumber(mine) then
    redis.call('ZADD', live, ends, id)
    keep_until(ends)
  end
  return string.match(redis.call('HGET', who, id) or '0', '^%d+')
end
if redis.call('ZCARD', live) >= limit then
  local late = redis.call('ZRANGEBYSCORE', live, string.format('(%.0f', ends), '+inf',
    'WITHSCORES', 'LIMIT', 0, 100)
  for i = 1, #late, 2 do
    local own = tonumber(string.match(redis.call('HGET', who, late[i]) or '', '^%d+ %d+ (%d+)'))
    if own and tonumber(late[i + 1]) > now + own then
      redis.call('ZADD', live, now + own, late[i])
    end
  end
  return false
end
local fence = math.max((tonumber(redis.call('GET', KEYS[3])) or 0) + 1, now)
redis.call('SET', KEYS[3], string.format('%.0f', fence), 'PX', ARGV[5])
redis.call('ZADD', live, ends, id)
redis.call('HSET', who, id, string.format('%.0f %.0f %.0f %s', fence, now, ttl, holder))
keep_until(ends)
return string.format('%.0f', fence)
""",
)

# KEYS: live, who. ARGV: id, ttl, id, ttl, … Returns 1 or 0 for each lease.
RENEW = Script(
    _CLOCK,
    _LEASES,
    """
forget_dead()
local answers, last = {}, now
for i = 1, #ARGV, 2 do
  local ends = now + tonumber(ARGV[i + 1])
  if redis.call('ZSCORE', live, ARGV[i]) then
    redis.call('ZADD', live, ends, ARGV[i])
    last = math.max(last, ends)
    answers[#answers + 1] = 1
  else
    answers[#answers + 1] = 0
  end
end
if last > now then keep_until(last) end
return answers
""",
)

# KEYS: live, who. ARGV: ids. Returns 1 or 0 for each lease.
RELEASE = Script(
    _CLOCK,
    _LEASES,
    """
forget_dead()
local answers = {}
for i, id in ipairs(ARGV) do
  answers[i] = redis.call('ZREM', live, id)
  redis.call('HDEL', who, id)
end
return answers
""",
)

# KEYS: live, who. Returns id, value in `who`, microseconds left, for each lease.
HELD = Script(
    _CLOCK,
    """
local found = redis.call('ZRANGEBYSCORE', KEYS[1], string.format('(%.0f', now), '+inf',
  'WITHSCORES')
local answers = {}
for i = 1, #found, 2 do
  answers[#answers + 1] = found[i]
  answers[#answers + 1] = redis.call('HGET', KEYS[2], found[i]) or ''
  answers[#answers + 1] = string.format('%.0f', tonumber(found[i + 1]) - now)
end
return answers
""",
)

# KEYS: rate. ARGV: rate, burst, tokens. Returns the tokens, and the wait for the next one.
#
# The value is the time at which the limit is full again. It lies between now (full) and `depth`
# ahead (empty). If it is further ahead, the clock was set back or the limit was lowered: the limit
# then counts as empty now, which never grants too much and does not block for long.
# Costs are rounded up and compared as integers, so that rounding never grants an extra token.
TAKE = Script(
    _CLOCK,
    """
local rate, burst, tokens = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local function cost(n) return math.ceil(n * 1000000 / rate) end
local depth = cost(burst)
local full = tonumber(redis.call('GET', KEYS[1])) or 0
local start = math.min(math.max(full, now), now + depth)
local room = now + depth - start
local granted = math.min(tokens, math.floor(room * rate / 1000000) + 1)
while granted > 0 and cost(granted) > room do granted = granted - 1 end
local ends = start + cost(granted)
if granted > 0 or start < full then
  redis.call('SET', KEYS[1], string.format('%.0f', ends), 'PX',
    math.ceil((ends - now) / 1000) + 60000)
end
return {granted, math.max(0, ends + cost(1) - depth - now)}
""",
)

# KEYS: the key of the newest fence, the key that is written. ARGV: fence, command, its arguments.
FENCED = Script(
    """
local seen = tonumber(redis.call('GET', KEYS[1])) or 0
if tonumber(ARGV[1]) < seen then
  return {0, string.format('%.0f', seen)}
end
redis.call('SET', KEYS[1], ARGV[1])
local command = {}
for i = 2, #ARGV do command[i - 1] = ARGV[i] end
return {1, redis.call(unpack(command))}
""",
)
