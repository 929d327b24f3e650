"""What the two pools have in common: how they are made, what they report, and their slow paths.

Their names and parameters are those of psycopg_pool, so that a change of one import is enough; the
rest is what psycopg_pool does not have.

The slow paths are coroutines. In a pool for threads nothing in them suspends: whatever they call
blocks, and `at_once` runs them to their end.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Literal, TypeVar

from moored.kernel import Clock, Recorder, awaited, describe, refuse, unmet
from moored.leases import Leases
from moored.leases import sync as leases_sync

from ._at_once import at_once
from ._config import ReservoirConfig
from ._core import Core, Waiter
from ._driver import Connect, DriverState, in_time
from ._errors import PoolOverloaded, PoolTimeout
from ._item import Item
from ._pool_settings import config_of
from ._psycopg_stats import counters, measures
from ._recipe import Conninfo, Options
from ._reservoir import Reservoir
from ._statistics import Statistics
from ._tokens import Provider, Tokens

__all__ = ["Pool"]

log = logging.getLogger("moored.reservoir")

C = TypeVar("C")

#: A connection that nobody used for so long is asked for a sign of life before it is handed out.
CHECK_IDLE = 30.0
PING_TIMEOUT = 5.0
#: How long a caller waits at least after a new connection failed its check.
CHECK_PAUSE = 0.1
#: What even a caller whose time is over grants it, so as not to throw away a good one in haste.
PING_LEAST = 0.1


class Pool(Generic[C]):
    """The common part of `ConnectionPool` and `AsyncConnectionPool`."""

    _asynchronous = True

    def __init__(
        self,
        conninfo: Conninfo = "",
        *,
        connection_class: type[C] | None = None,
        kwargs: Options | None = None,
        min_size: int | None = None,
        max_size: int | None = None,
        open: bool | None = None,  # noqa: A002 - psycopg_pool's name
        configure: Callable[[C], Any] | None = None,
        check: Callable[[C], Any] | None = None,
        reset: Callable[[C], Any] | Literal[False] | None = None,
        name: str | None = None,
        close_returns: bool = False,
        timeout: float = 30.0,
        max_waiting: int = 0,
        max_lifetime: float | None = None,
        max_idle: float | None = None,
        reconnect_timeout: float = 300.0,
        reconnect_failed: Callable[[Any], Any] | None = None,
        num_workers: int | None = None,
        config: ReservoirConfig | None = None,
        creation_rate: float | None = None,
        creation_burst: int | None = None,
        tokens: Tokens | Provider | None = None,
        leases: Leases | leases_sync.SyncLeases | str | None = None,
        connect: Connect | None = None,
        is_broken: Callable[[C], bool] | None = None,
        ping: Callable[[C], Any] | None = None,
        close_connection: Callable[[C], Any] | None = None,
        check_idle: float | None = CHECK_IDLE,
        leak_after: float | None = None,
        queue_target: float = 5.0,
        queue_interval: float = 10.0,
        endpoint: str | None = None,
        service: str | None = None,
        clock: Clock | None = None,
        recorder: Recorder | None = None,
        fail_fast: bool = False,
    ) -> None:
        positive, leaks = "more than 0 seconds", leak_after is None or leak_after > 0
        never = "at least 0 seconds, or None for never"
        mistakes = unmet(
            ("timeout", timeout, timeout >= 0, "at least 0 seconds"),
            ("max_waiting", max_waiting, max_waiting >= 0, "at least 0 (0 for no limit)"),
            ("check_idle", check_idle, (check_idle or 0) >= 0, never),
            ("leak_after", leak_after, leaks, f"{positive}, or None for never"),
            ("queue_target", queue_target, queue_target > 0, positive),
            ("queue_interval", queue_interval, queue_interval > 0, positive),
        )
        refuse(type(self).__name__, mistakes)
        config = config_of(
            config,
            min_size=min_size,
            max_size=max_size,
            max_lifetime=max_lifetime,
            max_idle=max_idle,
            max_in_flight=num_workers,
            rate=creation_rate,
            burst=creation_burst,
        )
        self.conninfo = conninfo
        self.kwargs = kwargs
        self.connection_class = connection_class
        #: Seconds that a caller waits for a connection, if it does not say otherwise.
        self.timeout = timeout
        #: How long connecting may fail before `reconnect_failed` is called.
        self.reconnect_timeout = reconnect_timeout
        #: Whether closing a psycopg connection gives it back instead.
        self.close_returns = close_returns
        self._check = check
        self._own_reset = reset
        self._check_idle = check_idle
        self._ping_timeout = PING_TIMEOUT
        self.reservoir: Reservoir[C] = Reservoir(
            conninfo,
            config=config,
            connect=connect,
            connection_class=connection_class,
            kwargs=kwargs,
            tokens=tokens,
            leases=leases,
            endpoint=endpoint,
            name=name,
            service=service,
            asynchronous=self._asynchronous,
            configure=configure,
            is_broken=is_broken,
            ping=ping,
            close=close_connection,
            reconnect_failed=None if reconnect_failed is None else lambda: reconnect_failed(self),
            reconnect_timeout=reconnect_timeout,
            leak_after=leak_after,
            max_waiting=max_waiting,
            queue_target=queue_target,
            queue_interval=queue_interval,
            clock=clock,
            recorder=recorder,
            owner=_Home(self) if close_returns else self,
            fail_fast=fail_fast,
        )
        self._popped: dict[str, int] = {}
        self._returns_bad = 0
        # Checkouts that came to nothing, because the connection failed its check.
        self._unfit = 0
        self._opens_itself = open is not False
        # What a subclass does with each connection is done in `connection()` too.
        shell = type(self)._shell()
        self._by_methods = any(
            getattr(type(self), name) is not getattr(shell, name) for name in ("getconn", "putconn")
        )
        self._maker = os.getpid()
        self.reservoir.on_change_of_state = self._bind
        self._bind()
        self._set_up()

    @classmethod
    def _shell(cls) -> type[Any]:
        """The pool of this package that a user's class is derived from."""
        home = __name__.rpartition(".")[0]
        return next(kind for kind in cls.__mro__ if kind.__module__.startswith(home))

    def _set_up(self) -> None:
        """What the shell needs besides."""

    def _bind(self) -> None:
        """Keep at hand what the usual checkout needs: looking it up would take half its time."""
        reservoir, driver = self.reservoir, self.reservoir.recipe.driver
        own = self._own_reset
        self._reset = driver.resetter() if own is None else (own or None)
        self._lock = reservoir.lock
        self._give = reservoir.core.give if os.getpid() == self._maker else self._give_own
        self._retired = reservoir.core.retired
        # A connection that must be reset is never clean as it comes back.
        self._is_clean = driver.clean if self._reset is None else _never
        self._monotonic = reservoir.clock.monotonic
        # A checkout may need more than a ready connection; then the quick way finds none.
        self._usable = reservoir.usable
        quick = self._usable and self._check is None and reservoir.leak_after is None
        self._take = reservoir.core.take if quick else _nothing

    # -- what it is ----------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """What it is called in logs and metrics."""
        return self.reservoir.name

    @property
    def config(self) -> ReservoirConfig:
        """The settings that it was opened with."""
        return self.reservoir.config

    @property
    def recorder(self) -> Recorder:
        """Where it records what happens, and why."""
        return self.reservoir.recorder

    @property
    def min_size(self) -> int:
        """How many connections it keeps."""
        return self._core.target

    @property
    def max_size(self) -> int:
        """How many connections there may be."""
        return self._core.max_size

    @property
    def max_waiting(self) -> int:
        """How many callers may wait; 0 for any number."""
        return self._core.max_waiting

    @property
    def max_lifetime(self) -> float:
        """How old a connection gets at most."""
        return self.config.base_lifetime + self.config.lifetime_jitter

    @property
    def max_idle(self) -> float:
        """What more than `min_size` is closed when it was not needed for so long."""
        return self.config.max_idle

    @property
    def num_workers(self) -> int:
        """How many connections are opened at the same time."""
        return self.config.max_in_flight

    @property
    def closed(self) -> bool:
        """Whether it is not open: not any more, or not before somebody opens it."""
        opens = self.reservoir.state == "new" and self._opens_itself
        return not (self.reservoir.usable or opens)

    @property
    def _core(self) -> Core[C]:
        return self.reservoir.core

    def statistics(self) -> Statistics:
        """This pool in numbers."""
        return self.reservoir.statistics()

    def get_stats(self) -> dict[str, int]:
        """The same numbers under the names of psycopg_pool."""
        now = counters(self.reservoir, unfit=self._unfit, returns_bad=self._returns_bad)
        since = {name: value - self._popped.get(name, 0) for name, value in now.items()}
        return {**since, **measures(self.reservoir)}

    def pop_stats(self) -> dict[str, int]:
        """The same as `get_stats`, and counts from zero again."""
        stats = self.get_stats()
        self._popped = counters(self.reservoir, unfit=self._unfit, returns_bad=self._returns_bad)
        return stats

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.reservoir.place}: {self.reservoir.describe()}>"

    # -- for the shells ------------------------------------------------------------------------

    def _owns(self, item: Item[C]) -> bool:
        """Whether it is a connection of this process: a block may have begun before a fork."""
        here = self.reservoir.pid == os.getpid()
        return here and self._core.items.get(id(item.conn)) is item

    def _give_own(self, item: Item[C], now: float) -> Waiter[C] | None:
        return self._core.give(item, now) if self._owns(item) else None

    def _by_hand(self, item: Item[C]) -> C:
        """Hand out a connection that comes back with `putconn`."""
        item.by_hand = True
        return item.conn

    def _claim(self, conn: C) -> Item[C] | None:
        """What `getconn` gave, to be given back; None if it was not that, or came back before."""
        with self.reservoir.lock:
            item = self._core.items.get(id(conn))
            if item is None or not (item.conn is conn and item.by_hand and self._owns(item)):
                return None
            item.by_hand = False
            return item

    def _item_of(self, conn: C) -> Item[C]:
        item = self._claim(conn)
        if item is None:
            raise ValueError(
                f"{conn!r} is not a connection that getconn() of {self.name} has handed out, or it "
                "was given back before"
            )
        return item

    def _timed_out(self, timeout: float) -> PoolTimeout:
        return PoolTimeout(
            f"{self.name}: no connection within {timeout:.1f} s: {self.reservoir.whereabouts()}"
        )

    def _refused(self, why: str) -> PoolOverloaded:
        return PoolOverloaded(f"{self.name}: {why}: {self.reservoir.whereabouts()}")

    def _not_full(self, number: int, timeout: float) -> str:
        return (
            f"{self.name} has {len(self._core.items)} of {number} connections after "
            f"{timeout:g} s: {self.reservoir.whereabouts()}"
        )

    def _state_of(self, conn: C, settled: bool) -> DriverState:
        """The state of a connection; one that cannot tell is believed to be idle once settled."""
        driver = self.reservoir.recipe.driver
        state = driver.state(conn)
        if settled and state is DriverState.TRANSACTION and not driver.knows_state:
            return DriverState.IDLE
        return state

    def _closes(self, item: Item[C]) -> bool:
        """Whether a pool that keeps nothing closes this connection, which then needs no reset. A
        caller that begins to wait after this does not get the connection."""
        core = self._core
        if core.config.keep:
            return False
        with self.reservoir.lock:
            if not core.waiting:
                core.doom(item, "not_kept")
        return item.doom is not None

    def _must_look(self, item: Item[C]) -> bool:
        """Whether a connection must be asked for a sign of life before it is handed out."""
        if self._check is not None:
            return True
        return self._check_idle is not None and item.since - item.idle_since >= self._check_idle

    def _came_too_late(self, item: Item[C]) -> bool:
        """Whether its time was over when it had been looked at; then it is let go."""
        if self._monotonic() < item.usable_until:
            return False
        self.reservoir.discard(item.conn, item.doom or "guard_on_checkout")
        return True

    def _patience(self, deadline: float) -> float:
        """How long a ping may take for a caller whose time is over at the deadline."""
        return min(self._ping_timeout, max(PING_LEAST, deadline - self._monotonic()))

    def _pause(self, item: Item[C], began: float, timeout: float) -> float:
        """How long a caller waits after a connection failed its check.

        If it was opened after the caller came, the next one would fail too, and each costs a turn
        under the rate: so it waits as long as it has waited before.
        """
        if item.born < began:
            return 0.0
        if item.born >= began + timeout:
            with self.reservoir.lock:
                self._core.timeouts += 1
            raise self._timed_out(timeout)
        now = self._monotonic()
        return min(max(CHECK_PAUSE, now - began), max(0.0, began + timeout - now))

    def _suspect_others(self) -> None:
        """Where one gave no sign of life, look at all that were unused for as long."""
        if self._check is None and self._check_idle is not None:
            self.reservoir.upkeep.examine(self._check_idle, self._ping_timeout)

    def _check_process(self) -> None:
        """What was opened by a parent process is not touched."""
        if self.reservoir.pid != os.getpid():
            self.reservoir.check_open()

    async def _fill(
        self, wait: bool, timeout: float, progress: Callable[[str], object] | None
    ) -> None:
        """Start the reservoir unless it is open; with `wait`, wait for the low watermark."""
        # Checked on the loop: of several threads that open the pool, one does it.
        if self.reservoir.state != "open":
            await self.reservoir.start()
        if wait:
            number = min(max(1, self._core.watermark), self._core.target)
            if not await self.reservoir.wait_ready(number, timeout, progress):
                log.warning("%s; starting anyway", self._not_full(number, timeout))

    async def _fill_up(self, timeout: float) -> None:
        """Wait until all connections that are to be kept are there, or raise `PoolTimeout`."""
        number = self._core.target
        if not await self.reservoir.wait_ready(number, timeout):
            raise PoolTimeout(self._not_full(number, timeout))

    def _drain(self) -> None:
        self._check_process()
        with self.reservoir.lock:
            self._core.drain()
        self.reservoir.carry_out(None)

    def _resize(self, min_size: int, max_size: int | None) -> None:
        self._check_process()
        max_size = min_size if max_size is None else max_size
        # Checked as if it were new: the rate must still be able to keep so many alive.
        self.config.but(max_size=max_size, target_ready=min_size, low_watermark=None)
        with self.reservoir.lock:
            self._core.resize(min_size, max_size)
        self.reservoir.carry_out(None)
        self.reservoir.upkeep.nudge()

    # -- checkout, when no fresh connection is ready ---------------------------------------------

    async def _wait(
        self, now: float, began: float, timeout: float, holder: Any, patient: bool
    ) -> Item[C]:
        """Join the queue, and wait there until the deadline at most."""
        raise NotImplementedError

    _sleep: Callable[[float], Coroutine[Any, Any, None]]

    async def _obtain(self, timeout: float | None, holder: Any) -> Item[C]:
        """A connection that was looked at, after waiting for it if need be."""
        patient = timeout is not None
        timeout = self.timeout if timeout is None else timeout
        now = began = self._monotonic()
        while True:
            item = self.reservoir.obtain(now, holder)
            if item is None:
                item = await self._wait(now, began, timeout, holder, patient)
            if not self._must_look(item):
                return item
            if await self._is_fit(item, began + timeout):
                if not self._came_too_late(item):
                    return item
                self._unfit += 1
            else:
                self._unfit += 1
                self._suspect_others()
                await self._sleep(self._pause(item, began, timeout))
            # Meanwhile it may have been closed.
            self.reservoir.check_open()
            now = self._monotonic()

    async def _is_fit(
        self, item: Item[C], deadline: float = math.inf, *, ping: bool = False
    ) -> bool:
        """Whether it gives a sign of life before the deadline; if not, it is let go."""
        try:
            if self._check is not None and not ping:
                await awaited(in_time(self._check(item.conn), PING_TIMEOUT))
            else:
                driver = self.reservoir.recipe.driver
                await awaited(driver.ping(item.conn, self._patience(deadline)))
        except BaseException as error:
            log.info("%s: a connection failed its check: %s", self.name, describe(error))
            self.reservoir.upkeep.lost += 1
            self.reservoir.discard(item.conn, "failed_check")
            if not isinstance(error, Exception):
                raise
            return False
        return True

    async def _check_all(self) -> None:
        """Ping every ready connection, and replace those that do not answer."""
        self._check_process()
        lock, core = self.reservoir.lock, self._core
        with lock:
            ready = list(core.ready)
        for item in ready:
            with lock:
                picked = core.pick(item, self._monotonic())
            if picked and await self._is_fit(item, ping=True):
                with lock:
                    waiter = core.put(item, self._monotonic())
                self.reservoir.carry_out(waiter)

    # -- return, when it needs more than to be put back -------------------------------------------

    async def _interrupt(self, conn: C) -> None:
        """End a statement that the connection still executes; in threads, its own thread does."""

    async def _settle(self, item: Item[C], error: BaseException | None) -> None:
        """The end of a block: commit, or roll back, and give back."""
        driver, conn = self.reservoir.recipe.driver, item.conn
        doubt, settled = error, False
        try:
            if error is not None:
                await self._interrupt(conn)
            if driver.is_broken(conn) or driver.interrupted(error):
                return
            if error is None:
                await awaited(driver.commit(conn))
            else:
                await awaited(driver.rollback(conn, self._ping_timeout))
            settled = True
        except BaseException as failure:
            doubt = failure
            if error is None or not isinstance(failure, Exception):
                raise
            log.warning("%s: rollback failed: %s", self.name, describe(failure))
        finally:
            await self._release(item, settled=settled, doubt=doubt)

    async def _end_transaction(self, conn: C, error: BaseException | None) -> None:
        """Commit, or roll back, a connection that a user's own `getconn` has handed out."""
        driver = self.reservoir.recipe.driver
        if error is None and not driver.is_broken(conn):
            await awaited(driver.commit(conn))
        elif error is not None and driver.state(conn) is DriverState.TRANSACTION:
            await awaited(driver.rollback(conn, self._ping_timeout))

    async def _release(
        self, item: Item[C], *, settled: bool = False, doubt: BaseException | None = None
    ) -> None:
        """Give back a connection, made clean first.

        :param settled: whether its transaction was ended just now.
        :param doubt: an error after which it may be of no use.
        """
        clean = False
        try:
            clean = await self._clean(item, settled, doubt)
        finally:
            if not clean:
                self._returns_bad += 1
                self.reservoir.discard(item.conn, "bad")
        if clean:
            with self.reservoir.lock:
                waiter = self._core.give(item, self._monotonic())
            self.reservoir.carry_out(waiter)

    async def _return(self, conn: C) -> None:
        """Give back what `getconn` gave; harmless if that was done."""
        if (item := self._claim(conn)) is not None:
            await self._release(item)

    async def _clean(self, item: Item[C], settled: bool, doubt: BaseException | None) -> bool:
        """End what the connection is in the middle of, and reset it; False if it cannot be kept."""
        driver, conn = self.reservoir.recipe.driver, item.conn
        if driver.interrupted(doubt):
            log.warning("%s: closing a connection that was interrupted", self.name)
            return False
        await self._interrupt(conn)
        state = self._state_of(conn, settled)
        if state is DriverState.TRANSACTION:
            if driver.knows_state:
                text = "%s: rolling back a connection left in a transaction: %r"
                log.warning(text, self.name, conn)
            if not await self._did("rollback failed", driver.rollback, conn, self._ping_timeout):
                return False
            state = self._state_of(conn, settled=True)
        if state is not DriverState.IDLE:
            # When all are closed, nobody need care how one comes back.
            level = logging.INFO if self.closed else logging.WARNING
            log.log(level, "%s: closing a connection that came back %s", self.name, state.value)
            return False
        if doubt is not None and driver.suspects(conn, doubt):
            lost = "closing a lost connection"
            if not await self._did(lost, driver.ping, conn, self._ping_timeout):
                return False
        if self._reset is not None and not self._closes(item):
            if not await self._did("the reset callback failed", self._reset, conn):
                return False
            state = self._state_of(conn, settled=True)
            if state is not DriverState.IDLE:
                text = "%s: the reset callback left a connection %s"
                log.warning(text, self.name, state.value)
                return False
        return True

    async def _did(self, failed: str, call: Callable[..., Any], *args: Any) -> bool:
        """Whether a call went well; a failure is logged."""
        try:
            await awaited(call(*args))
        except Exception as error:
            log.warning("%s: %s: %s", self.name, failed, describe(error))
            return False
        return True


class _Home:
    """What a psycopg connection knows of its pool under `close_returns`: to close it is to give it
    back, and the second time, or within a block of `connection()`, it does nothing."""

    close_returns = True

    def __init__(self, pool: Pool[Any]) -> None:
        back = pool._return
        self.putconn = back if pool._asynchronous else lambda conn: at_once(back(conn))


def _nothing(now: float) -> None:
    return None


def _never(conn: object) -> bool:
    return False
