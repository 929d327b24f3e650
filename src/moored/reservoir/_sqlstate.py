"""Classifies errors by their SQLSTATE, or by their message if the driver provides none.

libpq, and so psycopg, provides no SQLSTATE for errors while connecting.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["Meaning", "meaning_of", "sqlstate_of"]


class Meaning(Enum):
    """The classes of errors that need a reaction of their own."""

    #: The server limits connections, or new connections: slow down.
    THROTTLED = "throttled"
    #: The server rejects the login: a new token may help, once.
    UNAUTHORIZED = "unauthorized"
    #: The transaction conflicts with a concurrent one: repeat the whole transaction.
    CONFLICT = "conflict"
    OTHER = "other"


_STATES = {
    "53300": Meaning.THROTTLED,  # too many connections
    "53400": Meaning.THROTTLED,  # configured limit exceeded: Aurora DSQL's rate limit
    "28000": Meaning.UNAUTHORIZED,
    "28P01": Meaning.UNAUTHORIZED,
    "40001": Meaning.CONFLICT,
    "OC000": Meaning.CONFLICT,  # Aurora DSQL: the data changed meanwhile
    "OC001": Meaning.CONFLICT,  # Aurora DSQL: the schema changed meanwhile
}
_WORDS = (
    ("rate exceeded", Meaning.THROTTLED),
    ("too many open connections", Meaning.THROTTLED),
    ("too many connections", Meaning.THROTTLED),
    ("too many clients", Meaning.THROTTLED),
    ("too many new connections", Meaning.THROTTLED),
    ("connection slots are reserved", Meaning.THROTTLED),
    ("no more connections allowed", Meaning.THROTTLED),  # PgBouncer
    ("authentication failed", Meaning.UNAUTHORIZED),
    ("access denied", Meaning.UNAUTHORIZED),
    ("no password supplied", Meaning.UNAUTHORIZED),
    ("pam authentication failed", Meaning.UNAUTHORIZED),  # RDS: an expired token
    ("(oc000)", Meaning.CONFLICT),
    ("(oc001)", Meaning.CONFLICT),
)


def sqlstate_of(error: BaseException) -> str | None:
    """The SQLSTATE of an error of any known driver."""
    for name in ("sqlstate", "pgcode", "code"):
        state = getattr(error, name, None)
        if isinstance(state, str) and len(state) == 5:
            return state
    args = getattr(error, "args", ())
    if args and isinstance(args[0], dict) and isinstance(args[0].get("C"), str):
        return str(args[0]["C"])  # pg8000
    return None


def meaning_of(error: BaseException) -> Meaning:
    """Classify an error by itself or by its causes: wrappers have no SQLSTATE of their own."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        state = sqlstate_of(link)
        if state is not None:
            if state in _STATES:
                return _STATES[state]
        else:
            text = str(link).lower()
            for words, meaning in _WORDS:
                if words in text:
                    return meaning
        link = link.__cause__ or getattr(link, "orig", None)
    return Meaning.OTHER
