"""The background work of a manager: connect, probe, wait, and close unused connections.

It runs on one event loop: the user's own, or the private one of the manager for threads. Each event
is passed to a `ConnectionCore` under the manager's lock; no lock is held across an `await`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from moored.kernel import Clock, Recorder, Tasks, Timers, forget_frames, run_callback

from ._channels import PROBE_TIMEOUT, Channels
from ._connection_table import ConnectionTable
from ._core import Actions, ShellAct
from ._dial import close_channel, close_unused, reports_too_many_pings, with_rarer_pings
from ._errors import ConnectFailed
from ._fork import inside
from ._grpc_internals import is_connected
from ._live_channel import LiveChannel
from ._managed import ManagedConnection
from ._manager_options import ManagerOptions, unavailable
from ._secrets import hidden, safe_text, secrets_of, without_secrets
from ._tls_hints import with_hint
from ._verdicts import Verdict, judge, raised, where
from .topology._follower import Follower
from .topology._topology import Advice, TopologyMixin

__all__ = ["Background"]

log = logging.getLogger("moored.rpc")

#: Seconds in which calls in flight may still end when their connection is closed.
CLOSING = 5.0
#: A failed renewal of an old channel is retried after a tenth of `max_age`, or after this many
#: seconds if that is less.
RENEW_AGAIN = 30.0
#: The largest factor by which pings become rarer for a server that complains of too many pings.
MAX_PING_FACTOR = 1024
#: Pauses between checks of a connection after a call over it ended with UNAVAILABLE. gRPC reports
#: the loss of the connection a few milliseconds after that, and later on a busy machine.
CHECK_PAUSES = (0.001, 0.004, 0.015, 0.08)

Managed = ManagedConnection[Any]


class Background:
    """The background of one manager."""

    def __init__(
        self,
        lock: contextlib.AbstractContextManager[Any],
        channels: Channels,
        *,
        policy: ManagerOptions,
        clock: Clock,
        recorder: Recorder,
        table: ConnectionTable,
    ) -> None:
        self._lock = lock
        self._channels = channels
        self._policy = policy
        self._clock = clock
        self._recorder = recorder
        self._table = table
        self._tasks = Tasks()
        # By connection, not by key: the next connection with that key may exist already.
        self._closings: dict[Managed, asyncio.Task[None]] = {}
        self._timers = Timers()
        # By key: the next connection waits for the end of a cancelled attempt.
        self._dials: dict[str, asyncio.Task[None]] = {}
        self._watching = False

    # -- actions of the core -------------------------------------------------------------------

    def carry_out(self, managed: Managed, actions: Actions) -> None:
        """Carry out what the core has decided; on the loop."""
        for action in actions:
            match action.act:
                case ShellAct.DIAL:
                    self._start_dial(managed, action.number)
                case ShellAct.PROBE:
                    self._tasks.start(self._probe(managed, action.number))
                case ShellAct.CHECK:
                    self._tasks.start(self._check_connection(managed, action.number))
                case ShellAct.SET_TIMER:
                    due = partial(self._tell, managed, managed.core.due)
                    self._set_timer((managed, "due"), action.delay, due)
                case ShellAct.CANCEL_TIMER:
                    self._timers.cancel((managed, "due"))
                case ShellAct.WAKE:
                    self._wake(managed)
                case ShellAct.REFRESH:
                    self._tasks.start(self._refresh(managed))
                case ShellAct.CLOSE:
                    self._give_up(managed)
                    self._closings[managed] = self._tasks.start(self._close(managed))
                case _:  # SWAP and DISCARD are carried out by `_arrive`, which has the channel
                    raise AssertionError(action)

    def _wake(self, managed: Managed) -> None:
        """Wake the waiting callers; each checks the state of the connection itself."""
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
                waiter.exception()  # mark it as retrieved: the waiter may have left
        if verdict is not None:
            managed.handler._fail_waiting(verdict)

    def _set_timer(self, name: Hashable, delay: float, act: Callable[[], object]) -> None:
        # By the loop's clock: the manager's clock may be simulated by a test.
        self._timers.set(name, Clock.current().monotonic() + delay, act)

    def _aged(self, managed: Managed) -> None:
        self._tell(managed, managed.core.aged)
        # A new channel sets the timer anew; until there is one, the renewal is retried.
        self._set_age_timer(managed, again=True)

    def _set_age_timer(self, managed: Managed, *, again: bool = False) -> None:
        if (age := self._policy.max_age) is not None and not managed.core.closed:
            delay = min(age / 10, RENEW_AGAIN) if again else age
            # Jitter: channels that were made together would be renewed together.
            delay *= 0.9 + 0.1 * self._clock.random.random()
            self._set_timer((managed, "age"), delay, partial(self._aged, managed))

    # -- connecting ----------------------------------------------------------------------------

    def _start_dial(self, managed: Managed, attempt: int) -> None:
        key, before = managed.key, self._dials.get(managed.key)
        if isinstance(managed.strategy, TopologyMixin):
            managed.strategy.counters = managed.core.counters
        if isinstance(managed.strategy, Follower):
            managed.strategy.credentials = managed.handler._credentials
            managed.strategy.on_refused = managed.handler._refused_elsewhere
        managed.dial = task = self._tasks.start(self._dial(managed, attempt, before))
        self._dials[key] = task

        def ended(task: asyncio.Task[None]) -> None:
            if self._dials.get(key) is task:
                del self._dials[key]

        task.add_done_callback(ended)

    def _give_up(self, managed: Managed) -> None:
        """Cancel the current attempt to connect."""
        if managed.dial is not None and managed.dial is not asyncio.current_task():
            managed.dial.cancel()

    async def _dial(
        self, managed: Managed, attempt: int, before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await asyncio.wait({before})
        try:
            await self._dial_once(managed, attempt)
        except asyncio.CancelledError as given_up:
            # The task keeps this error, whose frames, or those of its context, may hold a call. A
            # closed `grpc.aio` channel goes on connecting while a call over it is referenced.
            forget_frames(given_up)
            raise

    async def _dial_once(self, managed: Managed, attempt: int) -> None:
        channel = None
        time_limit = managed.connect_timeout
        limit = asyncio.timeout(time_limit)
        try:
            async with limit:
                # The strategy is asked about an outage only, not about the renewal of a channel.
                recovers = managed.core.machine.phase == "recovering"
                if recovers and not await run_callback(managed.strategy.on_unavailable, managed):
                    self._tell(managed, managed.core.kept, attempt)
                    return
                self._lose(managed, None)
                config = with_rarer_pings(managed.config, managed.ping_factor)
                channel = await run_callback(
                    managed.strategy.create_handler, config, unwanted=close_unused
                )
                if (choices := getattr(managed.strategy, "choices", 1)) > 1:
                    # A member that does not answer leaves time for the other members.
                    time_limit /= choices
                    limit.reschedule(asyncio.get_running_loop().time() + time_limit)
                await self._channels.ready(channel)
        except TimeoutError as error:
            silent = ConnectFailed(
                managed.trouble or f"{managed.config.address} has not answered for {time_limit:g} s"
            )
            # Another TimeoutError comes from the channel factory and is reported as it is.
            await self._fail(managed, attempt, channel, silent if limit.expired() else error)
        except asyncio.CancelledError:
            if channel is not None:
                await self._discard(channel)
            raise
        except Exception as error:
            await self._fail(managed, attempt, channel, error)
        else:
            await self._arrive(managed, attempt, channel)

    async def _discard(self, channel: Any) -> None:
        """Close an unused channel completely, also if this task is cancelled meanwhile."""
        try:
            await asyncio.shield(self._tasks.start(close_channel(channel)))
        except Exception as error:  # the caller must still report the failure to the core
            log.info("closing an unused channel failed: %s", type(error).__name__)

    def broken(self, managed: Managed, generation: int, cause: BaseException | str) -> Actions:
        """Report that a generation is broken, under the lock; new calls wait for the next one."""
        if isinstance(cause, BaseException) and self._is_news(managed, generation):
            cause = self.without_secrets(managed, cause)
        actions = managed.core.broken(
            generation,
            cause,
            self._clock.monotonic(),
            connected=isinstance(cause, BaseException)
            and unavailable(cause)
            and self._is_connected(managed, generation),
        )
        if managed.strategy.always_recovers:
            self._lose(managed, cause if isinstance(cause, BaseException) else None)
        return actions

    def _is_connected(self, managed: Managed, generation: int) -> bool:
        live = managed.handler._current
        return live is not None and live.number == generation and is_connected(live.channel)

    async def _check_connection(self, managed: Managed, generation: int) -> None:
        """Check whether a generation lost its connection, or its server answered UNAVAILABLE."""
        for pause in CHECK_PAUSES:
            await asyncio.sleep(pause)
            with inside():
                connected = self._is_connected(managed, generation)
            if not connected:
                break
        with self._lock:
            cause = managed.core.suspected_cause
            actions = managed.core.checked(generation, connected, self._clock.monotonic())
            if managed.strategy.always_recovers:
                self._lose(managed, cause if isinstance(cause, BaseException) else None)
        self.carry_out(managed, actions)
        if connected and isinstance(managed.strategy, Follower):
            managed.strategy.hurry()  # the server may no longer be the primary

    def without_secrets(self, managed: Managed, error: BaseException) -> BaseException:
        """Return the error, or a redacted one if it shows a secret of this connection."""
        return without_secrets(error, _secrets(managed))

    def _is_news(self, managed: Managed, generation: int) -> bool:
        """Whether the core will keep this cause: of many calls that fail together, the first."""
        if managed.core.machine.phase == "recovering":
            return managed.strategy.always_recovers and managed.handler._live is not None
        return generation == managed.generation

    def _lose(self, managed: Managed, cause: BaseException | None) -> None:
        if managed.core.machine.phase == "recovering" and managed.handler._live is not None:
            if reports_too_many_pings(cause):
                managed.ping_factor = min(2 * managed.ping_factor, MAX_PING_FACTOR)
            managed.handler._lose(cause)

    def moved(self, managed: Managed, why: str) -> Actions:
        """Replace the connection if the topology wants another member; under the lock."""
        advise = getattr(managed.strategy, "advise", None)
        if advise is None or advise(managed.address) is not Advice.MOVE:
            return []
        return self.broken(managed, managed.generation, why)

    async def _arrive(self, managed: Managed, attempt: int, channel: Any) -> None:
        address = getattr(managed.strategy, "address", None) or managed.config.address
        with self._lock:
            actions = managed.core.dialled(attempt, self._clock.monotonic())
            swap = bool(actions) and actions[0].act is ShellAct.SWAP
            if swap:
                self._count_move(managed, address)
                managed.address = address
                if isinstance(managed.strategy, Follower):
                    managed.strategy.arrived(address)
                managed.handler._swap(LiveChannel(managed.generation, channel, address))
                # The primary may have moved during the attempt.
                actions += self.moved(managed, "the primary has moved meanwhile")
        if not swap:
            await self._discard(channel)
            return
        self._set_age_timer(managed)
        self.carry_out(managed, actions[1:])

    def _count_move(self, managed: Managed, address: str) -> None:
        """Count a new channel that leads to another address than the one before."""
        if managed.generation > 1 and managed.address != address:
            managed.core.counters.moves += 1
            why = f"it was connected to {managed.address} before"
            self._recorder.record(f"rpc.{managed.config.address}", f"moved to {address}", cause=why)

    async def _fail(self, managed: Managed, attempt: int, channel: Any, error: Exception) -> None:
        verdict = judge(error, made=channel is not None)
        kept, text = _error_and_text(managed, error, verdict, made=channel is not None)
        level = logging.INFO if verdict is Verdict.RETRY else logging.WARNING
        log.log(level, "%s: %s", managed.address, text)
        if channel is not None:
            await self._discard(channel)
        forget_frames(kept)
        core = managed.core
        if verdict is Verdict.REFUSED and (managed.generation or not managed.dedicated):
            self._tell(managed, core.refused, attempt, kept)
        else:
            event = core.failed if verdict is Verdict.RETRY else core.failed_for_good
            self._tell(managed, event, attempt, kept)

    async def _probe(self, managed: Managed, generation: int) -> None:
        healthy, live = False, managed.handler._live
        if live is not None and live.number == generation:
            try:
                async with asyncio.timeout(PROBE_TIMEOUT):
                    healthy = await self._channels.probe(live.channel)
            except Exception as error:
                text = safe_text(error, _secrets(managed))
                log.info("%s: the probe failed: %s", managed.address, text)
        self._tell(managed, managed.core.probed, generation, healthy)

    # -- credentials and calls -----------------------------------------------------------------

    async def _refresh(self, managed: Managed) -> None:
        """Refresh refused credentials, once for all callers."""
        handler, counters = managed.handler, managed.core.counters
        name = f"rpc.{managed.config.address}"
        try:
            async with asyncio.timeout(managed.connect_timeout):
                await run_callback(handler._credentials.refresh)
        except BaseException as error:
            with self._lock:
                counters.credential_refresh_failures += 1
            try:
                why = safe_text(error, _secrets(managed))
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
            why = "the server refused the previous ones"
            self._recorder.record(name, "the credentials were refreshed", cause=why)
            handler._renewed(None)

    def unsent(self, managed: Managed, error: BaseException) -> list[tuple[Managed, Actions]]:
        """Count a call that was not sent, under the lock; record the first one of an outage."""
        managed.core.counters.calls_unsent += 1
        if managed.unsent_in != managed.generation:
            managed.unsent_in = managed.generation
            self._recorder.record(
                f"rpc.{managed.config.address}",
                "calls are not sent: no connection within their timeout",
                kind="failure",
                cause=error,
            )
        return []

    def _tell(self, managed: Managed, event: Callable[..., Actions], *given: Any) -> None:
        with self._lock:
            actions = event(*given, self._clock.monotonic())
        self.carry_out(managed, actions)

    # -- the end -------------------------------------------------------------------------------

    def watch(self) -> None:
        """Close connections without clients after `linger`, as long as there are connections."""
        if not self._watching and len(self._table):
            self._watching = True
            self._sweep_later(weakref.ref(self))

    def _sweep_later(self, background: weakref.ref[Background]) -> None:
        # The timer holds it weakly, so that an unreferenced manager can be collected.
        def sweep() -> None:
            if (found := background()) is not None:
                found._sweep()

        self._set_timer("sweep", self._policy.linger / 4, sweep)

    def _sweep(self) -> None:
        with self._lock:
            found = self._table.unused(self._clock.monotonic(), self._policy.linger)
            over = [each for each in found if each.detach()]
            closing = [(each, each.core.close("no client uses it")) for each in over]
            self._watching = len(self._table) > 0
        for managed, actions in closing:
            self.carry_out(managed, actions)
        if self._watching:
            self._sweep_later(weakref.ref(self))

    async def _close(self, managed: Managed) -> None:
        with self._lock:
            self._table.remove(managed)
            empty = not len(self._table)
        if empty:
            self._timers.cancel("sweep")
            self._watching = False
        self._timers.cancel((managed, "age"))
        self.shut(managed)
        try:
            await run_callback(managed.strategy.close_async, managed)
            await run_callback(managed.handler._wait_closed)
        except Exception as error:
            text = safe_text(error, _secrets(managed))
            log.warning("%s: closing the connection failed: %s", managed.address, text)
        finally:
            self._closings.pop(managed, None)

    def shut(self, managed: Managed) -> None:
        """Refuse new calls; those in flight may end. Calling it twice is harmless."""
        managed.handler._on_close = None
        managed.handler._shut(CLOSING)

    async def closed(self, managed: Managed) -> None:
        """Wait until a connection is closed."""
        if (closing := self._closings.get(managed)) is not None:
            await asyncio.wait({closing})

    async def all_closed(self) -> None:
        """Wait for all connections that are being closed."""
        if self._closings:
            await asyncio.wait(list(self._closings.values()))

    async def drained(self) -> None:
        """Wait until all background tasks have ended."""
        await self._tasks.drain()


def _secrets(managed: Managed) -> list[str]:
    """The secrets of a connection, in all forms."""
    return secrets_of(managed.config.token, *managed.handler._sent.lately)


def _error_and_text(
    managed: Managed, error: Exception, verdict: Verdict, *, made: bool
) -> tuple[BaseException, str]:
    """Return the error to keep and the text to log, also for an error that cannot be printed."""
    secrets = _secrets(managed)
    # An error before there is a channel comes from the user's program, not from the server.
    found = with_hint(managed.config, error, known=managed.generation > 0) if made else error
    kept = without_secrets(found, secrets)
    return kept, hidden(where(error, verdict), secrets) or safe_text(kept, secrets)
