"""The common part of the two pools: parameters, properties, statistics and slow paths.

Names and parameters are those of psycopg_pool, so that a program changes one import to switch; the
others are additions.

The slow paths are coroutines. In a pool for threads they never suspend: the functions that they
await block instead, and `run_sync` runs the coroutine to its end.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, Literal, TypeVar

import psycopg

from moored.kernel import Clock, Recorder, awaited, describe, refuse, unmet
from moored.leases import Leases
from moored.leases import sync as leases_sync

from ._config import ReservoirConfig, config_of
from ._core import Core, Waiter
from ._driver import PING_TIMEOUT, Connect, in_time
from ._errors import PoolOverloaded, PoolTimeout
from ._item import Item
from ._psycopg_stats import counters, measures
from ._recipe import Conninfo, Options
from ._reservoir import Reservoir
from ._returns import Returns
from ._run_sync import run_sync
from ._statistics import Statistics
from ._tokens import Provider, Tokens

__all__ = ["Pool"]

log = logging.getLogger("moored.reservoir")

C = TypeVar("C")

#: A connection that was idle for this many seconds is pinged before it is handed out.
CHECK_IDLE = 30.0
#: The shortest pause of a caller after a new connection failed its check.
CHECK_PAUSE = 0.1
#: The shortest ping timeout, even if the caller's timeout expires earlier: a working connection
#: should not be closed because its caller had little time left.
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
        if connection_class is None and connect is None:
            own: Any = psycopg.AsyncConnection if self._asynchronous else psycopg.Connection
            connection_class = own
        self.conninfo = conninfo
        self.kwargs = kwargs
        self.connection_class = connection_class
        #: Seconds that a caller waits for a connection, unless it passes a timeout.
        self.timeout = timeout
        #: Seconds for which connecting may fail before `reconnect_failed` is called.
        self.reconnect_timeout = reconnect_timeout
        #: Whether `close()` of a psycopg connection returns it to the pool instead.
        self.close_returns = close_returns
        self._check = check
        self._own_reset = reset
        self._check_idle = check_idle
        self.reservoir: Reservoir[C] = Reservoir(
            self._resolve_conninfo if self._overrides("_resolve_conninfo") else conninfo,
            config=config,
            connect=connect,
            connection_class=connection_class,
            kwargs=self._resolve_kwargs if self._overrides("_resolve_kwargs") else kwargs,
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
            owner=_CloseReturns(self) if close_returns else self,
            fail_fast=fail_fast,
        )
        self._returns = Returns(self.reservoir, self._interrupt)
        self._popped: dict[str, int] = {}
        # Checkouts whose connection failed its check and was replaced.
        self._failed_checks = 0
        self._opens_itself = open is not False
        # `connection()` must call the `getconn` and `putconn` of a subclass that overrides them.
        self._by_methods = self._overrides("getconn", "putconn")
        self._maker = os.getpid()
        self.reservoir.on_change_of_state = self._bind
        self._bind()
        self._set_up()

    def _overrides(self, *names: str) -> bool:
        """Whether a subclass of the user's overrides one of these methods."""
        home = __name__.rpartition(".")[0]
        return any(not getattr(type(self), name).__module__.startswith(home) for name in names)

    #: Return what a new connection is opened with, under psycopg_pool's names.
    _resolve_conninfo: Callable[[], str | Coroutine[Any, Any, str]]
    _resolve_kwargs: Callable[[], dict[str, Any] | Coroutine[Any, Any, dict[str, Any]]]

    def _set_up(self) -> None:
        """Set the attributes that only this kind of pool has."""

    def _bind(self) -> None:
        """Cache what the fast path needs: the lookups would take half the time of a checkout."""
        reservoir, driver = self.reservoir, self.reservoir.recipe.driver
        own = self._own_reset
        self._returns.reset = driver.resetter() if own is None else (own or None)
        self._lock = reservoir.lock
        self._give = reservoir.core.give if os.getpid() == self._maker else self._give_own
        self._retired = reservoir.core.retired
        # A connection that must be reset is never clean when it is returned.
        self._is_clean = driver.clean if self._returns.reset is None else _never
        self._monotonic = reservoir.clock.monotonic
        # If a checkout needs more than a ready connection, the fast path never finds one.
        self._usable = reservoir.usable
        quick = self._usable and self._check is None and reservoir.leak_after is None
        self._take = reservoir.core.take if quick else _nothing

    # -- properties and statistics -------------------------------------------------------------

    @property
    def name(self) -> str:
        """The pool's name in logs and metrics."""
        return self.reservoir.name

    @property
    def config(self) -> ReservoirConfig:
        """The settings that the pool was created with."""
        return self.reservoir.config

    @property
    def recorder(self) -> Recorder:
        """The recorder of the pool's events and their causes."""
        return self.reservoir.recorder

    @property
    def min_size(self) -> int:
        """The number of connections that the pool keeps open."""
        return self._core.target

    @property
    def max_size(self) -> int:
        """The maximum number of connections."""
        return self._core.max_size

    @property
    def max_waiting(self) -> int:
        """The maximum number of waiting callers; 0 for no limit."""
        return self._core.max_waiting

    @property
    def max_lifetime(self) -> float:
        """The maximum age of a connection, in seconds."""
        return self.config.base_lifetime + self.config.lifetime_jitter

    @property
    def max_idle(self) -> float:
        """Seconds after which connections above `min_size` that were not needed are closed."""
        return self.config.max_idle

    @property
    def num_workers(self) -> int:
        """The number of connections that may be opened at the same time."""
        return self.config.max_in_flight

    @property
    def closed(self) -> bool:
        """Whether the pool was closed, or was never opened and does not open itself."""
        opens = self.reservoir.state == "new" and self._opens_itself
        return not (self.reservoir.usable or opens)

    @property
    def _core(self) -> Core[C]:
        return self.reservoir.core

    def statistics(self) -> Statistics:
        """Return the pool's counters and current numbers."""
        return self.reservoir.statistics()

    @property
    def silent_for(self) -> float:
        """Seconds for which the server has not answered; 0.0 if it answers, as far as known."""
        return self.reservoir.upkeep.watch.silent_for

    def get_stats(self) -> dict[str, int]:
        """Return the statistics under the names of psycopg_pool."""
        now = self._counters()
        since = {name: value - self._popped.get(name, 0) for name, value in now.items()}
        return {**since, **measures(self.reservoir)}

    def pop_stats(self) -> dict[str, int]:
        """Return `get_stats()`, and reset its counters to zero."""
        stats = self.get_stats()
        self._popped = self._counters()
        return stats

    def _counters(self) -> dict[str, int]:
        return counters(
            self.reservoir, failed_checks=self._failed_checks, returns_bad=self._returns.bad
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.reservoir.place}: {self.reservoir.describe()}>"

    # -- helpers of the two pools --------------------------------------------------------------

    def _owns(self, item: Item[C]) -> bool:
        """Whether the connection belongs to this process: a block may have begun before a fork."""
        here = self.reservoir.pid == os.getpid()
        return here and self._core.items.get(id(item.conn)) is item

    def _give_own(self, item: Item[C], now: float) -> Waiter[C] | None:
        return self._core.give(item, now) if self._owns(item) else None

    def _hand_out(self, item: Item[C]) -> C:
        """Return the connection, marked as one that `putconn` may return."""
        item.by_getconn = True
        return item.conn

    def _claim(self, conn: C) -> Item[C] | None:
        """Take over a connection that `getconn` handed out; None if it is not, or was returned."""
        with self.reservoir.lock:
            item = self._core.items.get(id(conn))
            if item is None or not (item.conn is conn and item.by_getconn and self._owns(item)):
                return None
            item.by_getconn = False
            return item

    def _item_of(self, conn: C) -> Item[C]:
        item = self._claim(conn)
        if item is None:
            raise ValueError(
                f"{conn!r} was not handed out by getconn() of {self.name}, or was returned before"
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

    def _needs_check(self, item: Item[C]) -> bool:
        """Whether a connection must be checked before it is handed out."""
        if self._check is not None:
            return True
        return self._check_idle is not None and item.since - item.idle_since >= self._check_idle

    def _expired_meanwhile(self, item: Item[C]) -> bool:
        """Whether a connection reached its guard window during its check; if so, discard it."""
        if self._monotonic() < item.usable_until:
            return False
        self.reservoir.discard(item.conn, item.retire_reason or "guard_on_checkout")
        return True

    def _ping_limit(self, deadline: float) -> float:
        """The timeout of a ping for a caller with this deadline."""
        return min(PING_TIMEOUT, max(PING_LEAST, deadline - self._monotonic()))

    def _pause(self, item: Item[C], began: float, timeout: float) -> float:
        """How long a caller waits after a connection failed its check.

        If the connection was opened after the caller arrived, the next one would probably fail
        too, and each uses up the rate limit: so the caller waits as long as it has waited so far.
        """
        if item.born < began:
            return 0.0
        if item.born >= began + timeout:
            with self.reservoir.lock:
                self._core.timeouts += 1
            raise self._timed_out(timeout)
        now = self._monotonic()
        return min(max(CHECK_PAUSE, now - began), max(0.0, began + timeout - now))

    def _ping_idle(self) -> None:
        """After a failed ping, ping all connections that are due for one."""
        if self._check is None and self._check_idle is not None:
            self.reservoir.upkeep.ping_idle(self._check_idle, PING_TIMEOUT)

    def _check_process(self) -> None:
        """Raise `PoolClosed` if the pool was opened by a parent process."""
        if self.reservoir.pid != os.getpid():
            self.reservoir.check_open()

    async def _fill(
        self, wait: bool, timeout: float, progress: Callable[[str], object] | None
    ) -> None:
        """Start the reservoir unless it is open; with `wait`, wait for the low watermark."""
        # Checked on the loop, so that only one of several threads starts the reservoir.
        if self.reservoir.state != "open":
            await self.reservoir.start()
        if wait:
            number = min(max(1, self._core.watermark), self._core.target)
            if not await self.reservoir.wait_ready(number, timeout, progress):
                log.warning("%s; starting anyway", self._not_full(number, timeout))

    async def _fill_up(self, timeout: float) -> None:
        """Wait until the pool has `min_size` connections, or raise `PoolTimeout`."""
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
        # Validate the new sizes: the rate must be able to replace that many connections in time.
        self.config.but(max_size=max_size, target_ready=min_size, low_watermark=None)
        with self.reservoir.lock:
            self._core.resize(min_size, max_size)
        self.reservoir.carry_out(None)
        self.reservoir.upkeep.nudge()

    # -- slow path of a checkout: no fresh connection is ready -----------------------------------

    def _new_waiter(self, since: float, deadline: float, holder: Any) -> Waiter[C]:
        raise NotImplementedError

    def _until_woken(self, waiter: Waiter[C]) -> Awaitable[None]:
        """Wait until the waiter is woken or its deadline has passed."""
        raise NotImplementedError

    _sleep: Callable[[float], Coroutine[Any, Any, None]]

    async def _obtain(self, timeout: float | None, holder: Any) -> Item[C]:
        """Return a checked connection; wait for one if none is ready.

        A caller with a timeout of its own is patient: it may join a queue that is overloaded.
        """
        patient = timeout is not None
        timeout = self.timeout if timeout is None else timeout
        now = began = self._monotonic()
        while True:
            item = self.reservoir.obtain(now, holder)
            if item is None:
                item = await self._wait(now, began, timeout, holder, patient)
            if not self._needs_check(item):
                return item
            if await self._passes_check(item, began + timeout):
                if not self._expired_meanwhile(item):
                    return item
                self._failed_checks += 1
            else:
                self._failed_checks += 1
                self._ping_idle()
                await self._sleep(self._pause(item, began, timeout))
            self.reservoir.check_open()  # the pool may have been closed meanwhile
            now = self._monotonic()

    async def _wait(
        self, now: float, began: float, timeout: float, holder: Any, patient: bool
    ) -> Item[C]:
        """Join the queue, and wait there until the deadline at most."""
        core, reservoir = self._core, self.reservoir
        waiter = self._new_waiter(now, began + timeout, holder)
        item = self._join(waiter, now, patient)
        if item is None:
            try:
                if core.can_grow:
                    reservoir.upkeep.nudge()
                await self._until_woken(waiter)
            except BaseException:
                # Cancelled, or interrupted by Ctrl-C: pass on a connection that it got meanwhile.
                with reservoir.lock:
                    now = self._monotonic()
                    item = core.leave(waiter, now)
                    next_waiter = None if item is None else core.give(item, now)
                reservoir.carry_out(next_waiter)
                raise
            if not waiter.settled:
                with reservoir.lock:
                    core.leave(waiter, self._monotonic(), late=True)
            item = waiter.item
            if item is None:
                raise waiter.error or self._timed_out(timeout)
            reservoir.latency.add(self._monotonic() - began)
        reservoir.mark(item, holder)
        return item

    def _join(self, waiter: Waiter[C], now: float, patient: bool) -> Item[C] | None:
        """Add a waiter to the queue, or raise if it would wait in vain or for too long.

        Return a connection instead if another thread has returned one meanwhile.
        """
        core, reservoir = self._core, self.reservoir
        with reservoir.lock:
            item = core.take(now) or core.search(now)
            if item is not None:
                return item
            if not core.open:
                reservoir.check_open()
            if (why := core.refuses(now, patient=patient)) is not None:
                raise self._refused(why)
            if (error := reservoir.upkeep.unreachable()) is not None:
                raise error
            core.enqueue(waiter)
        return None

    async def _passes_check(self, item: Item[C], deadline: float) -> bool:
        """Whether a connection passes its check, or else a ping; if not, discard it."""
        try:
            if self._check is not None:
                await awaited(in_time(self._check(item.conn), PING_TIMEOUT))
            else:
                driver = self.reservoir.recipe.driver
                await awaited(driver.ping(item.conn, self._ping_limit(deadline)))
        except BaseException as error:
            log.info("%s: a connection failed its check: %s", self.name, describe(error))
            self.reservoir.upkeep.lost += 1
            self.reservoir.discard(item.conn, "failed_check")
            if not isinstance(error, Exception):
                raise
            return False
        return True

    # -- return ----------------------------------------------------------------------------------

    async def _interrupt(self, conn: C) -> None:
        """Cancel a running statement of a cancelled task; a thread always waits for its own."""

    async def _return(self, conn: C) -> None:
        """Return a connection of `getconn`; do nothing if it was returned before."""
        if (item := self._claim(conn)) is not None:
            await self._returns.release(item)


class _CloseReturns:
    """The pool that psycopg connections refer to under `close_returns`.

    The `close()` of a connection then calls `putconn` here, which returns the connection; it does
    nothing the second time, or within a block of `connection()`.
    """

    close_returns = True

    def __init__(self, pool: Pool[Any]) -> None:
        back = pool._return
        self.putconn = back if pool._asynchronous else lambda conn: run_sync(back(conn))


def _nothing(now: float) -> None:
    return None


def _never(conn: object) -> bool:
    return False
