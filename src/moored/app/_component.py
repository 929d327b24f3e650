"""A user's own coroutines as parts of an app: components, and consumers of a change stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from typing import Any, TypeAlias

from prometheus_client.registry import Collector

from moored.kernel import Chart, Child, Clock, Context, Event, Machine, Recorder
from moored.postgres import Postgres, Reset, Transaction
from moored.service import Part, Status, Wiring

from ._parts import RETRY, Judgement, PartEntry, Shown, listed

__all__ = ["ComponentContext", "component_part", "consumer_part"]

Run: TypeAlias = Callable[["ComponentContext"], Awaitable[None]]
Handle: TypeAlias = Callable[[Transaction | Reset], Awaitable[None]]


class ComponentContext:
    """The argument of a component at each start: how it takes part in the app.

    A component is healthy from its start until it fails, unless it reports its health itself.
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
    ) -> None:
        """Show these numbers in the status, and this text as the explanation, while it runs.

        :param costs: counts what failures have cost, by name, such as "calls failed"; the page
            shows how many were added in an outage.
        """
        shown = Shown(statistics, explain or self._explain, costs=costs)
        self._stack.enter_context(listed(self._wiring, self.path, shown))

    def _explain(self) -> str:
        status, detail = self._health or ("starting", "")
        return f"{status}\n  because  {detail}" if detail else status

    def __repr__(self) -> str:
        return f"<ComponentContext {self.path} generation {self.generation}>"


def component_part(entry: PartEntry, run: Run, *, once: bool, shutdown: float) -> Part:
    """Return a part that runs a coroutine of the user's."""

    def build(wiring: Wiring) -> Sequence[Child]:
        async def supervised(ctx: Context) -> None:
            await entry.begin(ctx, wiring)
            if not entry.after:
                ctx.started()
            with ExitStack() as stack, entry.failing(wiring):
                given = ComponentContext(ctx, wiring, entry, stack)
                # After its first step, in which it may report another health.
                health: Judgement = ("starting", "it runs") if once else ("active", "")
                stack.callback(asyncio.get_running_loop().call_soon(given._assume, *health).cancel)
                await run(given)
            wiring.health(entry.name, "active", "it has finished")

        child = Child("run", supervised, backoff=RETRY, restart="transient", shutdown=shutdown)
        return [child]

    return entry.part(build)


def consumer_part(
    entry: PartEntry, pg: Postgres, consumer: str, tables: Iterable[str], handle: Handle
) -> Part:
    """Return a part that calls a function for each transaction, and then acknowledges it."""
    wanted = [tables] if isinstance(tables, str) else list(tables)

    async def run(ctx: ComponentContext) -> None:
        handled = resets = 0
        last: Any = None
        ctx.show(lambda: {"transactions": handled, "resets": resets, "acknowledged": last})
        async with aclosing(pg.changes(consumer, tables=wanted)) as items:
            async for item in items:
                await handle(item)
                if isinstance(item, Reset):
                    resets += 1
                    continue
                await item.ack()
                handled, last = handled + 1, str(item.position)
                ctx.healthy()

    return component_part(entry, run, once=False, shutdown=30.0)
