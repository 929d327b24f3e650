"""What the two pools have in common: how they are made, and what they tell.

Their names and parameters are those of psycopg_pool, so that a change of one import is enough; the
rest is what psycopg_pool does not have.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from moored.kernel import Clock, Recorder, describe, refuse
from moored.leases import Leases
from moored.leases import sync as leases_sync

from ._config import SIZE, ReservoirConfig
from ._core import Core, Waiter
from ._driver import Connect, State
from ._errors import PoolOverloaded, PoolTimeout
from ._item import Item
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
        reset: Callable[[C], Any] | None = None,
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
        leases: Leases | leases_sync.Leases | str | None = None,
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
    ) -> None:
        refuse(
            type(self).__name__,
            _mistakes(timeout, max_waiting, check_idle, leak_after, queue_target, queue_interval),
        )
        config = _config_of(
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
        self._reset = reset
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
        )
        self._popped: dict[str, int] = {}
        self._returns_bad = 0
        # Checkouts that came to nothing, because the connection failed its check.
        self._unfit = 0
        self._opens_itself = open is not False
        self._maker = os.getpid()
        self.reservoir.on_change_of_state = self._bind
        self._bind()
        self._set_up()

    def _set_up(self) -> None:
        """What the shell needs besides."""

    def _bind(self) -> None:
        """Keep at hand what the usual checkout needs: looking it up would take half its time."""
        reservoir = self.reservoir
        self._lock = reservoir.lock
        self._give = reservoir.core.give if os.getpid() == self._maker else self._give_own
        self._retired = reservoir.core.retired
        # A connection that must be reset is never clean as it comes back.
        self._is_clean = reservoir.recipe.driver.clean if self._reset is None else _never
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
        counters = self._counters()
        return {
            **{name: value - self._popped.get(name, 0) for name, value in counters.items()},
            **self._measures(),
        }

    def pop_stats(self) -> dict[str, int]:
        """The same as `get_stats`, and counts from zero again."""
        stats = self.get_stats()
        self._popped = self._counters()
        return stats

    def _measures(self) -> dict[str, int]:
        core = self._core
        return {
            "pool_min": core.target,
            "pool_max": core.max_size,
            "pool_size": len(core.items) + core.opening,
            "pool_available": len(core.ready),
            "requests_waiting": len(core.waiting),
        }

    def _counters(self) -> dict[str, int]:
        core, works = self._core, self.reservoir.works
        failed = core.timeouts + core.refused
        return {
            "requests_num": core.checkouts - self._unfit + failed,
            "requests_queued": core.queued,
            "requests_wait_ms": int(1000 * core.waited),
            "requests_errors": failed,
            "usage_ms": int(1000 * core.usage),
            "returns_bad": self._returns_bad,
            "connections_num": core.births + sum(works.failures.values()),
            "connections_ms": int(1000 * works.connect_time),
            "connections_errors": sum(works.failures.values()),
            "connections_lost": works.lost,
        }

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

    def _return(self, conn: C) -> Any:
        """Give back a connection; harmless if that was done."""
        raise NotImplementedError

    def _timed_out(self, timeout: float) -> PoolTimeout:
        return PoolTimeout(f"no connection within {timeout:.1f} s: {self.reservoir.whereabouts()}")

    def _refused(self, why: str) -> PoolOverloaded:
        return PoolOverloaded(f"{why}: {self.reservoir.whereabouts()}")

    def _number_to_start_with(self) -> int:
        """How many `open(wait=True)` waits for: none, where they are opened on demand."""
        return min(max(1, self._core.watermark), self._core.target)

    def _not_full(self, number: int, timeout: float) -> str:
        return (
            f"{self.name} has {len(self._core.items)} of {number} connections after "
            f"{timeout:g} s: {self.reservoir.whereabouts()}"
        )

    def _state_of(self, conn: C, settled: bool) -> State:
        """The state of a connection; one that cannot tell is believed to be idle once settled."""
        driver = self.reservoir.recipe.driver
        state = driver.state(conn)
        if settled and state is State.TRANSACTION and not driver.knows_state:
            return State.IDLE
        return state

    def _warn_open_transaction(self, conn: C) -> None:
        if self.reservoir.recipe.driver.knows_state:
            log.warning("%s: rolling back a connection left in a transaction: %r", self.name, conn)

    def _tell_unclean(self, state: State) -> None:
        # When all are closed, nobody need care how one comes back.
        level = logging.INFO if self.closed else logging.WARNING
        log.log(level, "%s: closing a connection that came back %s", self.name, state.value)

    def _warn_reset(self, state: State) -> None:
        log.warning("%s: the reset callback left a connection %s", self.name, state.value)

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

    def _failed_check(self, item: Item[C], error: BaseException) -> None:
        log.info("%s: a connection failed its check: %s", self.name, describe(error))
        self.reservoir.works.lost += 1
        self.reservoir.discard(item.conn, "failed_check")

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
            self.reservoir.works.examine(self._check_idle, self._ping_timeout)

    def _check_process(self) -> None:
        """What was opened by a parent process is not touched."""
        if self.reservoir.pid != os.getpid():
            self.reservoir.check_open()

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
        self.reservoir.works.nudge()


class _Home:
    """What a psycopg connection knows of its pool under `close_returns`: to close it is to give it
    back, and the second time, or within a block of `connection()`, it does nothing."""

    close_returns = True

    def __init__(self, pool: Pool[Any]) -> None:
        self.putconn = pool._return


def _nothing(now: float) -> None:
    return None


def _never(conn: object) -> bool:
    return False


def _config_of(
    config: ReservoirConfig | None,
    *,
    min_size: int | None,
    max_size: int | None,
    max_lifetime: float | None,
    **settings: Any,
) -> ReservoirConfig:
    """The settings, with what was passed by the names of psycopg_pool in them."""
    if max_size is None and min_size is not None and config is None:
        max_size = max(min_size, 1)
    sizes = {"max_size": max_size, "target_ready": min_size}
    changes = {k: v for k, v in {**sizes, **settings}.items() if v is not None}
    if max_lifetime is not None:
        lived = ReservoirConfig.for_lifetime(max_lifetime, max_size=1)
        changes["base_lifetime"] = lived.base_lifetime
        changes["lifetime_jitter"] = lived.lifetime_jitter
        changes["guard_window"] = lived.guard_window
    return (config or ReservoirConfig(max_size=changes.get("max_size", SIZE), rate=1e9)).but(
        **{"rate": ReservoirConfig.rate, **changes} if config is None else changes
    )


def _mistakes(
    timeout: float,
    max_waiting: int,
    check_idle: float | None,
    leak_after: float | None,
    queue_target: float,
    queue_interval: float,
) -> list[str]:
    found = []
    if not timeout >= 0:
        found.append(f"timeout={timeout!r} must be at least 0 seconds")
    if max_waiting < 0:
        found.append(f"max_waiting={max_waiting!r} must be at least 0 (0 for no limit)")
    if check_idle is not None and not check_idle >= 0:
        found.append(f"check_idle={check_idle!r} must be at least 0 seconds, or None for never")
    if leak_after is not None and not leak_after > 0:
        found.append(f"leak_after={leak_after!r} must be more than 0 seconds, or None for never")
    for name, value in (("queue_target", queue_target), ("queue_interval", queue_interval)):
        if not value > 0:
            found.append(f"{name}={value!r} must be more than 0 seconds")
    return found
