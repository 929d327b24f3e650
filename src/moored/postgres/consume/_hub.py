"""Who consumes, and how far everybody is: the slot's log, given out.

This is the persistent side: connections come and go, and it stays. A consumer is known by its name,
also while it is away: what it has not acknowledged is kept by the server, and comes again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from moored.kernel import Clock, Recorder, counted

from .._errors import ConfigurationError, PostgresError, StreamEnded
from .._lsn import LAST, Lsn
from .._position import History, Position, before_the_slot, beyond_the_end, of_another_history
from ..decode import Committed
from ..server import Findings
from ._backlog import Backlog
from ._backpressure import Backpressure
from ._consumer import Changes, Reset, Transaction, Visit
from ._continuity import NO_COMMIT, CommitMark, Continuity
from ._progress import Progress
from ._published import Published
from ._store import StateStore
from ._tables import Followed, dump, load

__all__ = ["Hub"]

log = logging.getLogger("moored.postgres")


class Hub:
    """The consumers of one stream."""

    def __init__(
        self, store: StateStore, recorder: Recorder, *, clock: Clock | None = None
    ) -> None:
        self._store = store
        self._recorder = recorder
        self.pressure = Backpressure(self.attached, clock or Clock.system())
        self._progress: dict[str, Progress | None] = {}
        self._resets: dict[str, str] = {}
        self._attached: weakref.WeakValueDictionary[str, Changes] = weakref.WeakValueDictionary()
        #: Whose acknowledgements count, also while they are away.
        self._visits: dict[str, Visit] = {}
        #: Whether somebody was told of progress, and has not looked since.
        self._told_progress = False
        #: The tables that each consumer follows, also while it is away.
        self._followed: dict[str, dict[str, Followed]] = {}
        #: Those whose tables were found to be published since the last reset: only they are told
        #: of a reset, and only they are given something after it.
        self._confirmed: set[str] = set()
        #: Those who were not given something because of that.
        self._skipped: set[str] = set()
        self.published = Published()
        #: What each consumer would need again, if it went and came back.
        self._backlogs: dict[str, Backlog] = {}
        #: Those who wait for what only the server has: until it comes, anything else is too early.
        self._behind: set[str] = set()
        #: Those who chose where to begin, and have not begun.
        self._starting: dict[str, Position] = {}
        #: The end of the last transaction that was applied; None before the stream began.
        self.seen: int | None = None
        #: The end of the last one that this process has seen; 0 if it has seen none.
        self._applied = 0
        #: The last commit that was ever received, and what it proves.
        self._last = NO_COMMIT
        self._continuity = Continuity(NO_COMMIT, 0, 0)
        #: How far the server's log went when it was last looked at; None if it was not.
        self._log_end: int | None = None
        #: Where the slot begins, if this process has made it.
        self._made_at = 0
        #: Whether the slot was there before anything was kept here: who reads from it is not known.
        self.adopted = False
        #: The history that is streamed now.
        self.history: History | None = None
        #: Called when the flush position may have moved, and when the stream must begin again.
        self.on_progress: Callable[[], None] = lambda: None
        self.on_rewind: Callable[[], None] = lambda: None
        #: Called when the tables of consumers must be looked at: one came, or a table changed.
        self.on_tables: Callable[[], None] = lambda: None
        self._times_reset = store.resets().times
        self.reload()

    def reload(self) -> None:
        """Read what was kept: another process may have had the lock meanwhile, and written more."""
        kept, resets = self._store.consumers(), self._store.resets()
        missed = resets.reason if resets.times != self._times_reset else None
        self._times_reset = resets.times
        if missed is not None:
            self.seen = None
            self._last = NO_COMMIT
        self._last = max(self._last, self._store.last())
        for name in [name for name in self._progress if name not in kept]:
            self._dropped_elsewhere(name)
        for name, saved in kept.items():
            mine, at = self._progress.get(name), saved.acknowledged
            self._followed[name] = load(saved.followed)
            if missed is not None:
                self._visits.pop(name, None)
            if missed is not None or mine is None:
                self._progress[name] = None if at is None else Progress(at, saved.delivered)
            elif at is not None:
                mine.reached(at, saved.delivered)
            reason = saved.reset or (missed if name in self._attached else None)
            if reason is not None and (missed is not None or name not in self._resets):
                self._confirmed.discard(name)
                self._begins_anew(name, reason)

    def _dropped_elsewhere(self, name: str) -> None:
        self._forget(name)
        if name in self._attached:
            reason = f"the consumer {name!r} was dropped by another instance"
            self._progress[name] = None
            self._store.add(name, None)
            self._store.reset(reason, name)
            self._confirmed.discard(name)
            self._begins_anew(name, reason)

    def _begins_anew(self, name: str, reason: str) -> None:
        """A consumer must be told: now, when its tables are published, or when it comes back."""
        self._resets[name] = reason
        self._backlogs.pop(name, None)
        self._visits.pop(name, None)
        if (changes := self._attached.get(name)) is not None:
            changes._begin_anew()
            self._visits[name] = changes._visit
            if name in self._confirmed:
                changes._put(Reset(reason))

    def _forget(self, name: str) -> None:
        self._progress.pop(name, None)
        self._resets.pop(name, None)
        self._visits.pop(name, None)
        self._starting.pop(name, None)
        self._followed.pop(name, None)
        self._backlogs.pop(name, None)
        self._behind.discard(name)

    # -- consumers -----------------------------------------------------------------------------

    def attach(
        self, name: str, *, tables: tuple[str, ...] = (), start: Position | None = None
    ) -> Changes:
        """A consumer comes, or comes back."""
        if (other := self._attached.get(name)) is not None and not other._closed:
            raise PostgresError(
                f"the consumer {name!r} is here already: give each its own name, or close the "
                "other; `async with pg.changes(...) as changes` closes it whatever happens"
            )
        changes = Changes(self, name, tables)
        if start is not None:
            self._start_at(name, start)
        elif name not in self._progress:
            self._add(name)
        self._attached[name] = changes
        self.published.came(name)
        self._visits[name] = changes._visit
        progress = self._progress[name]
        if progress is not None:
            progress.rewind()
            self._join(changes, progress)
        self.on_tables()
        return changes

    def _join(self, changes: Changes, progress: Progress) -> None:
        """A consumer comes to a stream that may be under way; it was here before, or says so."""
        name, at = changes.name, progress.acknowledged
        if self.seen is None:
            return
        backlog = self._backlogs.setdefault(name, self._new_backlog(at >= self.seen))
        if backlog.complete and name not in self._starting and name not in self._resets:
            self._give(backlog.take(), changes, progress, backlog)
            return
        # What it has not acknowledged is only in the server: it must be sent again. And whether the
        # log goes as far as the place that it has chosen, only the server knows.
        too_far = name in self._starting and at > max(self.seen, self._log_end or 0)
        if at < self.seen or too_far:
            self._behind.add(name)
            backlog.complete = False  # until the stream begins again
            self.on_rewind()
        else:
            self._starting.pop(name, None)

    def _new_backlog(self, complete: bool = True) -> Backlog:
        return Backlog(self.pressure.queue_bytes, self.pressure.queue_length, complete)

    def _add(self, name: str) -> None:
        if (saved := self._store.consumers().get(name)) is not None:  # it came to another process
            at = saved.acknowledged
            self._progress[name] = None if at is None else Progress(at, saved.delivered)
            self._followed[name] = load(saved.followed)
            if saved.reset is not None:
                self._resets[name] = saved.reset
            return
        self._store.add(name, self.seen)  # first: whoever is not kept there is not here either
        self._progress[name] = None if self.seen is None else Progress(self.seen)
        if self.adopted and self.seen is not None:
            self._resets[name] = reason = (
                "what was kept of this stream was lost, so it is not known how far the consumer "
                f"{name!r} was: it begins with what comes now"
            )
            self._store.reset(reason, name)

    def _start_at(self, name: str, start: Position) -> None:
        known, reason = self._store.history(), None
        if known is not None and start.history != known:
            reason = of_another_history(start, known)
        elif start.lsn < self._made_at:
            reason = before_the_slot(start)
        if reason is not None:
            self._store.add(name, self.seen)
            self._store.reset(reason, name)
            self._progress[name] = None if self.seen is None else Progress(self.seen)
            self._resets[name] = reason
            return
        before = self._progress.get(name)
        # A name that is not known may have missed whatever came before it.
        delivered = self._applied if before is None else before.delivered
        # It is kept once the server has confirmed it: a place that is not in the log would make the
        # log look too short, for all. One that is earlier than what was kept is kept now.
        saved = self._store.consumers().get(name)
        kept = None if saved is None else saved.acknowledged
        self._store.add(name, None if kept is None else min(kept, start.lsn))
        self._progress[name] = Progress(start.lsn, delivered)
        self._starting[name] = start

    def check_starts(self, history: History, found: Findings) -> None:
        """Whether the places that consumers have chosen are on the server; if not, they are told.

        Each of them shows that there was a stream, also where nothing else of it was kept.
        """
        self._log_end = int(found.wal_position)
        if found.slot_created:
            self._made_at = int(found.confirmed)
        for name, start in list(self._starting.items()):
            if start.history != history:
                self._refuse_start(name, of_another_history(start, history))
            elif found.slot_created:
                self._refuse_start(name, before_the_slot(start))
            elif start.lsn > found.wal_position:
                self._refuse_start(name, beyond_the_end(start, found.wal_position))

    def _refuse_start(self, name: str, reason: str) -> None:
        del self._starting[name]
        self._progress[name] = None
        self._store.reset(reason, name)
        self._begins_anew(name, reason)

    def detach(self, changes: Changes) -> None:
        """A consumer goes, for a while; what it was given it may still acknowledge."""
        if self._attached.get(changes.name) is changes:
            del self._attached[changes.name]
            self._confirmed.discard(changes.name)
        self.published.closed(changes)
        self.pressure.taken()

    def refuse(self, changes: Changes, why: str) -> None:
        """A consumer cannot have what it wants: it is told, and the others go on."""
        log.error("the consumer %r: %s", changes.name, why)
        changes._end(ConfigurationError(f"the consumer {changes.name!r}: {why}"))
        self.detach(changes)
        self.published.refuse(changes)

    async def drop(self, name: str, reason: str | None = None) -> None:
        """A consumer is not waited for any more; with a reason, it is told when it comes back."""
        if reason is None:
            self._forget(name)
            if (changes := self._attached.get(name)) is not None:
                changes._end(PostgresError(f"the consumer {name!r} was dropped while it was here"))
                self.detach(changes)
            await asyncio.to_thread(self._store.drop, name)
        else:
            await self._reset_one(name, reason)
        self.on_progress()

    def _from_now(self, at: int = 0) -> Progress | None:
        """How far a consumer is that begins with what comes now, or after this place."""
        place = max(self.seen or 0, at)
        return Progress(place, place) if place else None

    async def _reset_one(self, name: str, reason: str, at: int = 0) -> None:
        # First it is kept, so that nothing is told to the server that a crash would make unknown.
        await asyncio.to_thread(self._store.reset, reason, name)
        if name not in self._progress:
            return  # it was dropped meanwhile
        # The log has gone on meanwhile: what is queued and what is open go in one step.
        self._starting.pop(name, None)
        self._behind.discard(name)
        self._progress[name] = self._from_now(at)
        self._begins_anew(name, reason)

    def acknowledge(self, visit: Visit, end: int) -> bool:
        """A consumer is done with the transaction that ends here; returns whether that counts."""
        progress = self._progress.get(visit.name)
        if progress is None or self._visits.get(visit.name) is not visit:
            return False
        if progress.ack(end):
            if (backlog := self._backlogs.get(visit.name)) is not None:
                backlog.acknowledged(progress.acknowledged)
            if not self._told_progress:
                self._told_progress = True  # until `flushed` is asked: once is enough
                self.on_progress()
        return True

    async def understood(self, changes: Changes, reset: Reset) -> None:
        """A consumer has been told of a reset; there may be another one by now."""
        name, reason = changes.name, reset.reason
        await asyncio.to_thread(self._store.was_told, name, reason)
        if self._resets.get(name) == reason:
            del self._resets[name]

    # -- the log -------------------------------------------------------------------------------

    def begin(self, history: History, confirmed: int) -> None:
        """A stream begins, from here; whoever is new begins with it."""
        self.history = history
        self._continuity = Continuity(self._last, self._store.told() or 0, confirmed)
        self.seen = confirmed if self.seen is None else max(self.seen, confirmed)
        for name, start in list(self._starting.items()):
            # It came after the others were checked.
            if start.history != history:
                self._refuse_start(name, of_another_history(start, history))
            elif self._log_end is not None and start.lsn > max(self._log_end, self.seen):
                self._refuse_start(name, beyond_the_end(start, Lsn(self._log_end)))
        for name, progress in self._progress.items():
            if progress is None:
                self._progress[name] = Progress(confirmed, confirmed)
            elif name in self._starting and progress.acknowledged < min(
                confirmed, progress.delivered
            ):
                self._too_early(name, progress, confirmed)
            else:
                progress.passed(confirmed)
        self._backlogs = {name: self._new_backlog() for name in self._progress}
        self._behind.clear()
        self._skipped.clear()
        self._starting.clear()

    def _too_early(self, name: str, progress: Progress, confirmed: int) -> None:
        """It wants to begin at a place before what it acknowledged, which the server forgot."""
        reason = (
            f"the position {Lsn(progress.acknowledged)} is before the last transaction that was "
            f"acknowledged, at {Lsn(progress.delivered)}, and the server does not have those "
            "between any more"
        )
        self._progress[name] = Progress(confirmed, confirmed)
        self._store.reset(reason, name)
        self._begins_anew(name, reason)

    def apply_all(self, done: Sequence[Committed]) -> None:
        """Some more transactions, in the order of their commits."""
        for committed in done:
            if committed.xid:  # a message outside of any transaction has no commit
                commit = CommitMark(committed.end_lsn, committed.time)
                if not self._continuity.proven:
                    self._compare(self._continuity.committed(commit))
                self._last = max(self._last, commit)
        for name, progress in self._progress.items():
            if progress is None:
                continue
            changes = self._attached.get(name)
            if name in self._behind:
                continue  # just back: it comes again, after what comes before
            backlog = self._backlogs.setdefault(name, self._new_backlog())
            if changes is None:
                for committed in done:
                    if committed.end_lsn > progress.acknowledged:
                        backlog.append(committed)
                continue
            if name in self._resets and name not in self._confirmed:
                self._skipped.add(name)  # it must be told of the reset first
                continue
            self._give(done, changes, progress, backlog)
        for committed in done:
            self._applied = end = committed.end_lsn
            if self.seen is None or end > self.seen:
                self.seen = end
            if described := committed.body.described:
                known = [self.followed(name).values() for name in self._attached]
                if any(each.is_news(now) for now in described for each in chain(*known)):
                    self.on_tables()

    def _compare(self, difference: str | None) -> None:
        """End the stream of another history before anybody is given anything of it."""
        if difference is not None:
            self._store.give_up(difference)
            raise StreamEnded(difference)

    def _give(
        self, done: Sequence[Committed], changes: Changes, progress: Progress, backlog: Backlog
    ) -> None:
        history, visit, tables = self.history, changes._visit, None
        assert history is not None  # a stream has begun
        followed = self._followed.get(changes.name, {})
        for committed in done:
            if changes.tables:
                tables = changes._choose(committed, followed)
                if tables is not None and not tables and not committed.emits():
                    progress.passed(committed.end_lsn)
                    continue
            if progress.given(committed.end_lsn):
                changes._put(Transaction(committed, visit, tables, history))
            if committed.end_lsn > progress.acknowledged:
                backlog.append(committed)
        self.pressure.queued(changes)

    def flushed(self) -> int:
        """Everything before this place is safe: the least that any consumer has acknowledged."""
        self._told_progress = False
        known = [progress.acknowledged for progress in self._progress.values() if progress]
        return min(known, default=self.seen or 0)

    def passed(self, end: int) -> None:
        """The server has nothing up to here that was not sent, and everybody is up to date."""
        if not self._continuity.proven:
            self._compare(self._continuity.passed(end))
        self._log_end = max(end, self._log_end or 0)
        for name, progress in self._progress.items():
            # Who waits for the stream to begin again may be behind all this.
            if progress is not None and name not in self._behind and name not in self._starting:
                progress.passed(end)

    async def checkpoint(self, told: int) -> None:
        """Keep how far everybody is, before the server is told."""
        known = {
            name: progress
            for name, progress in self._progress.items()
            # Whether a place that was chosen exists is not known before the stream begins there.
            if progress is not None and name not in self._starting
        }
        now = {name: progress.acknowledged for name, progress in known.items()}
        delivered = {name: progress.delivered for name, progress in known.items()}
        times_reset, place = self._times_reset, Lsn(min(told, LAST))
        await asyncio.to_thread(
            self._store.save, place, now, delivered, last=self._last, times_reset=times_reset
        )
        if self._store.resets().times != times_reset:
            # Nothing was kept, so nothing may be told.
            raise StreamEnded("another instance with the same state has begun anew")

    async def reset(self, reason: str) -> None:
        """History is not what it was: everybody begins anew, and is told why."""
        await asyncio.to_thread(self._store.reset, reason)
        self._times_reset = self._store.resets().times
        self.seen = None
        self._applied = self._made_at = 0
        self._last = NO_COMMIT
        self._log_end = None
        self._starting.clear()
        self._followed.clear()
        self._confirmed.clear()
        self.published.clear()
        self._recorder.record("postgres.hub", f"reset: {reason}", kind="info")
        log.warning("%s begin anew: %s", counted(len(self._progress), "consumer"), reason)
        for name in self._progress:
            self._progress[name] = None
            self._begins_anew(name, reason)

    def slowest(self) -> str | None:
        """The consumer for which the server keeps the most; None if nobody holds it up."""
        behind = {
            name: progress.acknowledged
            for name, progress in self._progress.items()
            if progress is not None and progress.acknowledged < (self.seen or 0)
        }
        return min(behind, key=lambda name: behind[name], default=None)

    def attached(self) -> list[Changes]:
        """The consumers that are here."""
        return list(self._attached.values())

    async def save(self) -> None:
        """Keep how far everybody is."""
        if (told := self._store.told()) is not None:
            with contextlib.suppress(StreamEnded):
                await self.checkpoint(told)

    # -- tables --------------------------------------------------------------------------------

    def followed(self, name: str) -> Mapping[str, Followed]:
        """The tables that a consumer follows, as they were when they were last confirmed."""
        return self._followed.get(name, {})

    async def follow(
        self, changes: Changes, tables: dict[str, Followed], missed: str | None, at: int
    ) -> dict[str, str]:
        """The tables of a consumer are published: tell it of a reset; return what is to be kept.

        :param missed: why it has missed changes, if it has; then there is a reset.
        :param at: after a reset, it is given what was committed after this place.
        """
        name = changes.name
        if self._attached.get(name) is not changes:
            return {}
        known = self._followed.get(name)
        # At once: what comes after the reset is of these tables.
        self._followed[name], changes._known = tables, None
        self._confirm(changes, at)
        if missed is not None:
            log.warning("the consumer %r begins anew: %s", name, missed)
            await self._reset_one(name, missed, at)
        return {} if known == tables else {name: dump(tables)}

    async def keep_followed(self, followed: dict[str, str]) -> None:
        """Keep which tables consumers follow, those of all consumers with one write."""
        await asyncio.to_thread(self._store.follow, followed)

    def _confirm(self, changes: Changes, at: int = 0) -> None:
        name = changes.name
        if name in self._confirmed:
            return
        self._confirmed.add(name)
        if name not in self._resets:
            return
        if name in self._skipped:
            self._skipped.discard(name)
            self._progress[name] = self._from_now(at)
        changes._put(Reset(self._resets[name]))

    async def publication_changed(self, before: str, after: str) -> None:
        """This process has changed the publication: nobody has missed anything by that."""
        for tables in self._followed.values():
            tables |= {
                wanted: each._replace(publication=after)
                for wanted, each in tables.items()
                if each.publication == before
            }
        await self.keep_followed({name: dump(each) for name, each in self._followed.items()})

    # -- back-pressure -------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether reading is paused for a consumer."""
        return self.pressure.full

    async def room(self) -> None:
        """Wait until the slowest consumer has taken some of what is queued for it."""
        await self.pressure.room()

    # -- for people ----------------------------------------------------------------------------

    def end(self, error: BaseException | None) -> None:
        """Nothing more comes: tell everybody."""
        for changes in list(self._attached.values()):
            changes._end(error)

    def consumers(self) -> dict[str, dict[str, object]]:
        """Everybody, and how far."""
        return {name: self._describe(name, progress) for name, progress in self._progress.items()}

    def _describe(self, name: str, progress: Progress | None) -> dict[str, object]:
        changes = self._attached.get(name)
        return {
            "attached": changes is not None,
            "acknowledged": None if progress is None else str(Lsn(progress.acknowledged)),
            "behind": progress is not None and progress.acknowledged < (self.seen or 0),
            "outstanding": 0 if progress is None else progress.outstanding,
            "queued": 0 if changes is None else len(changes._queue),
            "queued_bytes": 0 if changes is None else changes._bytes,
            "full": changes is not None and self.pressure.is_full(changes),
            "reset": self._resets.get(name),
        }

    def __repr__(self) -> str:
        return f"<Hub: {counted(len(self._progress), 'consumer')}, {len(self._attached)} here>"
