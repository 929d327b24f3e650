"""The life of one child: start it and wait for `started()`, cancel it and wait for its end.

`Life` knows nothing of siblings or strategies. It reports an end that nobody asked for to its
supervisor, which decides.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Any

from ._child import Child, Context, current_context
from ._errors import RestartRequested, StartFailed, SupervisionError
from ._loop_end import unless_loop_ends
from ._ownership import Reason, adopt, reason_of
from ._recorder import Event
from ._rules import Restart, wants_restart
from ._tree import Tree
from ._words import describe

if TYPE_CHECKING:
    from ._supervisor import Supervisor

__all__ = ["Life"]

log = logging.getLogger("moored.supervisor")

# Tasks that did not end when cancelled. Held here until they do: nobody else may be holding them.
_abandoned: set[asyncio.Task[None]] = set()


class Life:
    """One child of a supervisor, over all its starts."""

    __slots__ = (
        "_context",
        "_task",
        "backoff",
        "child",
        "generation",
        "is_temporary",
        "last_failure",
        "lock",
        "name",
        "path",
        "restarts",
        "since",
        "state",
        "supervisor",
        "value",
        "why",
    )

    def __init__(self, supervisor: Supervisor, child: Child) -> None:
        self.supervisor = supervisor
        self.child = child
        self.name = child.name
        self.is_temporary = child.restart == Restart.TEMPORARY
        self.path = f"{supervisor.path}/{child.name}"
        self.backoff = None if child.backoff is None else child.backoff.fresh()
        #: Held by whatever changes it: its own, or the one of all siblings.
        self.lock = supervisor._lock or asyncio.Lock()
        self.generation = 0
        self.restarts = 0
        self.value: Any = None
        self.last_failure: str | None = None
        #: What the next thing that happens to it is due to.
        self.why: Event | BaseException | None = None
        self._task: asyncio.Task[None] | None = None
        self._context: Context | None = None
        self.enter("starting")

    def enter(self, state: str) -> None:
        """Enter a state."""
        self.state = state
        self.since = self.supervisor.clock.monotonic()

    def record(self, text: str, kind: str, *, cause: BaseException | None = None) -> None:
        """Record an event of this child; it is the cause of the next one."""
        self.why = self.supervisor.recorder.record(
            self.path, text, kind=kind, cause=cause or self.why, generation=self.generation
        )

    # -- starting ------------------------------------------------------------------------------

    async def start(self) -> Any:
        """Run the child and wait for its `started()`; raises `StartFailed`."""
        context = self._run()
        assert context._ack is not None
        limit = self.child.start_timeout
        try:
            async with asyncio.timeout(None if limit == math.inf else limit):
                # Shielded: when who waits is cancelled, the child may still say started().
                failure = await asyncio.shield(context._ack)
        except TimeoutError:
            await self.halt()
            raise self._not_started(
                f"did not call ctx.started() within {limit:g} s: call it once it is up, "
                "or raise start_timeout="
            ) from None
        if failure is not None:
            raise self._not_started(f"failed to start: {describe(failure)}") from failure
        return self.value

    def _run(self) -> Context:
        self.generation += 1
        self.value = None
        self.enter("starting")
        context = self._context = Context(self)
        task = self._task = self.supervisor.create_task(_live(context), context.path)
        context._owned = adopt(task)
        task.add_done_callback(context._ended)
        return context

    def _started(self, generation: int, value: Any) -> None:
        if generation != self.generation or self.state != "starting":
            return  # it was stopped, or abandoned and replaced, while it prepared
        self.value = value
        self.enter("running")
        self.record("running", "state")
        self.why = None

    def _prove_health(self, generation: int) -> None:
        if self.backoff is not None and generation == self.generation:
            self.backoff.succeed()

    def _not_started(self, what: str) -> StartFailed:
        error = StartFailed(f"{self.path} {what}", self.name)
        self.last_failure = describe(error)
        self.enter("finished")
        self.record(what, "failure")
        return error

    # -- ending --------------------------------------------------------------------------------

    def _ended(self, context: Context, task: asyncio.Task[None], looked: bool = False) -> None:
        """React to the end of the task, unless the supervisor is stopping it."""
        reason = reason_of(task)
        if not task.cancelled():
            task.exception()  # marks it as read: it is reported below, or by who stops it
        context._owned.release(reason)
        if self._task is not task:
            if task in _abandoned:
                _abandoned.discard(task)
                self.record("ended at last, after it was abandoned", "abandoned_ended")
            return
        if context._stop_by is not None:
            return  # whoever stops it waits for it
        if not looked:
            self._credit_uptime()
        if task.cancelled():
            if task.cancelling() and not looked:
                # A stranger, or the end of the loop. (Otherwise it awaited what was cancelled.)
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
            context._answer(None)  # it was done before it was up: that is a start too
        self._note_end(reason)
        self.supervisor._on_end(self, reason)

    def _credit_uptime(self) -> None:
        uptime = self.supervisor.clock.monotonic() - self.since
        if self.backoff is not None and uptime >= self.backoff.max:
            self.backoff.succeed()  # it held for longer than the longest wait: proof enough

    def _note_end(self, reason: Reason) -> None:
        self.enter("waiting" if wants_restart(self.child.restart, reason) else "finished")
        if isinstance(reason, BaseException):
            self.last_failure = describe(reason)
            if isinstance(reason, RestartRequested):
                log.debug("%s begins again: %s", self.path, self.last_failure)
            else:
                log.warning("%s failed: %s", self.path, self.last_failure, exc_info=reason)
            self.record("failed", "failure", cause=reason)
        else:
            self.record("ended", "state")

    async def halt(self) -> None:
        """Cancel the child and wait for its end, for as long as it may take; then abandon it."""
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
            log.warning("%s failed while it stopped", self.path, exc_info=reason)
            self.record("failed while it stopped", "failure", cause=reason)
        else:
            self.record("stopped", "state")

    def _abandon(self, context: Context, task: asyncio.Task[None]) -> None:
        self.supervisor.abandoned += 1
        _abandoned.add(task)
        error = SupervisionError(
            f"{self.path} did not end within {self.child.shutdown:g} s of being cancelled and was "
            "abandoned: it still runs, because asyncio cannot kill a task; "
            "find what swallows CancelledError in it, or raise shutdown="
        )
        context._owned.release(error)
        self.last_failure = describe(error)
        self.record("abandoned", "abandoned", cause=error)
        log.error("%s", error)
        task.cancel()  # a last knock: perhaps it swallowed the first one by mistake

    # -- showing -------------------------------------------------------------------------------

    def tree(self) -> Tree:
        """This child, and what it supervises itself, as data."""
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


async def _live(context: Context) -> None:
    """The child in its own task; what it owns is released before the task ends."""
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
