"""What an error means for a pool: by its SQLSTATE, or, where a driver keeps that to itself, by
what the server said.

libpq does not give the SQLSTATE of an error while connecting, so psycopg's says none there.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["Meaning", "meaning_of", "sqlstate_of"]


class Meaning(Enum):
    """What to do about an error."""

    #: The server wants fewer connections, or fewer new ones: slow down.
    THROTTLED = "throttled"
    #: The server does not believe who we are: a new token may help, once.
    UNAUTHORIZED = "unauthorized"
    #: A concurrent transaction won: do the whole transaction again.
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
    ("pam authentication failed", Meaning.UNAUTHORIZED),  # RDS, when a token is too old
    ("(oc000)", Meaning.CONFLICT),
    ("(oc001)", Meaning.CONFLICT),
)


def sqlstate_of(error: BaseException) -> str | None:
    """The SQLSTATE of an error, as the known drivers keep it."""
    for name in ("sqlstate", "pgcode", "code"):
        state = getattr(error, name, None)
        if isinstance(state, str) and len(state) == 5:
            return state
    args = getattr(error, "args", ())
    if args and isinstance(args[0], dict) and isinstance(args[0].get("C"), str):
        return str(args[0]["C"])  # pg8000
    return None


def meaning_of(error: BaseException) -> Meaning:
    """What an error means, looking at its causes too: wrappers have no SQLSTATE of their own."""
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
