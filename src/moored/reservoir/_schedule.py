"""When to replace connections ahead of their end, so that they do not end together."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["first_replacement"]


def first_replacement(ends: Iterable[float], every: float) -> float:
    """When the first replacement is due, if each is to be done before its connection's end and
    they are to be `every` seconds apart.

    The one that ends last can wait until its end; the one before it must go `every` seconds
    earlier than that, or at its own end if that comes first; and so on to the first. Connections
    that were born together are so replaced one by one over their whole life, and from then on
    their births, and their ends, are spread. Infinity, if there are none.
    """
    return min(
        (end - place * every for place, end in enumerate(sorted(ends))),
        default=float("inf"),
    )
