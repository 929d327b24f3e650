"""Moored's pools in place of psycopg_pool's, for libraries that import psycopg_pool themselves.

::

    from moored.reservoir.psycopg_pool import install

    install()  # before the libraries are imported

`import psycopg_pool` and `from psycopg_pool import ConnectionPool` then give Moored's classes, so
that the libraries create Moored's pools, and accept them. psycopg_pool need not be installed.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

from moored import reservoir

__all__ = ["install"]

NAMES = (
    *("ConnectionPool", "AsyncConnectionPool", "NullConnectionPool", "AsyncNullConnectionPool"),
    *("PoolClosed", "PoolTimeout", "TooManyRequests"),
)


def install() -> None:
    """Replace the pools and errors of psycopg_pool by Moored's, in the whole process.

    Raise `RuntimeError`, and replace nothing, if a module has imported one of psycopg_pool's own
    by name already.
    """
    try:
        module = import_module("psycopg_pool")
    except ModuleNotFoundError:
        module = sys.modules["psycopg_pool"] = ModuleType("psycopg_pool", __doc__)
    ours = {name: getattr(reservoir, name) for name in NAMES}
    theirs = {id(vars(module).get(name, ours[name])) for name in NAMES}
    if late := sorted(_users(theirs - {id(each) for each in ours.values()})):
        raise RuntimeError(
            "these modules have imported psycopg_pool's own classes: call "
            f"moored.reservoir.psycopg_pool.install() before they are imported: {', '.join(late)}"
        )
    vars(module).update(ours)


def _users(classes: set[int]) -> set[str]:
    """The names of modules that refer to one of these classes, by its id."""
    return {
        name
        for name, module in list(sys.modules.items())
        if not f"{name}.".startswith("psycopg_pool.")
        and any(id(value) in classes for value in list(getattr(module, "__dict__", {}).values()))
    }
