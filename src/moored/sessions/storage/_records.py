"""The records of one profile, each changed by one caller at a time.

Sending and receiving change the same records: with end-to-end encryption, the keys of a session
change with every message in both directions. Two callers that read, change and write at once would
lose one change, and every message after that could not be decrypted. So a change is a function.
One change of a record is made at a time, each to the result of the one before it, and is written
before its call returns.

A lock exists only while its record is being changed; nothing is cached. A profile must have only
one `Records` object at a time: two do not know of each other's locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from moored.kernel import Tasks, counted, outliving

from .._errors import CorruptRecord, StorageError
from ._storage import Changes, Storage

__all__ = ["Change", "ChangeMany", "Corruption", "Records"]

log = logging.getLogger("moored.sessions")

T = TypeVar("T")

#: The namespace and the key of a record.
Place: TypeAlias = tuple[str, str]
#: Gets the record or None, returns its new value or None to delete it. Not async.
Change: TypeAlias = Callable[[bytes | None], bytes | None]
#: The same for several records, by namespace and key; returns those that change.
ChangeMany: TypeAlias = Callable[[Changes], Changes]


class Corruption(NamedTuple):
    """A record that cannot be read, and is treated as missing."""

    namespace: str
    #: Keep it out of logs: it may be a recipient's address.
    key: str
    #: Why it cannot be read, without the profile and the key.
    reason: str
    #: Whether a copy was saved in the namespace with the suffix `.corrupt`.
    kept: bool


@dataclass(slots=True, eq=False, repr=False)
class Records:
    """The records of one profile in a storage; any number of changes may wait for one record."""

    storage: Storage
    profile: str
    _: KW_ONLY
    #: Called for each record that cannot be read.
    on_corrupt: Callable[[Corruption], object] | None = None
    #: Nothing is written while this returns False.
    may_write: Callable[[], bool] | None = None
    #: The number of times that a record could not be read.
    corrupt: int = field(default=0, init=False)
    # The changes in progress, and the locks of their records, which disappear when no change uses
    # them. Created with the first change: most profiles are only read.
    _changes: Tasks | None = field(default=None, init=False)
    _locks: WeakValueDictionary[Place, asyncio.Lock] | None = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)

    async def get(self, namespace: str, key: str) -> bytes | None:
        """Return the record as last written, or None; a damaged one is treated as missing."""
        try:
            return await self.storage.get(self.profile, namespace, key)
        except CorruptRecord as error:
            await self._lost(namespace, key, error)
            return None

    async def put(self, namespace: str, key: str, value: bytes) -> None:
        """Write the record, after all earlier changes of it."""
        _check(value)
        await self._alone([(namespace, key)], lambda: self._write(namespace, key, value))

    async def delete(self, namespace: str, key: str) -> None:
        """Delete the record, after all earlier changes of it."""
        await self._alone([(namespace, key)], lambda: self._write(namespace, key, None))

    async def update(self, namespace: str, key: str, change: Change) -> bytes | None:
        """Change the record; return its new value when that is durable.

        A change that raises fails only this call, and the record keeps its value. A change is
        completed even if its caller is cancelled.
        """
        return await self._alone([(namespace, key)], lambda: self._changed(namespace, key, change))

    async def update_many(
        self, places: Iterable[Place], change: ChangeMany
    ) -> Mapping[Place, bytes | None]:
        """Change several records in one transaction; return all their values when it is durable.

        `change` gets the records by namespace and key, and returns those that change; None deletes
        a record. Other changes of these records wait meanwhile. Raises `StorageError` if the
        storage has no transactions: see `Storage.put_all`.
        """
        # Always in the same order, so that two calls cannot deadlock.
        wanted = sorted(set(places))
        return await self._alone(wanted, lambda: self._changed_many(wanted, change))

    async def close(self, timeout: float | None = None) -> None:
        """Accept no more changes, and wait for those in progress; the storage stays open."""
        self._closed = True
        if self._changes:
            try:
                await asyncio.wait(list(self._changes), timeout=timeout)
            finally:
                await self._changes.cancel()

    @property
    def busy(self) -> int:
        """The number of changes in progress."""
        return len(self._changes or ())

    async def __aenter__(self) -> Records:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Records: {counted(self.busy, 'change')} in progress, {self.corrupt} corrupt>"

    async def _alone(self, places: Sequence[Place], work: Callable[[], Awaitable[T]]) -> T:
        """Do work after all earlier changes of these records, and before all later ones."""
        ended = "the session has ended: its records can only be changed while it runs"
        if self._closed:
            raise StorageError(ended)
        if self._changes is None or self._locks is None:
            self._changes, self._locks = Tasks(), WeakValueDictionary()
        locks = [self._locks.setdefault(place, asyncio.Lock()) for place in places]
        change = self._changes.start(_locked(locks, work))
        # If its caller is cancelled, an error of the change is retrieved here.
        change.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await outliving(change)
        except asyncio.CancelledError:
            if change.cancelled():
                raise StorageError(ended) from None
            raise

    async def _changed(self, namespace: str, key: str, change: Change) -> bytes | None:
        damaged = self.corrupt
        old = await self.get(namespace, key)
        new = change(old)
        _check(new)
        if new == old and self.corrupt == damaged:
            return old
        await self._write(namespace, key, new)
        return new

    async def _changed_many(
        self, wanted: Sequence[Place], change: ChangeMany
    ) -> Mapping[Place, bytes | None]:
        old = {place: await self.get(*place) for place in wanted}
        new = change(dict(old))
        if strange := set(new) - set(old):
            raise StorageError(f"the change returned {len(strange)} records it was not given")
        for value in new.values():
            _check(value)
        self._check_lease()
        if new:
            await self.storage.put_all(self.profile, new)
        return {**old, **new}

    async def _write(self, namespace: str, key: str, value: bytes | None) -> None:
        self._check_lease()
        if value is None:
            await self.storage.delete(self.profile, namespace, key)
        else:
            await self.storage.put(self.profile, namespace, key, value)

    def _check_lease(self) -> None:
        if self.may_write is not None and not self.may_write():
            raise StorageError(
                "the lease of this profile is lost: another process may be changing its records"
            )

    async def _lost(self, namespace: str, key: str, error: CorruptRecord) -> None:
        self.corrupt += 1
        kept = False
        try:
            kept = await self.storage.set_aside(self.profile, namespace, key)
        except StorageError as failure:
            log.error("a damaged record could not be copied: %s", failure)
        if self.on_corrupt is None:
            return
        try:
            self.on_corrupt(Corruption(namespace, key, str(error), kept))
        except Exception:
            log.exception("on_corrupt failed")


async def _locked(locks: Sequence[asyncio.Lock], work: Callable[[], Awaitable[T]]) -> T:
    async with contextlib.AsyncExitStack() as stack:
        for lock in locks:
            await stack.enter_async_context(lock)
        return await work()


def _check(new: object) -> None:
    if new is None or isinstance(new, bytes):
        return
    if inspect.iscoroutine(new):
        new.close()
    raise TypeError(f"a record must be bytes, or None for no record, not {type(new).__name__}")
