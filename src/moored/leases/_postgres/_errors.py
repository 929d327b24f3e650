"""Translate the errors of Postgres and psycopg."""

from __future__ import annotations

import psycopg

from moored.kernel import SECRETS

from .._errors import LeaseError, StoreMisconfigured, StoreUnavailable

__all__ = ["is_stale_primary", "translate"]

#: SQLSTATEs, or classes of them, that may pass: connections lost or refused, shutdown, resources,
#: serialization conflicts, timeouts, and a primary that became a standby (25006).
_TRANSIENT = ("08", "25006", "40", "53", "55", "57", "58")

#: A refused connection has no SQLSTATE, only a message. These messages do not pass without a
#: change; each with what to do.
_REMEDIES = {
    "authentication failed": "correct the user or password in the URL",
    "no password supplied": "give the password in the URL, or in a pgpass file",
    "no pg_hba.conf entry": "let the server accept this user from here",
    "does not exist": "create it, or correct the URL",
    "no such database": "create it, or correct the URL",
    "permission denied": "let the user connect to this database",
    "server does not support SSL": "choose another sslmode= in the URL",
    "certificate verify failed": "name the authority with sslrootcert= in the URL",
    "unsupported startup parameter": "let the pooler ignore it (ignore_startup_parameters)",
}


def translate(error: Exception, place: str) -> LeaseError:
    """Return the `StoreUnavailable` or `StoreMisconfigured` for an error of the driver."""
    message = _first_line(error)
    state = getattr(error, "sqlstate", None)
    remedy = next((what for text, what in _REMEDIES.items() if text in str(error)), None)
    if state is not None:
        message, transient = f"{message} ({state})", state.startswith(_TRANSIENT)
    elif remedy is not None:
        message, transient = f"{message}; {remedy}", False
    else:
        transient = isinstance(error, (psycopg.OperationalError, OSError))
    if transient:
        return StoreUnavailable(f"Postgres at {place} is unavailable: {message}")
    return StoreMisconfigured(f"Postgres at {place} cannot be used as configured: {message}")


def is_stale_primary(error: psycopg.Error) -> bool:
    """Whether the server became a standby; new connections may reach the new primary."""
    return error.sqlstate == "25006"


def _first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0].removeprefix("connection failed: ").rstrip(".")
    return SECRETS.hide(line) or type(error).__name__
