"""The errors of reservoirs and pools.

::

    MooredError
    └── ReservoirError
        ├── PoolTimeout        no connection was returned or opened within the caller's timeout
        ├── PoolClosed         the pool was closed, is not open yet, or belongs to another process
        ├── PoolOverloaded     too many callers wait, or the queue is permanently too slow
        ├── ServerUnreachable  with `fail_fast`: no connection is left, and connecting fails
        ├── ReservoirEmpty     `try_checkout()` found no ready connection
        └── TokenError         a token could not be fetched, or is invalid

All of them are subclasses of `psycopg.OperationalError`, which callers of psycopg_pool catch.
"""

from __future__ import annotations

import psycopg

from moored.kernel import MooredError


class ReservoirError(MooredError, psycopg.OperationalError):
    """Base class of the errors of reservoirs and pools."""


class PoolTimeout(ReservoirError, TimeoutError):
    """No connection was free within the caller's timeout; the message shows the pool's state."""


class PoolClosed(ReservoirError):
    """The pool is not open: open it first, or create a new one."""


class PoolOverloaded(ReservoirError):
    """The pool refused a caller because too many wait, or because its queue is too slow."""


#: psycopg_pool's name of `PoolOverloaded`.
TooManyRequests = PoolOverloaded


class ServerUnreachable(ReservoirError):
    """No connection is left and the server cannot be reached; only raised with `fail_fast`."""


class ReservoirEmpty(ReservoirError):
    """`try_checkout()` found no ready connection."""


class TokenError(ReservoirError):
    """A token could not be fetched, or is invalid."""


# Tracebacks name the public module.
for _error in (ReservoirError, *ReservoirError.__subclasses__()):
    _error.__module__ = "moored.reservoir"
