"""What may be behind a failure of TLS that gRPC does not explain.

A server that wants a certificate of its clients hangs up on one that has none, when that one takes
the handshake for done: all that gRPC tells is "Socket closed". And of certificates and keys that
cannot be used it tells the reason to its own log only.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ._config import ConnectionConfig
from ._errors import ConfigError, ConnectFailed

__all__ = ["hinted", "unusable"]

_HUNG_UP = ("Socket closed", "Connection reset", "Broken pipe")
_UNUSABLE = "Failed to create security handshaker"


def hinted(config: ConnectionConfig, error: Exception) -> Exception:
    """The same error; if the server may have hung up for want of a certificate, one that says so.

    :param error: of an attempt to connect.
    """
    told = _details(error)
    if not config.secure or not any(words in told for words in _HUNG_UP):
        return error
    if config.options.get("certificate") is None:
        hint = "perhaps it wants a certificate: give the options certificate and private_key"
    else:
        hint = "perhaps it does not accept what the option certificate holds"
    return ConnectFailed(f"{told}; {hint}")


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
