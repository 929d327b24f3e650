"""The parts of an app: a system that is opened, shown, judged and closed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.registry import Collector

from moored.kernel import Backoff, Callers, Child, Context, Link, Tree, describe
from moored.kernel.prometheus import LinkHolder
from moored.service import READY_STATES, Part, ServiceError, Status, System, Wiring

__all__ = ["RETRY", "STOP_TIMEOUT", "Judgement", "PartEntry", "Shown", "listed", "system_part"]

log = logging.getLogger("moored.app")

#: Seconds between two looks at the health of a system.
LOOK = 0.25
#: Pauses before a part that failed is started again.
RETRY = Backoff(0.2, 10.0, jitter=0.25)
#: Seconds that a system may take to close.
STOP_TIMEOUT = 30.0

Judgement = tuple[Status, str]


@dataclass(frozen=True)
class Shown:
    """How a system is shown: its numbers, its causes and its tree."""

    statistics: Callable[[], Mapping[str, Any]]
    #: The whole explanation, or lines that follow the health of the part.
    explain: Callable[[], str] = str
    tree: Callable[[], Tree] = field(default=lambda: Tree("", "running", 0.0))
    #: What failures have cost callers so far, by name.
    costs: Callable[[], Mapping[str, int]] = dict
    #: What is known about its connections to servers.
    links: Callable[[], Sequence[Link]] = tuple
    #: The callers that wait for it.
    hanging: Callable[[], Callers] = Callers
    #: What is shown while it works, in a few words; empty for the reason of its health.
    fact: Callable[[], str] = str


@dataclass(frozen=True)
class PartEntry:
    """What all parts of an app have: a name, and their place among the others."""

    name: str
    required: bool = True
    #: The parts that must be ready before this one starts.
    after: tuple[str, ...] = ()
    #: The parts that this one depends on, if they are others than `after`.
    uses: tuple[str, ...] | None = None

    @property
    def condition(self) -> str:
        """The name of the condition of this part."""
        return f"{self.name}_ready"

    def part(
        self, build: Callable[[Wiring], Sequence[Child]], ties: Iterable[str] = (), **more: Any
    ) -> Part:
        """Return the part: its children are restarted without limit, with pauses."""
        return Part(
            self.name,
            build,
            conditions=(self.condition,),
            strategy="one_for_one",
            intensity=None,
            required=self.required,
            ties={*(self.after if self.uses is None else self.uses), *ties},
            **more,
        )

    async def begin(self, ctx: Context, wiring: Wiring, *, early: bool) -> None:
        """Wait for the parts that this one comes after.

        The next part starts before that; also without them, if this one is early.
        """
        if early or self.after:
            ctx.started()
        if self.after:
            why = f"waits for {', '.join(self.after)}"
            if ctx.generation == 1:  # later, the last failure says more
                wiring.health(self.name, "starting", why)
            await wiring.until(self.after, READY_STATES)

    async def opened(
        self, opening: Awaitable[object], ctx: Context, wiring: Wiring, *, early: bool
    ) -> None:
        """Wait until a system is open; if that fails, the part fails: it cannot be opened twice.

        The next part starts then, unless it did at `begin()`.
        """
        waited_for, failure = not (early or self.after), None
        try:
            await opening
        except Exception as error:
            if waited_for and self.required:
                raise  # and entering the app raises
            failure = describe(error)
        if waited_for:
            ctx.started()
        if failure is not None:
            log.error("%s cannot start: %s", self.name, failure)
            wiring.fail(ServiceError(f"{self.name} cannot start: {failure}"))
            wiring.health(self.name, "failed", failure)
            await asyncio.Event().wait()

    @contextmanager
    def failing(self, wiring: Wiring) -> Iterator[None]:
        """Report the end of a run as the health of the part."""
        why = "it has stopped"
        try:
            yield
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):
                why = describe(error)
            raise
        finally:
            wiring.health(self.name, "starting", why)


def system_part(
    entry: PartEntry,
    child: str,
    running: Callable[[], AbstractAsyncContextManager[object]],
    shown: System,
    judge: Callable[[], Judgement],
    *,
    collector: Callable[[], Collector],
    links: LinkHolder | None = None,
    early: bool = False,
    beside: Callable[[PartEntry, Wiring], Child] | None = None,
    before_stop: Callable[[], Awaitable[None]] | None = None,
    **more: Any,
) -> Part:
    """Return a part that keeps one system open, and reports its health.

    :param child: the name of the child that runs the system.
    :param running: returns an async context manager that opens and closes the system.
    :param judge: returns the health of the open system, with the reason.
    :param links: what holds the links of the system.
    :param early: whether the next part starts before this system is open.
    :param beside: returns a child that is started before that of the system.
    :param before_stop: awaited before HTTP and the parts are stopped.
    """

    def build(wiring: Wiring) -> Sequence[Child]:
        wiring.collectors.append(collector())
        if links is not None:
            wiring.links.add(links)
        if before_stop is not None:
            wiring.before_stop.append(before_stop)

        async def run(ctx: Context) -> None:
            await entry.begin(ctx, wiring, early=early)
            with entry.failing(wiring):
                async with AsyncExitStack() as stack:
                    opening = stack.enter_async_context(running())
                    await entry.opened(opening, ctx, wiring, early=early)
                    with listed(wiring, ctx.path, shown):
                        while True:
                            wiring.health(entry.name, *judge())
                            await asyncio.sleep(LOOK)

        first = [] if beside is None else [beside(entry, wiring)]
        return [*first, Child(child, run, backoff=RETRY, shutdown=STOP_TIMEOUT)]

    return entry.part(build, **more)


@contextmanager
def listed(wiring: Wiring, path: str, shown: System) -> Iterator[None]:
    """Show a system in this block."""
    wiring.systems[path] = shown
    try:
        yield
    finally:
        del wiring.systems[path]
