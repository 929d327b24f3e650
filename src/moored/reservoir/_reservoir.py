"""The reservoir: connections that are opened before callers need them."""

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

from moored.kernel import (
    Callers,
    Clock,
    Link,
    LoopThread,
    Recorder,
    at_fork,
    counted,
    describe,
    duration,
    start_task,
)
from moored.leases import Leases, connect
from moored.leases import sync as leases_sync

from ._budget import Budget
from ._config import ReservoirConfig
from ._core import Core, Waiter
from ._driver import PING_TIMEOUT, Connect, DriverState, Hooks
from ._errors import PoolClosed, ReservoirEmpty
from ._item import Item, Place, holder_name
from ._recipe import Conninfo, Options, Recipe
from ._silence import LOOK
from ._statistics import Latency, Statistics
from ._tokens import CachedTokens, Provider, Tokens
from ._types import AnyC as C
from ._upkeep import Upkeep, wait_set

__all__ = ["Reservoir"]

log = logging.getLogger("moored.reservoir")

_numbers = itertools.count(1)
#: How many frames of a caller's stack are stored if `leak_after` is set.
_FRAMES = 12
#: How long the exit of the interpreter waits for a pool that was not closed.
EXIT_TIMEOUT = 1.0
# All reservoirs, for the fork hook; and what a forked child inherited, which is kept alive because
# the destructor of a connection could end the parent's session at the server.
_all: weakref.WeakSet[Reservoir[Any]] = weakref.WeakSet()
_inherited: list[object] = []


