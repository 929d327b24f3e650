"""The consumers of a stream, and their positions.

The `Hub` lives as long as its `Postgres`, whatever happens to the connections. A consumer is known
by its name, also while it is not attached: the server keeps its unacknowledged transactions, and
sends them again.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from moored.kernel import Clock, Recorder, counted

from .._errors import ConfigurationError, PostgresError, StreamEnded
from .._lsn import LAST, Lsn
from .._position import History, Position, before_the_slot, beyond_the_end, of_another_history
from ..decode import Committed
from ..server import Findings
from ._backlog import Backlog
from ._backpressure import Backpressure
from ._consumer import Attachment, Changes, Reset, Transaction
from ._continuity import NO_COMMIT, CommitMark, Continuity
from ._followed_tables import FollowedTables
from ._known import KnownConsumer, progress_of
from ._progress import Progress
from ._published_tables import PublishedTables
from ._store import GIVEN_UP, SLOT_CREATED, StateStore, StoredState, stored
from ._tables import Followed, dump, load

__all__ = ["Hub"]

log = logging.getLogger("moored.postgres")


class Hub:
    """The consumers of one stream.

    :param state: what the store has; without it, it is read here.
    """

    def __init__(
        self,
        store: StateStore,
        recorder: Recorder,
        *,
        clock: Clock | None = None,
        state: StoredState | None = None,
    ) -> None:
        self._store = store
        self._recorder = recorder
        self.pressure = Backpressure(self.attached, clock or Clock.system())
        #: All consumers by their names, also those that are not attached.
        self._known: dict[str, KnownConsumer] = {}
        self._attached: weakref.WeakValueDictionary[str, Changes] = weakref.WeakValueDictionary()
        #: Whether `on_progress` was called since the last `flushed()`.
        self._progress_reported = False
        self.published = PublishedTables()
        self.tables = FollowedTables(store, self._known, self.attached)
        #: The number of the check of the tables that runs, or that was the last one.
        self.checks = 0
        #: The end of the last transaction that was applied; None before the stream began.
        self.seen: int | None = None
        #: The end of the last transaction that this process has applied; 0 if there was none.
        self._applied = 0
        #: The last commit that was ever received, and its comparison with the server's commits.
        self._last = NO_COMMIT
        self._continuity = Continuity(NO_COMMIT, 0, 0)
        #: The last known end of the server's WAL; None if unknown.
        self._log_end: int | None = None
        #: Whether the slot existed although no state was stored: its consumers are unknown.
        self.adopted = False
        #: The history that is streamed now.
        self.history: History | None = None
        #: Called when the flush position may have moved, and when the stream must be restarted.
        self.on_progress: Callable[[], None] = lambda: None
        self.on_rewind: Callable[[], None] = lambda: None
        #: Called when the tables of consumers must be checked: now, because a consumer attached or
        #: was dropped, and soon, because a table may have changed.
        self.on_tables: Callable[[], None] = lambda: None
        self.on_changed_tables: Callable[[], None] = lambda: None
        state = state or store.load()
        self._times_reset = state.resets.times
        self._take(state)

    async def reload(self) -> None:
        """Read the stored state: another process may have had the lock, and changed it."""
        writes = -1
        while writes != self._store.writes:  # a consumer came or went while the file was read
            writes = self._store.writes
            state = await stored(self._store.load)
        self._take(state)

    def _take(self, state: StoredState) -> None:
        kept, resets = state.consumers, state.resets
        #: The highest LSN that may have been confirmed; None if unknown.
        self._confirmed: int | None = state.confirmed
        self.tables.added = state.added
        #: The position at which the slot was created.
        self._slot_created = state.slot_created and Position.parse(state.slot_created)
        self._reset_number = state.reset_number
        missed = Reset(resets.reason) if resets.times != self._times_reset else None
        self._times_reset = resets.times
        if missed is not None:
            self.seen = None
            self._last = NO_COMMIT
        self._last = max(self._last, state.last)
        for name in [name for name in self._known if name not in kept]:
            self._dropped_elsewhere(name)
        for name, saved in kept.items():
            known = self._known.setdefault(name, KnownConsumer(name))
            known.followed = load(saved.followed)
            known.stored = saved.acknowledged or 0
            if missed is not None:
                known.attachment = None
            if missed is not None or known.progress is None:
                known.progress = progress_of(saved)
            elif saved.acknowledged is not None:
                known.progress.reached(saved.acknowledged, saved.delivered)
            reset = saved.reset or (missed if name in self._attached else None)
            if reset is not None and (missed is not None or known.reset is None):
                known.confirmed = False
                self._start_over(known, reset)

    def _dropped_elsewhere(self, name: str) -> None:
        del self._known[name]
        if name in self._attached:
            known = self._known[name] = KnownConsumer(name)
            reason = f"the consumer {name!r} was dropped by another instance"
            self._store.post(self._store.put_new, name, None)
            self._start_over(known, self._new_reset(reason, name))

    def _new_reset(self, reason: str, name: str) -> Reset:
        """Reset a consumer in the store, soon."""
        self._reset_number += 1
        reset = Reset(reason, self._reset_number)
        self._store.post(self._store.put_reset, reset, name)
        return reset

    def _start_over(self, known: KnownConsumer, reset: Reset) -> None:
        """Reset a consumer: deliver the `Reset` now, when it is confirmed, or when it attaches."""
        known.reset, known.backlog, known.attachment, known.stored = reset, None, None, 0
        if (changes := self._attached.get(known.name)) is not None:
            changes._start_over()
            known.attachment = changes._attachment
            if known.confirmed:
                changes._put(reset)

    # -- consumers -----------------------------------------------------------------------------

    def attach(
        self,
        name: str,
        *,
        tables: tuple[str, ...] = (),
        start: Position | None = None,
        schema_changes: bool = False,
    ) -> Changes:
        """Attach a consumer."""
        if (other := self._attached.get(name)) is not None and not other._closed:
            raise PostgresError(
                f"a consumer {name!r} is already attached: give each its own name, or close the "
                "other one; `async with pg.changes(...) as changes` always closes it"
            )
        changes: Changes = Changes(self, name, tables, schema_changes=schema_changes)
        if start is not None:
            self._start_at(name, start)
        elif name not in self._known:
            self._add(name)
        self._attached[name] = changes
        self.published.forget_refusal(name)
        known = self._known[name]
        known.attachment = changes._attachment
        if known.progress is not None:
            known.progress.rewind()
            self._join(known, known.progress, changes)
        self.on_tables()
        return changes

    def _join(self, known: KnownConsumer, progress: Progress, changes: Changes) -> None:
        """Let a known consumer join a stream that may be running."""
        at = progress.acknowledged
        if self.seen is None:
            return
        backlog = known.backlog = known.backlog or self._new_backlog(at >= self.seen)
        if backlog.complete and known.start is None and known.reset is None:
            self._give(backlog.take(), changes, progress, backlog)
            return
        # Only the server has its unacknowledged transactions: they must be sent again. And only the
        # server knows whether its WAL reaches the chosen start position.
        too_far = known.start is not None and at > max(self.seen, self._log_end or 0)
        if at < self.seen or too_far:
            known.behind = True
            backlog.complete = False  # until the stream is restarted
            self.on_rewind()
        else:
            known.start = None

    def _new_backlog(self, complete: bool = True) -> Backlog:
        return Backlog(self.pressure.queue_bytes, self.pressure.queue_length, complete)

    def _add(self, name: str) -> None:
        # If another process has added it, its state is read with the lock of the stream.
        self._store.post(self._store.put_new, name, self.seen)
        known = self._known[name] = KnownConsumer(name)
        if self.seen is not None:
            known.progress = Progress(self.seen)
            if self.adopted:
                known.reset = self._new_reset(
                    "the stored state of this stream was lost, so the position of the consumer "
                    f"{name!r} is unknown: it begins at the newest transaction",
                    name,
                )

    def _start_at(self, name: str, start: Position) -> None:
        # Without a stream, `check_starts` decides.
        history, reason = self.history, None
        if history is not None and start.history != history:
            reason = of_another_history(start, history)
        elif self._precedes_slot(start):
            reason = before_the_slot(start)
        known = self._known.get(name) or KnownConsumer(name)
        if reason is not None:
            self._store.post(self._store.put, name, self.seen)
            known.reset = self._new_reset(reason, name)
            known.progress = None if self.seen is None else Progress(self.seen)
            self._known[name] = known
            return
        # An unknown consumer may have missed any transaction before now.
        received = max(self._applied, self._last.end)
        delivered = received if known.progress is None else known.progress.delivered
        # The position is stored when the server has confirmed that it exists: a stored position
        # beyond the end of the WAL would reset all consumers. An earlier one is stored now.
        self._store.post(self._store.put_start, name, start.lsn)
        known.progress, known.start = Progress(start.lsn, delivered), start
        known.stored = min(known.stored, start.lsn)
        self._known[name] = known

    def _precedes_slot(self, start: Position) -> bool:
        """Return whether the slot was created after a position, perhaps by another process."""
        created = self._slot_created or start
        return start.history == created.history and start.lsn < created.lsn

    def check_starts(self, history: History, found: Findings) -> None:
        """Reset the consumers whose `start=` does not exist on this server.

        A `start=` shows that there was a stream, even if no other state of it is stored.
        """
        self._log_end = int(found.wal_position)
        if found.slot_created:
            self._slot_created = Position(history, found.confirmed)
            self._store.post(self._store.put_fact, SLOT_CREATED, str(self._slot_created))
        for known, start in self._starting():
            if start.history != history:
                self._refuse_start(known, of_another_history(start, history))
            elif found.slot_created or self._precedes_slot(start):
                self._refuse_start(known, before_the_slot(start))
            elif start.lsn > found.wal_position:
                self._refuse_start(known, beyond_the_end(start, found.wal_position))

    def _starting(self) -> list[tuple[KnownConsumer, Position]]:
        return [(each, each.start) for each in self._known.values() if each.start is not None]

    def _refuse_start(self, known: KnownConsumer, reason: str) -> None:
        known.start = known.progress = None
        self._start_over(known, self._new_reset(reason, known.name))

    def detach(self, changes: Changes[Any]) -> None:
        """Detach a consumer; it may still acknowledge delivered transactions."""
        if self._attached.get(changes.name) is changes:
            del self._attached[changes.name]
            if (known := self._known.get(changes.name)) is not None:
                known.confirmed = False
        self.published.closed(changes)
        self.pressure.taken()

    def refuse(self, changes: Changes, why: str) -> None:
        """End a consumer whose tables cannot be published; the others continue."""
        changes._end(ConfigurationError(f"the consumer {changes.name!r}: {why}"))
        self.detach(changes)
        self.published.refuse(changes)

    async def drop(self, name: str, reason: str | None = None) -> None:
        """Remove a consumer; with a reason, reset it instead, to the newest transaction."""
        if reason is None:
            self._known.pop(name, None)
            if (changes := self._attached.get(name)) is not None:
                changes._end(PostgresError(f"the consumer {name!r} was dropped while attached"))
                self.detach(changes)
            self._store.post(self._store.put_dropped, name)
            await stored(self._store.flush)
            self.on_tables()
        else:
            await self._reset_one(name, reason)
        self.on_progress()

    def _from_now(self, at: int = 0) -> Progress | None:
        """Return the progress of a consumer that begins after the last transaction, or `at`."""
        place = max(self.seen or 0, at)
        return Progress(place, place) if place else None

    async def _reset_one(self, name: str, reason: str, at: int = 0) -> None:
        # Store it first: after a crash, a confirmed position must not be unknown here.
        reset = await stored(self._store.reset, reason, name)
        self._reset_number = max(self._reset_number, reset.number)
        if (known := self._known.get(name)) is None:
            return  # it was dropped meanwhile
        # Transactions were received meanwhile: discard queued and outstanding ones in one step.
        known.start, known.behind = None, False
        known.progress = self._from_now(at)
        self._start_over(known, reset)

    def acknowledge(self, attachment: Attachment, end: int) -> bool:
        """Acknowledge the transaction that ends here; return whether that is valid."""
        known = self._known.get(attachment.name)
        if known is None or known.progress is None or not self.is_valid(attachment):
            return False
        if known.progress.ack(end):
            if known.backlog is not None:
                known.backlog.acknowledged(known.progress.acknowledged)
            if not self._progress_reported:
                self._progress_reported = True  # until the next call of `flushed`
                self.on_progress()
        return True

    def is_valid(self, attachment: Attachment) -> bool:
        """Return whether acknowledgements of an attachment count."""
        known = self._known.get(attachment.name)
        return known is not None and known.attachment is attachment

    async def reset_handled(self, changes: Changes[Any], reset: Reset) -> None:
        """Record that a consumer has handled a reset, unless there is another one by now."""
        await stored(self._store.reset_handled, changes.name, reset.number)
        known = self._known.get(changes.name)
        if known is not None and known.reset is reset:
            known.reset = None

    # -- the stream ----------------------------------------------------------------------------

    def begin(self, history: History, confirmed: int) -> None:
        """Start a stream at this LSN; consumers without a position start with it."""
        self.history = history
        self._continuity = Continuity(self._last, self._confirmed or 0, confirmed)
        self._confirmed = max(self._confirmed or 0, confirmed)
        self.seen = confirmed if self.seen is None else max(self.seen, confirmed)
        for known, start in self._starting():
            # It may have attached after check_starts().
            if start.history != history:
                self._refuse_start(known, of_another_history(start, history))
            elif self._log_end is not None and start.lsn > max(self._log_end, self.seen):
                self._refuse_start(known, beyond_the_end(start, Lsn(self._log_end)))
        for known in self._known.values():
            progress, starts = known.progress, known.start is not None
            if progress is None:
                known.progress = Progress(confirmed, confirmed)
            elif starts and progress.acknowledged < min(confirmed, progress.delivered):
                self._too_early(known, progress, confirmed)
            else:
                progress.passed(confirmed)
            known.backlog = self._new_backlog()
            known.behind = known.skipped = False
            known.start = None
        self.published.notify()

    def _too_early(self, known: KnownConsumer, progress: Progress, confirmed: int) -> None:
        """Reset a consumer whose `start=` is before transactions that the server has discarded."""
        reason = (
            f"the position {Lsn(progress.acknowledged)} is before the last acknowledged "
            f"transaction, at {Lsn(progress.delivered)}, and the server has discarded the "
            "transactions in between"
        )
        known.progress = Progress(confirmed, confirmed)
        self._start_over(known, self._new_reset(reason, known.name))

    def apply_all(self, done: Sequence[Committed]) -> None:
        """Take transactions in commit order, and deliver them to the consumers."""
        for committed in done:
            if committed.xid:  # a message outside of any transaction has no commit
                commit = CommitMark(committed.end_lsn, committed.time)
                if not self._continuity.proven:
                    self._compare(self._continuity.committed(commit))
                self._last = max(self._last, commit)
        for known in self._known.values():
            progress = known.progress
            if progress is None or known.behind:
                continue  # if it is behind, all is sent again when the stream is restarted
            backlog = known.backlog = known.backlog or self._new_backlog()
            if (changes := self._attached.get(known.name)) is None:
                for committed in done:
                    if committed.end_lsn > progress.acknowledged:
                        backlog.append(committed)
                continue
            if known.reset is not None and not known.confirmed:
                known.skipped = True  # the Reset must be delivered first
                continue
            self._give(done, changes, progress, backlog)
        for committed in done:
            self._applied = end = committed.end_lsn
            if self.seen is None or end > self.seen:
                self.seen = end
            if (described := committed.body.described) and self.tables.contradicted(described):
                self.on_changed_tables()

    def _compare(self, difference: str | None) -> None:
        """End a stream of another history before any transaction of it is delivered."""
        if difference is not None:
            self._store.post(self._store.put_fact, GIVEN_UP, difference)
            raise StreamEnded(difference)

    def _give(
        self, done: Sequence[Committed], changes: Changes, progress: Progress, backlog: Backlog
    ) -> None:
        history, attachment, tables = self.history, changes._attachment, None
        assert history is not None  # a stream has begun
        followed = self.tables.of(changes.name)
        for committed in done:
            if changes.tables:
                tables = changes._choose(committed, followed)
                if tables is not None and not tables and not committed.emits():
                    progress.passed(committed.end_lsn)
                    continue
            if progress.given(committed.end_lsn):
                changes._put(Transaction(committed, attachment, tables, history))
            if committed.end_lsn > progress.acknowledged:
                backlog.append(committed)
        self.pressure.queued(changes)

    def flushed(self) -> int:
        """Return the LSN before which every consumer has acknowledged everything."""
        self._progress_reported = False
        places = [each.progress.acknowledged for each in self._known.values() if each.progress]
        return min(places, default=self.seen or 0)

    def passed(self, end: int) -> None:
        """Advance all consumers to this LSN: everything before it was sent and acknowledged."""
        if not self._continuity.proven:
            self._compare(self._continuity.passed(end))
        self._log_end = max(end, self._log_end or 0)
        for each in self._known.values():
            # A consumer that waits for a restart of the stream may need earlier transactions.
            if each.progress is not None and not each.behind and each.start is None:
                each.progress.passed(end)

    async def checkpoint(self, end: int) -> None:
        """Store all positions before this LSN is confirmed to the server."""
        known = {
            name: each.progress
            for name, each in self._known.items()
            # Whether a chosen start position exists is unknown until the stream begins.
            if each.progress is not None and each.start is None
        }
        now = {name: progress.acknowledged for name, progress in known.items()}
        delivered = {name: progress.delivered for name, progress in known.items()}
        times_reset, confirmed = self._times_reset, Lsn(min(end, LAST))
        if not await stored(
            self._store.save, confirmed, now, delivered, last=self._last, times_reset=times_reset
        ):
            # Nothing was stored, so nothing may be confirmed.
            raise StreamEnded("another instance with the same state_dir has reset the stream")
        self._confirmed = max(self._confirmed or 0, confirmed)
        for name, at in now.items():
            if (consumer := self._known.get(name)) is None:
                continue
            if consumer.progress is known[name]:
                consumer.stored = max(consumer.stored, at)
            elif consumer.start is not None:  # it attached meanwhile: the save may have come last
                self._store.post(self._store.put_start, name, consumer.start.lsn)

    async def reset(self, reason: str) -> None:
        """Reset all consumers: the server's history is not the known one."""
        self.seen = None  # a consumer that attaches meanwhile has no position
        reset, state = await stored(lambda: (self._store.reset(reason), self._store.load()))
        self._times_reset = state.resets.times
        self._reset_number = max(self._reset_number, state.reset_number)
        self._confirmed = None
        self._applied = 0
        self._last = NO_COMMIT
        self._log_end = None
        self.published.clear()
        self._recorder.record("postgres.hub", f"reset: {reason}", kind="info")
        log.warning("reset of %s: %s", counted(len(self._known), "consumer"), reason)
        for known in self._known.values():
            known.progress = known.start = None
            known.followed, known.confirmed = {}, False
            self._start_over(known, reset)

    def slowest(self, place: int) -> str | None:
        """Return the consumer that is furthest behind; None if all have acknowledged this place."""
        behind = {
            name: each.progress.acknowledged
            for name, each in self._known.items()
            if each.progress is not None and each.progress.acknowledged < place
        }
        return min(behind, key=lambda name: behind[name], default=None)

    def attached(self) -> list[Changes]:
        """Return the attached consumers."""
        return list(self._attached.values())

    async def save(self) -> None:
        """Store all positions."""
        if self._confirmed is not None:
            with contextlib.suppress(StreamEnded):
                await self.checkpoint(self._confirmed)

    def stored(self, name: str) -> int:
        """Return the stored position of a consumer; 0 if it has none."""
        known = self._known.get(name)
        return 0 if known is None else known.stored

    # -- tables --------------------------------------------------------------------------------

    def is_ready(self, name: str, check: int = 0) -> bool:
        """Whether a stream has begun, and a consumer has a position and its tables are published.

        They were checked since it attached: a table that another consumer has published may have
        been unpublished meanwhile.

        :param check: they were confirmed by the check with this number, or by a later one.
        """
        known = self._known.get(name)
        if known is None or not known.confirmed or known.progress is None:
            return False
        if self.history is None:  # the position is a stored one
            return False
        return known.checked >= check

    def check_tables(self) -> int:
        """Have the tables of consumers checked soon; return the number of the check."""
        self.on_changed_tables()
        return self.checks + 1  # the one that runs may have queried the catalog before

    async def follow(
        self, changes: Changes, tables: dict[str, Followed], missed: str | None, at: int
    ) -> dict[str, str]:
        """Confirm the published tables of a consumer; return what must be stored of them.

        :param missed: why it has missed changes, if it has; then it is reset.
        :param at: after a reset, it is given the transactions after this LSN.
        """
        name = changes.name
        if self._attached.get(name) is not changes:
            return {}
        before = self._known[name].followed
        # Without an await before: transactions after the reset are those of these tables.
        self._known[name].followed, changes._known = tables, None
        self._known[name].checked = self.checks
        self._confirm(changes, at)
        if missed is not None:
            log.warning("reset of the consumer %r: %s", name, missed)
            await self._reset_one(name, missed, at)
        self.published.notify()
        return {} if before == tables else {name: dump(tables)}

    def _confirm(self, changes: Changes, at: int = 0) -> None:
        known = self._known[changes.name]
        if known.confirmed:
            return
        known.confirmed = True
        if known.reset is None:
            return
        if known.skipped:
            known.skipped = False
            known.progress = self._from_now(at)
        changes._put(known.reset)

    # -- back-pressure -------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether reading is paused."""
        return self.pressure.full

    async def room(self) -> None:
        """Wait until no queue is full."""
        await self.pressure.room()

    # -- state ---------------------------------------------------------------------------------

    def end(self, error: BaseException | None) -> None:
        """End all consumers, with this error if there is one."""
        for changes in list(self._attached.values()):
            changes._end(error)
        self.published.notify()

    def outstanding(self, name: str) -> int:
        """Return the number of transactions that a consumer has not acknowledged."""
        known = self._known.get(name)
        return 0 if known is None or known.progress is None else known.progress.outstanding

    def consumers(self) -> dict[str, dict[str, object]]:
        """Return the state of each consumer, as plain data."""
        found = {}
        for name, known in self._known.items():
            changes = self._attached.get(name)
            full = changes is not None and self.pressure.is_full(changes)
            found[name] = known.describe(changes, self.seen or 0, full=full)
        return found

    def __repr__(self) -> str:
        return f"<Hub: {counted(len(self._known), 'consumer')}, {len(self._attached)} attached>"
