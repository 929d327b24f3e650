"""A user's own coroutines as parts of an app."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeAlias

from prometheus_client.registry import Collector

from moored.kernel import Chart, Child, Clock, Context, Event, Machine, Recorder
from moored.service import Part, Status, Wiring

from ._parts import RETRY, Judgement, PartEntry, Shown, listed

__all__ = ["ComponentContext", "component_part"]

#: Seconds after which a component that had failed counts as working.
PROVEN = 2.0

Run: TypeAlias = Callable[["ComponentContext"], Awaitable[None]]


class ComponentContext:
    """The argument of a component at each start: how it takes part in the app.

    A component is healthy from its start until it fails, unless it reports its health itself. After
    a failure, it is healthy again when it has run for 2 s, or has called `healthy()`.
    """

    def __init__(self, ctx: Context, wiring: Wiring, entry: PartEntry, stack: ExitStack) -> None:
        self._ctx = ctx
        self._wiring = wiring
        self._entry = entry
        self._stack = stack
        self._health: tuple[Status, str] | None = None
        #: The path of the component in the tree, such as "orders/importer/run".
        self.path = ctx.path
        #: 1 for the first start, one more at each restart.
        self.generation = ctx.generation

    @property
    def clock(self) -> Clock:
        """The clock of the app; use it for all times, so that a simulation can replace it."""
        return self._ctx.clock

    @property
    def recorder(self) -> Recorder:
        """The recorder of the app."""
        return self._ctx.recorder

    def record(
        self,
        text: str,
        *,
        kind: str = "info",
        cause: Event | BaseException | str | None = None,
        **data: Any,
    ) -> Event:
        """Record an event of this component, which `explain` and the page then show."""
        return self._ctx.record(text, kind=kind, cause=cause, **data)

    def health(self, status: Status, detail: str = "") -> None:
        """Report the health of this component, with the reason."""
        self._health = status, detail
        self._wiring.health(self._entry.name, status, detail)

    def _assume(self, status: Status, detail: str) -> None:
        """Report this health, unless the component has reported its own."""
        if self._health is None:
            self.health(status, detail)

    def healthy(self) -> None:
        """Report that this component has proven to work, which resets its restart backoff."""
        self._ctx.healthy()
        self._assume("active", "")

    def machine(self, chart: Chart, **options: Any) -> Machine:
        """Return a state machine that is shown while this component runs."""
        made = Machine(self.path, chart, clock=self.clock, recorder=self.recorder, **options)
        self._wiring.machines[made] = self._entry.name
        self._stack.callback(self._wiring.machines.pop, made)
        return made

    def metrics(self, collector: Collector) -> None:
        """Add a Prometheus collector to `/metrics` while this component runs."""
        self._wiring.collectors.append(collector)
        self._stack.callback(self._wiring.collectors.remove, collector)

    def show(
        self,
        statistics: Callable[[], dict[str, Any]],
        explain: Callable[[], str] | None = None,
        *,
        costs: Callable[[], Mapping[str, int]] = dict,
        fact: Callable[[], str] = str,
    ) -> None:
        """Show statistics in the status, and an explanation, while the component runs.

        :param explain: returns the whole text, or lines that begin with a space, which follow the
            health of the component.
        :param costs: counts what failures have cost, by name, such as "calls failed"; the page
            shows how many were added in an outage.
        :param fact: returns what the map says of the component while it works, in a few words.
        """
        shown = Shown(statistics, explain or str, costs=costs, fact=fact)
        self._stack.enter_context(listed(self._wiring, self.path, shown))

    def __repr__(self) -> str:
        return f"<ComponentContext {self.path} generation {self.generation}>"


def component_part(
    entry: PartEntry, run: Run, *, assumed: Judgement | None, shutdown: float, **more: Any
) -> Part:
    """Return a part that runs a coroutine of the user's.

    :param assumed: its health once it runs, unless it reports its own; None if it always does.
    :param more: further fields of `Part`.
    """

    def build(wiring: Wiring) -> Sequence[Child]:
        async def supervised(ctx: Context) -> None:
            await entry.begin(ctx, wiring, early=True)
            with ExitStack() as stack, entry.failing(wiring):
                given = ComponentContext(ctx, wiring, entry, stack)
                if assumed is not None:
                    # Not before its first step, in which it may report another health. After a
                    # failure, that failure is its health until it has proven to work.
                    loop, first = asyncio.get_running_loop(), ctx.generation == 1
                    call = loop.call_soon if first else partial(loop.call_later, PROVEN)
                    stack.callback(call(partial(given._assume, *assumed)).cancel)
                await run(given)
            wiring.health(entry.name, "active", "it has finished")

        child = Child("run", supervised, backoff=RETRY, restart="transient", shutdown=shutdown)
        return [child]

    return entry.part(build, **more)
