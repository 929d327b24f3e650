"""What a supervisor is given: a child, and what the child is given in turn: its context."""

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
    from ._recorder import Event, Recorder
    from ._registry import Registration, Registry
    from ._supervisor import Supervisor

__all__ = ["Child", "Context", "current_context"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True)
class Child:
    """A part that a supervisor keeps running.

    `run` is a coroutine function that gets a `Context`. It prepares, calls `ctx.started(value)`,
    and goes on working. Returning means that it is done, raising that it failed, and being
    cancelled that its supervisor stops it.
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
    """What a child is given at each start: its name, its clock, and a way to say that it is up."""

    def __init__(
        self,
        supervisor: Supervisor,
        child: Child,
        generation: int,
        *,
        on_started: Callable[[Any], None],
        on_healthy: Callable[[], None],
    ) -> None:
        #: The supervisor that runs this child.
        self.supervisor = supervisor
        #: The child's specification.
        self.child = child
        #: The names from the root down, as in "root/account/link".
        self.path = f"{supervisor.path}/{child.name}"
        #: 1 for the first start, one more at each restart.
        self.generation = generation
        # The rest is between the supervisor and this object.
        self._on_started = on_started
        self._on_healthy = on_healthy
        self._owned = Owned()
        self._ack: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
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
        """Say that this child is up: its caller gets the value, and the next sibling may start.

        Once per start; a second call is a mistake in the child and raises.
        """
        if self._ack.done():
            raise RuntimeError(f"{self.path} called started() twice")
        self._on_started(value)
        self._ack.set_result(None)

    def healthy(self) -> None:
        """Say that this child has proven to work, so that its restart backoff begins anew."""
        self._on_healthy()

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


current_context: ContextVar[Context | None] = ContextVar("holdfast_context", default=None)
