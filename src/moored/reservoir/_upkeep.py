"""The upkeep of a reservoir: opens connections in advance, checks them, and closes them.

It runs on an event loop: the user's own under asyncio, the library's loop thread for pools for
threads, whose connections are opened and closed in threads.

Opening a connection takes, in this order: a lease, a turn under the rate limit, a token, the
connect. So no turn is used up without a lease; and if a later step fails, the lease is released.
"""

from __future__ import annotations

import asyncio
import logging
import math
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
    patiently,
    run_callback,
    start_task,
)
from moored.leases import Lease

from ._budget import Budget, Destination, LeaseDenied
from ._connect_attempts import ConnectAttempts
from ._core import Waiter
from ._driver import DriverState
from ._errors import ServerUnreachable
from ._item import Item, Place
from ._leaks import warn_of_leaks
from ._sqlstate import Meaning, meaning_of
from ._watch import Watch

if TYPE_CHECKING:
    from ._reservoir import Reservoir

__all__ = ["Upkeep", "wait_set"]

log = logging.getLogger("moored.reservoir")

C = TypeVar("C")

#: For how many seconds a turn under the rate limit is valid; a later connect needs a new turn.
TURN = 0.1
#: How long a close listener, and then the driver, may take to close one connection.
CLOSE_PATIENCE = 5.0


class _NotNeeded(Exception):
    """Raised when a connection that is about to be opened would exceed `max_size`."""


