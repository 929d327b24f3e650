"""What may be behind a failure of TLS that gRPC does not explain, and what to do about it.

A server that wants a certificate of its clients hangs up on one that has none, when that one takes
the handshake for done: all that gRPC tells is "Socket closed". And of certificates and keys that
cannot be used it tells the reason to its own log only.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ._config import ConnectionConfig
from ._errors import ConfigError, ConnectFailed, TopologyError

__all__ = ["unusable", "with_hint"]

_HUNG_UP = ("Socket closed", "Connection reset", "Broken pipe")
_AUTHORITY = "give the authority of its certificate with the option ca"
_OTHER_AUTHORITY = "the option ca does not hold its authority"
#: What BoringSSL and gRPC say, and what is to be done; the first that fits.
_HINTS = {
    "WRONG_VERSION_NUMBER": "perhaps the server speaks no TLS: then write http:// for https://",
    "CERTIFICATE_VERIFY_FAILED: certificate has expired": "its certificate has expired",
    "CERTIFICATE_VERIFY_FAILED: certificate is not yet valid": (
        "its certificate is not valid yet: perhaps a clock is wrong"
    ),
    "CERTIFICATE_VERIFY_FAILED": _AUTHORITY,
    "Hostname Verification Check failed": (
        "if its certificate is for another name, give that with the option server_name"
    ),
}
_UNUSABLE = "Failed to create security handshaker"


def with_hint(config: ConnectionConfig, error: Exception, *, known: bool = False) -> Exception:
    """The same error; if what may be behind it is known, one that says so.

    :param error: of an attempt to connect.
    :param known: whether there was a connection before.
    """
    if isinstance(error, (ConfigError, TopologyError)):
        return error  # of another connection, or of none
    told = _details(error)
    if (hint := _hint(config, told, known)) is None:
        return error
    # The hint first: what gRPC says is long, and may be cut.
    return ConnectFailed(f"{hint} ({told})")


def _hint(config: ConnectionConfig, told: str, known: bool) -> str | None:
    hung_up = any(words in told for words in _HUNG_UP)
    if not config.secure:
        if known:
            return None  # it goes, or restarts
        return "perhaps the server wants TLS: then write https:// for http://" if hung_up else None
    if not hung_up:
        hint = next((hint for words, hint in _HINTS.items() if words in told), None)
        return _OTHER_AUTHORITY if hint is _AUTHORITY and config.options.get("ca") else hint
    if config.options.get("certificate") is None:
        return "perhaps it wants a certificate: give the options certificate and private_key"
    return "perhaps it does not accept what the option certificate holds"


def unusable(details: str) -> ConfigError | None:
    """What to raise, if gRPC could not even begin with the certificates that it was given."""
    if _UNUSABLE not in details:
        return None
    return ConfigError(
        "the options ca, certificate and private_key cannot be used: "
        "each must be PEM, and the key that of the certificate"
    )


def _details(error: Any) -> str:
    """gRPC's own words; those of its errors are long otherwise."""
    found = error
    with suppress(Exception):  # others may mean something else by this name
        found = error.details() if callable(getattr(error, "details", None)) else error
    return str(found or "")
