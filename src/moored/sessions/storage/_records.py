"""The records of one profile, and a custodian for each that is being changed.

Sending and receiving change the same records: a session's keys move on with every message, in both
directions. Two that read, change and write at once would lose one change, in silence, and with it
every message after that. So a change is a function, and the record's custodian applies one at a
time, each to what the one before it left, and writes it down before anybody is told.

A custodian exists only while there is something to change (`KeyedWorkers`); nothing is cached. A
profile may have many records, but only one `Records` at a time: custodians of two know nothing
of each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

from moored.kernel import KeyedWorkers

from .._errors import CorruptRecord, StorageError
from ._storage import Changes, Storage

__all__ = ["Change", "ChangeMany", "Corruption", "Records"]

log = logging.getLogger("moored.sessions")

#: Gets the record or None, returns what it shall be or None for no record. Not async.
Change: TypeAlias = Callable[[bytes | None], bytes | None]
#: The same for several records, by namespace and key; returns those that shall be different.
ChangeMany: TypeAlias = Callable[[Changes], Changes]


class Corruption(NamedTuple):
    """A record that cannot be read, and counts as missing."""

    namespace: str
    #: It may be somebody's address: keep it out of logs.
    key: str
    #: Why, without names.
    reason: str
    #: Whether there is a copy in the namespace with `.corrupt` at its end.
    kept: bool


class _Done(NamedTuple):
    value: bytes | None
    error: BaseException | None = None


class _Hold:
    """Keeps a record's custodian busy while several records are changed together."""

    __slots__ = ("begun", "lost", "over")

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.over = asyncio.Event()
        #: Whether the custodian was cancelled meanwhile.
        self.lost = False

    async def wait(self) -> _Done:
        self.begun.set()
        try:
            await self.over.wait()
        except asyncio.CancelledError:
            self.lost = True
            raise
        return _Done(None)


#: One for each record that is being changed.
_Custodians: TypeAlias = KeyedWorkers[tuple[str, str], Change | bytes | _Hold | None, _Done]


