"""Where the errors of Postgres and its driver become ours, with one mapping."""

from __future__ import annotations

import psycopg

from moored.kernel import SECRETS

from .._errors import LeaseError, StoreMisconfigured, StoreUnavailable

__all__ = ["is_stale_primary", "translate"]

#: The server says by these that it cannot now, and may be able to later: connections lost, refused
#: or being ended, resources, conflicts with others, timeouts, and a server that became a standby.
_LATER = ("08", "25006", "40", "53", "55", "57", "58")

#: Without a state there is only the text of a refused connection; these are no passing troubles.
_CURES = {
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
    """What an error of the driver means here."""
    said = _first_line(error)
    state = getattr(error, "sqlstate", None)
    if state is not None:
        if state.startswith(_LATER):
            return StoreUnavailable(f"Postgres at {place} cannot be used now: {said} ({state})")
        return StoreMisconfigured(f"Postgres at {place} cannot be used like this: {said} ({state})")
    cure = next((cure for word, cure in _CURES.items() if word in str(error)), None)
    if cure is not None:
        return StoreMisconfigured(f"Postgres at {place} cannot be used like this: {said}; {cure}")
    if isinstance(error, (psycopg.OperationalError, OSError)):
        return StoreUnavailable(f"Postgres at {place} cannot be used now: {said}")
    return StoreMisconfigured(f"Postgres at {place} cannot be used like this: {said}")


def is_stale_primary(error: psycopg.Error) -> bool:
    """Whether the server was demoted: its connections must be made anew, to find the new one."""
    return error.sqlstate == "25006"


def _first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0].removeprefix("connection failed: ").rstrip(".")
    return SECRETS.hide(line) or type(error).__name__
