"""What can go wrong with a pool, and what to do about it.

::

    MooredError
    └── ReservoirError
        ├── PoolTimeout       nobody gave a connection back in time, and none could be opened
        ├── PoolClosed        the pool is not open: not yet, not any more, or not in this process
        ├── PoolOverloaded    too many callers wait already, or have waited for too long
        ├── ServerUnreachable no connection is there, none can be opened, and callers do not wait
        ├── ReservoirEmpty    no connection is ready right now, and the caller did not want to wait
        └── TokenError        nobody gave a token in time, or what was given is none

All of them are `psycopg.OperationalError` too, because that is what callers of a pool catch today.
"""

from __future__ import annotations

import psycopg

from moored.kernel import MooredError

__all__ = [
    "PoolClosed",
    "PoolOverloaded",
    "PoolTimeout",
    "ReservoirEmpty",
    "ReservoirError",
    "ServerUnreachable",
    "TokenError",
]


class ReservoirError(MooredError, psycopg.OperationalError):
    """Something that a reservoir or a pool raises on purpose."""


class PoolTimeout(ReservoirError, TimeoutError):
    """No connection within the caller's time; the message says where they all are."""


class PoolClosed(ReservoirError):
    """The pool is not open: open it first, or make a new one."""


class PoolOverloaded(ReservoirError):
    """The pool cannot keep up, so it says so at once instead of letting more callers wait."""


class ServerUnreachable(ReservoirError):
    """No connection is left and the server cannot be reached; raised with `fail_fast` alone."""


class ReservoirEmpty(ReservoirError):
    """No connection is ready, and the caller asked not to wait for one."""


class TokenError(ReservoirError):
    """A token could not be had, or is not one."""


# What a user reads in a traceback is where a user finds it.
for _error in (ReservoirError, *ReservoirError.__subclasses__()):
    _error.__module__ = "moored.reservoir"
