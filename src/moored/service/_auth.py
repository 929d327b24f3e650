"""Who may come in: the admin token, the session that a browser gets for it, and the Host header.

A browser proves the token once, in a form, and then holds a cookie that says until when that is
good, signed with the token: nothing is kept on the server, and a changed token ends every session.
"""

from __future__ import annotations

import hashlib
import hmac
import re

__all__ = [
    "COOKIE",
    "LIFETIME",
    "bearer_of",
    "issue_session",
    "name_in_host",
    "same",
    "session_holds",
    "session_of",
]

COOKIE = "moored_session"
#: A working day: long enough to watch a page, short enough for a machine that is left unlocked.
LIFETIME = 12 * 3600.0

_HOST = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::\d*)?")


def same(one: str, other: str) -> bool:
    """Whether two secrets are equal, in a time that does not tell how much of them is."""
    return hmac.compare_digest(one.encode(), other.encode())


def bearer_of(authorization: str | None) -> str | None:
    """The token in an Authorization header, if it holds one."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def issue_session(token: str, *, now: float) -> str:
    """What a browser's cookie holds after the token was given."""
    until = str(int(now + LIFETIME))
    return f"{until}.{_signature(token, until)}"


def session_holds(token: str, session: str | None, *, now: float) -> bool:
    """Whether the cookie was issued for this token and is still good."""
    until, _, signature = (session or "").partition(".")
    if not until.isascii() or not until.isdigit():
        return False
    return same(signature, _signature(token, until)) and now < int(until)


def session_of(cookies: str | None) -> str | None:
    """Our cookie out of a Cookie header.

    Cookies of other services on this host come with it, in whatever syntax they have, so each is
    looked at alone. The standard library's parser takes quadratic time for some.
    """
    for cookie in (cookies or "").split(";"):
        name, _, value = cookie.partition("=")
        if name.strip() == COOKIE:
            return value.strip().strip('"')
    return None


def name_in_host(header: str | None) -> str:
    """The name in a Host header, without port and brackets; all of it if it is malformed."""
    host = (header or "").strip().lower()
    found = _HOST.fullmatch(host)
    return host if found is None else found[1] or found[2] or ""


def _signature(token: str, until: str) -> str:
    return hmac.new(token.encode(), f"moored session {until}".encode(), hashlib.sha256).hexdigest()