class Reservoir(Generic[C]):
    """Keeps connections ready: opened in advance at a limited rate, replaced before they expire.

    With `async with` it runs on the running loop, with `with` on the library's own loop thread.
    `try_checkout()` returns a connection or raises `ReservoirEmpty`, and never waits; a pool
    (`ConnectionPool`, `AsyncConnectionPool`) adds a queue of waiting callers.
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
            conninfo=conninfo,
            kwargs=kwargs,
            connector=connect,
            connection_class=connection_class,
            hooks=Hooks(is_broken=is_broken, ping=ping, close=close),
            tokens=_tokens_of(tokens),
            address=endpoint,
            asynchronous=asynchronous,
            connect_timeout=self.config.connect_timeout,
            name=self.name,
        )
        self.state = "new"
        #: Called when the reservoir is opened, closed or forked, and when the driver is known.
        self.on_change_of_state: Callable[[], None] = lambda: None
        #: Called before a connection is closed; returns a function to call first, if any.
        self.on_close: Callable[[Item[C]], Callable[[], Any] | None] = lambda item: None
        self.recipe.on_driver = lambda: self.on_change_of_state()
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        """Create an empty core and its upkeep: at first, and in a forked child."""
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.core: Core[C] = Core(self.config, **self._queue)
        self.upkeep: Upkeep[C] = Upkeep(self)
        self._change: asyncio.Event | None = None
        self._stopping: asyncio.Task[None] | None = None

    def begin_again(self) -> None:
        """Start over with new connections: the event loop of the former ones has ended."""
        self.state = "new"
        self._begin()
        self.on_change_of_state()

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start opening connections on the running loop, without waiting for one."""
        if self.state != "new":
            hint = "is open already" if self.state == "open" else "was closed: create a new one"
            raise PoolClosed(f"{self.name} {hint}")
        self.state = "open"
        self._change = asyncio.Event()
        self.on_change_of_state()
        await self.upkeep.start()

    async def stop(self, timeout: float = 5.0) -> None:
        """Refuse waiting callers, close all connections, and release their leases.

        If the caller is cancelled, this continues in the background; later calls wait for it.
        """
        if self.state == "open" and self.pid == os.getpid():
            self.state = "closed"
            self.on_change_of_state()
            self._stopping = start_task(self._stop(timeout), name=f"{self.name}-stop")
        self.state = "closed"
        if self._stopping is not None and self.pid == os.getpid():
            await asyncio.shield(self._stopping)

    async def _stop(self, timeout: float) -> None:
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
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def __enter__(self) -> Self:
        if self.asynchronous:
            raise TypeError(
                f"{self.name} is for asyncio: open it with `async with`, or create it for threads "
                "with asynchronous=False"
            )
        LoopThread.shared().run(self.start())
        return self

    def __exit__(self, *_: object) -> None:
        if self.pid == os.getpid():
            LoopThread.shared().run(self.stop())

    # -- use -----------------------------------------------------------------------------------

    def try_checkout(self) -> C:
        """Return a ready connection, or raise `ReservoirEmpty` if there is none.

        Expired and broken connections are skipped, so `ReservoirEmpty` means that no usable one is
        ready.
        """
        self.check_open()
        item = self.obtain(self.clock.monotonic(), holder=self._current())
        if item is None:
            self.upkeep.nudge()
            raise ReservoirEmpty(f"no connection is ready: {self.whereabouts()}")
        return item.conn

    def give_back(self, conn: C, *, bad: bool = False) -> None:
        """Return a connection; do nothing if it was returned before.

        A connection that is broken, busy or in a transaction, or is passed as `bad`, is closed. A
        DB-API connection, which cannot report a transaction, is rolled back.
        """
        item = self.core.items.get(id(conn))
        if item is None or item.conn is not conn or item.place is Place.READY:
            return
        waiter: Waiter[C] | None = None
        keep = not bad and self._can_be_kept(conn)  # without the lock: it may query the server
        with self.lock:
            if keep:
                waiter = self.core.give(item, self.clock.monotonic())
            else:
                self.core.discard(item, "bad")
        self.carry_out(waiter)

    def _can_be_kept(self, conn: C) -> bool:
        driver = self.recipe.driver
        if driver.knows_state:
            return driver.clean(conn)
        try:
            driver.rollback(conn, PING_TIMEOUT)
            return driver.state(conn) is not DriverState.BROKEN
        except Exception as error:
            log.warning("%s: rollback failed: %s", self.name, describe(error))
            return False

    def obtain(self, now: float, holder: Any) -> Item[C] | None:
        """Take a ready connection whose socket was checked, or return None; never wait."""
        while True:
            with self.lock:
                item = self.core.take(now) or self.core.search(now)
                if item is None:
                    self.core.empty += 1
                elif now >= item.fresh_until and self.is_broken(item.conn):
                    self.core.checkouts -= 1
                    self.core.discard(item, "bad")
                    self.upkeep.lost += 1
                    continue
            if self.core.retired:
                self.carry_out(None)
            if item is not None:
                self.mark(item, holder)
            return item

    def is_broken(self, conn: C) -> bool:
        """Whether an idle connection is unusable, or the user's `is_broken` fails."""
        try:
            return self.recipe.driver.is_broken(conn)
        except Exception as error:
            log.warning(
                "%s: is_broken failed, closing a connection: %s", self.name, describe(error)
            )
            return True

    def mark(self, item: Item[C], holder: Any) -> None:
        """Store the holder of a connection and, with `leak_after`, the stack of the checkout."""
        item.holder = holder
        if self.leak_after is not None:
            item.leak_reported = False
            item.stack = traceback.extract_stack(sys._getframe(2), limit=_FRAMES)

    def carry_out(self, waiter: Waiter[C] | None) -> None:
        """Wake the waiter that was served, and close and replace retired connections."""
        if waiter is not None:
            waiter.wake()
        if self.core.retired:
            for item in self.core.retired.copy():
                self.recipe.driver.close_socket(item.conn)
            self.upkeep.sweep()
            self.upkeep.nudge()

    def discard(self, conn: C, reason: str = "bad") -> None:
        """Close a connection, even if it is in use; do nothing if it is unknown."""
        with self.lock:
            item = self.core.items.get(id(conn))
            if item is not None and item.conn is conn:
                self.core.discard(item, reason)
        self.carry_out(None)

    # -- waiting for connections -----------------------------------------------------------------

    async def wait_ready(
        self, number: int, timeout: float, progress: Callable[[str], object] | None = None
    ) -> bool:
        """Wait for this many connections, ready or in use; return False after the timeout.

        The progress is logged once a second, and passed to `progress`.
        """
        assert self._change is not None
        ends = self.clock.monotonic() + timeout
        next_report = self.clock.monotonic() + 1.0
        while len(self.core.items) < number:
            now = self.clock.monotonic()
            if now >= ends or self.state != "open":
                return False
            if now >= next_report:
                next_report = now + 1.0
                text = self._progress(number)
                log.info("%s", text)
                if progress is not None:
                    progress(text)
            self._change.clear()
            await wait_set(self._change, min(ends, next_report) - now)
        return True

    async def changed(self) -> None:
        """Wait until a connection was opened or closed, or a connect has failed."""
        assert self._change is not None
        self._change.clear()
        await self._change.wait()

    def _progress(self, number: int) -> str:
        text = f"{self.name}: filling, {len(self.core.items)} of {number} connections"
        if (error := self.upkeep.attempts.error) is not None:
            text += f"; the last connect failed: {describe(error)}"
        return text

    def note_change(self) -> None:
        """Note that a connection was opened or closed, or that a connect has failed."""
        if self._change is not None:
            self._change.set()

    # -- state and statistics ------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether the reservoir is open, and was opened by this process."""
        return self.state == "open" and self.pid == os.getpid()

    def check_open(self) -> None:
        """Raise `PoolClosed` unless the reservoir is `usable`."""
        if self.pid != os.getpid():
            raise PoolClosed(
                f"{self.name} was opened by process {self.pid}, from which this one was forked, "
                "and its connections belong to that process: create a new pool here"
            )
        if self.state != "open":
            hint = "open it first, with `with` or open()" if self.state == "new" else "it is closed"
            raise PoolClosed(f"{self.name} is not open: {hint}")

    def whereabouts(self) -> str:
        """Describe where the connections are, for error messages."""
        core, now = self.core, self.clock.monotonic()
        parts = [f"{core.out} of {core.max_size} in use"]
        if waiting := list(core.waiting):  # a copy: other threads may change it
            first = duration(now - waiting[0].since)
            parts[0] += f", {len(waiting)} waiting (the first for {first})"
        if (longest := next(core.in_use(), None)) is not None:
            held = f"longest held {duration(now - longest.since)}"
            parts.append(f"{held} ({holder_name(longest.holder)})" if longest.holder else held)
        if silent := self.upkeep.watch.silent_for:
            parts.append(f"{self.place} has not answered for {duration(silent)}")
        flight = f"{counted(core.opening, 'connect')} in flight"
        parts.append(f"{flight}, creation limited to {self.config.rate:g}/s")
        attempts = self.upkeep.attempts
        if (failing := attempts.failing_for) is not None and attempts.last_error is not None:
            since = f"connecting has failed for {duration(failing)}"
            parts.append(f"{since}: {describe(attempts.last_error)}")
        return "; ".join(parts)

    def statistics(self) -> Statistics:
        """Return the reservoir's counters and current numbers."""
        with self.lock:
            core, upkeep, now = self.core, self.upkeep, self.clock.monotonic()
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
                overloaded=core.overloaded(now),
                checkouts=core.checkouts,
                queued=core.queued,
                empty=core.empty,
                refused=core.refused,
                timeouts=core.timeouts,
                wait_seconds=core.waited,
                usage_seconds=core.usage,
                returns=core.checkouts - core.out,
                refills=core.births,
                refill_seconds=upkeep.attempts.seconds,
                discards=MappingProxyType(dict(core.discards)),
                refill_failures=MappingProxyType(dict(upkeep.attempts.failures)),
                leases_held=leases,
                rate_tokens_left=upkeep.tokens_left(),
                longest_wait=max(0.0, now - core.waiting[0].since) if core.waiting else 0.0,
                silent=upkeep.watch.silent_for,
                latency=latency,
            )

    def describe(self) -> str:
        """Describe the state, for `repr()`."""
        core = self.core
        if self.state != "open":
            return self.state
        # A copy: other threads may change it.
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
        """The server and database for display; the reservoir's name if they are unknown."""
        return self.recipe.place or self.name

    def link(self, server: str, *, of: str = "", vital: bool = True) -> Link:
        """Return what is known about the connections to the server at this address."""
        upkeep, why, refused = self.upkeep, "", False
        heard_at, silent_for = upkeep.watch.heard_at, upkeep.watch.silent_for
        up = True if self.core.items or heard_at is not None else None
        silent = bool(silent_for)
        if silent:
            up, why = False, "no answer arrives on open connections"
            # A pool that was idle has not missed an answer before it asked.
            heard_at = max(heard_at or 0.0, upkeep.clock.monotonic() - silent_for - 2 * LOOK)
        elif not self.core.items and (error := upkeep.attempts.error) is not None:
            up, why = False, describe(error)
            # The server's own words. While it starts or stops, it does not serve.
            refused = "FATAL:" in why and "the database system is" not in why
        kind = "PostgreSQL" if self.recipe.libpq else "database"
        return Link(server, up, heard_at, why, silent, refused, kind, of, vital)

    @property
    def hanging(self) -> Callers:
        """Callers that wait for a connection, or for an answer of a silent server."""
        return self.upkeep.watch.hanging

    def __repr__(self) -> str:
        return f"<Reservoir {self.place}: {self.describe()}>"

    def _current(self) -> Any:
        try:
            return asyncio.current_task() or threading.get_ident()
        except RuntimeError:
            return threading.get_ident()

    def _forked(self) -> None:
        """Start anew in a forked child; the parent's connections are not even closed."""
        _inherited.append((self.core, self.upkeep))
        if not self.asynchronous and self.state == "open":
            self.state = "new"
            self._begin()
        self.on_change_of_state()


