"""Who uses a connection: known for as long as they live, each as itself.

Two clients that are equal (frozen dataclasses with the same fields, say) are two clients: one that
gives a connection back must not take it from the other. So they are told apart by identity, and
need be neither equal to anything nor hashable.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, MutableSet, Set
from typing import TYPE_CHECKING, Any

from ._errors import ConfigError

__all__ = ["Clients", "refuse_unreferable"]

Reference = weakref.KeyedRef[int, Any]


if TYPE_CHECKING:
    _WeakSet = weakref.WeakSet[Any]
else:

    class _WeakSet(MutableSet, weakref.WeakSet):
        """Whatever a set can do, done with the few methods below."""


class Clients(_WeakSet):
    """A `WeakSet` by identity.

    The garbage collector may take a member out at any time, also while somebody iterates: what is
    iterated over is a copy.
    """

    def __init__(self, members: Iterable[Any] = ()) -> None:
        super().__init__()
        self._references: dict[int, Reference] = {}
        self._forget = _forgetting(self._references)
        self.update(members)

    def add(self, item: Any) -> None:
        """Know it from now on; for each checkout, so it is short."""
        known = self._references.get(id(item))
        if known is None or known() is not item:
            refuse_unreferable(item)
            self._references[id(item)] = weakref.KeyedRef(item, self._forget, id(item))

    def discard(self, item: Any) -> None:
        """Not any more; of one that is not known, it is harmless."""
        if item in self:
            self._references.pop(id(item), None)

    def __contains__(self, item: object) -> bool:
        known = self._references.get(id(item))
        return known is not None and known() is item

    def __iter__(self) -> Iterator[Any]:
        for reference in list(self._references.values()):
            if (item := reference()) is not None:
                yield item

    def __len__(self) -> int:
        return len(self._references)

    def issubset(self, other: Iterable[Any]) -> bool:
        """Whether all of them are in the other."""
        others = other if isinstance(other, Set) else Clients(other)
        return all(item in others for item in self)

    def issuperset(self, other: Iterable[Any]) -> bool:
        """Whether all of the other are here."""
        return all(item in self for item in other)

    def __repr__(self) -> str:
        return f"<Clients: {list(self)!r}>"


def refuse_unreferable(client: object) -> None:
    """Raise for what cannot be held weakly: when it is gone could not be known."""
    try:
        weakref.ref(client)
    except TypeError:
        raise ConfigError(
            f"client= is held weakly, which is not possible with {type(client).__name__}: give the "
            "object that uses the connection"
        ) from None


def _forgetting(references: dict[int, Reference]) -> Any:
    # Not a method: what is called at the end of a member must not keep the set alive.
    def forget(reference: Reference) -> None:
        if references.get(reference.key) is reference:
            del references[reference.key]

    return forget
