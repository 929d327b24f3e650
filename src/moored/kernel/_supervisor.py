"""Supervision: children are started in order, restarted by rule, and stopped in reverse order.

Each operation (starting a child, reacting to its end, restarting it) is a task of its own that
holds a lock. Under `one_for_all` and `rest_for_one`, where siblings depend on each other, the
supervisor has one lock. Under `one_for_one` each child has its own, so that a child that is slow to
start or waits for its backoff delays no sibling. Stopping cancels all operations first, and then
the children, the newest first.

Invariants:

- a child runs at most once at a time, unless it was abandoned, which is counted and reported;
- children start in order, each after the previous one has called `started()`;
- children stop in reverse order, each awaited before the next;
- what a child owned (names, conditions) is free before its next start;
- a caller sees a child's failure only as an exception from `start_child`, `wait` or `async with`,
  or as an event.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self

from ._child import Child, Context, current_context
from ._child_runner import ChildRunner
from ._clock import Clock
from ._errors import (
    BackoffExhausted,
    NotRunning,
    RestartIntensityExceeded,
    RestartRequested,
    StartFailed,
    SupervisionError,
)
from ._ownership import Reason
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
    is_defect,
    wants_restart,
)
from ._tasks import is_cancelled, outliving, start_task
from ._tree import Tree
from ._waiting import patiently
from ._words import describe, duration

__all__ = ["Supervisor"]

log = logging.getLogger("moored.supervisor")


class Supervisor:
    """Keeps children running: starts them in order, restarts them by rule, stops them in reverse.

    Use it as an async context manager, or call `start()` and `stop()`. Leaving the context stops
    the whole tree in order, also if the caller is cancelled, once or several times.

    `intensity` is the number of restarts that are allowed within a number of seconds. At the next
    failure the supervisor stops its children and raises `RestartIntensityExceeded`; None sets no
    limit. Children run in a copy of the context variables that were set where the supervisor was
    made.
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
        #: The error that made the supervisor fail, or None.
        self.error: BaseException | None = None
        #: How many children did not end within their `shutdown` time.
        self.abandoned = 0
        self._since = self.clock.monotonic()
        self._intensity = None if intensity is None else Intensity(*intensity)
        self._to_start = list(children)
        for child in self._to_start:
            self._check_significant(child)
        self._runners: dict[str, ChildRunner] = {}
        # Shared by siblings that depend on each other; under one_for_one each child has its own.
        self._lock = None if self.strategy is Strategy.ONE_FOR_ONE else asyncio.Lock()
        self._operations: dict[asyncio.Task[Any], None] = {}  # in order, so that runs repeat
        self._pending: dict[ChildRunner, asyncio.Task[Any]] = {}
        self._stopping: asyncio.Task[None] | None = None
        self._auto_shut_down = False
        # The callers of wait(); None once the supervisor has ended. An asyncio.Event would take
        # 800 bytes.
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
        """Return the specification of a supervisor as a child; its value is the `Supervisor`.

        `start_timeout` and `shutdown` are infinite by default: its own children have their limits.
        """
        make = partial(
            cls,
            children=tuple(children),
            strategy=strategy,
            intensity=intensity,
            auto_shutdown=auto_shutdown,
        )
        return Child(
            name,
            partial(_run_nested, make),
            restart=restart,
            significant=significant,
            start_timeout=start_timeout,
            shutdown=shutdown,
        )

    # -- public methods ------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the initial children, each after the previous one has called `started()`.

        If one of them does not start, the others are stopped again and `StartFailed` is raised.
        """
        if self.state != "new":
            raise NotRunning(f"{self.path} is {self.state}: make a new Supervisor to start again")
        self._enter("starting")
        try:
            while self._to_start and not self._auto_shut_down:
                runner = ChildRunner(self, self._to_start.pop(0))
                await self._outcome(self._add(runner), runner)
        except BaseException as error:
            await self.stop()
            if not isinstance(error, NotRunning):
                raise
            if not self._auto_shut_down:
                raise self.error or error from None
        if self.state == "starting":
            self._enter("running")

    async def stop(self) -> None:
        """Stop every child, the newest first, and wait for its end; harmless if already stopped.

        If the caller is cancelled meanwhile, the cancellation is raised when all have stopped. A
        call from one of the supervisor's own children does not return: that child is cancelled.
        """
        stopping = self._begin_stop(None)
        if self._caller() is None:
            await patiently(stopping)
        else:
            await asyncio.shield(stopping)

    async def wait(self) -> None:
        """Wait until the supervisor has ended; raises `error` if it failed."""
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
        """Add a child and start it; returns the value that the child passed to `started()`.

        If the child does not start, it is removed and `StartFailed` is raised. If the caller is
        cancelled, the child is stopped before the cancellation is raised. (A caller that is itself
        a child of this supervisor does not wait for that: the operation that stops the caller may
        hold the lock that stopping the child needs.)
        """
        self._check_running(child.name)
        self._check_significant(child)
        self._check_not_starting_itself()
        runner = ChildRunner(self, child)
        operation = self._add(runner)
        try:
            return await self._outcome(operation, runner)
        except asyncio.CancelledError:
            operation.cancel()
            removal = self._operate(self._remove(runner), "stop " + child.name)
            if self._caller() is None:
                await patiently(removal)
            raise

    async def stop_child(self, name: str) -> None:
        """Stop a child and remove it, so that its name is free; harmless if there is none.

        A caller that this supervisor is stopping does not wait for what would wait for the caller:
        the end of the supervisor, or the lock that siblings share.
        """
        runner = self._runners.get(name)
        if runner is None:
            return
        caller = self._caller()
        stopped = caller is not None and caller._stop_by is not None
        if self._stopping is None:
            self._check_not_starting_itself()
            self._interrupt(runner)
            operation = self._operate(self._remove(runner), "stop " + name)
            if stopped and self._lock is not None:
                return
            try:
                await outliving(operation)
                return
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
        if not stopped:
            await self._end()  # the whole supervisor stops, and this child with it

    async def restart_child(self, name: str) -> Any:
        """Stop a child if it runs, and start it again without its siblings; returns its value.

        This does not count as a failure. A child that waits for its backoff is started now. If the
        child does not start, `StartFailed` is raised, and it is restarted by the usual rules.
        """
        self._check_running(name)
        self._check_not_starting_itself()
        runner = self._runners.get(name)
        if runner is None:
            known = ", ".join(self._runners) or "none"
            raise SupervisionError(f"{self.path} has no child {name!r}; it has: {known}")
        self._interrupt(runner)
        return await self._outcome(
            self._operate(self._restart_alone(runner), "restart " + name), runner
        )

    def value(self, name: str) -> Any:
        """Return the value that a child passed to `started()`, or None if it is not running."""
        runner = self._runners.get(name)
        return None if runner is None or runner.state != "running" else runner.value

    def tree(self) -> Tree:
        """Return the current tree as data; `str()` of it is a drawing."""
        return Tree(
            name=self.path.rpartition("/")[2],
            state=self.state,
            since=self.clock.monotonic() - self._since,
            strategy=self.strategy.value,
            last_failure=None if self.error is None else describe(self.error),
            children=tuple(runner.tree() for runner in self._runners.values()),
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
        running = sum(runner.state == "running" for runner in self._runners.values())
        return (
            f"<Supervisor {self.path}: {self.state}, {self.strategy}, "
            f"{running} of {len(self._runners)} children running>"
        )

    # -- operations: each holds the lock of what it touches ------------------------------------

    def _add(self, runner: ChildRunner) -> asyncio.Task[Any]:
        return self._operate(self._start_new(runner), "start " + runner.name)

    async def _start_new(self, runner: ChildRunner) -> Any:
        async with self._holding(runner):
            if runner.name in self._runners:
                raise SupervisionError(
                    f"{self.path} already has a child {runner.name!r}: stop it first, or restart it"
                )
            # Under the lock: otherwise a restart of the group could start this child a second time.
            self._runners[runner.name] = runner
            try:
                return await runner.start()
            except StartFailed:
                self._forget(runner)
                raise

    async def _remove(self, runner: ChildRunner) -> None:
        async with self._holding(runner, interruptible=False):
            await runner.halt()
            self._forget(runner)

    async def _restart_alone(self, runner: ChildRunner) -> Any:
        async with self._holding(runner):
            if self._runners.get(runner.name) is not runner:
                raise SupervisionError(f"{runner.path} was stopped and removed before its restart")
            await runner.halt()
            try:
                return await runner.start()
            except StartFailed as failed:
                self._on_end(runner, failed)
                raise

    async def _outcome(self, operation: asyncio.Task[Any], runner: ChildRunner) -> Any:
        """Wait for an operation that continues if its caller is cancelled."""
        try:
            return await outliving(operation)
        except asyncio.CancelledError:
            if operation.cancelled() and not is_cancelled():
                raise NotRunning(f"{runner.path} was stopped before it had started") from None
            raise

    def _on_end(self, runner: ChildRunner, reason: Reason) -> None:
        if self._stopping is not None:
            return  # every child is being stopped
        self._operate(self._react(runner, runner.generation, reason), "react to " + runner.name)

    async def _react(self, runner: ChildRunner, generation: int, reason: Reason) -> None:
        """React to a child that ended by itself: restart or remove it."""
        async with self._holding(runner):
            if runner.generation != generation or self._runners.get(runner.name) is not runner:
                return  # a sibling's failure or a call has restarted or removed it already
            if wants_restart(runner.child.restart, reason):
                await self._restart(runner, reason)
            else:
                self._finish(runner)

    async def _restart(self, runner: ChildRunner, reason: Reason) -> None:
        while self._may_restart(runner, reason):
            runner.restarts += 1
            names = affected(self.strategy, list(self._runners), runner.name)
            members = [self._runners[name] for name in names]
            for member in reversed(members):
                member.why = runner.why
                await member.halt()
                if member.is_temporary:
                    self._forget(member)
            if not await self._pause(runner, reason):
                return
            try:
                for member in members:
                    if not member.is_temporary:
                        member.why = runner.why
                        await member.start()
                return
            except StartFailed as failed:
                runner, reason = self._runners[failed.child], failed

    def _may_restart(self, runner: ChildRunner, reason: Reason) -> bool:
        now = self.clock.monotonic()
        if self._intensity is None or self._intensity.allows(now, runner.name, reason):
            return True
        causes = self._intensity.causes
        history = "".join(
            f"\n  {duration(now - at)} ago: {who}: {what}" for at, who, what in causes
        )
        error = RestartIntensityExceeded(
            f"{self.path} gave up: {len(causes)} failures within {self._intensity.period:g} s, "
            f"where {self._intensity.limit} restarts are allowed; fix the cause, "
            f"raise intensity=, or give the child a backoff{history}",
            causes,
        )
        error.__cause__ = reason if isinstance(reason, BaseException) else None
        self._fail(error, runner)
        return False

    async def _pause(self, runner: ChildRunner, reason: Reason) -> bool:
        """Wait for the child's backoff; returns False when its attempts are exhausted."""
        delay = 0.0
        if runner.backoff is not None:
            try:
                delay = runner.backoff.fail()
            except BackoffExhausted as error:
                self._fail(error, runner)
                return False
        runner.enter("waiting")
        when = f" in {duration(delay)}" if delay else ""
        text = f"{_ordinal(runner.restarts)} restart{when}"
        # A failed start is an event of its own, with its cause.
        failed = isinstance(reason, BaseException) and not isinstance(reason, StartFailed)
        failure = runner.last_failure if failed else None
        runner.record(text, "restarting", delay=delay, failure=failure)
        if failed and not isinstance(reason, RestartRequested) and not is_defect(reason):
            log.warning("%s failed: %s; %s", runner.path, failure, text)
        if delay:
            await asyncio.sleep(delay)
        return True

    # -- the end of the supervisor -------------------------------------------------------------

    def _finish(self, runner: ChildRunner) -> None:
        """Handle the permanent end of a child, which may end the supervisor."""
        if runner.is_temporary:
            self._forget(runner)
        if runner.child.significant:
            others = self._runners.values()
            left = sum(o.child.significant and o.state != "finished" for o in others)
            left += sum(child.significant for child in self._to_start)
            if ends_supervisor(self.auto_shutdown, left):
                self._auto_shut_down = True
                text = f"shut down because its significant child {runner.name} ended"
                self._record(text, "auto_shutdown")
                self._begin_stop(None)

    def _fail(self, error: BaseException, runner: ChildRunner) -> None:
        log.error("%s", error)
        self._record("gave up", "failure", cause=runner.why or error)
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
        for runner in reversed(list(self._runners.values())):
            await runner.halt()
        self._enter("stopped" if self.error is None else "failed")
        waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            if not waiter.done():
                waiter.set_result(None)

    # -- helpers -------------------------------------------------------------------------------

    def create_task(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start a task with the supervisor's own context variables, not the caller's."""
        return start_task(work, name=name, context=self._variables.copy())

    def _operate(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run an operation as a task that is referenced until it ends."""
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
            self._operations.clear()  # frees the memory of an emptied dict
        if task.cancelled() or isinstance(error := task.exception(), SupervisionError | None):
            return  # the caller of the operation gets the error
        log.error("%s: a defect in the supervisor", self.path, exc_info=error)
        self._begin_stop(error)

    @asynccontextmanager
    async def _holding(
        self, runner: ChildRunner, *, interruptible: bool = True
    ) -> AsyncIterator[None]:
        alone = self.strategy is Strategy.ONE_FOR_ONE
        async with runner.lock:
            if alone and interruptible and (task := asyncio.current_task()) is not None:
                self._pending[runner] = task
            try:
                yield
            finally:
                self._pending.pop(runner, None)

    def _interrupt(self, runner: ChildRunner) -> None:
        """Cancel the pending operation of an independent child: a call overrides its backoff."""
        operation = self._pending.get(runner)
        if operation is not None and runner.state in ("starting", "waiting"):
            operation.cancel()

    def _forget(self, runner: ChildRunner) -> None:
        if self._runners.get(runner.name) is runner:
            del self._runners[runner.name]

    def _enter(self, state: str) -> None:
        self.state, self._since = state, self.clock.monotonic()
        self._record(state, "state")

    def _record(self, text: str, kind: str, cause: Event | BaseException | None = None) -> None:
        self.recorder.record(self.path, text, kind=kind, cause=cause)

    def _caller(self) -> Context | None:
        """Return the child of this supervisor that makes a call, itself or by a child below it."""
        context = current_context.get()
        while context is not None and context.supervisor is not self:
            context = context.supervisor._within
        return context

    def _check_running(self, name: str) -> None:
        if self.state not in ("starting", "running"):
            hint = ": use `async with`, or call start() first" if self.state == "new" else ""
            raise NotRunning(f"{self.path} is {self.state}: cannot start {name!r}{hint}")

    def _check_significant(self, child: Child) -> None:
        if child.significant and self.auto_shutdown is AutoShutdown.NEVER:
            raise ValueError(
                f"{child.name!r} is significant, but {self.path} has auto_shutdown='never': "
                "choose any_significant or all_significant, or remove significant=True"
            )

    def _check_not_starting_itself(self) -> None:
        """Refuse a call from a child that has not started: it would wait for its own lock."""
        context = current_context.get()
        if context is None or context.supervisor is not self or context._ack is None:
            return
        if self.strategy is not Strategy.ONE_FOR_ONE:
            raise SupervisionError(
                f"{context.path} must call ctx.started() before it starts or stops a sibling: "
                "siblings start one after the other"
            )


async def _run_nested(make: Callable[..., Supervisor], ctx: Context) -> None:
    """Run a supervisor as a child, until it ends."""
    ctx._nested = nested = make(ctx.path, recorder=ctx.recorder, clock=ctx.clock)
    async with nested:
        ctx.started(nested)
        await nested._end()  # leaving the block raises the supervisor's error


async def _refuse(path: str) -> None:
    raise NotRunning(f"{path} has stopped")


def _ordinal(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}" + {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
