"""The reservoir: ready connections that wait for callers, instead of the other way round."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import math
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, Self

from moored.kernel import Clock, LoopThread, Recorder, at_fork, counted, describe, duration
from moored.leases import Leases, connect
from moored.leases import sync as leases_sync

from ._budget import Budget
from ._config import ReservoirConfig
from ._core import Core, Waiter
from ._driver import Connect, DriverState, Hooks
from ._errors import PoolClosed, ReservoirEmpty
from ._item import Item, Place, holder_name
from ._recipe import Conninfo, Options, Recipe
from ._statistics import Latency, Statistics
from ._tokens import CachedTokens, Provider, Tokens
from ._types import AnyC as C
from ._upkeep import Upkeep, wait_set

__all__ = ["Reservoir"]

log = logging.getLogger("moored.reservoir")

_numbers = itertools.count(1)
#: How many frames of the caller are kept when leaks are looked for.
_FRAMES = 12
#: How long the end of the interpreter waits for a pool that nobody closed.
EXIT_TIMEOUT = 1.0
# Every reservoir there is, to be told of a fork; and what a fork brought along, kept because
# collecting a parent's connection could say farewell to its server.
_all: weakref.WeakSet[Reservoir[Any]] = weakref.WeakSet()
_inherited: list[object] = []


class Reservoir(Generic[C]):
    """Keeps connections ready: opened ahead of need, at a limited rate, replaced before they end.

    With `async with` it works on the running loop, with `with` on the library's own loop thread.
    `try_checkout()` gives a connection or raises `ReservoirEmpty`, and never waits; a pool
    (`ConnectionPool`, `AsyncConnectionPool`) adds the queue for those who can wait.
    """

    def __init__(
        self,
        conninfo: Conninfo = "",
        *,
        config: ReservoirConfig | None = None,
        connect: Connect | None = None,
        connection_class: type[C] | None = None,
        kwargs: Options | None = None,
        tokens: Tokens | Provider | None = None,
        leases: Leases | leases_sync.SyncLeases | str | None = None,
        endpoint: str | None = None,
        name: str | None = None,
        service: str | None = None,
        asynchronous: bool = True,
        configure: Callable[[C], Any] | None = None,
        is_broken: Callable[[C], bool] | None = None,
        ping: Callable[[C], Any] | None = None,
        close: Callable[[C], Any] | None = None,
        reconnect_failed: Callable[[], Any] | None = None,
        reconnect_timeout: float = 300.0,
        leak_after: float | None = None,
        max_waiting: int = 0,
        queue_target: float = 5.0,
        queue_interval: float = 10.0,
        clock: Clock | None = None,
        recorder: Recorder | None = None,
        owner: Any = None,
        fail_fast: bool = False,
    ) -> None:
        config = config or ReservoirConfig()
        self.config, self.leases = _with_leases(config, leases)
        self.name = name or f"pool-{next(_numbers)}"
        self.service = service or Path(sys.argv[0]).name or "python"
        self.clock = clock or Clock.current()
        self.recorder = recorder or Recorder(clock=self.clock)
        self.leak_after = leak_after
        self.latency = Latency()
        self.asynchronous = asynchronous
        self.owner = owner or self
        self.configure = configure
        self.reconnect_failed = reconnect_failed
        self.reconnect_timeout = reconnect_timeout
        self.fail_fast = fail_fast
        self._queue: dict[str, Any] = {
            "max_waiting": max_waiting,
            "queue_target": queue_target,
            "queue_interval": queue_interval,
        }
        self.recipe = Recipe(
            conninfo,
            kwargs,
            connect=connect,
            connection_class=connection_class,
            hooks=Hooks(is_broken=is_broken, ping=ping, close=close),
            tokens=_tokens_of(tokens),
            endpoint=endpoint,
            asynchronous=asynchronous,
            connect_timeout=self.config.connect_timeout,
            name=self.name,
        )
        self.state = "new"
        #: Called when it is opened, closed or forked, and when the driver is known.
        self.on_change_of_state: Callable[[], None] = lambda: None
        self.recipe.on_driver = lambda: self.on_change_of_state()
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        """Start from nothing: at first, and in a forked child."""
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.core: Core[C] = Core(self.config, **self._queue)
        self.upkeep: Upkeep[C] = Upkeep(self)
        self._change: asyncio.Event | None = None

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to fill, on the running loop; does not wait for a connection."""
        if self.state != "new":
            hint = "is open already" if self.state == "open" else "was closed: make a new one"
            raise PoolClosed(f"{self.name} {hint}")
        self.state = "open"
        self._change = asyncio.Event()
        self.on_change_of_state()
        await self.upkeep.start()

    async def stop(self, timeout: float = 5.0) -> None:
        """Hand out nothing more, close everything, and give the leases back."""
        if self.state != "open" or self.pid != os.getpid():
            self.state = "closed"
            return
        self.state = "closed"
        self.on_change_of_state()
        with self.lock:
            in_vain = self.core.close()
        for waiter in in_vain:
            waiter.error = PoolClosed(f"{self.name} was closed while this caller waited")
            waiter.wake()
        out = self.core.out
        if out:
            log.info("%s: closed with %s in use", self.name, counted(out, "connection"))
        left = await self.upkeep.stop(timeout)
        if isinstance(self.recipe.tokens, CachedTokens):
            self.recipe.tokens.close()
        if left:
            log.warning(
                "%s: %s did not close within %g s", self.name, counted(left, "connection"), timeout
            )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def __enter__(self) -> Self:
        if self.asynchronous:
            raise TypeError(
                f"{self.name} is for asyncio, so it is opened with `async with`: for threads, make "
                "it with asynchronous=False"
            )
        LoopThread.shared().run(self.start())
        return self

    def __exit__(self, *_: object) -> None:
        if self.pid == os.getpid():
            LoopThread.shared().run(self.stop())

    # -- use -----------------------------------------------------------------------------------

    def try_checkout(self) -> C:
        """A ready connection with life enough; raises `ReservoirEmpty` if there is none.

        It passes over what is stale or broken, so it never says so while a good one waits.
        """
        self.check_open()
        item = self.obtain(self.clock.monotonic(), holder=self._current())
        if item is None:
            self.upkeep.nudge()
            raise ReservoirEmpty(f"no connection is ready: {self.whereabouts()}")
        return item.conn

    def give_back(self, conn: C, *, bad: bool = False) -> None:
        """Take a connection back; harmless if it was given back before.

        One that is broken, busy, in a transaction, or said to be bad, is not kept.
        """
        with self.lock:
            item = self.core.items.get(id(conn))
            if item is None or item.conn is not conn or item.place is Place.READY:
                return
            waiter: Waiter[C] | None = None
            now = self.clock.monotonic()
            if bad or not self._fit(conn):
                self.core.discard(item, "bad")
            else:
                waiter = self.core.give(item, now)
        self.carry_out(waiter)

    def _fit(self, conn: C) -> bool:
        driver = self.recipe.driver
        return driver.clean(conn) or (
            not driver.knows_state and driver.state(conn) is not DriverState.BROKEN
        )

    def obtain(self, now: float, holder: Any) -> Item[C] | None:
        """A ready connection that was looked at, or None; without waiting for anything."""
        while True:
            with self.lock:
                item = self.core.take(now) or self.core.search(now)
                if item is None:
                    self.core.empty += 1
                elif now >= item.fresh_until and self.recipe.driver.is_broken(item.conn):
                    self.core.checkouts -= 1
                    self.core.discard(item, "bad")
                    self.upkeep.lost += 1
                    continue
            if self.core.retired:
                self.carry_out(None)
            if item is not None:
                self.mark(item, holder)
            return item

    def mark(self, item: Item[C], holder: Any) -> None:
        """Note who has it, and if leaks are looked for, from where."""
        item.holder = holder
        if self.leak_after is not None:
            item.leak_told = False
            item.stack = traceback.extract_stack(sys._getframe(2), limit=_FRAMES)

    def carry_out(self, waiter: Waiter[C] | None) -> None:
        """Do what the core decided: wake who was served, close what was let go, fill up."""
        if waiter is not None:
            waiter.wake()
        if self.core.retired:
            for item in self.core.retired.copy():
                self.recipe.driver.cut(item.conn)
            self.upkeep.sweep()
            self.upkeep.nudge()

    def discard(self, conn: C, reason: str = "bad") -> None:
        """Let go of a connection, wherever it is; harmless if it is gone."""
        with self.lock:
            item = self.core.items.get(id(conn))
            if item is not None and item.conn is conn:
                self.core.discard(item, reason)
        self.carry_out(None)

    # -- waiting for it to fill ------------------------------------------------------------------

    async def wait_ready(
        self, number: int, timeout: float, progress: Callable[[str], object] | None = None
    ) -> bool:
        """Wait until so many are there, ready or in use; False if the time is over before.

        `progress` is told each second how far it is; the log is told in any case.
        """
        assert self._change is not None
        ends = self.clock.monotonic() + timeout
        next_word = self.clock.monotonic() + 1.0
        while len(self.core.items) < number:
            now = self.clock.monotonic()
            if now >= ends or self.state != "open":
                return False
            if now >= next_word:
                next_word = now + 1.0
                text = self._progress(number)
                log.info("%s", text)
                if progress is not None:
                    progress(text)
            self._change.clear()
            await wait_set(self._change, min(ends, next_word) - now)
        return True

    async def changed(self) -> None:
        """Wait until a connection has come, gone, or could not be opened."""
        assert self._change is not None
        self._change.clear()
        await self._change.wait()

    def _progress(self, number: int) -> str:
        text = f"{self.name}: filling, {len(self.core.items)} of {number} connections"
        error = self.upkeep.last_error
        if self.upkeep.failing_for is not None and error is not None:
            text += f"; the last connect failed: {describe(error)}"
        return text

    def note_change(self) -> None:
        """A connection has come, gone, or could not be opened."""
        if self._change is not None:
            self._change.set()

    # -- for people ----------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether it is open, in this process."""
        return self.state == "open" and self.pid == os.getpid()

    def check_open(self) -> None:
        """Raise `PoolClosed` unless it is open, in this process."""
        if self.pid != os.getpid():
            raise PoolClosed(
                f"{self.name} was opened by process {self.pid}, from which this one was forked, "
                "and the connections are the parent's: open a new one here"
            )
        if self.state != "open":
            hint = "open it first, with `with` or open()" if self.state == "new" else "it is closed"
            raise PoolClosed(f"{self.name} is not open: {hint}")

    def whereabouts(self) -> str:
        """Where all the connections are, in words."""
        core, now = self.core, self.clock.monotonic()
        parts = [f"{core.out} of {core.max_size} in use"]
        if waiting := list(core.waiting):  # a copy: they may be served meanwhile
            first = duration(now - waiting[0].since)
            parts[0] += f", {len(waiting)} waiting (the first for {first})"
        if (longest := next(core.in_use(), None)) is not None:
            held = f"longest held {duration(now - longest.since)}"
            parts.append(f"{held} ({holder_name(longest.holder)})" if longest.holder else held)
        flight = f"{counted(core.opening, 'connect')} in flight"
        parts.append(f"{flight}, creation limited to {self.config.rate:g}/s")
        failing = self.upkeep.failing_for
        if failing is not None and self.upkeep.last_error is not None:
            since = f"connecting fails since {duration(failing)}"
            parts.append(f"{since}: {describe(self.upkeep.last_error)}")
        return "; ".join(parts)

    def statistics(self) -> Statistics:
        """This reservoir in numbers."""
        with self.lock:
            core, upkeep = self.core, self.upkeep
            fast = core.checkouts - core.handed
            latency = (self.latency.counts[0] + fast, *self.latency.counts[1:])
            leases = sum(item.lease is not None for item in list(core.items.values()))
            return Statistics(
                size=len(core.ready),
                in_use=core.out,
                in_flight=core.opening,
                closing=core.closing,
                target=core.target,
                max_size=core.max_size,
                waiting=len(core.waiting),
                overloaded=core.overloaded(self.clock.monotonic()),
                checkouts=core.checkouts,
                queued=core.queued,
                empty=core.empty,
                refused=core.refused,
                timeouts=core.timeouts,
                wait_seconds=core.waited,
                usage_seconds=core.usage,
                returns=core.checkouts - core.out,
                refills=core.births,
                refill_seconds=upkeep.connect_time,
                discards=MappingProxyType(dict(core.discards)),
                refill_failures=MappingProxyType(dict(upkeep.failures)),
                leases_held=leases,
                rate_tokens_left=upkeep.tokens_left(),
                latency=latency,
            )

    def describe(self) -> str:
        """The state in a few words."""
        core = self.core
        if self.state != "open":
            return self.state
        # A copy: somebody else may change it meanwhile.
        items = list(core.items.values())
        ends = min((item.usable_until for item in items), default=math.inf)
        text = (
            f"{len(core.items)} of {core.max_size}, {len(core.ready)} ready, "
            f"{core.out} in use, {len(core.waiting)} waiting"
        )
        if ends < math.inf:
            text += f", next expiry in {duration(max(0.0, ends - self.clock.monotonic()))}"
        return text

    @property
    def place(self) -> str:
        """What it connects to, for people."""
        return self.recipe.place or self.name

    def __repr__(self) -> str:
        return f"<Reservoir {self.place}: {self.describe()}>"

    def _current(self) -> Any:
        try:
            return asyncio.current_task() or threading.current_thread()
        except RuntimeError:
            return threading.current_thread()

    def _forked(self) -> None:
        """In a forked child: the parent's connections are never touched, not even to close them."""
        _inherited.append((self.core, self.upkeep))
        if not self.asynchronous and self.state == "open":
            self.state = "new"
            self._begin()
        self.on_change_of_state()


