"""Where the errors of Redis and its driver become ours, with one mapping."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from redis import exceptions as theirs

from moored.kernel import SECRETS

from .._errors import LeaseError, StoreMisconfigured, StoreUnavailable

__all__ = ["is_stale_primary", "translate", "translated"]

#: The server says by these that it cannot now, and may be able to later.
_LATER = (
    "BUSY",
    "CLUSTERDOWN",
    "LOADING",
    "MASTERDOWN",
    "MISCONF",
    "NOREPLICAS",
    "OOM",
    "READONLY",
    "TRYAGAIN",
    "UNBLOCKED",
)

#: Errors whose cure is known, by a word that the server says, and what to do about them.
_CURES = {
    "NOAUTH": "give the user and password in the URL: redis://USER:PASSWORD@HOST",
    "Authentication required": "give the user and password in the URL: redis://USER:PASSWORD@HOST",
    "WRONGPASS": "correct the user or password in the URL",
    "invalid username-password": "correct the user or password in the URL",
    "NOPERM": "give the user the commands and keys that the how-to for Redis lists",
    "no permissions": "give the user the commands and keys that the how-to for Redis lists",
    "WRONGTYPE": "something else uses these names: choose another prefix= in the URL",
    "wrong kind of value": "something else uses these names: choose another prefix= in the URL",
    "MOVED": "this is a node of a Redis Cluster: add cluster=yes to the URL",
    "Cluster mode is not enabled": (
        "this is no Redis Cluster, or the user may not look at it (+cluster|slots): "
        "leave cluster=yes out of the URL, or give the right"
    ),
    "DB index is out of range": "choose a database that the server has",
    "unknown command": "scripts (EVALSHA, EVAL) and TIME must be allowed, in Redis 5 or newer",
    "CERTIFICATE_VERIFY_FAILED": "name the authority with ssl_ca_certs= in the URL",
}


@contextmanager
def translated(place: str) -> Iterator[None]:
    """Turns whatever Redis or its driver raises within the block into an error of ours."""
    try:
        yield
    except (theirs.RedisError, theirs.RedisClusterException, OSError, EOFError) as error:
        raise translate(error, place) from error


def translate(error: Exception, place: str) -> LeaseError:
    """What an error of the driver means here."""
    said = SECRETS.hide(str(error).strip().rstrip(".")) or type(error).__name__
    # The driver takes the code off the text of the errors that it has a class for.
    code = getattr(error, "status_code", None) or ""
    whole = said if not isinstance(code, str) or said.startswith(code) else f"{code} {said}"
    if _may_work_later(error, whole):
        return StoreUnavailable(f"Redis at {place} cannot be used now: {whole}")
    cure = next((cure for word, cure in _CURES.items() if word in whole), "see the cause")
    return StoreMisconfigured(f"Redis at {place} cannot be used like this: {whole}; {cure}")


def is_stale_primary(error: BaseException) -> bool:
    """Whether the server was demoted: its connections must be made anew, to find the new one."""
    return isinstance(error, theirs.ReadOnlyError) or "READONLY" in str(error)


def _may_work_later(error: Exception, text: str) -> bool:
    if _has_cause(error, ssl.SSLCertVerificationError):
        return False
    match error:
        case theirs.AuthenticationError() | theirs.AuthorizationError():
            return False
        case theirs.ConnectionError() | theirs.TimeoutError() | OSError() | EOFError():
            return "DB index is out of range" not in text
        case theirs.ClusterDownError() | theirs.TryAgainError() | theirs.SlotNotCoveredError():
            return True
        case theirs.ReadOnlyError() | theirs.OutOfMemoryError():
            return True
        case theirs.RedisClusterException():
            return "Cluster mode is not enabled" not in text
    # A script's error carries the error of the command within it, after a dash in older servers.
    return any(text.startswith(code) or f"-{code} " in text for code in _LATER)


def _has_cause(error: BaseException | None, kind: type[BaseException]) -> bool:
    while error is not None:
        if isinstance(error, kind):
            return True
        error = error.__cause__ or error.__context__
    return False
