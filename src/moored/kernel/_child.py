"""The specification of a child, and the context that it gets at each start."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ._ownership import Owned
from ._rules import Restart, RestartName
from ._words import refuse

if TYPE_CHECKING:
    from ._backoff import Backoff
    from ._child_runner import ChildRunner
    from ._clock import Clock
    from ._recorder import Event, Recorder
    from ._registry import Registration, Registry
    from ._supervisor import Supervisor

__all__ = ["Child", "Context", "current_context"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Child:
    """The specification of a component that a supervisor keeps running.

    `run` is a coroutine function that gets a `Context`. It prepares, calls `ctx.started(value)`,
    and goes on working. Returning means that it is done, raising that it failed; its supervisor
    stops it by cancelling it. A cancellation by other code is a failure, but is treated as one
    only after a second, because the whole event loop may be ending.
    """

    #: The child's name, unique among its siblings; part of the path in logs and in `tree()`.
    name: str
    #: The coroutine function to run, again at each restart.
    run: Callable[[Context], Awaitable[None]]
    _: KW_ONLY
    #: Whether the child is restarted after a return, and after a failure.
    restart: Restart | RestartName = Restart.PERMANENT
    #: Whether the child's permanent end may end the supervisor (see `AutoShutdown`).
    significant: bool = False
    #: Seconds that the child may take to call `started()`; the next sibling waits for it.
    start_timeout: float = 30.0
    #: Seconds that the child may take to end once cancelled. Then it is abandoned, because asyncio
    #: cannot kill a task.
    shutdown: float = 5.0
    #: The delays before restarts; None restarts at once.
    backoff: Backoff | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "restart", Restart(self.restart))
        refuse(f"child {self.name!r}", self._mistakes())

    def _mistakes(self) -> list[str]:
        found = []
        if not self.name or "/" in self.name:
            found.append("its name must not be empty or contain '/', which separates paths")
        if self.significant and self.restart == Restart.PERMANENT:
            found.append("a permanent child is always restarted, so it cannot be significant")
        if self.start_timeout <= 0:
            found.append(f"start_timeout={self.start_timeout} must be > 0 s")
        if self.shutdown <= 0:
            found.append(f"shutdown={self.shutdown} must be > 0 s")
        return found


class Context:
    """The argument of a child's `run` at each start: its name, its clock, and `started()`."""

    __slots__ = (
        "__weakref__",
        "_ack",
        "_nested",
        "_owned",
        "_runner",
        "_stop_by",
        "child",
        "generation",
        "path",
        "supervisor",
    )

    def __init__(self, runner: ChildRunner) -> None:
        #: The supervisor that runs this child.
        self.supervisor = runner.supervisor
        #: The child's specification.
        self.child = runner.child
        #: The names from the root down, as in "root/account/link".
        self.path = runner.path
        #: 1 for the first start, one more at each restart.
        self.generation = runner.generation
        # The rest is for the supervisor.
        self._runner = runner
        self._owned = Owned()
        # Set to the outcome of the start (None: it succeeded); None once the outcome is known.
        self._ack: asyncio.Future[BaseException | None] | None
        self._ack = asyncio.get_running_loop().create_future()
        self._nested: Supervisor | None = None
        self._stop_by: float | None = None  # None until the supervisor stops this child

    @property
    def name(self) -> str:
        """The child's own name."""
        return self.child.name

    @property
    def clock(self) -> Clock:
        """The supervisor's clock; use it for all times, so that a simulation can replace it."""
        return self.supervisor.clock

    @property
    def recorder(self) -> Recorder:
        """The recorder of the supervision tree."""
        return self.supervisor.recorder

    def started(self, value: Any = None) -> None:
        """Report that this child is running: `start_child()` returns the value, the next sibling
        starts.

        Call it once per start; a second call raises.
        """
        if self._ack is None:
            raise RuntimeError(f"{self.path} called started() twice")
        self._runner._started(self.generation, value)
        self._answer(None)

    def _answer(self, failure: BaseException | None) -> None:
        """Set the outcome of the start for its waiter, once."""
        ack, self._ack = self._ack, None
        if ack is not None:
            ack.set_result(failure)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """React to the end of the task."""
        self._runner._ended(self, task)

    def healthy(self) -> None:
        """Report that this child has proven to work, which resets its restart backoff."""
        self._runner._prove_health(self.generation)

    def register(self, registry: Registry[K, V], key: K, value: V) -> Registration[K, V]:
        """Register a value under a key that is freed when this child ends, before it restarts."""
        return registry.register(key, value)

    def record(
        self,
        text: str,
        *,
        kind: str = "info",
        cause: Event | BaseException | str | None = None,
        **data: Any,
    ) -> Event:
        """Record an event of this component."""
        return self.recorder.record(self.path, text, kind=kind, cause=cause, **data)

    def __repr__(self) -> str:
        return f"<Context {self.path} generation {self.generation}>"


current_context: ContextVar[Context | None] = ContextVar("moored_context", default=None)
