"""The records of one profile, each changed by one worker at a time.

Sending and receiving change the same records: with end-to-end encryption, the keys of a session
change with every message in both directions. Two callers that read, change and write at once would
lose one change, and every message after that could not be decrypted. So a change is a function.
The record's worker applies one change at a time, each to the result of the one before it, and
writes the result before the call returns.

A worker exists only while its record has changes to make (`KeyedWorkers`); nothing is cached. A
profile must have only one `Records` object at a time: two do not know of each other's workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple, TypeAlias

from moored.kernel import KeyedWorkers

from .._errors import CorruptRecord, StorageError
from ._storage import Changes, Storage

__all__ = ["Change", "ChangeMany", "Corruption", "Records"]

log = logging.getLogger("moored.sessions")

SESSION_ENDED = "the session has ended: its records can only be changed while it runs"

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


class _Done(NamedTuple):
    value: bytes | None
    error: BaseException | None = None


@dataclass(slots=True, eq=False, repr=False)
class _Hold:
    """Keeps a record's worker busy while several records are changed together."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    #: Whether the worker was cancelled meanwhile.
    lost: bool = False

    async def wait(self) -> _Done:
        self.begun.set()
        try:
            await self.over.wait()
        except asyncio.CancelledError:
            self.lost = True
            raise
        return _Done(None)


#: One worker for each record that is being changed.
_RecordWorkers: TypeAlias = KeyedWorkers[tuple[str, str], Change | bytes | _Hold | None, _Done]


@dataclass(slots=True, eq=False, repr=False)
class Records:
    """The records of one profile in a storage."""

    storage: Storage
    profile: str
    _: KW_ONLY
    #: Called for each record that cannot be read.
    on_corrupt: Callable[[Corruption], object] | None = None
    #: Nothing is written while this returns False.
    may_write: Callable[[], bool] | None = None
    #: The most changes that may wait for one record; one more raises `QueueFull`.
    max_queue: int = 1000
    #: The number of times that a record could not be read.
    corrupt: int = field(default=0, init=False)
    # Created with the first change: most profiles are only read.
    _workers: _RecordWorkers | None = field(default=None, init=False)
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
        await self._submit(namespace, key, value)

    async def delete(self, namespace: str, key: str) -> None:
        """Delete the record, after all earlier changes of it."""
        await self._submit(namespace, key, None)

    async def update(self, namespace: str, key: str, change: Change) -> bytes | None:
        """Change the record; return its new value when that is durable.

        A change that raises fails only this call, and the record keeps its value. A change that has
        begun is completed even if its caller is cancelled.
        """
        return await self._submit(namespace, key, change)

    async def update_many(
        self, places: Iterable[tuple[str, str]], change: ChangeMany
    ) -> Mapping[tuple[str, str], bytes | None]:
        """Change several records in one transaction; return all their values when it is durable.

        `change` gets the records by namespace and key, and returns those that change; None deletes
        a record. Other changes of these records wait meanwhile. Raises `StorageError` if the
        storage has no transactions: see `Storage.put_all`.
        """
        wanted = sorted(set(places))
        async with contextlib.AsyncExitStack() as stack:
            # Always in the same order, so that two calls cannot deadlock.
            holds = [await stack.enter_async_context(self._held(place)) for place in wanted]
            old = {place: await self.get(*place) for place in wanted}
            new = change(dict(old))
            if strange := set(new) - set(old):
                raise StorageError(f"the change returned {len(strange)} records it was not given")
            for value in new.values():
                _check(value)
            self._check_lease()
            if any(hold.lost for hold in holds):
                raise StorageError(SESSION_ENDED)
            if new:
                await self.storage.put_all(self.profile, new)
            return {**old, **new}

    @contextlib.asynccontextmanager
    async def _held(self, place: tuple[str, str]) -> AsyncIterator[_Hold]:
        """Make other changes of a record wait."""
        hold = _Hold()
        self._open_workers().submit(place, hold)
        try:
            await hold.begun.wait()
            yield hold
        finally:
            hold.over.set()

    async def close(self, timeout: float | None = None) -> None:
        """Accept no more changes, and wait for those in progress; the storage stays open."""
        self._closed = True
        if self._workers is not None:
            await self._workers.close(timeout)

    @property
    def busy(self) -> int:
        """The number of records that are being changed."""
        return 0 if self._workers is None else len(self._workers)

    async def __aenter__(self) -> Records:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Records: {self.busy} being changed, {self.corrupt} corrupt>"

    async def _submit(self, namespace: str, key: str, work: Change | bytes | None) -> bytes | None:
        done = await self._open_workers().run((namespace, key), work)
        if done.error is not None:
            raise done.error
        return done.value

    def _open_workers(self) -> _RecordWorkers:
        if self._closed:
            raise StorageError(SESSION_ENDED)
        if self._workers is None:
            self._workers = KeyedWorkers(self._apply, name="records", max_queue=self.max_queue)
        return self._workers

    async def _apply(self, place: tuple[str, str], work: Change | bytes | _Hold | None) -> _Done:
        # An exception would fail all changes that wait for this worker, so it is returned instead.
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


def _check(new: object) -> None:
    if new is None or isinstance(new, bytes):
        return
    if inspect.iscoroutine(new):
        new.close()
    raise TypeError(f"a record must be bytes, or None for no record, not {type(new).__name__}")
