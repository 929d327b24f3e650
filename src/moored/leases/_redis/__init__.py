"""Leases in Redis: the rooms behind `moored.leases.redis`.

::

    RedisStore        what a lease is, in names and values
    RedisLink         scripts and their answers, within their time
    Script            what the server does without being interrupted

Invariants:

- what is counted and what is given is one script, by the server's own time;
- a fence is greater than every earlier one of its key, also when the server lost the last one;
- a late answer reaches nobody: its connection is closed.
"""