def _tokens_of(tokens: Tokens | Provider | None) -> Tokens | None:
    if tokens is None or hasattr(tokens, "get"):
        return tokens  # type: ignore[return-value]
    if not callable(tokens):
        raise TypeError(f"tokens={tokens!r} must be a function that returns one, or CachedTokens")
    return CachedTokens(tokens)


def _with_leases(
    config: ReservoirConfig, leases: Leases | leases_sync.SyncLeases | str | None
) -> tuple[ReservoirConfig, Leases | None]:
    if isinstance(leases, str):
        connect(leases)  # not opened: only to raise for an invalid URL here
        return config.but(lease_enabled=True, lease_url=leases), None
    if isinstance(leases, leases_sync.SyncLeases):
        leases = leases._client
    if leases is not None:
        return config.but(lease_enabled=True), leases
    if config.lease_enabled and config.lease_url is None:
        raise ValueError(
            "lease_enabled=True needs a lease store that the cluster shares: set lease_url (or "
            "MOORED_DISTRIBUTED_CONN_LEASE_URL, …_TABLE), or pass leases="
        )
    return config, None


def _after_fork() -> None:
    Budget.forget_all()
    for reservoir in list(_all):
        reservoir._forked()


def _at_exit() -> None:
    """Close the pools for threads that are still open, while the loop thread still runs."""
    for reservoir in [one for one in _all if one.usable and not one.asynchronous]:
        with suppress(Exception):
            LoopThread.shared().run(reservoir.stop(EXIT_TIMEOUT), timeout=2 * EXIT_TIMEOUT)


at_fork(after_in_child=_after_fork)
# Registered after the kernel's own exit hook, so that it runs before the loop thread is stopped.
atexit.register(_at_exit)
