"""Who consumes, and how far everybody is: the slot's log, given out.

This is the persistent side: connections come and go, and it stays. A consumer is known by its name,
also while it is away: what it has not acknowledged is kept by the server, and comes again.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence

from holdfast.kernel import Recorder, counted

from ._consumer import Changes, Reset, Transaction
from ._errors import ConfigurationError, PostgresError
from ._lsn import LAST, Lsn
from ._position import History, Position
from ._progress import Progress
from ._store import StateStore
from ._transaction import Committed

__all__ = ["Hub"]

log = logging.getLogger("holdfast.postgres")

#: With more than this queued for a consumer, in bytes or in transactions, reading is paused.
QUEUE_BYTES = 64 * 2**20
QUEUE_LENGTH = 10_000


class Hub:
    """The consumers of one stream."""

    def __init__(
        self,
        store: StateStore,
        recorder: Recorder,
        *,
        queue_bytes: int = QUEUE_BYTES,
        queue_length: int = QUEUE_LENGTH,
    ) -> None:
        self._store = store
        self._recorder = recorder
        self._queue_bytes = queue_bytes
        self._queue_length = queue_length
        self._progress: dict[str, Progress | None] = {}
        self._resets: dict[str, str] = {}
        self._attached: weakref.WeakValueDictionary[str, Changes] = weakref.WeakValueDictionary()
        self._published: set[str] = set()
        self._told_published = asyncio.Event()
        #: Those who wait for what only the server has: until it comes, anything else is too early.
        self._behind: set[str] = set()
        #: Those who chose where to begin, and have not begun.
        self._starting: set[str] = set()
        self._room = asyncio.Event()
        self._room.set()
        #: The end of the last transaction that was applied; None before the stream began.
        self.seen: int | None = None
        #: The history that is streamed now.
        self.history: History | None = None
        #: Called when the flush position may have moved, and when the stream must begin again.
        self.on_progress: Callable[[], None] = lambda: None
        self.on_rewind: Callable[[], None] = lambda: None
        #: Called when a consumer comes: its tables must be published, and the database awake.
        self.on_attach: Callable[[Changes], None] = lambda changes: None
        for name, saved in store.consumers().items():
            at = saved.acknowledged
            self._progress[name] = None if at is None else Progress(at, saved.delivered)
            if saved.reset is not None:
                self._resets[name] = saved.reset

    # -- consumers -----------------------------------------------------------------------------

    def attach(
        self, name: str, *, tables: tuple[str, ...] = (), start: Position | None = None
    ) -> Changes:
        """A consumer comes, or comes back."""
        if name in self._attached:
            raise PostgresError(
                f"the consumer {name!r} is here already: give each its own name, or close the other"
            )
        changes = Changes(self, name, tables)
        if start is not None:
            self._start_at(name, start)
        elif name not in self._progress:
            self._progress[name] = None if self.seen is None else Progress(self.seen)
            self._store.add(name, self.seen)
        self._attached[name] = changes
        if name in self._resets:
            changes._put(Reset(self._resets[name]))
        progress = self._progress[name]
        if progress is not None:
            progress.rewind()
            if self.seen is not None and progress.acknowledged < self.seen:
                # What it has not acknowledged is only in the server: it must be sent again.
                self._behind.add(name)
                self.on_rewind()
        self.on_attach(changes)
        return changes

    def _start_at(self, name: str, start: Position) -> None:
        known = self._store.history()
        if known is not None and start.history != known:
            self._resets[name] = (
                f"the position {start} is of another history than the database's, {known}"
            )
            self._progress[name] = None if self.seen is None else Progress(self.seen)
            self._store.add(name, self.seen)
            self._store.reset(self._resets[name], name)
            return
        before = self._progress.get(name)
        self._progress[name] = Progress(start.lsn, 0 if before is None else before.delivered)
        self._store.add(name, start.lsn)
        self._starting.add(name)

    def detach(self, changes: Changes) -> None:
        """A consumer goes, for a while."""
        if self._attached.get(changes.name) is changes:
            del self._attached[changes.name]
        self.made_room()

    def refuse(self, changes: Changes, why: str) -> None:
        """A consumer cannot have what it wants: it is told, and the others go on."""
        log.error("the consumer %r: %s", changes.name, why)
        changes._end(ConfigurationError(f"the consumer {changes.name!r}: {why}"))
        self.detach(changes)

    async def drop(self, name: str, reason: str | None = None) -> None:
        """A consumer is not waited for any more; with a reason, it is told when it comes back."""
        if reason is None:
            self._progress.pop(name, None)
            self._resets.pop(name, None)
            await asyncio.to_thread(self._store.drop, name)
        else:
            await self._reset_one(name, reason)
        self.on_progress()

    async def _reset_one(self, name: str, reason: str) -> None:
        self._resets[name] = reason
        self._progress[name] = None if self.seen is None else Progress(self.seen)
        await asyncio.to_thread(self._store.reset, reason, name)
        if (changes := self._attached.get(name)) is not None:
            changes._forget()
            changes._put(Reset(reason))

    def acknowledge(self, changes: Changes, end: int) -> None:
        """A consumer is done with the transaction that ends here."""
        if self._attached.get(changes.name) is not changes:
            return
        progress = self._progress.get(changes.name)
        if progress is not None and progress.ack(end):
            self.on_progress()

    async def understood(self, changes: Changes) -> None:
        """A consumer has been told of a reset."""
        self._resets.pop(changes.name, None)
        await asyncio.to_thread(self._store.was_told, changes.name)

    # -- the log -------------------------------------------------------------------------------

    def begin(self, history: History, confirmed: int) -> None:
        """A stream begins, from here; whoever is new begins with it."""
        self.history = history
        self.seen = confirmed if self.seen is None else max(self.seen, confirmed)
        for name, progress in self._progress.items():
            if progress is None:
                self._progress[name] = Progress(confirmed, confirmed)
            elif name in self._starting and progress.acknowledged < min(
                confirmed, progress.delivered
            ):
                self._too_early(name, progress, confirmed)
            else:
                progress.passed(confirmed)
        self._behind.clear()
        self._starting.clear()

    def _too_early(self, name: str, progress: Progress, confirmed: int) -> None:
        """It wants to begin at a place before what it acknowledged, which the server forgot."""
        self._resets[name] = reason = (
            f"the position {Lsn(progress.acknowledged)} is before the last transaction that was "
            f"acknowledged, at {Lsn(progress.delivered)}, and the server does not have those "
            "between any more"
        )
        self._progress[name] = Progress(confirmed, confirmed)
        self._store.reset(reason, name)
        if (changes := self._attached.get(name)) is not None:
            changes._put(Reset(reason))

    def apply(self, committed: Committed) -> None:
        """One more transaction, for everybody whom it concerns."""
        end = committed.end_lsn
        for name, progress in self._progress.items():
            if progress is None:
                continue
            changes = self._attached.get(name)
            if changes is None or name in self._behind:
                continue  # away, or just back: it comes again, after what comes before
            tables = self._chosen(committed, changes.tables)
            if tables is not None and not tables:
                progress.passed(end)
            elif progress.given(end):
                changes._put(Transaction(committed, changes, tables))
                if self._is_full(changes):
                    self._room.clear()
        self.seen = max(self.seen or 0, end)
        if not self._progress:
            self.on_progress()

    def _chosen(self, committed: Committed, tables: tuple[str, ...]) -> frozenset[int] | None:
        """The tables of a transaction that a consumer wants; None for all of them."""
        if not tables:
            return None
        known = committed.known()
        wanted = {
            oid
            for oid, relation in known.items()
            if relation.name in tables or relation.qualified in tables
        }
        if len(wanted) == len(known):
            return None  # nothing else is published: there is no need to look
        return frozenset(wanted & committed.touched())

    def flushed(self) -> int:
        """Everything before this place is safe: the least that any consumer has acknowledged."""
        known = [progress.acknowledged for progress in self._progress.values() if progress]
        return min(known, default=self.seen or 0)

    def passed(self, end: int) -> None:
        """The server has nothing up to here that was not sent, and everybody is up to date."""
        for progress in self._progress.values():
            if progress is not None:
                progress.passed(end)

    async def checkpoint(self, told: int) -> None:
        """Keep how far everybody is, before the server is told."""
        now = {name: p.acknowledged for name, p in self._progress.items() if p is not None}
        delivered = {name: p.delivered for name, p in self._progress.items() if p is not None}
        await asyncio.to_thread(self._store.save, Lsn(min(told, LAST)), now, delivered)

    async def reset(self, reason: str) -> None:
        """History is not what it was: everybody begins anew, and is told why."""
        await asyncio.to_thread(self._store.reset, reason)
        self.seen = None
        self._recorder.record("postgres.hub", f"reset: {reason}", kind="info")
        log.warning("%s begin anew: %s", counted(len(self._progress), "consumer"), reason)
        for name in self._progress:
            self._progress[name] = None
            self._resets[name] = reason
            if (changes := self._attached.get(name)) is not None:
                changes._forget()
                changes._put(Reset(reason))

    def slowest(self) -> str | None:
        """The consumer for which the server keeps the most; None if nobody holds it up."""
        behind = {
            name: progress.acknowledged
            for name, progress in self._progress.items()
            if progress is not None and progress.acknowledged < (self.seen or 0)
        }
        return min(behind, key=lambda name: behind[name], default=None)

    def note_published(self, tables: Iterable[str]) -> None:
        """These tables are published from now on."""
        self._published.update(tables)
        self._told_published.set()

    async def published(self, tables: Sequence[str]) -> None:
        """Wait until these tables are published, or all that the consumers here want."""
        while True:
            wanted = set(tables) or {t for each in self.attached() for t in each.tables}
            if wanted <= self._published:
                return
            self._told_published.clear()
            await self._told_published.wait()

    def attached(self) -> list[Changes]:
        """The consumers that are here."""
        return list(self._attached.values())

    def published_to(self) -> list[Changes]:
        """Those of them whose tables are published."""
        return [each for each in self.attached() if self._published.issuperset(each.tables)]

    async def save(self) -> None:
        """Keep how far everybody is."""
        if (told := self._store.told()) is not None:
            await self.checkpoint(told)

    # -- back-pressure -------------------------------------------------------------------------

    async def room(self) -> None:
        """Wait until the slowest consumer has taken some of what is queued for it."""
        await self._room.wait()

    @property
    def full(self) -> bool:
        """Whether reading is paused for a consumer."""
        return not self._room.is_set()

    def made_room(self) -> None:
        """A consumer has taken something."""
        if not self._room.is_set() and not any(map(self._is_full, self._attached.values())):
            self._room.set()

    def _is_full(self, changes: Changes) -> bool:
        return changes._bytes > self._queue_bytes or len(changes._queue) > self._queue_length

    # -- for people ----------------------------------------------------------------------------

    def end(self, error: BaseException | None) -> None:
        """Nothing more comes: tell everybody."""
        for changes in list(self._attached.values()):
            changes._end(error)

    def consumers(self) -> dict[str, dict[str, object]]:
        """Everybody, and how far."""
        return {
            name: {
                "attached": name in self._attached,
                "acknowledged": None if p is None else str(Lsn(p.acknowledged)),
                "outstanding": 0 if p is None else p.outstanding,
                "reset": self._resets.get(name),
            }
            for name, p in self._progress.items()
        }

    def __repr__(self) -> str:
        return f"<Hub: {counted(len(self._progress), 'consumer')}, {len(self._attached)} here>"
