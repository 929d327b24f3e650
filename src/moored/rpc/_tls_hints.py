"""Hints for TLS failures that gRPC does not explain.

A server that requires client certificates closes the connection of a client without one after the
client has finished its handshake: gRPC only reports "Socket closed". And why a certificate or a key
cannot be used, gRPC writes to its own log only.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ._config import ConnectionConfig
from ._errors import ConfigError, ConnectFailed, TopologyError

__all__ = ["unusable", "with_hint"]

_HUNG_UP = ("Socket closed", "Connection reset", "Broken pipe")
_AUTHORITY = "give the server's certificate authority with the option ca"
_OTHER_AUTHORITY = "the option ca does not hold the server's authority"
#: Parts of the errors of BoringSSL and gRPC, and what to do; the first match counts.
_HINTS = {
    "WRONG_VERSION_NUMBER": "perhaps the server speaks no TLS: then write http:// for https://",
    "CERTIFICATE_VERIFY_FAILED: certificate has expired": "the server's certificate has expired",
    "CERTIFICATE_VERIFY_FAILED: certificate is not yet valid": (
        "the server's certificate is not valid yet: perhaps a clock is wrong"
    ),
    "CERTIFICATE_VERIFY_FAILED": _AUTHORITY,
    "Hostname Verification Check failed": (
        "if the server's certificate is for another name, give that with the option server_name"
    ),
}
_UNUSABLE = "Failed to create security handshaker"


def with_hint(config: ConnectionConfig, error: Exception, *, known: bool = False) -> Exception:
    """Return the error of an attempt to connect, or one with a hint about its likely cause.

    :param known: whether the server was connected before.
    """
    if isinstance(error, (ConfigError, TopologyError)):
        return error  # it is not an error of this connection
    text = _details(error)
    if (hint := _hint(config, text, known)) is None:
        return error
    # The hint first: gRPC's text is long, and may be truncated.
    return ConnectFailed(f"{hint} ({text})")


def _hint(config: ConnectionConfig, text: str, known: bool) -> str | None:
    hung_up = any(words in text for words in _HUNG_UP)
    if not config.secure:
        if known:
            return None  # the server stops or restarts
        return "perhaps the server wants TLS: then write https:// for http://" if hung_up else None
    if not hung_up:
        hint = next((hint for words, hint in _HINTS.items() if words in text), None)
        return _OTHER_AUTHORITY if hint is _AUTHORITY and config.options.get("ca") else hint
    if config.options.get("certificate") is None:
        return "the server may want a certificate: give the options certificate and private_key"
    return "perhaps the server does not accept the client certificate of the option certificate"


def unusable(details: str) -> ConfigError | None:
    """Return an error if gRPC could not use the given certificates; otherwise None."""
    if _UNUSABLE not in details:
        return None
    return ConfigError(
        "the options ca, certificate and private_key cannot be used: "
        "each must be PEM, and the key that of the certificate"
    )


def _details(error: Any) -> str:
    """Return gRPC's details of an error, whose `str` is much longer."""
    with suppress(Exception):  # others may mean something else by this name
        if callable(getattr(error, "details", None)):
            return str(error.details() or "")
    with suppress(Exception):  # its text cannot be read
        return str(error)
    return ""