def _tokens_of(tokens: Tokens | Provider | None) -> Tokens | None:
    if tokens is None or hasattr(tokens, "get"):
        return tokens  # type: ignore[return-value]
    if not callable(tokens):
        raise TypeError(f"tokens={tokens!r} must be a function that makes one, or CachedTokens")
    return CachedTokens(tokens)


def _with_leases(
    config: ReservoirConfig, leases: Leases | leases_sync.SyncLeases | str | None
) -> tuple[ReservoirConfig, Leases | None]:
    if isinstance(leases, str):
        connect(leases)  # not opened: a wrong URL is told here, and not in the background
        return config.but(lease_enabled=True, lease_url=leases), None
    if isinstance(leases, leases_sync.SyncLeases):
        leases = leases._client
    if leases is not None:
        return config.but(lease_enabled=True), leases
    if config.lease_enabled and config.lease_url is None:
        raise ValueError(
            "lease_enabled=True needs a store that the cluster shares: set lease_url (or "
            "MOORED_DISTRIBUTED_CONN_LEASE_URL, …_TABLE), or pass leases="
        )
    return config, None


def _after_fork() -> None:
    Budget.forget_all()
    for reservoir in list(_all):
        reservoir._forked()


def _at_exit() -> None:
    """Close the pools for threads that nobody closed, while there still is a loop to do it."""
    for reservoir in [one for one in _all if one.usable and not one.asynchronous]:
        with suppress(Exception):
            LoopThread.shared().run(reservoir.stop(EXIT_TIMEOUT), timeout=2 * EXIT_TIMEOUT)


at_fork(after_in_child=_after_fork)
# After the import of the kernel, so that it is called before the loop thread is stopped.
atexit.register(_at_exit)
