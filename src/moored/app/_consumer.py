"""Consumers as parts of an app: a function that is called for each item."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import psycopg
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from moored.kernel import Child, MooredError, counted, describe, first_of, patiently
from moored.kernel.prometheus import counter, gauge
from moored.postgres import Reset
from moored.service import Part, Wiring

from ._component import ComponentContext, component_part
from ._consumed import Consumed, Item
from ._parked import OnPoison, ParkedItems
from ._parts import Judgement, PartEntry

__all__ = ["Handle", "consumer_part"]

log = logging.getLogger("moored.app")

T = TypeVar("T")
Handle: TypeAlias = Callable[[Any], Awaitable[None]]

#: Seconds between two looks at the health, and while items are parked, for retries that operators
#: have asked for.
LOOK = 2.0
#: Seconds that the function may take to end when the consumer is stopped.
FINISH = 2.0
#: Parked items in an explanation.
SHOWN = 3


class _StreamLost(Exception):
    """Another instance has the stream."""


class _Consumer(Collector):
    """What a consumer has done so far, over all of its runs."""

    def __init__(
        self, name: str, source: Consumed, handle: Handle, on_poison: OnPoison | None
    ) -> None:
        self._name = name
        self._source = source
        self._handle = handle
        self._parked = on_poison and ParkedItems(name, source.parking(), on_poison)
        self._handled = self._resets = self._failures = 0
        self._last: str | None = None
        #: The item that the function has; if it has failed, it gets the same item again.
        self._in_hand: Item | Reset | None = None
        #: Why it is not ready; empty if it is.
        self._why = source.not_ready
        self._reported: Judgement | None = None
        # The function never runs for two items at the same time.
        self._turn = asyncio.Lock()

    async def run(self, ctx: ComponentContext) -> None:
        """Give each item to the function, and report when the consumer is ready."""
        ctx.show(self._statistics, self._explain, fact=lambda: self._source.behind or "caught up")
        self._reported = None
        self._report(ctx)  # first, because the items may be here already
        try:
            await self._source.opened()
            self._reported = None  # while it was not open, that was the health
            self._report(ctx)
            while True:
                await self._stand_by(ctx)
                with suppress(_StreamLost):
                    return await first_of(self._run(ctx), self._stream_lost())
        except Exception as error:
            self._why = describe(error)
            raise

    # -- one of several replicas ---------------------------------------------------------------

    @property
    def _standby_of(self) -> str:
        """The instance that gets the items in place of this one; empty if there is none."""
        return "" if self._source.stream is None else self._source.stream.standby_of

    async def _stand_by(self, ctx: ComponentContext) -> None:
        """Wait until this instance has the stream."""
        if (stream := self._source.stream) is None or stream.status().conn.has_lock:
            return
        if self._standby_of:  # and what has failed here, the other one gets
            self._in_hand, self._why = None, self._source.not_ready
        self._report(ctx)
        with ExitStack() as stack:
            stack.callback(stream.monitor.subscribe(lambda _: self._report(ctx)))
            async with self._source.standing_by():
                await stream.wait_for_lock()
        self._report(ctx)

    async def _stream_lost(self) -> None:
        """Wait until another instance has the stream; then raise `_StreamLost`."""
        if (stream := self._source.stream) is None:
            await asyncio.Event().wait()
        else:
            await stream.monitor.wait_until(lambda _: bool(self._standby_of))
            raise _StreamLost

    # -- items ---------------------------------------------------------------------------------

    async def _run(self, ctx: ComponentContext) -> None:
        if self._parked is not None:
            await self._parked.load()
            await self._retry(self._parked)  # also while the next item fails at each start
        async with self._source.attach() as items:
            if self._in_hand is not None and self._source.passed(items, self._in_hand):
                self._in_hand = None
            running = [self._consume(ctx, items), self._look(ctx)]
            if self._in_hand is None:
                running.append(self._become_ready(ctx))
            await first_of(*running)

    async def _consume(self, ctx: ComponentContext, items: AsyncIterator[Item | Reset]) -> None:
        async for item in items:
            await self._finished(self._take(ctx, item))

    async def _finished(self, step: Coroutine[Any, Any, T]) -> T:
        """Await a step, which may end when the consumer is stopped: otherwise it is done twice."""
        task = asyncio.ensure_future(step)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved
        loop = asyncio.get_running_loop()

        def stop() -> None:
            loop.call_later(0.0 if self._standby_of else FINISH, task.cancel)

        await patiently(task, stop)
        return task.result()

    async def _take(self, ctx: ComponentContext, item: Item | Reset) -> None:
        again, self._in_hand = self._in_hand is not None, item
        handled = await self._handle_or_park(item)
        self._in_hand = None
        if isinstance(item, Reset):
            self._resets += 1
        else:
            await item.ack()
            self._last = self._source.position(item)
            if handled:
                self._handled += 1
                ctx.healthy()
        if again:
            self._why = ""
        self._report(ctx)

    async def _handle_or_park(self, item: Item | Reset) -> bool:
        """Return True if the function has handled the item, and False if the item is parked."""
        parked = None if isinstance(item, Reset) else self._parked
        if parked is not None and item in parked:
            return False
        try:
            async with self._turn:
                await self._call(item)
        except Exception as error:
            if parked is None or not await parked.park(item, error):
                raise
            return False
        return True

    async def _call(self, item: Any) -> None:
        try:
            await self._handle(item)
        except Exception:
            self._failures += 1
            raise

    async def _become_ready(self, ctx: ComponentContext) -> None:
        await self._source.ready()
        self._why = ""
        ctx.healthy()
        self._report(ctx)
        await asyncio.Event().wait()

    async def _look(self, ctx: ComponentContext) -> None:
        while True:
            await asyncio.sleep(LOOK)
            if self._parked is not None:
                await self._retry(self._parked)
            self._report(ctx)

    async def _retry(self, parked: ParkedItems) -> None:
        """Give the function the parked items whose retry an operator has asked for."""
        try:
            while parked.items:
                # Taken in the function's turn, so that its failure with another item cancels none.
                async with self._turn:
                    if not await self._finished(parked.retry(self._call)):
                        return
        except (psycopg.Error, OSError, MooredError) as error:
            log.info("%s reads its parked items later: %s", self._name, describe(error))

    # -- shown ---------------------------------------------------------------------------------

    def _report(self, ctx: ComponentContext) -> None:
        if (now := self._judge()) != self._reported:
            self._reported = now
            ctx.health(*now)

    def _judge(self) -> Judgement:
        if holder := self._standby_of:
            return "waiting", f"standby of {holder}: another instance has the change stream"
        if self._why:
            return "starting", self._why
        if self._source.delayed:
            return "degraded", self._source.delayed
        if self._parked is None or not self._parked.items:
            return "active", ""
        last = self._parked.items[-1]
        number = counted(len(self._parked.items), "item")
        return "degraded", f"{number} parked, the last one {last.what}: {last.error}"

    def _statistics(self) -> dict[str, Any]:
        parked = {} if self._parked is None else {"parked": len(self._parked.items)}
        return {
            f"{self._source.noun}s": self._handled,
            "resets": self._resets,
            "acknowledged": self._last,
            **self._source.statistics(),
            **parked,
        }

    def _explain(self) -> str:
        done = f"{counted(self._handled, self._source.noun)} and {counted(self._resets, 'reset')}"
        lines = [f"  because  handled {done}"]
        if self._last is not None:
            lines.append(f"  because  everything up to {self._last} is acknowledged")
        lines += (f"  because  {each}" for each in self._source.explain())
        if self._parked is not None and (items := self._parked.items):
            for each in items[-SHOWN:]:
                tries = counted(each.tries, "attempt")
                lines.append(
                    f"  because  parked {each.id}: {each.what}, after {tries}: {each.error}"
                )
            lines.append(
                "  so       moored consumers list, then retry or drop them by their number"
            )
        return "\n".join(lines)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this consumer."""
        part = (self._name,)
        text = "Failures of the function of a consumer."
        yield counter("moored_consumer_failures", text, ("part",), [(part, self._failures)])
        if self._parked is not None:
            text = "Items that a consumer has parked, which wait for an operator."
            found = [(part, float(len(self._parked.items)))]
            yield gauge("moored_consumer_parked", text, ("part",), found)


def consumer_part(
    entry: PartEntry, source: Consumed, handle: Handle, on_poison: OnPoison | None
) -> Part:
    """Return a part that calls a function for each item, and then acknowledges it.

    It is ready when no item can be missed any more. After a failure of the function, it is ready
    when the function has handled the same item, or the item is parked.
    """
    consumer = _Consumer(entry.name, source, handle, on_poison)
    part = component_part(entry, consumer.run, assumed=None, shutdown=30.0, kind="consumer")

    def build(wiring: Wiring) -> Sequence[Child]:
        wiring.collectors.append(consumer)
        return [*source.children(entry, wiring), *part.build(wiring)]

    return replace(part, build=build)
