"""Leases in Redis: the modules behind `moored.leases.redis`.

::

    RedisStore        the `Store` methods, as script calls
    RedisLink         connections; runs scripts with a timeout
    Script            a Lua script, which the server runs atomically

Invariants:

- counting and granting are one script, by the server's clock;
- a fence is greater than every earlier fence of its key, even if the server lost the last one;
- a late response is never read: its connection is closed.
"""
