"""The URI of an MQTT server.

::

    mqtts://user:password@host:8883        mqtt (1883), mqtts (8883): over TCP
    wss://user:password@host:443/mqtt      ws (80), wss (443): over WebSocket, with a path

User names and passwords are percent-decoded and never shown. In an invalid URI, a part of the
password may look like a host, so no error shows more of it than its scheme.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from urllib.parse import SplitResult, unquote, unquote_to_bytes, urlsplit

__all__ = ["Address", "parse_uri"]

PORTS = {"mqtt": 1883, "mqtts": 8883, "ws": 80, "wss": 443}
#: The usual path of MQTT over WebSocket.
WEB_PATH = "/mqtt"
_HINT = "a password with / ? # @ or : in it must be percent-encoded"
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f]")


@dataclass(frozen=True, slots=True)
class Address:
    """The parts of a URI."""

    scheme: str
    host: str
    port: int
    #: The path and the query of a WebSocket URL; the query may hold a token.
    path: str = field(default="", repr=False)
    username: str | None = field(default=None, repr=False)
    password: bytes | None = field(default=None, repr=False)

    @property
    def secure(self) -> bool:
        """Whether it is over TLS."""
        return self.scheme in ("mqtts", "wss")

    @property
    def web(self) -> bool:
        """Whether it is over WebSocket."""
        return self.scheme in ("ws", "wss")

    def elsewhere(self, reference: str) -> Address | None:
        """Return this address at another host ("host:port …"); None if that is not valid."""
        first = reference.split()[:1]
        try:
            parts = urlsplit(f"//{first[0]}")
            host, port = parts.hostname, parts.port or PORTS[self.scheme]
        except (ValueError, IndexError):
            return None
        if not host or parts.netloc != first[0] or "@" in first[0]:
            return None
        return replace(self, host=host, port=port)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def parse_uri(uri: str, mistakes: list[str]) -> Address | None:
    """Return the parts of a URI, or None after adding to the mistakes."""
    try:
        parts = urlsplit(uri)
    except ValueError:
        mistakes.append("the URI cannot be parsed: an IPv6 address needs brackets")
        return None
    if parts.scheme not in PORTS or not uri.lower().startswith(f"{parts.scheme}://"):
        mistakes.append(f"the URI must begin with {', '.join(f'{one}://' for one in PORTS)}")
        return None
    found = _wrong(uri, parts)
    mistakes += found
    if found:
        return None
    path = ""
    if parts.scheme in ("ws", "wss"):
        path = (parts.path or WEB_PATH) + (f"?{parts.query}" if parts.query else "")
    return Address(
        parts.scheme,
        parts.hostname or "",
        parts.port or PORTS[parts.scheme],
        path,
        unquote(parts.username) if parts.username else None,
        unquote_to_bytes(parts.password) if parts.password is not None else None,
    )


def _wrong(uri: str, parts: SplitResult) -> list[str]:
    wrong = []
    if _FORBIDDEN.search(uri):
        wrong.append("the URI has a space or a control character")
    if not parts.hostname:
        wrong.append("the URI has no host")
    try:
        if parts.port == 0:
            raise ValueError
    except ValueError:
        wrong.append(f"the URI's port is not a number from 1 to 65535 ({_HINT})")
    if parts.fragment:
        wrong.append(f"the URI has a fragment, which MQTT does not use ({_HINT})")
    if parts.scheme in ("mqtt", "mqtts") and (parts.path not in ("", "/") or parts.query):
        wrong.append(f"the URI has a path, which only ws:// and wss:// have ({_HINT})")
    return wrong
