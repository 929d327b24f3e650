"""What a manager does in the background: it dials, probes, waits, and closes what nobody has.

It is written once, and runs on one loop: the user's own, or the private one of users of threads.
Whatever it tells the core, it tells under the manager's lock; no lock is held while it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from holdfast.kernel import Clock, Recorder, describe

from ._book import Book
from ._core import Act, Actions
from ._errors import ConnectFailed
from ._live import Live
from ._managed import ManagedConnection
from ._policy import Policy
from ._threads import in_thread
from ._topology import Advice

__all__ = ["Works"]

log = logging.getLogger("holdfast.rpc")

#: How long a probe may take.
PROBE_TIMEOUT = 5.0

Managed = ManagedConnection[Any]


class Channels(Protocol):
    """What is done with channels, of one kind or the other."""

    async def ready(self, channel: Any) -> None:
        """Wait until it is connected; raises when it cannot be."""

    async def probe(self, managed: Managed, live: Live) -> bool:
        """Whether the server answers over it."""

    async def close(self, channel: Any) -> None:
        """Close one that no call was made over."""


class Works:
    """The background of one manager."""

    def __init__(
        self,
        lock: contextlib.AbstractContextManager[Any],
        channels: Channels,
        *,
        policy: Policy,
        clock: Clock,
        recorder: Recorder,
        book: Book,
    ) -> None:
        self._lock = lock
        self._channels = channels
        self._policy = policy
        self._clock = clock
        self._recorder = recorder
        self._book = book
        self._tasks: set[asyncio.Task[None]] = set()
        self._closings: dict[str, asyncio.Task[None]] = {}
        self._timers: dict[tuple[str, str], asyncio.TimerHandle] = {}
        self._watching = False

    # -- what the core wants -------------------------------------------------------------------

    def carry_out(self, managed: Managed, actions: Actions) -> None:
        """Do it; on the loop."""
        for action in actions:
            match action.act:
                case Act.DIAL:
                    self._spawn(self._dial(managed, action.number))
                case Act.PROBE:
                    self._spawn(self._probe(managed, action.number))
                case Act.SET_TIMER:
                    self._set_timer(managed, "due", action.delay, self._due)
                case Act.CANCEL_TIMER:
                    self._cancel_timer(managed, "due")
                case Act.WAKE:
                    self._wake(managed)
                case Act.CLOSE:
                    self._closings[managed.key] = self._spawn(self._close(managed))
                case _:  # a swap and a discard are done where the channel is
                    raise AssertionError(action)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _wake(self, managed: Managed) -> None:
        """Tell those who wait; they look for themselves what has become of it."""
        with self._lock:
            waiters, managed.waiters = managed.waiters, []
            managed.core.waiting -= len(waiters)
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _set_timer(
        self, managed: Managed, what: str, delay: float, act: Callable[[Managed], None]
    ) -> None:
        self._cancel_timer(managed, what)

        def run() -> None:
            self._timers.pop((managed.key, what), None)
            act(managed)

        loop = asyncio.get_running_loop()
        self._timers[managed.key, what] = loop.call_later(delay, run)

    def _cancel_timer(self, managed: Managed, what: str) -> None:
        if (timer := self._timers.pop((managed.key, what), None)) is not None:
            timer.cancel()

    def _due(self, managed: Managed) -> None:
        self._tell(managed, managed.core.due)

    def _aged(self, managed: Managed) -> None:
        self._tell(managed, managed.core.aged)
        self._set_age_timer(managed)  # also if it is not the time for it now

    def _set_age_timer(self, managed: Managed) -> None:
        if (age := self._policy.max_age) is not None and not managed.core.closed:
            # Not all at once: those that were made together would be renewed together.
            delay = age * (0.9 + 0.1 * self._clock.random.random())
            self._set_timer(managed, "age", delay, self._aged)

    # -- dialling ------------------------------------------------------------------------------

    async def _dial(self, managed: Managed, attempt: int) -> None:
        channel = None
        try:
            async with asyncio.timeout(managed.connect_timeout):
                # One that is only old is not unavailable: nobody need be asked about it.
                recovers = managed.core.machine.phase == "recovering"
                if recovers and not await self._wants_recovery(managed):
                    self._tell(managed, managed.core.kept, attempt)
                    return
                self._lose(managed, None)
                channel = await _run(managed.strategy.create_handler, managed.config)
                await self._channels.ready(channel)
        except TimeoutError:
            silent = ConnectFailed(
                f"{managed.config.address} has not answered for {managed.connect_timeout:g} s"
            )
            await self._fail(managed, attempt, channel, silent)
        except Exception as error:
            await self._fail(managed, attempt, channel, error)
        else:
            await self._arrive(managed, attempt, channel)

    def broken(self, managed: Managed, generation: int, cause: BaseException | str) -> Actions:
        """A generation is broken; under the lock. Calls wait for the next one from now on."""
        actions = managed.core.broken(generation, cause, self._clock.monotonic())
        if managed.strategy.always_recovers:
            self._lose(managed, cause if isinstance(cause, BaseException) else None)
        return actions

    def _lose(self, managed: Managed, cause: BaseException | None) -> None:
        if managed.core.machine.phase == "recovering" and managed.handler._live is not None:
            managed.handler._lose(cause)

    async def _wants_recovery(self, managed: Managed) -> bool:
        return bool(await _run(managed.strategy.on_unavailable, managed))

    def _outdated(self, managed: Managed) -> Actions:
        advise = getattr(managed.strategy, "advise", None)
        if advise is None or advise(managed.address) is not Advice.MOVE:
            return []
        return self.broken(managed, managed.generation, "another primary is known by now")

    def moved(self, managed: Managed, version: int) -> Actions:
        """Another topology is known; under the lock."""
        if managed.strategy.advise(managed.address) is not Advice.MOVE:
            return []
        why = f"version {version} of the topology has another primary"
        return self.broken(managed, managed.generation, why)

    async def _arrive(self, managed: Managed, attempt: int, channel: Any) -> None:
        address = getattr(managed.strategy, "address", None) or managed.config.address
        with self._lock:
            actions = managed.core.dialled(attempt, self._clock.monotonic())
            swap = bool(actions) and actions[0].act is Act.SWAP
            if swap:
                managed.address = address
                managed.handler._swap(Live(managed.generation, channel, address))
                # While it was dialled, the primary may have moved on.
                actions += self._outdated(managed)
        if not swap:
            await self._channels.close(channel)
            return
        self._recorder.record(
            f"rpc.{managed.address}", f"generation {managed.generation} is connected"
        )
        self._set_age_timer(managed)
        self.carry_out(managed, actions[1:])

    async def _fail(self, managed: Managed, attempt: int, channel: Any, error: Exception) -> None:
        log.info("%s: %s", managed.address, describe(error))
        if channel is not None:
            await self._channels.close(channel)
        self._tell(managed, managed.core.failed, attempt, error)

    async def _probe(self, managed: Managed, generation: int) -> None:
        healthy, live = False, managed.handler._live
        if live is not None and live.number == generation:
            try:
                async with asyncio.timeout(PROBE_TIMEOUT):
                    healthy = await self._channels.probe(managed, live)
            except Exception as error:
                log.info("%s: the probe failed: %s", managed.address, describe(error))
        self._tell(managed, managed.core.probed, generation, healthy)

    def _tell(self, managed: Managed, event: Callable[..., Actions], *given: Any) -> None:
        with self._lock:
            actions = event(*given, self._clock.monotonic())
        self.carry_out(managed, actions)

    # -- the end -------------------------------------------------------------------------------

    def watch(self) -> None:
        """Close what nobody has had for a while, from now on and as long as there is something."""
        if not self._watching:
            self._watching = True
            self._look_later(weakref.ref(self))

    def _look_later(self, works: weakref.ref[Works]) -> None:
        # Not kept alive by its own timer: a manager that everybody has forgotten may go.
        def look() -> None:
            if (found := works()) is not None:
                found._look()

        asyncio.get_running_loop().call_later(self._policy.linger / 4, look)

    def _look(self) -> None:
        with self._lock:
            over = self._book.deserted(self._clock.monotonic(), self._policy.linger)
            closing = [(each, each.core.close("nobody has it any more")) for each in over]
            self._watching = len(self._book) > len(over)
        for managed, actions in closing:
            self.carry_out(managed, actions)
        if self._watching:
            self._look_later(weakref.ref(self))

    async def _close(self, managed: Managed) -> None:
        with self._lock:
            self._book.remove(managed)
        self._cancel_timer(managed, "age")
        managed.handler._on_close = None
        try:
            await _run(managed.strategy.close_async, managed)
        except Exception as error:
            log.warning("%s: closing: %s", managed.address, describe(error))
        finally:
            self._closings.pop(managed.key, None)

    async def closed(self, managed: Managed) -> None:
        """Wait until a connection is closed."""
        if (closing := self._closings.get(managed.key)) is not None:
            await asyncio.wait({closing})

    async def drained(self) -> None:
        """Wait until nothing is under way any more."""
        while self._tasks:
            await asyncio.wait(self._tasks)


async def _run(call: Callable[..., Any], *given: Any) -> Any:
    """Call what may be written either way; a plain function may block, so it gets a thread."""
    if inspect.iscoroutinefunction(call):
        return await call(*given)
    outcome = await asyncio.wrap_future(in_thread(partial(call, *given), name="holdfast-rpc"))
    return await outcome if inspect.isawaitable(outcome) else outcome
