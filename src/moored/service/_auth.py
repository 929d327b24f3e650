"""The admin token, the session cookie that a browser gets for it, and the Host header.

A browser sends the token once, in a form, and gets a cookie with an expiry time, signed with the
token. The server stores no sessions, and a changed token ends all of them.
"""

from __future__ import annotations

import hashlib
import hmac
import re

COOKIE = "moored_session"
#: Seconds until a session expires: a working day.
LIFETIME = 12 * 3600.0

_HOST = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::\d*)?")


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


def session_of(cookies: str | None) -> str | None:
    """Return the value of the session cookie in a Cookie header, or None.

    The header also has the cookies of other services on this host, in any syntax, so each cookie is
    parsed alone. The standard library's parser takes quadratic time for some.
    """
    for cookie in (cookies or "").split(";"):
        name, _, value = cookie.partition("=")
        if name.strip() == COOKIE:
            return value.strip().strip('"')
    return None


def name_in_host(header: str | None) -> str:
    """Return the name in a Host header, without port and brackets; all of it if malformed."""
    host = (header or "").strip().lower()
    found = _HOST.fullmatch(host)
    return host if found is None else found[1] or found[2] or ""


def _signature(token: str, until: str) -> str:
    return hmac.new(token.encode(), f"moored session {until}".encode(), hashlib.sha256).hexdigest()
