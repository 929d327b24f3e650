"""Translate the errors of Redis and its driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis import exceptions

from moored.kernel import SECRETS

from .._errors import LeaseError, StoreMisconfigured, StoreUnavailable

__all__ = ["is_stale_primary", "translate", "translated"]

#: Error codes of the server that may pass.
_TRANSIENT = (
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

#: Errors that may pass, whatever their message.
_PASSING = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.RedisClusterException,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    OSError,
    EOFError,
)

#: Parts of messages of errors that do not pass, although others of their class do.
_LASTING = (
    "CERTIFICATE_VERIFY_FAILED",
    "Cluster mode is not enabled",
    "DB index is out of range",
)

_GRANT = "run the ACL SETUSER command of the how-to 'Keep leases in Redis' for this user"
#: Parts of error messages, each with what to do.
_REMEDIES = {
    "NOAUTH": "give the user and password in the URL: redis://USER:PASSWORD@HOST",
    "Authentication required": "give the user and password in the URL: redis://USER:PASSWORD@HOST",
    "WRONGPASS": "correct the user or password in the URL",
    "invalid username-password": "correct the user or password in the URL",
    "NOPERM": _GRANT,
    "no permissions": _GRANT,
    "WRONGTYPE": "another program uses these keys: choose another prefix= in the URL",
    "wrong kind of value": "another program uses these keys: choose another prefix= in the URL",
    "MOVED": "this is a node of a Redis Cluster: add cluster=yes to the URL",
    "Cluster mode is not enabled": (
        "either this is not a Redis Cluster: remove cluster=yes from the URL; or the user may not "
        "run CLUSTER SLOTS: grant +cluster|slots"
    ),
    "DB index is out of range": "choose a database that the server has",
    "unknown command": "allow scripts (EVALSHA, EVAL) and TIME, in Redis 5 or newer",
    "CERTIFICATE_VERIFY_FAILED": "set the certificate authority with ssl_ca_certs= in the URL",
}


@contextmanager
def translated(place: str) -> Iterator[None]:
    """Translate what Redis or its driver raises in the block."""
    try:
        yield
    except (exceptions.RedisError, exceptions.RedisClusterException, OSError, EOFError) as error:
        raise translate(error, place) from error


def translate(error: Exception, place: str) -> LeaseError:
    """Return the `StoreUnavailable` or `StoreMisconfigured` for an error of the driver."""
    message = SECRETS.hide(str(error).strip().rstrip(".")) or type(error).__name__
    # For errors with a class of their own, the driver removes the code from the message.
    code = getattr(error, "status_code", None)
    if isinstance(code, str) and not message.startswith(code):
        message = f"{code} {message}"
    if _is_transient(error, message):
        return StoreUnavailable(f"Redis at {place} is unavailable: {message}")
    remedy = next((what for text, what in _REMEDIES.items() if text in message), "see the cause")
    return StoreMisconfigured(f"Redis at {place} cannot be used as configured: {message}; {remedy}")


def is_stale_primary(error: BaseException) -> bool:
    """Whether the server became a replica; new connections may reach the new primary."""
    return isinstance(error, exceptions.ReadOnlyError) or "READONLY" in str(error)


def _is_transient(error: Exception, text: str) -> bool:
    if any(lasting in text for lasting in _LASTING):
        return False
    if isinstance(error, (exceptions.AuthenticationError, exceptions.AuthorizationError)):
        return False
    if isinstance(error, _PASSING):
        return True
    # The error of a script contains that of its command; older servers put a dash before the code.
    return any(text.startswith(code) or f"-{code} " in text for code in _TRANSIENT)
