"""Runs one child: starts it and waits for `started()`, cancels it and waits for its end.

`ChildRunner` knows nothing of siblings or strategies. It reports to its supervisor when the child
ends by itself, and the supervisor decides what follows.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ._child import Child, Context, current_context
from ._errors import RestartRequested, StartFailed, SupervisionError
from ._loop_end import unless_loop_ends
from ._ownership import Reason, adopt, reason_of
from ._recorder import Event
from ._rules import Restart, is_defect, wants_restart
from ._secrets import SECRETS
from ._tree import Tree
from ._words import describe

if TYPE_CHECKING:
    from ._backoff import Backoff
    from ._supervisor import Supervisor

__all__ = ["ChildRunner"]

log = logging.getLogger("moored.supervisor")
log.addFilter(SECRETS.hide_in_traceback)

# Tasks that did not end when cancelled, referenced until they end: the loop holds them weakly.
_abandoned: set[asyncio.Task[None]] = set()


@dataclass(slots=True, eq=False, repr=False)
class ChildRunner:
    """One child of a supervisor, through all its starts."""

    supervisor: Supervisor
    child: Child
    generation: int = 0
    restarts: int = 0
    value: Any = None
    last_failure: str | None = None
    #: The cause of the next event of this child.
    why: Event | BaseException | None = None
    name: str = field(init=False)
    path: str = field(init=False)
    is_temporary: bool = field(init=False)
    backoff: Backoff | None = field(init=False)
    #: Held by each operation on this child: its own lock, or the one that all siblings share.
    lock: asyncio.Lock = field(init=False)
    state: str = field(init=False)
    since: float = field(init=False)
    _task: asyncio.Task[None] | None = None
    _context: Context | None = None

    def __post_init__(self) -> None:
        self.name = self.child.name
        self.path = f"{self.supervisor.path}/{self.name}"
        self.is_temporary = self.child.restart == Restart.TEMPORARY
        self.backoff = None if self.child.backoff is None else self.child.backoff.fresh()
        self.lock = self.supervisor._lock or asyncio.Lock()
        self.enter("starting")

    def enter(self, state: str) -> None:
        """Enter a state."""
        self.state = state
        self.since = self.supervisor.clock.monotonic()

    def record(
        self, text: str, kind: str, *, cause: BaseException | None = None, **data: Any
    ) -> None:
        """Record an event of this child, which becomes the cause of the next one."""
        self.why = self.supervisor.recorder.record(
            self.path, text, kind=kind, cause=cause or self.why, generation=self.generation, **data
        )

    # -- starting ------------------------------------------------------------------------------

    async def start(self) -> Any:
        """Run the child and wait for its `started()`; raises `StartFailed`."""
        context = self._run()
        assert context._ack is not None
        limit = self.child.start_timeout
        try:
            async with asyncio.timeout(None if limit == math.inf else limit):
                # Shielded: if the waiter is cancelled, the child may still call started().
                failure = await asyncio.shield(context._ack)
        except TimeoutError:
            await self.halt()
            raise self._not_started(
                f"did not call ctx.started() within {limit:g} s: call it once the child is ready, "
                "or raise start_timeout="
            ) from None
        if isinstance(failure, StartFailed):  # of a supervisor, whose child has recorded it
            raise self._not_started("failed to start", failure) from failure
        if failure is not None:
            raise self._not_started(f"failed to start: {describe(failure)}") from failure
        return self.value

    def _run(self) -> Context:
        self.generation += 1
        self.value = None
        self.enter("starting")
        context = self._context = Context(self)
        task = self._task = self.supervisor.create_task(_run_child(context), context.path)
        context._owned = adopt(task)
        task.add_done_callback(context._ended)
        return context

    def _started(self, generation: int, value: Any) -> None:
        if generation != self.generation or self.state != "starting":
            return  # the child was stopped, or abandoned and replaced, before this call
        self.value = value
        self.enter("running")
        self.record("running", "state")
        self.why = None

    def _prove_health(self, generation: int) -> None:
        if self.backoff is not None and generation == self.generation:
            self.backoff.succeed()

    def _not_started(self, what: str, below: StartFailed | None = None) -> StartFailed:
        error = StartFailed(f"{self.path} {what}" if below is None else str(below), self.name)
        self.last_failure = describe(error)
        self.enter("finished")
        self.record(what, "failure" if below is None else "info", cause=below)
        return error

    # -- ending --------------------------------------------------------------------------------

    def _ended(self, context: Context, task: asyncio.Task[None], looked: bool = False) -> None:
        """React to the end of the task, unless the supervisor is stopping it."""
        reason = reason_of(task)
        if not task.cancelled():
            task.exception()  # marks the error as retrieved: it is reported below, or by halt()
        context._owned.release(reason)
        if self._task is not task:
            if task in _abandoned:
                _abandoned.discard(task)
                self.record("ended, after it was abandoned", "abandoned_ended")
            return
        if context._stop_by is not None:
            return  # halt() waits for it
        if not looked:
            self._credit_uptime()
        if task.cancelled():
            if task.cancelling() and not looked:
                # Cancelled by other code, or because the loop ends. (Without cancelling(), the
                # child awaited something that was cancelled.)
                if self.state == "running":
                    self.enter("waiting")
                unless_loop_ends(lambda: self._ended(context, task, looked=True))
                return
            reason = SupervisionError(f"{self.path} was cancelled, and not by its supervisor")
        self._task = None
        if context._ack is not None:
            if isinstance(reason, BaseException):
                context._answer(reason)
                return
            context._answer(None)  # it returned before started(), which counts as a start
        self._note_end(reason)
        self.supervisor._on_end(self, reason)

    def _credit_uptime(self) -> None:
        uptime = self.supervisor.clock.monotonic() - self.since
        if self.backoff is not None and uptime >= self.backoff.max:
            self.backoff.succeed()  # it ran for longer than the longest delay

    def _note_end(self, reason: Reason) -> None:
        self.enter("waiting" if wants_restart(self.child.restart, reason) else "finished")
        if isinstance(reason, BaseException):
            before, self.last_failure = self.last_failure, describe(reason)
            restarts = self.state == "waiting"
            if isinstance(reason, RestartRequested):
                log.debug("%s requested a restart: %s", self.path, self.last_failure)
            elif is_defect(reason) or not restarts:  # else the line about the restart has the cause
                trace = reason if is_defect(reason) and before != self.last_failure else None
                log.warning("%s failed: %s", self.path, self.last_failure, exc_info=trace)
            self.record("failed", "failure", cause=reason, restarts=restarts)
        else:
            self.record("ended", "state")

    async def halt(self) -> None:
        """Cancel the child and wait for its end; abandon it after its `shutdown` time."""
        task, context = self._task, self._context
        if task is None or context is None:
            if self.state in ("starting", "waiting"):
                self.enter("stopped")
            return
        now = self.supervisor.clock.monotonic()
        if context._stop_by is None:
            context._stop_by = now + self.child.shutdown
            self.enter("stopping")
            task.cancel()
        left = None if context._stop_by == math.inf else max(0.0, context._stop_by - now)
        await asyncio.wait({task}, timeout=left)
        self._task = None
        self.enter("stopped")
        if task.done():
            self._note_halted(reason_of(task))
        else:
            self._abandon(context, task)

    def _note_halted(self, reason: Reason) -> None:
        if isinstance(reason, BaseException):
            self.last_failure = describe(reason)
            trace = reason if is_defect(reason) else None
            log.warning(
                "%s failed while stopping: %s", self.path, self.last_failure, exc_info=trace
            )
            self.record("failed while stopping", "failure", cause=reason)
        else:
            self.record("stopped", "state")

    def _abandon(self, context: Context, task: asyncio.Task[None]) -> None:
        self.supervisor.abandoned += 1
        _abandoned.add(task)
        error = SupervisionError(
            f"{self.path} did not end within {self.child.shutdown:g} s of being cancelled and was "
            "abandoned: it still runs, because asyncio cannot kill a task; "
            "find the code in it that swallows CancelledError, or raise shutdown="
        )
        context._owned.release(error)
        self.last_failure = describe(error)
        self.record("abandoned", "abandoned", cause=error)
        log.error("%s", error)
        task.cancel()  # once more: the child may have swallowed the first one by mistake

    # -- reporting -----------------------------------------------------------------------------

    def tree(self) -> Tree:
        """Return this child and the children of a nested supervisor as data."""
        nested = self._context._nested if self._context is not None and self._task else None
        below = None if nested is None else nested.tree()
        return Tree(
            name=self.name,
            state=self.state,
            since=self.supervisor.clock.monotonic() - self.since,
            strategy=None if below is None else below.strategy,
            restart=str(self.child.restart),
            generation=self.generation,
            restarts=self.restarts,
            last_failure=self.last_failure,
            children=() if below is None else below.children,
        )


async def _run_child(context: Context) -> None:
    """Run the child in its own task; what it owns is released before the task ends."""
    current_context.set(context)
    reason: Reason = "normal"
    try:
        await context.child.run(context)
    except asyncio.CancelledError:
        reason = "shutdown"
        raise
    except BaseException as error:
        reason = error
        raise
    finally:
        context._owned.release(reason)