class Upkeep(Generic[C]):
    """Opens, looks after and closes the connections of one core."""

    def __init__(self, home: Reservoir[C]) -> None:
        self._reservoir = home
        # Stored, because the reservoir has others after a fork.
        self.core, self._lock = home.core, home.lock
        self.recipe, self.config, self.clock = home.recipe, home.config, home.clock
        self.recorder, self.name = home.recorder, home.name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._need = asyncio.Event()
        self._full = asyncio.Event()
        self._budget_lock = asyncio.Lock()
        # `stop` cancels connects (`_opening`); it waits for closes, checks and returns (`_tasks`);
        # and it does not wait for `reconnect_failed` (`_callbacks`), which may have called it.
        self._opening, self._tasks, self._callbacks = Tasks(), Tasks(), Tasks()
        self._supervisor: Supervisor | None = None
        self.watch: Watch[C] = Watch(self)
        self.budget: Budget | None = None
        self._destination: Destination | None = None
        self._stopped = False
        self.attempts = ConnectAttempts(
            self.name,
            self.recorder,
            self.clock,
            patience=home.reconnect_timeout,
            quick=home.fail_fast,
        )
        #: Connections that were found to be broken while they were idle.
        self.lost = 0

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the refiller, the scanner and the watch on the running loop."""
        self._loop = asyncio.get_running_loop()
        backoff = Backoff(0.1, 5.0, jitter="half", clock=self.clock)
        self._supervisor = Supervisor(
            self.name,
            children=[
                Child("refiller", self._refill, backoff=backoff.fresh()),
                Child("scanner", self._scan, backoff=backoff.fresh()),
                Child("watch", self.watch.run, backoff=backoff),
            ],
            intensity=None,  # restart them however often they fail
            recorder=self.recorder,
            clock=self.clock,
        )
        # The caller that opens the pool may be cancelled while others wait for it.
        starting = start_task(self._supervisor.start())
        await patiently(starting)
        starting.result()

    async def stop(self, timeout: float) -> int:
        """Cancel connects and close connections; return how many did not close in time."""
        if self._supervisor is not None:
            await self._supervisor.stop()
        for task in self._opening:
            task.cancel()
        self.sweep()
        ends = self.clock.monotonic() + timeout
        # More tasks may start, because connections in use may be returned meanwhile. Slow tasks are
        # not cancelled: a close that never ran would leak its connection and its lease.
        while (left := [*self._opening, *self._tasks]) and (
            patience := ends - self.clock.monotonic()
        ) > 0:
            await asyncio.wait(left, timeout=patience)
        self._stopped = True
        await self._leave_when_empty()
        return len(left)

    async def _leave_when_empty(self) -> None:
        """Leave the budget when the last connection with a lease is closed.

        Connections that are in use, or still being opened, when the pool is closed hold their
        leases until then.
        """
        budget = self.budget
        held = self.config.lease_enabled and self.core.size
        if budget is not None and self._stopped and not held:
            self.budget = None
            await budget.leave()

    def nudge(self) -> None:
        """Wake the refiller, because a connection may be needed; from any thread."""
        self._on_loop(self._need.set)

    def sweep(self) -> None:
        """Close the connections that the core has retired; from any thread, without its lock."""
        if self.core.retired:
            self._on_loop(self._sweep)

    def _on_loop(self, call: Callable[[], None]) -> None:
        if self._loop is not None and self._loop is asyncio._get_running_loop():
            call()
        else:
            self.later(call)

    def later(self, call: Callable[[], object]) -> None:
        """Call a function on the loop soon; from any thread, without taking a lock."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and its connections with it
                self._loop.call_soon_threadsafe(call)

    def _sweep(self) -> None:
        with self._lock:
            retired = self.core.retired.copy()
            self.core.retired.clear()
        for item in retired:
            self._tasks.start(self._close_item(item), name=f"{self.name}-close")

    async def shielded(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work that continues if the caller is cancelled, and that `stop` waits for."""
        await asyncio.shield(self._tasks.start(work, name=f"{self.name}-return"))

    # -- opening -------------------------------------------------------------------------------

    async def _refill(self, ctx: Context) -> None:
        """Run the refiller: open as many connections as the core plans, with a backoff."""
        ctx.started()
        await self._stagger()
        while True:
            self._need.clear()
            pause = self.attempts.pause
            if pause <= 0:
                with self._lock:
                    number = self.core.plan()
                for _ in range(number):
                    self._opening.start(self._open(), name=f"{self.name}-open")
                if number:
                    continue
            await wait_set(self._need, pause if pause > 0 else None)

    async def _stagger(self) -> None:
        """Open the first connection now, and delay the others by a random time.

        So processes that start together do not connect together. A waiting caller ends the delay.
        """
        if not self.config.enabled or self.core.births or self.core.opening:
            return
        with self._lock:
            one = self.core.plan()
            # The rest of the batch is opened after the delay.
            self.core.opening -= max(0, one - 1)
        if one:
            self._opening.start(self._open(), name=f"{self.name}-open")
        ends = self.clock.monotonic() + self.clock.random.random() * self.config.stagger
        while (left := ends - self.clock.monotonic()) > 0 and not self.core.waiting:
            self._need.clear()
            await wait_set(self._need, left)

    async def _open(self) -> None:
        """Open one connection: lease, rate limit, token, connect, configure."""
        began = self.clock.monotonic()
        stage = "connect"  # the endpoint may come from a user's conninfo function, which may fail
        lease: Lease | None = None
        conn: Any = None
        try:
            endpoint = await self._endpoint()
            stage = "lease"
            budget = await self._budget(endpoint)
            async with budget.slots:
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
            try:
                await self._close_and_release(conn, lease)
            finally:
                with self._lock:
                    self.core.failed()
                await self._leave_when_empty()
            if isinstance(error, asyncio.CancelledError):
                raise
            if isinstance(error, _NotNeeded):
                self._need.set()
            else:
                self._note_failure(stage, error, began)
        else:
            self._arrive(conn, lease, began)

    async def turn_apart(self) -> str | None:
        """Wait for the token and then the turn of a connection that does not belong to the pool."""
        assert self.budget is not None
        token = None if self.recipe.tokens is None else await self.recipe.tokens.get()
        await self.budget.turn()
        return token

    async def ask_apart(self, token: str | None, patience: float) -> None:
        """Query the server on such a connection."""
        conn = await self.recipe.connect_in_time(token, self._close)
        try:
            await self._call(self.recipe.driver.ping, conn, patience)
        finally:
            self._tasks.start(self._close(conn), name=f"{self.name}-close")

    def start_opening(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run work that `stop` cancels."""
        self._opening.start(work, name=f"{self.name}-{name}")

    def note_change(self) -> None:
        """Wake the tasks that wait for a change of the reservoir."""
        self._reservoir.note_change()

    def _check_wanted(self) -> None:
        """Raise `_NotNeeded` if the pool was resized while this connect waited for its turn."""
        with self._lock:
            if self.core.overfull:
                raise _NotNeeded

    async def _endpoint(self) -> Destination:
        async with self._budget_lock:
            if self._destination is None:
                self._destination = await self.recipe.endpoint()
            return self._destination

    async def _budget(self, endpoint: Destination) -> Budget:
        async with self._budget_lock:
            if self.budget is None:
                budget = Budget.of(endpoint, self._reservoir)
                await budget.enter()
                self.budget = budget
            return self.budget

    async def _token(self, budget: Budget) -> str | None:
        if self.recipe.tokens is None:
            return None
        began = self.clock.monotonic()
        token = await self.recipe.tokens.get()
        if self.clock.monotonic() - began > TURN:
            # All connects that waited for this token have had their turns, and would run together.
            await budget.turn()
        return token

    async def _connect(self, budget: Budget, token: str | None) -> Any:
        try:
            return await self.recipe.connect_in_time(token, self._close)
        except Exception as error:
            tokens = self.recipe.tokens
            if tokens is None or token is None or meaning_of(error) is not Meaning.UNAUTHORIZED:
                raise
            # The token may have expired: try once more with a new one, and with another turn,
            # because the rate limit counts each connect.
            tokens.reject(token)
            again = await tokens.get()
            if again == token:
                raise
            log.warning("%s: the server rejected a token (%s): trying a new one", self.name, error)
            await budget.turn()
            return await self.recipe.connect_in_time(again, self._close)

    async def _prepare(self, conn: Any) -> None:
        driver = self.recipe.driver
        driver.set_pool(conn, self._reservoir.owner)
        if self._reservoir.configure is None:
            return
        await self._call(self._reservoir.configure, conn)
        state = driver.state(conn)
        if state is DriverState.TRANSACTION and not driver.knows_state:
            await self._call(driver.commit, conn)
        elif state is not DriverState.IDLE:
            raise RuntimeError(
                f"the configure callback left a connection {state.value}: end its transaction "
                "there, for example with conn.commit()"
            )

    def _arrive(self, conn: Any, lease: Lease | None, began: float) -> None:
        now = self.clock.monotonic()
        config = self.config
        lifetime = config.base_lifetime + self.clock.random.random() * config.lifetime_jitter
        item: Item[C] = Item(
            conn, born=now, lifetime=lifetime, guard=config.guard_window, lease=lease
        )
        if self.recipe.asynchronous:
            item.ready_future = asyncio.get_running_loop().create_future()
            item.ready_future.set_result(conn)
        self.attempts.succeeded(began)
        self.watch.answered()
        if lease is not None:
            if not lease.live:
                item.retire_reason, item.usable_until = "lease_lost", -math.inf
            lease.on_lost(lambda error: self._lease_lost(item, error))
        with self._lock:
            waiter = self.core.arrived(item, now)
        if len(self.core.items) >= self.core.target:
            self._full.set()
        self._settle(waiter)

    def _lease_lost(self, item: Item[C], error: BaseException) -> None:
        self.recorder.record(self.name, "a connection lost its lease", kind="info", cause=error)
        with self._lock:
            self.core.retire(item, "lease_lost")
        self._settle(None)

    def _settle(self, waiter: Waiter[C] | None) -> None:
        """Wake the waiter that was served, close retired connections, and wake the refiller."""
        if waiter is not None:
            waiter.wake()
        self._sweep()
        self._need.set()
        self._reservoir.note_change()

    async def _close_and_release(self, conn: Any, lease: Lease | None) -> None:
        try:
            if conn is not None:
                await self._close(conn)
        finally:
            if lease is not None:
                try:
                    await lease.release()
                except Exception as error:  # the lease client tries again, or lets it expire
                    log.warning("%s: releasing a lease failed: %s", self.name, describe(error))

    # -- failures and recovery -------------------------------------------------------------------

    def _note_failure(self, stage: str, error: BaseException, began: float) -> None:
        exceeded = self.attempts.failed(stage, error, began)
        if exceeded and (failed := self._reservoir.reconnect_failed) is not None:
            work = self._call_reconnect_failed(failed)
            self._callbacks.start(work, name=f"{self.name}-reconnect-failed")
        if self.unreachable() is not None:
            with self._lock:
                refused = self.core.give_up()
            for waiter in refused:
                waiter.error = self.unreachable()
                waiter.wake()
        self._need.set()
        self._reservoir.note_change()

    async def _call_reconnect_failed(self, failed: Callable[[], Any]) -> None:
        try:
            await self._call(failed)
        except Exception as error:
            log.error("%s: the reconnect_failed callback failed", self.name, exc_info=error)

    def unreachable(self) -> ServerUnreachable | None:
        """The error for callers that must not wait for an unreachable server (`fail_fast`)."""
        core, cause = self.core, self.attempts.error
        if not (self._reservoir.fail_fast and self.attempts.unreachable) or cause is None:
            return None
        if core.items or core.opening:
            return None
        error = ServerUnreachable(f"{self.name}: {describe(cause)}")
        error.__cause__ = cause
        return error

    def tokens_left(self) -> float:
        """How many connections the rate limit allows now, as far as this process knows."""
        if self.budget is None:
            return float(self.config.burst or self.config.rate)
        return self.budget.rate.left

    # -- closing -------------------------------------------------------------------------------

    async def _close_item(self, item: Item[C]) -> None:
        """Close a connection, and then release its lease."""
        try:
            try:
                await self._report_close(item)
            finally:
                await self._close_and_release(item.conn, item.lease)
        finally:
            with self._lock:
                self.core.closed()
            if isinstance(self.attempts.last_error, LeaseDenied):
                # A lease is free now: try to get it before another process does.
                self.attempts.end_pause()
            self._need.set()
            self._reservoir.note_change()
            await self._leave_when_empty()

    async def _report_close(self, item: Item[C]) -> None:
        """Call the close listener, which may wait for a connection that is dead."""
        limit = asyncio.timeout(CLOSE_PATIENCE)
        try:
            if (report := self._reservoir.on_close(item)) is not None:
                async with limit:
                    await self._call(report)
        except Exception as error:
            late = f"it did not end within {CLOSE_PATIENCE:g} s"
            why = late if limit.expired() else describe(error)
            log.error("%s: a close listener failed: %s", self.name, why, exc_info=error)

    async def _close(self, conn: Any) -> None:
        driver = self.recipe.driver
        try:
            if driver.state(conn) is DriverState.BUSY:
                # The server would keep the session until the statement has ended.
                await self._call(driver.interrupt, conn, CLOSE_PATIENCE)
        except Exception as error:
            log.info("%s: cancelling a statement failed: %s", self.name, describe(error))
        try:
            if driver.closes_at_once or self.recipe.asynchronous:
                async with asyncio.timeout(CLOSE_PATIENCE):
                    await awaited(driver.close(conn))
            else:
                await self._call(driver.close, conn)
        except Exception as error:
            log.debug("%s: closing a connection failed: %s", self.name, describe(error))

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a plain or async function; in a pool for threads, call it in a thread."""
        if self.recipe.asynchronous:
            return await awaited(function(*args))
        return await run_callback(function, *args, name=f"{self.name}-callback")

    # -- checks --------------------------------------------------------------------------------

    async def _scan(self, ctx: Context) -> None:
        """Run the scanner: retire expired, broken, surplus and due connections."""
        ctx.started()
        next_check = -math.inf
        while True:
            now = self.clock.monotonic()
            if now >= next_check:
                self._find_broken()
                if (after := self._reservoir.leak_after) is not None:
                    warn_of_leaks(self.core, self._lock, after, now, self.name)
                next_check = now + self.config.scan_every
            self._full.clear()
            with self._lock:
                due = self.core.scan(now, replacing=self.attempts.error is None)
            self._settle(None)
            # When the reservoir is full again, the next replacement is scheduled anew.
            await wait_set(self._full, max(0.0, min(due, next_check) - self.clock.monotonic()))

    def _find_broken(self) -> None:
        """Discard ready connections whose sockets the server has closed."""
        with self._lock:
            items = list(self.core.ready)
        now = self.clock.monotonic()
        for item in items:
            with self._lock:
                # Another thread may have taken the connection since, and may be using it.
                idle = item.place is Place.READY and now >= item.fresh_until
                if idle and self._reservoir.is_broken(item.conn):
                    self.core.discard(item, "bad")
                    self.lost += 1

    def ping_idle(self, idle: float, patience: float) -> None:
        """Ping all connections that were idle for this many seconds, at once; from any thread.

        If one did not answer, the others may not either, for example because a firewall dropped
        them: callers should not have to find that out one by one.
        """
        now = self.clock.monotonic()
        with self._lock:
            items = [item for item in self.core.ready if now - item.idle_since >= idle]
            for item in items:
                self.core.pick(item, now)

        def begin() -> None:
            for item in items:
                self._tasks.start(self.ping_item(item, patience), name=f"{self.name}-check")

        self._on_loop(begin)

    async def ping_all(self, patience: float) -> None:
        """Ping every ready connection, one after the other, and replace those that fail."""
        with self._lock:
            ready = list(self.core.ready)
        for item in ready:
            with self._lock:
                picked = self.core.pick(item, self.clock.monotonic())
            if picked:
                await self.ping_item(item, patience)

    def pick_ready(self) -> Item[C] | None:
        """Take a ready connection, to ping it."""
        with self._lock:
            item = next(iter(self.core.ready), None)
            if item is not None:
                self.core.pick(item, self.clock.monotonic())
        return item

    async def ping_item(self, item: Item[C], patience: float) -> bool:
        """Ping a connection that was picked, keep or replace it; return whether it answered."""
        waiter: Waiter[C] | None = None
        try:
            await self._call(self.recipe.driver.ping, item.conn, patience)
        except BaseException as error:
            with self._lock:
                self.core.discard(item, "failed_check")
                self.lost += 1
            if not isinstance(error, Exception):
                raise
            return False
        else:
            with self._lock:
                waiter = self.core.put(item, self.clock.monotonic())
            return True
        finally:
            self._settle(waiter)


async def wait_set(event: asyncio.Event, seconds: float | None) -> None:
    """Wait until an event is set, for this many seconds at most."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
