"""What a manager does in the background: it dials, probes, waits, and closes what nobody has.

It is written once, and runs on one loop: the user's own, or the private one of users of threads.
Whatever it tells the core, it tells under the manager's lock; no lock is held while it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from moored.kernel import Clock, Recorder, forget_frames

from ._book import Book
from ._core import Act, Actions
from ._errors import ConnectFailed
from ._follower import Follower
from ._hints import hinted
from ._live import Live
from ._managed import ManagedConnection
from ._policy import Policy
from ._refusals import explained
from ._running import close_unused, run
from ._secrets import alike, harmless, hidden, secrets_of, words
from ._topology import Advice, TopologyMixin
from ._verdicts import Verdict, judge, raised, where

__all__ = ["Works"]

log = logging.getLogger("moored.rpc")

#: How long a probe may take.
PROBE_TIMEOUT = 5.0
#: How long calls that are under way may still take when their connection is closed.
CLOSING = 5.0
#: When the renewal of a channel that is too old has failed, it is tried again after a tenth of its
#: age, or this.
RENEW_AGAIN = 30.0

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
        # By the connection, not its key: the next one with that key may be there already.
        self._closings: dict[Managed, asyncio.Task[None]] = {}
        self._timers: dict[tuple[Managed, str], asyncio.TimerHandle] = {}
        # By the key: the next connection waits for the end of an attempt that was given up.
        self._dials: dict[str, asyncio.Task[None]] = {}
        self._watching = False
        self._looking: asyncio.TimerHandle | None = None

    # -- what the core wants -------------------------------------------------------------------

    def carry_out(self, managed: Managed, actions: Actions) -> None:
        """Do it; on the loop."""
        for action in actions:
            match action.act:
                case Act.DIAL:
                    self._start_dial(managed, action.number)
                case Act.PROBE:
                    self._spawn(self._probe(managed, action.number))
                case Act.SET_TIMER:
                    self._set_timer(managed, "due", action.delay, self._due)
                case Act.CANCEL_TIMER:
                    self._cancel_timer(managed, "due")
                case Act.WAKE:
                    self._wake(managed)
                case Act.REFRESH:
                    self._spawn(self._refresh(managed))
                case Act.CLOSE:
                    self._give_up(managed)
                    self._closings[managed] = self._spawn(self._close(managed))
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
            verdict = managed.core.verdict
        for waiter in waiters:
            if waiter.done():
                continue
            if verdict is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(raised(verdict, managed.config.address))
                waiter.exception()  # seen, whether or not somebody still waits
        if verdict is not None:
            managed.handler._fail_waiting(verdict)

    def _set_timer(
        self, managed: Managed, what: str, delay: float, act: Callable[[Managed], None]
    ) -> None:
        self._cancel_timer(managed, what)

        def run() -> None:
            self._timers.pop((managed, what), None)
            act(managed)

        loop = asyncio.get_running_loop()
        self._timers[managed, what] = loop.call_later(delay, run)

    def _cancel_timer(self, managed: Managed, what: str) -> None:
        if (timer := self._timers.pop((managed, what), None)) is not None:
            timer.cancel()

    def _due(self, managed: Managed) -> None:
        self._tell(managed, managed.core.due)

    def _aged(self, managed: Managed) -> None:
        self._tell(managed, managed.core.aged)
        # A new channel begins a new age. Until there is one, it is tried again and again.
        self._set_age_timer(managed, again=True)

    def _set_age_timer(self, managed: Managed, *, again: bool = False) -> None:
        if (age := self._policy.max_age) is not None and not managed.core.closed:
            delay = min(age / 10, RENEW_AGAIN) if again else age
            # Not all at once: those that were made together would be renewed together.
            delay *= 0.9 + 0.1 * self._clock.random.random()
            self._set_timer(managed, "age", delay, self._aged)

    # -- dialling ------------------------------------------------------------------------------

    def _start_dial(self, managed: Managed, attempt: int) -> None:
        key, before = managed.key, self._dials.get(managed.key)
        if isinstance(managed.strategy, TopologyMixin):
            managed.strategy.counters = managed.core.counters
        if isinstance(managed.strategy, Follower):
            managed.strategy.credentials = managed.handler._credentials
            managed.strategy.on_refused = managed.handler._refused_elsewhere
        managed.dial = task = self._spawn(self._dial(managed, attempt, before))
        self._dials[key] = task

        def ended(task: asyncio.Task[None]) -> None:
            if self._dials.get(key) is task:
                del self._dials[key]

        task.add_done_callback(ended)

    def _give_up(self, managed: Managed) -> None:
        """Nobody wants what is being dialled."""
        if managed.dial is not None and managed.dial is not asyncio.current_task():
            managed.dial.cancel()

    async def _dial(
        self, managed: Managed, attempt: int, before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await asyncio.wait({before})
        channel = None
        limit = asyncio.timeout(managed.connect_timeout)
        try:
            async with limit:
                # One that is only old is not unavailable: nobody need be asked about it.
                recovers = managed.core.machine.phase == "recovering"
                if recovers and not await self._wants_recovery(managed):
                    self._tell(managed, managed.core.kept, attempt)
                    return
                self._lose(managed, None)
                channel = await run(
                    managed.strategy.create_handler, managed.config, unwanted=close_unused
                )
                await self._channels.ready(channel)
        except TimeoutError as error:
            silent = ConnectFailed(
                managed.trouble
                or f"{managed.config.address} has not answered for {managed.connect_timeout:g} s"
            )
            # It may be that of what makes the channel, and say something else.
            await self._fail(managed, attempt, channel, silent if limit.expired() else error)
        except asyncio.CancelledError as given_up:
            if channel is not None:
                await self._discard(channel)
            # The task keeps it, and with it a call: a closed channel of asyncio goes on dialling as
            # long as somebody has a call that was made over it.
            forget_frames(given_up)
            raise
        except Exception as error:
            await self._fail(managed, attempt, channel, error)
        else:
            await self._arrive(managed, attempt, channel)

    async def _discard(self, channel: Any) -> None:
        """Close a channel that nobody has used; to the end, also if this is given up meanwhile."""
        try:
            await asyncio.shield(self._spawn(self._channels.close(channel)))
        except Exception as error:  # what comes after it must come
            log.info("a channel that nobody has used: closing: %s", type(error).__name__)

    def broken(self, managed: Managed, generation: int, cause: BaseException | str) -> Actions:
        """A generation is broken; under the lock. Calls wait for the next one from now on."""
        if isinstance(cause, BaseException) and self._is_news(managed, generation):
            cause = self.harmless(managed, cause)
        actions = managed.core.broken(generation, cause, self._clock.monotonic())
        if managed.strategy.always_recovers:
            self._lose(managed, cause if isinstance(cause, BaseException) else None)
        return actions

    def harmless(self, managed: Managed, error: BaseException) -> BaseException:
        """The error, without the secrets of this connection."""
        return harmless(error, _secrets(managed))

    def _is_news(self, managed: Managed, generation: int) -> bool:
        """Whether the cause is kept: of many calls that fail together, that of the first is."""
        if managed.core.machine.phase == "recovering":
            return managed.strategy.always_recovers and managed.handler._live is not None
        return generation == managed.generation

    def _lose(self, managed: Managed, cause: BaseException | None) -> None:
        if managed.core.machine.phase == "recovering" and managed.handler._live is not None:
            managed.handler._lose(cause)

    async def _wants_recovery(self, managed: Managed) -> bool:
        return bool(await run(managed.strategy.on_unavailable, managed))

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
                self._count_move(managed, address)
                managed.address = address
                if isinstance(managed.strategy, Follower):
                    managed.strategy.arrived(address)
                managed.handler._swap(Live(managed.generation, channel, address))
                # While it was dialled, the primary may have moved on.
                actions += self._outdated(managed)
        if not swap:
            await self._discard(channel)
            return
        self._set_age_timer(managed)
        self.carry_out(managed, actions[1:])

    def _count_move(self, managed: Managed, address: str) -> None:
        """Before the first channel, it was nowhere."""
        if managed.generation > 1 and managed.address != address:
            managed.core.counters.moves += 1
            why = f"it led to {managed.address} before"
            self._recorder.record(f"rpc.{managed.config.address}", f"moved to {address}", cause=why)

    async def _fail(self, managed: Managed, attempt: int, channel: Any, error: Exception) -> None:
        verdict = judge(error, made=channel is not None)
        kept, told = _put(managed, error, verdict, made=channel is not None)
        level = logging.INFO if verdict is Verdict.RETRY else logging.WARNING
        log.log(level, "%s: %s", managed.address, told)
        if channel is not None:
            await self._discard(channel)
        forget_frames(kept)
        core = managed.core
        if verdict is Verdict.REFUSED and (managed.generation or not managed.dedicated):
            self._tell(managed, core.refused, attempt, kept)
        else:
            event = core.failed if verdict is Verdict.RETRY else core.hopeless
            self._tell(managed, event, attempt, kept)

    async def _probe(self, managed: Managed, generation: int) -> None:
        healthy, live = False, managed.handler._live
        if live is not None and live.number == generation:
            try:
                async with asyncio.timeout(PROBE_TIMEOUT):
                    healthy = await self._channels.probe(managed, live)
            except Exception as error:
                told = words(error, _secrets(managed))
                log.info("%s: the probe failed: %s", managed.address, told)
        self._tell(managed, managed.core.probed, generation, healthy)

    # -- credentials and calls -----------------------------------------------------------------

    async def _refresh(self, managed: Managed) -> None:
        """The server has refused the credentials: have them refreshed, for all who use them."""
        handler, counters = managed.handler, managed.core.counters
        name = f"rpc.{managed.config.address}"
        try:
            async with asyncio.timeout(managed.connect_timeout):
                await run(handler._credentials.refresh)
        except BaseException as error:
            with self._lock:
                counters.credential_refresh_failures += 1
            try:
                sent = handler._sent.lately
                why = explained(error, handler._credentials, managed.config.token, *sent)
                self._recorder.record(
                    name, "the credentials were not refreshed", kind="failure", cause=why
                )
                log.warning("%s: the credentials were not refreshed: %s", managed.address, why)
            finally:
                handler._renewed(error)
            if not isinstance(error, Exception):
                raise
        else:
            with self._lock:
                counters.credential_refreshes += 1
            why = "the server refused those that there were"
            self._recorder.record(name, "the credentials were refreshed", cause=why)
            handler._renewed(None)

    def unsent(self, managed: Managed, error: BaseException) -> None:
        """A call was not sent; under the lock. Of many in one outage, the first is told."""
        managed.core.counters.calls_unsent += 1
        if managed.unsent_in != managed.generation:
            managed.unsent_in = managed.generation
            self._recorder.record(
                f"rpc.{managed.config.address}",
                "calls are not sent: there is no connection in their time",
                kind="failure",
                cause=error,
            )

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

        self._looking = asyncio.get_running_loop().call_later(self._policy.linger / 4, look)

    def _look(self) -> None:
        with self._lock:
            found = self._book.deserted(self._clock.monotonic(), self._policy.linger)
            over = [each for each in found if each.part()]
            closing = [(each, each.core.close("nobody has it any more")) for each in over]
            self._watching = len(self._book) > 0
        for managed, actions in closing:
            self.carry_out(managed, actions)
        if self._watching:
            self._look_later(weakref.ref(self))

    async def _close(self, managed: Managed) -> None:
        with self._lock:
            self._book.remove(managed)
            nobody = not len(self._book)
        if nobody and self._looking is not None:
            self._looking.cancel()
            self._watching = False
        self._cancel_timer(managed, "age")
        self.shut(managed)
        try:
            await run(managed.strategy.close_async, managed)
            await run(managed.handler._wait_closed)
        except Exception as error:
            told = words(error, _secrets(managed))
            log.warning("%s: closing: %s", managed.address, told)
        finally:
            self._closings.pop(managed, None)

    def shut(self, managed: Managed) -> None:
        """No call begins from now on; those that are under way may end. Twice is harmless."""
        managed.handler._on_close = None
        managed.handler._shut(CLOSING)

    async def closed(self, managed: Managed) -> None:
        """Wait until a connection is closed."""
        if (closing := self._closings.get(managed)) is not None:
            await asyncio.wait({closing})

    async def all_closed(self) -> None:
        """Wait until all that is being closed is."""
        if self._closings:
            await asyncio.wait(list(self._closings.values()))

    async def drained(self) -> None:
        """Wait until nothing is under way any more."""
        while self._tasks:
            await asyncio.wait(self._tasks)


def _secrets(managed: Managed) -> list[str]:
    """What must not be shown of it."""
    return secrets_of(managed.config.token, *managed.handler._sent.lately)


def _put(
    managed: Managed, error: Exception, verdict: Verdict, *, made: bool
) -> tuple[BaseException, str]:
    """What to keep of a failure, and what to log; whatever the error is, there is something."""
    try:
        secrets = _secrets(managed)
        # What fails before there is a channel is the user's own program, and not the server.
        found = hinted(managed.config, error, known=managed.generation > 0) if made else error
        kept = harmless(found, secrets)
        return kept, hidden(where(error, verdict), secrets) or words(kept, secrets)
    except Exception:
        kind = type(error).__name__
        return alike(error, kind), kind
