"""When to replace connections before they expire, so that they do not expire together."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["first_replacement"]


def first_replacement(ends: Iterable[float], every: float) -> float:
    """Return when the first replacement is due; infinity if there are no connections.

    Each connection must be replaced before its end, and replacements are `every` seconds apart. The
    connection that ends last is replaced at its end; the one before it `every` seconds earlier, or
    at its own end if that is sooner; and so on to the first. So connections that were opened
    together are replaced one by one over their whole lifetime, and their ends are spread from then
    on.
    """
    return min(
        (end - place * every for place, end in enumerate(sorted(ends))),
        default=float("inf"),
    )
