"""The items of a consumer that its function could not handle: parked, and retried on request."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from moored.kernel import counted, describe
from moored.postgres import ParkedItem, Parking
from moored.service import ServiceError

__all__ = ["OnPoison", "ParkedItems"]

log = logging.getLogger("moored.app")


class OnPoison(NamedTuple):
    """When items are parked."""

    #: How often the function gets an item before it is parked.
    tries: int
    #: More items are not parked: not they, but something that all of them need is broken.
    most: int


class ParkedItems:
    """The parked items of a consumer, as this process knows them."""

    def __init__(self, name: str, parking: Parking[Any], when: OnPoison) -> None:
        self._name = name
        self._parking = parking
        self._when = when
        self.items: list[ParkedItem] = []
        #: The position of the item that has failed last, and how often.
        self._failed: tuple[str, int] = "", 0

    async def load(self) -> None:
        """Read what is parked, also by other processes."""
        await self._parking.prepare()
        await self._read()

    async def _read(self) -> None:
        self.items = await self._parking.items()

    def __contains__(self, item: object) -> bool:
        """Whether an item is parked: the process was killed before it was acknowledged."""
        position = self._parking.position(item) if self.items else None
        return any(each.position == position for each in self.items)

    async def park(self, item: Any, error: Exception) -> bool:
        """Park an item if it has failed often enough; return whether it is parked."""
        position = self._parking.position(item)
        before, times = self._failed
        self._failed = position, times = position, times + 1 if position == before else 1
        if times < self._when.tries:
            return False
        try:
            if len(self.items) >= self._when.most:
                raise ServiceError(f"max_parked allows no more than {len(self.items)} parked items")
            await self._parking.park(item, error, tries=times)
        except Exception as failure:
            why = f"{describe(error)}; the {item!r} was not parked: {describe(failure)}"
            raise ServiceError(why) from error
        log.warning(
            "%s parked %r after %s, and goes on: %s",
            *(self._name, item, counted(times, "attempt"), describe(error)),
        )
        await self._read()
        return True

    async def retry(self, handle: Callable[[Any], Awaitable[None]]) -> bool:
        """Handle the next item whose retry an operator has asked for; return False without one."""
        claimed = await self._parking.claim()
        if claimed is not None:
            number, item = claimed
            try:
                if isinstance(item, Exception):
                    raise item
                await handle(item)
            except Exception as error:
                why = describe(error)
                log.warning("%s failed again with the parked item %d: %s", self._name, number, why)
                await self._parking.failed(number, error)
            else:
                log.info("%s has handled the parked item %d", self._name, number)
                await self._parking.remove(number)
        await self._read()
        return claimed is not None
