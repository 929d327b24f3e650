"""The upkeep of a reservoir: opens connections ahead of need, checks them, and closes them.

It is written once, for an event loop: the user's own under asyncio, the library's loop thread for
users of threads, where connections are opened and closed in threads.

To open one takes, in this order: a lease, a turn under the rate limit, a token, the connect. So no
turn is used up without a lease; and whatever fails, the lease is given back, once.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from moored.kernel import (
    Backoff,
    Child,
    Context,
    Supervisor,
    Tasks,
    awaited,
    describe,
    duration,
    run_callback,
)
from moored.leases import Lease

from ._budget import Budget, Destination, LeaseDenied
from ._core import Waiter
from ._driver import DriverState
from ._errors import ServerUnreachable
from ._item import Item, Place
from ._leaks import warn_of_leaks
from ._sqlstate import Meaning, meaning_of

if TYPE_CHECKING:
    from ._reservoir import Reservoir

__all__ = ["Upkeep", "wait_set"]

log = logging.getLogger("moored.reservoir")

C = TypeVar("C")

#: After a failure, and after one in which the server said that we are too fast.
FAILED = (0.25, 5.0)
#: The same where callers do not wait for the server, and get the last error meanwhile.
QUICK = (0.25, 0.5)
THROTTLED = (1.0, 30.0)
#: For how long a turn under the rate limit is good: who waits longer needs another one.
TURN = 0.1
#: How long a driver may take to close one connection before it is left alone.
CLOSE_PATIENCE = 5.0


class _Unwanted(Exception):
    """A connection that was to be opened is one too many now."""


class Upkeep(Generic[C]):
    """Opens, looks after and closes the connections of one core."""

    def __init__(self, home: Reservoir[C]) -> None:
        self._home = home
        # After a fork the reservoir has others.
        self.core, self._lock = home.core, home.lock
        self.recipe, self.config, self.clock = home.recipe, home.config, home.clock
        self.recorder, self.name = home.recorder, home.name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._need = asyncio.Event()
        self._full = asyncio.Event()
        self._entering = asyncio.Lock()
        # Connects, whose end `stop` asks for; closes, checks and returns, for which it waits; and
        # the user's callback, which may be what stops it.
        self._opening, self._tasks, self._callbacks = Tasks(), Tasks(), Tasks()
        self._supervisor: Supervisor | None = None
        self.budget: Budget | None = None
        self._where: Destination | None = None
        self._stopped = False
        # After a failure nothing is tried before this time; of several that fail together, only
        # one counts.
        self._pause_until = -math.inf
        self._failed_at = -math.inf
        steps = QUICK if home.fail_fast else FAILED
        self._failing = Backoff(*steps, jitter="half", clock=home.clock)
        self._throttled = Backoff(*THROTTLED, jitter="half", clock=home.clock)
        self._failing_since: float | None = None
        self._told_failed = False
        self._unreachable = False
        self.last_error: BaseException | None = None
        #: Failed opens by reason, and seconds that successful ones took in all.
        self.failures: Counter[str] = Counter()
        self.connect_time = 0.0
        #: Connections that the server, or the net, ended while nobody used them.
        self.lost = 0

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin, on the running loop."""
        self._loop = asyncio.get_running_loop()
        backoff = Backoff(0.1, 5.0, jitter="half", clock=self.clock)
        self._supervisor = Supervisor(
            self.name,
            children=[
                Child("refiller", self._refill, backoff=backoff.fresh()),
                Child("scanner", self._scan, backoff=backoff),
            ],
            intensity=None,  # however often they fail, somebody must go on
            recorder=self.recorder,
            clock=self.clock,
        )
        # Whoever opens it may be cancelled meanwhile, and others wait for it already.
        await asyncio.shield(self._supervisor.start())

    async def stop(self, timeout: float) -> int:
        """End everything; returns how many connections could not be closed in time."""
        if self._supervisor is not None:
            await self._supervisor.stop()
        for task in self._opening:
            task.cancel()
        self.sweep()
        ends = self.clock.monotonic() + timeout
        # Those in use may come back meanwhile. What takes too long is left alone, not cut short:
        # a close that had no time to begin would leave its connection, and its lease, for ever.
        while (left := [*self._opening, *self._tasks]) and (
            patience := ends - self.clock.monotonic()
        ) > 0:
            await asyncio.wait(left, timeout=patience)
        self._stopped = True
        await self._leave_when_empty()
        return len(left)

    async def _leave_when_empty(self) -> None:
        """The leases are given back when their connections are gone: those in use at the end of
        the pool are so later."""
        budget = self.budget
        held = self.config.lease_enabled and (self.core.items or self.core.closing)
        if budget is not None and self._stopped and not held:
            self.budget = None
            await budget.leave()

    def nudge(self) -> None:
        """There may be something to open; from any thread."""
        self._on_loop(self._need.set)

    def sweep(self) -> None:
        """Close what the core has let go; from any thread, without its lock held."""
        if self.core.retired:
            self._on_loop(self._sweep)

    def _on_loop(self, call: Callable[[], None]) -> None:
        if self._loop is not None and self._loop is asyncio._get_running_loop():
            call()
        else:
            self.later(call)

    def later(self, call: Callable[[], object]) -> None:
        """Call something on the loop, soon; from any thread, and without a lock."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended: so has the need
                self._loop.call_soon_threadsafe(call)

    def _sweep(self) -> None:
        with self._lock:
            retired = self.core.retired.copy()
            self.core.retired.clear()
        for item in retired:
            self._tasks.start(self._bury(item), name=f"{self.name}-close")

    async def shielded(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for work that goes on when the caller is cancelled, and that `stop` waits for."""
        await asyncio.shield(self._tasks.start(work, name=f"{self.name}-return"))

    # -- opening -------------------------------------------------------------------------------

    async def _refill(self, ctx: Context) -> None:
        """The refiller: opens what the core wants, unless it must wait after a failure."""
        ctx.started()
        await self._stagger()
        while True:
            self._need.clear()
            pause = self._pause_until - self.clock.monotonic()
            if pause <= 0:
                with self._lock:
                    number = self.core.plan()
                for _ in range(number):
                    self._opening.start(self._open(), name=f"{self.name}-open")
                if number:
                    continue
            await wait_set(self._need, pause if pause > 0 else None)

    async def _stagger(self) -> None:
        """The first connection is opened at once, the others a little later, each process by a
        time of its own; whoever waits is not made to wait for this."""
        if not self.config.enabled or self.core.births or self.core.opening:
            return
        with self._lock:
            one = self.core.plan()
            # The rest of the batch is for later.
            self.core.opening -= max(0, one - 1)
        if one:
            self._opening.start(self._open(), name=f"{self.name}-open")
        ends = self.clock.monotonic() + self.clock.random.random() * self.config.stagger
        while (left := ends - self.clock.monotonic()) > 0 and not self.core.waiting:
            self._need.clear()
            await wait_set(self._need, left)

    async def _open(self) -> None:
        """Open one connection, with everything that it takes."""
        began = self.clock.monotonic()
        stage = "connect"  # where to, is a function of the user's sometimes, which may fail
        lease: Lease | None = None
        conn: Any = None
        try:
            endpoint = await self._endpoint()
            stage = "lease"
            budget = await self._budget(endpoint)
            async with budget.slot():
                lease = await budget.lease(self.config)
                stage = "rate_limit"
                await budget.turn()
                self._check_wanted()
                stage = "token"
                token = await self._token(budget)
                stage = "connect"
                conn = await self._connect(budget, token)
                stage = "configure"
                await self._prepare(conn)
        except BaseException as error:
            await self._undo(conn, lease)
            with self._lock:
                self.core.failed()
            if isinstance(error, asyncio.CancelledError):
                raise
            if isinstance(error, _Unwanted):
                self._need.set()
            else:
                self._note_failure(stage, error, began)
        else:
            self._arrive(conn, lease, began)

    def _check_wanted(self) -> None:
        """While it waited for its turn, the reservoir may have been made smaller."""
        with self._lock:
            if self.core.overfull:
                raise _Unwanted

    async def _endpoint(self) -> Destination:
        async with self._entering:
            if self._where is None:
                self._where = await self.recipe.endpoint()
            return self._where

    async def _budget(self, endpoint: Destination) -> Budget:
        async with self._entering:
            if self.budget is None:
                budget = Budget.of(endpoint, self._home)
                await budget.enter()
                self.budget = budget
            return self.budget

    async def _token(self, budget: Budget) -> str | None:
        if self.recipe.tokens is None:
            return None
        began = self.clock.monotonic()
        token = await self.recipe.tokens.get()
        if self.clock.monotonic() - began > TURN:
            # All that waited for this token had their turns before, and would connect together.
            await budget.turn()
        return token

    async def _connect(self, budget: Budget, token: str | None) -> Any:
        try:
            return await self.recipe.connect_in_time(token, self._close)
        except Exception as error:
            tokens = self.recipe.tokens
            if tokens is None or token is None or meaning_of(error) is not Meaning.UNAUTHORIZED:
                raise
            # It may have been a token of yesterday: once, with a new one, and with a turn of its
            # own, because it is one more connect for the server.
            tokens.reject(token)
            again = await tokens.get()
            if again == token:
                raise
            log.warning("%s: the server refused a token (%s): trying a new one", self.name, error)
            await budget.turn()
            return await self.recipe.connect_in_time(again, self._close)

    async def _prepare(self, conn: Any) -> None:
        driver = self.recipe.driver
        driver.adopt(conn, self._home.owner)
        if self._home.configure is None:
            return
        await self._call(self._home.configure, conn)
        state = driver.state(conn)
        if state is DriverState.TRANSACTION and not driver.knows_state:
            await self._call(driver.commit, conn)
        elif state is not DriverState.IDLE:
            raise RuntimeError(
                f"the configure callback left a connection {state.value}: end what it begins, "
                "for example with conn.commit()"
            )

    def _arrive(self, conn: Any, lease: Lease | None, began: float) -> None:
        now = self.clock.monotonic()
        config = self.config
        lifetime = config.base_lifetime + self.clock.random.random() * config.lifetime_jitter
        item: Item[C] = Item(
            conn, born=now, lifetime=lifetime, guard=config.guard_window, lease=lease
        )
        if self.recipe.asynchronous:
            item.at_hand = asyncio.get_running_loop().create_future()
            item.at_hand.set_result(conn)
        self.connect_time += now - began
        self._note_success(began)
        if lease is not None:
            if not lease.live:
                item.doom, item.usable_until = "lease_lost", -math.inf
            lease.on_lost(lambda error: self._lease_lost(item, error))
        with self._lock:
            waiter = self.core.arrived(item, now)
        if len(self.core.items) >= self.core.target:
            self._full.set()
        self._settle(waiter)

    def _lease_lost(self, item: Item[C], error: BaseException) -> None:
        self.recorder.record(self.name, "a connection lost its lease", kind="info", cause=error)
        with self._lock:
            self.core.doom(item, "lease_lost")
        self._settle(None)

    def _settle(self, waiter: Waiter[C] | None) -> None:
        """Carry out what the core decided."""
        if waiter is not None:
            waiter.wake()
        self._sweep()
        self._need.set()
        self._home.note_change()

    async def _undo(self, conn: Any, lease: Lease | None) -> None:
        try:
            if conn is not None:
                await self._close(conn)
        finally:
            if lease is not None:
                await lease.release()

    # -- failing, and succeeding again -----------------------------------------------------------

    def _note_failure(self, stage: str, error: BaseException, began: float) -> None:
        now = self.clock.monotonic()
        self.failures[stage] += 1
        # That the cluster is full is no fault: it is not held against the server.
        denied = isinstance(error, LeaseDenied)
        if self._failing_since is None or (not denied and isinstance(self.last_error, LeaseDenied)):
            self._failing_since = now
        self.last_error = error
        if began >= self._failed_at:
            throttled = meaning_of(error) is Meaning.THROTTLED
            wait = (self._throttled if throttled else self._failing).fail()
            # The attempt that fails when `reconnect_timeout` ends is the one that is reported.
            left = self._failing_since + self._home.reconnect_timeout - now
            wait = left if 0 < left < wait and not (throttled or denied) else wait
            self._failed_at = now
            self._pause_until = now + wait
            text = f"could not open a connection ({stage}); next try in {duration(wait)}"
            self.recorder.record(self.name, text, kind="failure", cause=error)
            log.warning("%s: %s: %s", self.name, text, describe(error))
        if not denied:
            self._tell_if_failing_for_long(now)
        self._unreachable = stage == "connect" and meaning_of(error) is not Meaning.THROTTLED
        if self.unreachable() is not None:
            with self._lock:
                in_vain = self.core.give_up()
            for waiter in in_vain:
                waiter.error = self.unreachable()
                waiter.wake()
        self._need.set()
        self._home.note_change()

    def _note_success(self, began: float) -> None:
        if self._failing_since is not None:
            took = self.clock.monotonic() - self._failing_since
            log.info("%s: connecting again after %s", self.name, duration(took))
            self.recorder.record(self.name, f"connecting again after {duration(took)}")
        self._failing_since = None
        self._told_failed = self._unreachable = False
        # What was on its way when the server said no does not mean that it says yes again.
        if began >= self._failed_at:
            self._failing.succeed()
            self._throttled.succeed()
            self._pause_until = -math.inf

    def _tell_if_failing_for_long(self, now: float) -> None:
        assert self._failing_since is not None
        if self._told_failed or now - self._failing_since < self._home.reconnect_timeout:
            return
        self._told_failed = True
        took = duration(now - self._failing_since)
        log.error("%s: no connection could be opened for %s", self.name, took)
        if (failed := self._home.reconnect_failed) is not None:
            work = self._call_reconnect_failed(failed)
            self._callbacks.start(work, name=f"{self.name}-reconnect-failed")

    async def _call_reconnect_failed(self, failed: Callable[[], Any]) -> None:
        try:
            await self._call(failed)
        except Exception as error:
            log.error("%s: the reconnect_failed callback failed", self.name, exc_info=error)

    def unreachable(self) -> ServerUnreachable | None:
        """What a caller gets instead of waiting, if it is not to wait for a server that is down."""
        core = self.core
        if not (self._home.fail_fast and self._unreachable) or core.items or core.opening:
            return None
        assert self.last_error is not None
        error = ServerUnreachable(f"{self.name}: {describe(self.last_error)}")
        error.__cause__ = self.last_error
        return error

    def tokens_left(self) -> float:
        """How many connections could be opened at once, as far as this process knows."""
        if self.budget is None:
            return float(self.config.burst or self.config.rate)
        return self.budget.rate.left

    @property
    def failing_for(self) -> float | None:
        """Seconds since connecting began to fail; None while it works."""
        if self._failing_since is None:
            return None
        return self.clock.monotonic() - self._failing_since

    # -- closing -------------------------------------------------------------------------------

    async def _bury(self, item: Item[C]) -> None:
        """Close a connection; its lease is given back when it is gone, and not before."""
        try:
            await self._close(item.conn)
        finally:
            try:
                if item.lease is not None:
                    await item.lease.release()
            finally:
                with self._lock:
                    self.core.closed()
                if isinstance(self.last_error, LeaseDenied):
                    # What was refused is there again, for a moment at least.
                    self._pause_until = -math.inf
                self._need.set()
                self._home.note_change()
                await self._leave_when_empty()

    async def _close(self, conn: Any) -> None:
        driver = self.recipe.driver
        try:
            if driver.state(conn) is DriverState.BUSY:
                # The server would go on with the statement, and keep the connection that long.
                await self._call(driver.interrupt, conn, CLOSE_PATIENCE)
        except Exception as error:
            log.info("%s: a statement could not be cancelled: %s", self.name, describe(error))
        try:
            if driver.closes_at_once or self.recipe.asynchronous:
                async with asyncio.timeout(CLOSE_PATIENCE):
                    await awaited(driver.close(conn))
            else:
                await self._call(driver.close, conn)
        except Exception as error:
            log.debug("%s: a connection did not close well: %s", self.name, describe(error))

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call what may block (for users of threads, in a thread) or may have to be awaited."""
        if self.recipe.asynchronous:
            return await awaited(function(*args))
        return await run_callback(function, *args, name=f"{self.name}-callback")

    # -- looking -------------------------------------------------------------------------------

    async def _scan(self, ctx: Context) -> None:
        """The scanner: lets go of what is over, broken, or due to be replaced."""
        ctx.started()
        look_at_all = -math.inf
        while True:
            now = self.clock.monotonic()
            if now >= look_at_all:
                self._find_broken()
                if (after := self._home.leak_after) is not None:
                    warn_of_leaks(self.core, self._lock, after, now, self.name)
                look_at_all = now + self.config.scan_every
            self._full.clear()
            with self._lock:
                due = self.core.scan(now, replacing=self._failing_since is None)
            self._settle(None)
            # When none is missing any more, it is known anew which is replaced when.
            await wait_set(self._full, max(0.0, min(due, look_at_all) - self.clock.monotonic()))

    def _find_broken(self) -> None:
        """Look at those that are ready: what the server has ended is kept for nobody."""
        driver = self.recipe.driver
        with self._lock:
            items = list(self.core.ready)
        now = self.clock.monotonic()
        for item in items:
            with self._lock:
                # Only while nobody uses it: whoever has one looks after it.
                quiet = item.place is Place.READY and now >= item.fresh_until
                if quiet and driver.is_broken(item.conn):
                    self.core.discard(item, "bad")
                    self.lost += 1

    def examine(self, idle: float, patience: float) -> None:
        """Ask all that were ready for so long for a sign of life, at once; from any thread.

        Where one gave none, the others may give none either, as when the net has forgotten them:
        callers should not have to try them one by one.
        """
        now = self.clock.monotonic()
        with self._lock:
            items = [item for item in self.core.ready if now - item.idle_since >= idle]
            for item in items:
                self.core.pick(item, now)

        def begin() -> None:
            for item in items:
                self._tasks.start(self._look_at(item, patience), name=f"{self.name}-check")

        self._on_loop(begin)

    async def _look_at(self, item: Item[C], patience: float) -> None:
        waiter: Waiter[C] | None = None
        try:
            await self._call(self.recipe.driver.ping, item.conn, patience)
        except Exception:
            with self._lock:
                self.core.discard(item, "failed_check")
                self.lost += 1
        else:
            with self._lock:
                waiter = self.core.put(item, self.clock.monotonic())
        self._settle(waiter)


async def wait_set(event: asyncio.Event, seconds: float | None) -> None:
    """Wait until an event is set, or the time is over."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
