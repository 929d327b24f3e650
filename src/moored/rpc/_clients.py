"""The clients of a connection: weak references, compared by identity.

Two equal clients (frozen dataclasses with the same fields, for instance) are two clients: one that
releases a connection must not take it from the other. So clients need not be hashable.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from ._errors import ConfigError

__all__ = ["Clients", "refuse_unreferable"]

T = TypeVar("T")


class Clients(Generic[T]):
    """A set of weak references by identity; any thread may iterate over it.

    The garbage collector may remove a member at any time, so iteration uses a copy.
    """

    def __init__(self) -> None:
        self._references: dict[int, weakref.KeyedRef[int, T]] = {}
        self._forget = _forgetting(self._references)

    def add(self, item: T) -> None:
        """Add a member. It is short because every checkout calls it."""
        known = self._references.get(id(item))
        if known is None or known() is not item:
            refuse_unreferable(item)
            self._references[id(item)] = weakref.KeyedRef(item, self._forget, id(item))

    def discard(self, item: T) -> None:
        """Remove a member, if it is one."""
        if item in self:
            self._references.pop(id(item), None)

    def __contains__(self, item: object) -> bool:
        known = self._references.get(id(item))
        return known is not None and known() is item

    def __iter__(self) -> Iterator[T]:
        # Copying is one step of the interpreter, so no other thread can interrupt it.
        for reference in list(self._references.values()):
            if (item := reference()) is not None:
                yield item

    def __len__(self) -> int:
        return len(self._references)


def refuse_unreferable(client: object) -> None:
    """Raise `ConfigError` for an object that cannot be weakly referenced."""
    try:
        weakref.ref(client)
    except TypeError:
        raise ConfigError(
            f"client= is held weakly, which is not possible with {type(client).__name__}: give the "
            "object that uses the connection"
        ) from None


def _forgetting(references: dict[int, Any]) -> Any:
    # Not a method: the callback of a weak reference must not keep the set alive.
    def forget(reference: weakref.KeyedRef[int, Any]) -> None:
        if references.get(reference.key) is reference:
            del references[reference.key]

    return forget
