"""The tokens, the session cookie that a browser gets for one, and the Host and Origin headers.

A browser sends a token once, in a form or a link, and gets a cookie with an expiry time, signed
with the token. The server stores no sessions, and a changed token ends all of them.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from typing import Literal

Right = Literal["admin", "read"]
COOKIE = "moored_session"
#: Seconds until a session expires: a working day.
LIFETIME = 12 * 3600.0

_HOST = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::(\d{0,5}))?")


class Tokens:
    """The tokens of a service: the admin token for all requests, the read token for reading."""

    def __init__(self, admin: str | None, read: str | None = None) -> None:
        given: dict[Right, str | None] = {"admin": admin, "read": read}
        self._tokens = {right: token for right, token in given.items() if token is not None}

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def equal_to(self, given: str | None) -> str | None:
        """Return the token that a client has sent, or None if it is not one of them."""
        # Each is compared, so that the time does not tell which one it is.
        found = [token for token in self._tokens.values() if same(given or "", token)]
        return found[0] if found else None

    def right_of(self, headers: Mapping[str, str], *, now: float) -> Right | None:
        """Return what the sender of a request may do, by its header or its session."""
        bearer = bearer_of(headers.get("authorization"))
        session = session_of(headers.get("cookie"), cookie_name(headers.get("host")))
        found: list[Right] = [
            right
            for right, token in self._tokens.items()
            if (session_holds(token, session, now=now) if bearer is None else same(bearer, token))
        ]
        return found[0] if found else None


def cookie_name(host: str | None) -> str:
    """Return the name of the session cookie: browsers send a host's cookies to all its ports."""
    _, port = address_in(host)
    return f"{COOKIE}_{port}" if port else COOKIE


def same(one: str, other: str) -> bool:
    """Whether two secrets are equal, compared in constant time."""
    return hmac.compare_digest(one.encode(), other.encode())


def bearer_of(authorization: str | None) -> str | None:
    """Return the bearer token of an Authorization header, or None."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def issue_session(token: str, *, now: float) -> str:
    """Return the value of the session cookie for this token."""
    until = str(int(now + LIFETIME))
    return f"{until}.{_signature(token, until)}"


def session_holds(token: str, session: str | None, *, now: float) -> bool:
    """Whether the cookie was issued for this token and has not expired."""
    until, _, signature = (session or "").partition(".")
    if not until.isascii() or not until.isdigit():
        return False
    return same(signature, _signature(token, until)) and now < int(until)


def session_of(cookies: str | None, wanted: str = COOKIE) -> str | None:
    """Return the value of the session cookie in a Cookie header, or None.

    The header also has the cookies of other services on this host, in any syntax, so each cookie is
    parsed alone. The standard library's parser takes quadratic time for some.
    """
    for cookie in (cookies or "").split(";"):
        name, _, value = cookie.partition("=")
        if name.strip() == wanted:
            return value.strip().strip('"')
    return None


def address_in(header: str | None) -> tuple[str, int | None]:
    """Return the name, without brackets, and the port of a Host header; all of it if malformed."""
    host = (header or "").strip().lower()
    found = _HOST.fullmatch(host)
    if found is None:
        return host, None
    return found[1] or found[2] or "", int(found[3]) if found[3] else None


def port_of(port: int | None, scheme: str) -> int | None:
    """Return a port, or the default one of the scheme."""
    return port or {"http": 80, "https": 443}.get(scheme)


def _signature(token: str, until: str) -> str:
    return hmac.new(token.encode(), f"moored session {until}".encode(), hashlib.sha256).hexdigest()
