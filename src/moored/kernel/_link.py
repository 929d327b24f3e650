"""What a system knows about its connections to servers, and about callers that wait for them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Callers", "Link"]


class Link(NamedTuple):
    """What a system knows about one connection, or one pool of them, to a server."""

    #: The address of the server, as "host:port".
    server: str
    #: True while connected, False when it is lost, None while neither is known.
    up: bool | None
    #: When the server was last heard, in monotonic seconds; None if it never was.
    heard_at: float | None = None
    #: Why it is lost.
    why: str = ""
    #: Whether the connection is open, and the server does not answer.
    silent: bool = False
    #: Whether the server answers although the connection is lost: it refuses.
    refused: bool = False
    #: What the server is, such as "PostgreSQL".
    kind: str = ""
    #: What the connection is for, such as "change stream"; empty if the system has only one.
    of: str = ""
    #: Whether the system does not work without it.
    vital: bool = True


class Callers(NamedTuple):
    """Callers that wait for an answer or a connection."""

    number: int = 0
    #: For how many seconds the first of them has waited.
    longest: float = 0.0
