"""What Redis does by itself, without being interrupted: one script per thing that a store does.

All times are whole microseconds of the server's own clock. A Lua number is a double: it holds such
a time exactly, but `..` writes only 14 digits of it, so numbers are written with `%.0f`.
"""

from __future__ import annotations

import hashlib

__all__ = ["ACQUIRE", "FENCED", "HELD", "RELEASE", "RENEW", "TAKE", "Script"]


class Script:
    """A script, and the name by which a server that has seen it knows it."""

    __slots__ = ("name", "sha", "text")

    def __init__(self, name: str, *parts: str) -> None:
        self.name = name
        self.text = "".join(parts)
        # Redis names scripts by their SHA-1: a name, not a protection.
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    def __repr__(self) -> str:
        return f"<Script {self.name} {self.sha[:8]}>"


_CLOCK = """
local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end
local now = clock()
"""

# KEYS: live (sorted set: id -> end), who (hash: id -> fence, creation, ttl and holder).
# The server forgets both by itself when the last lease has been over for a minute.
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

# KEYS: live, who, fence. ARGV: id, limit, ttl, holder, for how long an idle fence is kept in ms.
#
# A fence is the time, or one more than the last one, whichever is greater. So it grows even when
# the last one is gone: by a failover, a restore, an eviction, or because it was idle for long.
#
# A lease with more than its own ttl left was given before the clock went back; it gets the ttl
# from now, which is at least what it had. Without this it would be stuck for as long as the step.
ACQUIRE = Script(
    "acquire",
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

# KEYS: live, who. ARGV: id, ttl, id, ttl, … Answers 1 or 0 for each.
RENEW = Script(
    "renew",
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

# KEYS: live, who. ARGV: ids. Answers 1 or 0 for each.
RELEASE = Script(
    "release",
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

# KEYS: live, who. Answers id, what is known of it, microseconds left, and so on.
HELD = Script(
    "held",
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

# KEYS: rate. ARGV: rate, burst, tokens. Answers the tokens and the wait for the next one.
#
# The number kept is the time at which the limit is full again. It lies between now (full) and
# `depth` ahead (empty). Further ahead than that, the clock went back, or the limit was made
# smaller: it is then empty as of now, which never gives too much and does not wait for ever.
# Costs are rounded up and compared as whole numbers, so that rounding never gives a token away.
TAKE = Script(
    "take",
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

# KEYS: the newest fence seen, the key that is written. ARGV: fence, command and its arguments.
FENCED = Script(
    "fenced",
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