class Records:
    """The records of one profile in a storage.

    `on_corrupt` is called for each record that cannot be read. Nothing is written while `may_write`
    returns False. At most `max_queue` changes wait for one record; one more raises `QueueFull`.
    """

    __slots__ = (
        "_closed",
        "_custodians",
        "_max_queue",
        "_may_write",
        "_on_corrupt",
        "corrupt",
        "profile",
        "storage",
    )

    def __init__(
        self,
        storage: Storage,
        profile: str,
        *,
        on_corrupt: Callable[[Corruption], object] | None = None,
        may_write: Callable[[], bool] | None = None,
        max_queue: int = 1000,
    ) -> None:
        self.storage = storage
        self.profile = profile
        #: How often a record could not be read.
        self.corrupt = 0
        self._on_corrupt = on_corrupt
        self._may_write = may_write
        self._max_queue = max_queue
        # Made with the first change: most profiles are only read.
        self._custodians: _Custodians | None = None
        self._closed = False

    async def get(self, namespace: str, key: str) -> bytes | None:
        """The record as it was last written, or None; one that is damaged counts as missing."""
        try:
            return await self.storage.get(self.profile, namespace, key)
        except CorruptRecord as error:
            await self._lost(namespace, key, error)
            return None

    async def put(self, namespace: str, key: str, value: bytes) -> None:
        """Write the record, after the changes that were asked for before."""
        _check(value)
        await self._submit(namespace, key, value)

    async def delete(self, namespace: str, key: str) -> None:
        """Remove the record, after the changes that were asked for before."""
        await self._submit(namespace, key, None)

    async def update(self, namespace: str, key: str, change: Change) -> bytes | None:
        """Change the record; returns what it is now, when that is durable.

        A change that raises fails this call alone, and the record stays as it is. A caller that
        gives up once the change has begun does not stop it.
        """
        return await self._submit(namespace, key, change)

    async def update_many(
        self, places: Iterable[tuple[str, str]], change: ChangeMany
    ) -> Mapping[tuple[str, str], bytes | None]:
        """Change several records in one transaction: all of them, or none.

        `change` gets the records by namespace and key, and returns those that shall be different,
        with None for no record. Other changes of any of them wait meanwhile. Returns what all of
        them are now, when that is durable. Not every storage can do it: see `Storage.put_all`.
        """
        wanted = sorted(set(places))
        async with contextlib.AsyncExitStack() as stack:
            # Always in the same order, so that no two wait for each other.
            holds = [await stack.enter_async_context(self._held(place)) for place in wanted]
            old = {place: await self.get(*place) for place in wanted}
            new = change(dict(old))
            if strange := set(new) - set(old):
                raise StorageError(f"the change names {len(strange)} records it was not given")
            for value in new.values():
                _check(value)
            self._check_lease()
            if any(hold.lost for hold in holds):
                raise StorageError("its session has ended: change records while it lives")
            if new:
                await self.storage.put_all(self.profile, new)
            return {**old, **new}

    @contextlib.asynccontextmanager
    async def _held(self, place: tuple[str, str]) -> AsyncIterator[_Hold]:
        """Keep other changes of a record waiting."""
        hold = _Hold()
        self._custody().submit(place, hold)
        try:
            await hold.begun.wait()
            yield hold
        finally:
            hold.over.set()

    async def close(self, timeout: float | None = None) -> None:
        """Take no more changes, and wait for those there are; the storage stays open."""
        self._closed = True
        if self._custodians is not None:
            await self._custodians.close(timeout)

    @property
    def busy(self) -> int:
        """How many records are being changed."""
        return 0 if self._custodians is None else len(self._custodians)

    async def __aenter__(self) -> Records:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Records: {self.busy} being changed, {self.corrupt} corrupt>"

    async def _submit(self, namespace: str, key: str, work: Change | bytes | None) -> bytes | None:
        done = await self._custody().run((namespace, key), work)
        if done.error is not None:
            raise done.error
        return done.value

    def _custody(self) -> _Custodians:
        if self._closed:
            raise StorageError("its session has ended: change records while it lives")
        if self._custodians is None:
            self._custodians = KeyedWorkers(self._apply, name="records", max_queue=self._max_queue)
        return self._custodians

    async def _apply(self, place: tuple[str, str], work: Change | bytes | _Hold | None) -> _Done:
        # What is raised here would fail all that wait behind it: it is handed over instead.
        if isinstance(work, _Hold):
            return await work.wait()
        try:
            if callable(work):
                return _Done(await self._changed(*place, work))
            await self._write(*place, work)
            return _Done(work)
        except Exception as error:
            return _Done(None, error)

    async def _changed(self, namespace: str, key: str, change: Change) -> bytes | None:
        damaged = self.corrupt
        old = await self.get(namespace, key)
        new = change(old)
        _check(new)
        if new == old and self.corrupt == damaged:
            return old
        await self._write(namespace, key, new)
        return new

    async def _write(self, namespace: str, key: str, value: bytes | None) -> None:
        self._check_lease()
        if value is None:
            await self.storage.delete(self.profile, namespace, key)
        else:
            await self.storage.put(self.profile, namespace, key, value)

    def _check_lease(self) -> None:
        if self._may_write is not None and not self._may_write():
            raise StorageError(
                "the lease of this profile is lost: another may change its records by now"
            )

    async def _lost(self, namespace: str, key: str, error: CorruptRecord) -> None:
        self.corrupt += 1
        kept = False
        try:
            kept = await self.storage.set_aside(self.profile, namespace, key)
        except StorageError as failure:
            log.error("a damaged record could not be kept: %s", failure)
        if self._on_corrupt is None:
            return
        try:
            self._on_corrupt(Corruption(namespace, key, str(error), kept))
        except Exception:
            log.exception("on_corrupt failed")


def _check(new: object) -> None:
    if new is None or isinstance(new, bytes):
        return
    if inspect.iscoroutine(new):
        new.close()
    raise TypeError(f"a record is bytes, or None for none, and not {type(new).__name__}")
