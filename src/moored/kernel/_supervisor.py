"""Supervision: children are started in order, restarted by rule, and stopped in reverse order.

How it works. Each operation (starting a child, reacting to its end, restarting) is a task of its
own that holds a lock: one lock for the whole supervisor where siblings depend on each other
(`one_for_all`, `rest_for_one`), one for each child where they do not (`one_for_one`), so that
there a child that is slow to start or waits for its backoff holds up nobody. Stopping ends all
operations first, and then the children, the newest first.

Invariants:

- a child runs at most once at a time, unless it was abandoned, which is counted and reported;
- children start in order, each after the one before it has called `started()`;
- children stop in reverse order, each awaited before the next;
- what a child owned (names, conditions) is free before its next start;
- a child's failure reaches the caller only as a failed await (`start_child`, `wait`) or an event.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, Self

from ._child import Child, Context, current_context
from ._clock import Clock
from ._errors import (
    BackoffExhausted,
    NotRunning,
    RestartIntensityExceeded,
    StartFailed,
    SupervisionError,
)
from ._life import Life
from ._ownership import Reason
from ._patience import patiently
from ._recorder import Event, Recorder
from ._rules import (
    AutoShutdown,
    AutoShutdownName,
    Intensity,
    Restart,
    RestartName,
    Strategy,
    StrategyName,
    affected,
    ends_supervisor,
    wants_restart,
)
from ._tasks import start_task
from ._tree import Tree
from ._words import describe, duration

__all__ = ["Supervisor"]

log = logging.getLogger("moored.supervisor")


class Supervisor:
    """Keeps children running: starts them in order, restarts them by rule, stops them in reverse.

    Use it as an async context manager, or call `start()` and `stop()`. Leaving the context, also by
    being cancelled (once or more), stops the whole tree in order.

    `intensity` is how many restarts are allowed within how many seconds, before the supervisor
    gives up and fails upward; None never gives up. Children run in a copy of the context variables
    that were set where the supervisor was made.
    """

    def __init__(
        self,
        name: str = "root",
        *,
        strategy: Strategy | StrategyName = Strategy.ONE_FOR_ONE,
        children: Iterable[Child] = (),
        intensity: tuple[int, float] | None = (3, 5.0),
        auto_shutdown: AutoShutdown | AutoShutdownName = AutoShutdown.NEVER,
        recorder: Recorder | None = None,
        clock: Clock | None = None,
    ) -> None:
        #: The names from the root down.
        self.path = name
        self.strategy = Strategy(strategy)
        self.auto_shutdown = AutoShutdown(auto_shutdown)
        self.clock = clock or Clock.current()
        self.recorder = recorder or Recorder(clock=self.clock)
        #: "new", "starting", "running", "stopping", "stopped" or "failed".
        self.state = "new"
        #: Why it failed, when it did.
        self.error: BaseException | None = None
        #: How many children did not end in their time and were left behind.
        self.abandoned = 0
        self._since = self.clock.monotonic()
        self._intensity = None if intensity is None else Intensity(*intensity)
        self._to_start = list(children)
        for child in self._to_start:
            self._check_significant(child)
        self._lives: dict[str, Life] = {}
        # For siblings that depend on each other; where they do not, each child has its own.
        self._lock = None if self.strategy is Strategy.ONE_FOR_ONE else asyncio.Lock()
        self._operations: dict[asyncio.Task[Any], None] = {}  # in order, so that runs repeat
        self._pending: dict[Life, asyncio.Task[Any]] = {}
        self._stopping: asyncio.Task[None] | None = None
        self._has_ended_itself = False
        # Who waits for its end; None when it has come. (An asyncio.Event takes 800 bytes.)
        self._waiters: list[asyncio.Future[None]] | None = []
        self._within = current_context.get()
        self._variables = contextvars.copy_context()

    @classmethod
    def child(
        cls,
        name: str,
        *,
        children: Iterable[Child] = (),
        strategy: Strategy | StrategyName = Strategy.ONE_FOR_ONE,
        intensity: tuple[int, float] | None = (3, 5.0),
        auto_shutdown: AutoShutdown | AutoShutdownName = AutoShutdown.NEVER,
        restart: Restart | RestartName = Restart.PERMANENT,
        significant: bool = False,
        start_timeout: float = math.inf,
        shutdown: float = math.inf,
    ) -> Child:
        """A supervisor as the child of another one; its value is the `Supervisor` itself.

        Both times are endless by default, because its own children have theirs.
        """
        nested = _Nested(cls, tuple(children), strategy, intensity, auto_shutdown)
        return Child(
            name,
            nested.run,
            restart=restart,
            significant=significant,
            start_timeout=start_timeout,
            shutdown=shutdown,
        )

    # -- what users call -----------------------------------------------------------------------

    async def start(self) -> None:
        """Start the initial children, each after the one before it is up.

        When one of them does not start, the others are stopped again and `StartFailed` is raised.
        """
        if self.state != "new":
            raise NotRunning(f"{self.path} is {self.state}: make a new Supervisor to start again")
        self._enter("starting")
        try:
            while self._to_start and not self._has_ended_itself:
                life = Life(self, self._to_start.pop(0))
                await self._outcome(self._add(life), life)
        except BaseException as error:
            await self.stop()
            if not isinstance(error, NotRunning):
                raise
            if not self._has_ended_itself:
                raise self.error or error from None
        if self.state == "starting":
            self._enter("running")

    async def stop(self) -> None:
        """Stop every child, the newest first, and wait for it; harmless when it has stopped.

        Being cancelled while waiting does not cut it short: the cancellation is raised afterwards.
        Called by one of its own children, it is as if that child were cancelled.
        """
        stopping = self._begin_stop(None)
        if self._runs_caller():
            await asyncio.shield(stopping)
        else:
            await patiently(stopping)

    async def wait(self) -> None:
        """Wait until the supervisor has ended; raises what made it fail, if it failed."""
        await self._end()
        if self.error is not None:
            raise self.error

    async def _end(self) -> None:
        if self._waiters is not None:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                if self._waiters is not None:
                    self._waiters.remove(waiter)

    async def start_child(self, child: Child) -> Any:
        """Add a child and start it; returns what it gave to `started()`.

        Raises `StartFailed` when it does not start; it is then forgotten. When the caller is
        cancelled, the child is stopped before the cancellation goes on (a caller that is itself a
        child here cannot wait for that: whoever stops it may hold what the stopping needs).
        """
        self._check_running(child.name)
        self._check_significant(child)
        self._check_not_starting_itself()
        life = Life(self, child)
        operation = self._add(life)
        try:
            return await asyncio.shield(operation)
        except asyncio.CancelledError:
            if operation.cancelled() and not _cancelling():
                raise self._stopped(life) from None
            operation.cancel()
            removal = self._operate(self._remove(life), "stop " + child.name)
            if not self._runs_caller():
                await patiently(removal)
            raise

    async def stop_child(self, name: str) -> None:
        """Stop a child and forget it; its name is free afterwards. Harmless when there is none."""
        life = self._lives.get(name)
        if life is None:
            return
        if self._stopping is None:
            self._check_not_starting_itself()
            self._interrupt(life)
            operation = self._operate(self._remove(life), "stop " + name)
            try:
                await asyncio.shield(operation)
                return
            except asyncio.CancelledError:
                if _cancelling():
                    raise
        await self._end()  # the whole supervisor stops, and this child with it

    async def restart_child(self, name: str) -> Any:
        """Stop a child if it runs and start it again, alone; returns what it gave to `started()`.

        It does not count as a failure. A child that waits for its backoff is started now. When it
        does not start, `StartFailed` is raised, and it is restarted by the usual rules.
        """
        self._check_running(name)
        self._check_not_starting_itself()
        life = self._lives.get(name)
        if life is None:
            known = ", ".join(self._lives) or "none"
            raise SupervisionError(f"{self.path} has no child {name!r}; it has: {known}")
        self._interrupt(life)
        return await self._outcome(
            self._operate(self._restart_alone(life), "restart " + name), life
        )

    def value(self, name: str) -> Any:
        """What a child gave to `started()` at its newest start, or None while it is not running."""
        life = self._lives.get(name)
        return None if life is None or life.state != "running" else life.value

    def tree(self) -> Tree:
        """The current tree as data; printed, as text."""
        return Tree(
            name=self.path.rpartition("/")[2],
            state=self.state,
            since=self.clock.monotonic() - self._since,
            strategy=self.strategy.value,
            last_failure=None if self.error is None else describe(self.error),
            children=tuple(life.tree() for life in self._lives.values()),
        )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self.stop()
        if self.error is None or self.error is error:
            return
        if error is None:
            raise self.error
        error.add_note(f"meanwhile {self.path} failed: {describe(self.error)}")

    def __repr__(self) -> str:
        running = sum(life.state == "running" for life in self._lives.values())
        return (
            f"<Supervisor {self.path}: {self.state}, {self.strategy}, "
            f"{running} of {len(self._lives)} children running>"
        )

    # -- operations: each holds the lock of what it touches ------------------------------------

    def _add(self, life: Life) -> asyncio.Task[Any]:
        return self._operate(self._start_new(life), "start " + life.name)

    async def _start_new(self, life: Life) -> Any:
        async with self._holding(life):
            if life.name in self._lives:
                raise SupervisionError(
                    f"{self.path} has a child {life.name!r} already: stop it first, or restart it"
                )
            # Only now, under the lock: a restart of the group must not start it a second time.
            self._lives[life.name] = life
            try:
                return await life.start()
            except StartFailed:
                self._forget(life)
                raise

    async def _remove(self, life: Life) -> None:
        async with self._holding(life, interruptible=False):
            await life.halt()
            self._forget(life)

    async def _restart_alone(self, life: Life) -> Any:
        async with self._holding(life):
            if self._lives.get(life.name) is not life:
                raise SupervisionError(f"{life.path} was stopped and forgotten meanwhile")
            await life.halt()
            try:
                return await life.start()
            except StartFailed as failed:
                self._on_end(life, failed)
                raise

    async def _outcome(self, operation: asyncio.Task[Any], life: Life) -> Any:
        """Wait for an operation that goes on when its caller is cancelled."""
        try:
            return await asyncio.shield(operation)
        except asyncio.CancelledError:
            if operation.cancelled() and not _cancelling():
                raise self._stopped(life) from None
            raise

    def _stopped(self, life: Life) -> NotRunning:
        return NotRunning(f"{life.path} was stopped before it was up")

    def _on_end(self, life: Life, reason: Reason) -> None:
        if self._stopping is not None:
            return  # it is all the same now
        self._operate(self._react(life, life.generation, reason), "react to " + life.name)

    async def _react(self, life: Life, generation: int, reason: Reason) -> None:
        """React to a child that ended by itself: restart or remove it."""
        async with self._holding(life):
            if life.generation != generation or self._lives.get(life.name) is not life:
                return  # a sibling's failure, or a user, has dealt with it already
            if wants_restart(life.child.restart, reason):
                await self._restart(life, reason)
            else:
                self._let_go(life)

    async def _restart(self, life: Life, reason: Reason) -> None:
        while self._may_restart(life, reason):
            life.restarts += 1
            names = affected(self.strategy, list(self._lives), life.name)
            members = [self._lives[name] for name in names]
            for member in reversed(members):
                member.why = life.why
                await member.halt()
                if member.is_temporary:
                    self._forget(member)
            if not await self._pause(life):
                return
            try:
                for member in members:
                    if not member.is_temporary:
                        member.why = life.why
                        await member.start()
                return
            except StartFailed as failed:
                life, reason = self._lives[failed.child], failed

    def _may_restart(self, life: Life, reason: Reason) -> bool:
        now = self.clock.monotonic()
        if self._intensity is None or self._intensity.allows(now, life.name, reason):
            return True
        causes = self._intensity.causes
        history = "".join(
            f"\n  {duration(now - at)} ago: {who}: {what}" for at, who, what in causes
        )
        error = RestartIntensityExceeded(
            f"{self.path} gave up: {len(causes)} failures within {self._intensity.period:g} s, "
            f"where {self._intensity.limit} restarts are allowed; mend the cause, "
            f"raise intensity=, or give the child a backoff{history}",
            causes,
        )
        error.__cause__ = reason if isinstance(reason, BaseException) else None
        self._fail(error, life)
        return False

    async def _pause(self, life: Life) -> bool:
        """Wait for the child's backoff; returns False when its attempts are exhausted."""
        delay = 0.0
        if life.backoff is not None:
            try:
                delay = life.backoff.fail()
            except BackoffExhausted as error:
                self._fail(error, life)
                return False
        life.enter("waiting")
        when = f" in {duration(delay)}" if delay else ""
        life.record(f"{_ordinal(life.restarts)} restart{when}", "restarting")
        if delay:
            await asyncio.sleep(delay)
        return True

    # -- its own end ---------------------------------------------------------------------------

    def _let_go(self, life: Life) -> None:
        """Remove a child that is not restarted."""
        if life.is_temporary:
            self._forget(life)
        if life.child.significant:
            others = self._lives.values()
            left = sum(o.child.significant and o.state != "finished" for o in others)
            left += sum(child.significant for child in self._to_start)
            if ends_supervisor(self.auto_shutdown, left):
                self._has_ended_itself = True
                self._record(f"ends because its significant child {life.name} has", "auto_shutdown")
                self._begin_stop(None)

    def _fail(self, error: BaseException, life: Life) -> None:
        log.error("%s", error)
        self._record("gave up", "failure", cause=life.why or error)
        self._begin_stop(error)

    def _begin_stop(self, error: BaseException | None) -> asyncio.Task[None]:
        if self._stopping is None:
            self._enter("stopping")
            self.error = error
            self._stopping = self.create_task(self._stop_all(), f"{self.path}: stop")
        return self._stopping

    async def _stop_all(self) -> None:
        operations = list(self._operations)
        for operation in operations:
            operation.cancel()
        if operations:
            await asyncio.wait(operations)
        for life in reversed(list(self._lives.values())):
            await life.halt()
        self._enter("stopped" if self.error is None else "failed")
        waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            if not waiter.done():
                waiter.set_result(None)

    # -- small things --------------------------------------------------------------------------

    def create_task(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start a task with the supervisor's own context variables, not the caller's."""
        return start_task(work, name=name, context=self._variables.copy())

    def _operate(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run an operation as a task that is held until it ends, and whose failure is read."""
        if self._stopping is not None:
            work.close()
            work = _refuse(self.path)
        task = self.create_task(work, f"{self.path}: {name}")
        self._operations[task] = None
        task.add_done_callback(self._operation_ended)
        return task

    def _operation_ended(self, task: asyncio.Task[Any]) -> None:
        self._operations.pop(task, None)
        if not self._operations:
            self._operations.clear()  # which gives back the room that it took
        if task.cancelled() or isinstance(error := task.exception(), SupervisionError | None):
            return  # its caller has been told, or there is nothing to tell
        log.error("%s: a defect in the supervisor", self.path, exc_info=error)
        self._begin_stop(error)

    @asynccontextmanager
    async def _holding(self, life: Life, *, interruptible: bool = True) -> AsyncIterator[None]:
        alone = self.strategy is Strategy.ONE_FOR_ONE
        async with life.lock:
            if alone and interruptible and (task := asyncio.current_task()) is not None:
                self._pending[life] = task
            try:
                yield
            finally:
                self._pending.pop(life, None)

    def _interrupt(self, life: Life) -> None:
        """Cancel the pending operation of an independent child: a call overrides its backoff."""
        operation = self._pending.get(life)
        if operation is not None and life.state in ("starting", "waiting"):
            operation.cancel()

    def _forget(self, life: Life) -> None:
        if self._lives.get(life.name) is life:
            del self._lives[life.name]

    def _enter(self, state: str) -> None:
        self.state, self._since = state, self.clock.monotonic()
        self._record(state, "state")

    def _record(self, text: str, kind: str, cause: Event | BaseException | None = None) -> None:
        self.recorder.record(self.path, text, kind=kind, cause=cause)

    def _runs_caller(self) -> bool:
        context = current_context.get()
        while context is not None and context.supervisor is not self:
            context = context.supervisor._within
        return context is not None

    def _check_running(self, name: str) -> None:
        if self.state not in ("starting", "running"):
            hint = ": use `async with`, or call start() first" if self.state == "new" else ""
            raise NotRunning(f"{self.path} is {self.state}, so it cannot start {name!r}{hint}")

    def _check_significant(self, child: Child) -> None:
        if child.significant and self.auto_shutdown is AutoShutdown.NEVER:
            raise ValueError(
                f"{child.name!r} is significant, but {self.path} has auto_shutdown='never': "
                "choose any_significant or all_significant, or take the mark away"
            )

    def _check_not_starting_itself(self) -> None:
        """Where siblings share a lock, a child that is not up yet would wait for itself."""
        context = current_context.get()
        if context is None or context.supervisor is not self or context._ack is None:
            return
        if self.strategy is not Strategy.ONE_FOR_ONE:
            raise SupervisionError(
                f"{context.path} must call ctx.started() before it starts or stops a sibling: "
                "siblings start one after the other"
            )


class _Nested:
    """Runs a supervisor as a child; with slots, because there may be thousands."""

    __slots__ = ("_auto_shutdown", "_children", "_intensity", "_kind", "_strategy")

    def __init__(
        self,
        kind: type[Supervisor],
        children: tuple[Child, ...],
        strategy: Strategy | StrategyName,
        intensity: tuple[int, float] | None,
        auto_shutdown: AutoShutdown | AutoShutdownName,
    ) -> None:
        self._kind = kind
        self._children = children
        self._strategy = strategy
        self._intensity = intensity
        self._auto_shutdown = auto_shutdown

    async def run(self, ctx: Context) -> None:
        """Run the nested supervisor until it ends."""
        nested = self._kind(
            ctx.path,
            strategy=self._strategy,
            children=self._children,
            intensity=self._intensity,
            auto_shutdown=self._auto_shutdown,
            recorder=ctx.recorder,
            clock=ctx.clock,
        )
        ctx._nested = nested
        async with nested:
            ctx.started(nested)
            await nested._end()  # leaving the block raises what made it fail


def _cancelling() -> bool:
    """Whether the running task has been cancelled itself, and not only what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _refuse(path: str) -> None:
    raise NotRunning(f"{path} has stopped")


def _ordinal(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}" + {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
