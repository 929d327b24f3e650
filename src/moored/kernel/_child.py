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
    from ._clock import Clock
    from ._life import Life
    from ._recorder import Event, Recorder
    from ._registry import Registration, Registry
    from ._supervisor import Supervisor

__all__ = ["Child", "Context", "current_context"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Child:
    """A part that a supervisor keeps running.

    `run` is a coroutine function that gets a `Context`. It prepares, calls `ctx.started(value)`,
    and goes on working. Returning means that it is done, raising that it failed, and being
    cancelled that its supervisor stops it. A `CancelledError` that its supervisor did not order is
    a failure; when a stranger cancelled the task, it counts as one a second later, because
    it may also be the end of the loop.
    """

    #: Unique among its siblings; part of the path in logs and in `tree()`.
    name: str
    #: What to run, again at each restart.
    run: Callable[[Context], Awaitable[None]]
    _: KW_ONLY
    #: After which ends it is started again.
    restart: Restart | RestartName = Restart.PERMANENT
    #: Whether its end for good may end the supervisor (see `AutoShutdown`).
    significant: bool = False
    #: How long it may take to call `started()`, because the next sibling waits for it.
    start_timeout: float = 30.0
    #: How long it may take to end once cancelled, before it is abandoned: asyncio has no kill.
    shutdown: float = 5.0
    #: How long to wait before each restart; None restarts at once.
    backoff: Backoff | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "restart", Restart(self.restart))
        refuse(f"child {self.name!r}", self._mistakes())

    def _mistakes(self) -> list[str]:
        found = []
        if not self.name or "/" in self.name:
            found.append("its name must not be empty or hold a '/', which separates paths")
        if self.significant and self.restart == Restart.PERMANENT:
            found.append("a permanent child never ends for good, so it cannot be significant")
        if self.start_timeout <= 0:
            found.append(f"start_timeout={self.start_timeout} must be > 0 s")
        if self.shutdown <= 0:
            found.append(f"shutdown={self.shutdown} must be > 0 s")
        return found


class Context:
    """What a child gets at each start: its name, its clock, and `started()`."""

    __slots__ = (
        "__weakref__",
        "_ack",
        "_life",
        "_nested",
        "_owned",
        "_stop_by",
        "child",
        "generation",
        "path",
        "supervisor",
    )

    def __init__(self, life: Life) -> None:
        #: The supervisor that runs this child.
        self.supervisor = life.supervisor
        #: The child's specification.
        self.child = life.child
        #: The names from the root down, as in "root/account/link".
        self.path = life.path
        #: 1 for the first start, one more at each restart.
        self.generation = life.generation
        # The rest is between the supervisor and this object.
        self._life = life
        self._owned = Owned()
        # Tells whoever waits for the start; None once that is known.
        self._ack: asyncio.Future[BaseException | None] | None
        self._ack = asyncio.get_running_loop().create_future()
        self._nested: Supervisor | None = None
        self._stop_by: float | None = None  # None while nobody asked it to stop

    @property
    def name(self) -> str:
        """The child's own name."""
        return self.child.name

    @property
    def clock(self) -> Clock:
        """The clock to use for everything, so that a simulation can replace it."""
        return self.supervisor.clock

    @property
    def recorder(self) -> Recorder:
        """Where this tree records what happens."""
        return self.supervisor.recorder

    def started(self, value: Any = None) -> None:
        """Report that this child is up: its starter gets the value, and the next sibling may start.

        Once per start; a second call is a mistake in the child and raises.
        """
        if self._ack is None:
            raise RuntimeError(f"{self.path} called started() twice")
        self._life._started(self.generation, value)
        self._answer(None)

    def _answer(self, failure: BaseException | None) -> None:
        """Report the outcome of the start to its waiter, once."""
        ack, self._ack = self._ack, None
        if ack is not None:
            ack.set_result(failure)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """React to the end of the task."""
        self._life._ended(self, task)

    def healthy(self) -> None:
        """Report that this child has proven to work, which resets its restart backoff."""
        self._life._prove_health(self.generation)

    def register(self, registry: Registry[K, V], key: K, value: V) -> Registration[K, V]:
        """Register a value that is freed when this child ends, before its next start."""
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
