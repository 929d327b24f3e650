"""Up to which id the events of an outbox are final: decided from looks at the server, without I/O.

Ids are given in one order and committed in another, so a reader stops before the first id that a
transaction may still commit. A transaction that publishes holds the lock ROW EXCLUSIVE of the
outbox from before its first id until its rows are visible: a holder of that lock may commit lower
ids than those that are visible, and no other transaction can.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Self

__all__ = ["Barrier"]

#: A prepared transaction after a restart of the server, which forgets the name that it had before.
_PREPARED = "-1/"


class Barrier(NamedTuple):
    """What successive looks have found; `look()` returns the next one.

    Invariants, which the model in the tests checks:

    - no transaction commits an id up to `final` any more;
    - a holder in `bounds` was given no id up to its bound.
    """

    #: Every id up to this one is final: it is visible, or will never exist.
    final: int = 0
    #: The highest id that was visible at the last look.
    highest: int = 0
    #: The holders of the lock by their virtual transaction IDs, each with its bound.
    bounds: tuple[tuple[str, int], ...] = ()

    @classmethod
    def at(cls, final: int) -> Self:
        """Begin at an id that is known to be final, with nothing known about the holders."""
        return cls(final, final)

    def look(self, highest: int, holders: Collection[str]) -> Self:
        """Return the state after a look.

        :param highest: the highest id that was visible before the holders were queried.
        :param holders: the holders of the lock. A holder that is not among them is given its ids
            later, so they are above `highest`.
        """
        known = dict(self.bounds)
        # A backend between two transactions is `3/0`: it ends one, which may be visible by now, or
        # prepares one, which is about to get its name back.
        between = {name for name in holders if name.endswith("/0")}
        kept = [name for name in known if _between(name) in between and name not in holders]
        now = {*holders, *kept}
        gone = [bound for name, bound in known.items() if name not in now]
        bounds = {}
        for name in now:
            if (bound := known.get(name)) is None:
                earlier = gone if name.startswith(_PREPARED) else ()
                bound = min(self.highest, known.get(_between(name), self.highest), *earlier)
            bounds[name] = bound
        highest = max(highest, self.highest)
        final = max(self.final, min([highest, *bounds.values()]))
        return self._replace(final=final, highest=highest, bounds=tuple(sorted(bounds.items())))

    @property
    def holder(self) -> str | None:
        """The holder that events wait for; None if they wait for none."""
        if self.final >= self.highest:
            return None
        return min(self.bounds, key=lambda each: each[1])[0]


def _between(name: str) -> str:
    """Return the name of a holder's backend between two transactions."""
    return name.partition("/")[0] + "/0"
