"""The background work of a manager: connect, probe, wait, and close unused connections.

It runs on one event loop: the user's own, or the private one of the manager for threads. Nothing
else changes the state of the connections, so there is no lock.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

from moored.kernel import (
    Child,
    Clock,
    Context,
    Recorder,
    Supervisor,
    Tasks,
    Timers,
    Tree,
    forget_frames,
    is_cancelled,
    raise_if_cancelled,
    run_callback,
)

from ._channels import PROBE_TIMEOUT, answers, until_ready
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
    """The background of one manager.

    :param kind: the kind of its channels: `grpc.Channel` or `grpc.aio.Channel`.
    """

    def __init__(
        self,
        kind: type,
        policy: ManagerOptions,
        clock: Clock,
        recorder: Recorder,
        table: ConnectionTable,
    ) -> None:
        self._kind = kind
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
        sweep = partial(_sweep, weakref.ref(self), policy.linger / 4)
        self._supervisor = Supervisor(
            "rpc",
            children=[Child("sweeper", sweep, restart="transient")],
            intensity=None,
            recorder=recorder,
            clock=clock,
        )
        self._supervising: asyncio.Task[None] | None = None

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
                    self._close(managed)

    def _wake(self, managed: Managed) -> None:
        """Wake the waiting callers; each checks the state of the connection itself."""
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
        if self._supervising is None:
            self._supervising = self._tasks.start(self._supervisor.start())
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
                recovers = managed.core.machine.at("recovering")
                if (
                    recovers
                    and not await run_callback(managed.strategy.on_unavailable, managed)
                    and managed.handler._current is not None
                ):
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
                await until_ready(self._kind, channel)
        except TimeoutError as error:
            silent = ConnectFailed(
                managed.trouble or f"{managed.config.address} has not answered for {time_limit:g} s"
            )
            # Another TimeoutError comes from the channel factory and is reported as it is.
            await self._fail(managed, attempt, channel, silent if limit.expired() else error)
        except asyncio.CancelledError:
            if not is_cancelled():
                foreign = ConnectFailed("the factory, strategy or topology raised CancelledError")
                await self._fail(managed, attempt, channel, foreign)
                return
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

    def broken(self, managed: Managed, generation: int, cause: BaseException | str) -> None:
        """Report that a generation is broken; new calls wait for the next one."""
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
        self.carry_out(managed, actions)

    def _is_connected(self, managed: Managed, generation: int) -> bool:
        live = managed.handler._current
        with inside():
            return live is not None and live.number == generation and is_connected(live.channel)

    async def _check_connection(self, managed: Managed, generation: int) -> None:
        """Check whether a generation lost its connection, or its server answered UNAVAILABLE."""
        for pause in CHECK_PAUSES:
            await asyncio.sleep(pause)
            if not (connected := self._is_connected(managed, generation)):
                break
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
        if managed.core.machine.at("recovering"):
            return managed.strategy.always_recovers and managed.handler._live is not None
        return generation == managed.generation

    def _lose(self, managed: Managed, cause: BaseException | None) -> None:
        if managed.core.machine.at("recovering") and managed.handler._live is not None:
            if reports_too_many_pings(cause):
                managed.ping_factor = min(2 * managed.ping_factor, MAX_PING_FACTOR)
            managed.handler._lose(cause)

    def moved(self, managed: Managed, why: str) -> None:
        """Replace the connection if the topology wants another member."""
        advise = getattr(managed.strategy, "advise", None)
        if advise is not None and advise(managed.address) is Advice.MOVE:
            self.broken(managed, managed.generation, why)

    async def _arrive(self, managed: Managed, attempt: int, channel: Any) -> None:
        address = getattr(managed.strategy, "address", None) or managed.config.address
        if (actions := managed.core.dialled(attempt, self._clock.monotonic())) is None:
            await self._discard(channel)
            return
        self._count_move(managed, address)
        managed.address = address
        if isinstance(managed.strategy, Follower):
            managed.strategy.arrived(address)
        managed.handler._swap(LiveChannel(managed.generation, channel, address))
        self._set_age_timer(managed)
        self.carry_out(managed, actions)
        self.moved(managed, "the primary has moved meanwhile")

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
        if verdict is Verdict.REFUSED and managed.dedicated and not managed.generation:
            verdict = Verdict.MISTAKE  # no other caller can wait for it
        actions = managed.core.failed(attempt, kept, self._clock.monotonic(), verdict)
        self.carry_out(managed, actions)

    async def _probe(self, managed: Managed, generation: int) -> None:
        healthy, live = False, managed.handler._live
        if live is not None and live.number == generation:
            try:
                async with asyncio.timeout(PROBE_TIMEOUT):
                    healthy = await answers(self._kind, live.channel, self._policy.probe)
            except (Exception, asyncio.CancelledError) as error:
                raise_if_cancelled(error)
                text = safe_text(error, _secrets(managed))
                log.info("%s: the probe failed: %s", managed.address, text)
        self._tell(managed, managed.core.probed, generation, healthy)

    # -- credentials and calls -----------------------------------------------------------------

    async def _refresh(self, managed: Managed) -> None:
        """Refresh refused credentials, once for all callers."""
        handler, counters = managed.handler, managed.core.counters
        failure: BaseException | None = asyncio.CancelledError()
        try:
            try:
                async with asyncio.timeout(managed.connect_timeout):
                    await run_callback(handler._credentials.refresh)
                failure = None
            except Exception as error:
                failure = error
            counters.credential_refreshes += failure is None
            counters.credential_refresh_failures += failure is not None
            self._record_refresh(managed, failure)
        finally:
            handler._renewed(failure)

    def _record_refresh(self, managed: Managed, failure: BaseException | None) -> None:
        name, kind = f"rpc.{managed.config.address}", "info"
        text, why = "the credentials were refreshed", "the server refused the previous ones"
        if failure is not None:
            kind, text = "failure", "the credentials were not refreshed"
            why = safe_text(failure, _secrets(managed))
            log.warning("%s: %s: %s", managed.address, text, why)
        self._recorder.record(name, text, kind=kind, cause=why)

    def unsent(self, managed: Managed, error: BaseException) -> None:
        """Count a call that was not sent; record the first one of an outage."""
        managed.core.counters.calls_unsent += 1
        if managed.unsent_in != managed.generation:
            managed.unsent_in = managed.generation
            self._recorder.record(
                f"rpc.{managed.config.address}",
                "calls are not sent: no connection within their timeout",
                kind="failure",
                cause=error,
            )

    def _tell(self, managed: Managed, event: Callable[..., Actions], *given: Any) -> None:
        self.carry_out(managed, event(*given, self._clock.monotonic()))

    # -- the end -------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Close connections that had no client, call or waiter for `linger` seconds."""
        for managed in self._table.unused(self._clock.monotonic(), self._policy.linger):
            if self._table.detach(managed):
                self.close(managed, "no client uses it")

    def tree(self) -> Tree:
        """Return the tree of the supervisor, with those of the topologies below it."""
        own = self._supervisor.tree()
        strategies = (managed.strategy for managed in self._table)
        followed = [each.tree() for each in strategies if isinstance(each, Follower)]
        return replace(own, children=(*own.children, *(tree for tree in followed if tree)))

    def close(self, managed: Managed, why: str) -> None:
        """Close a connection: it refuses new calls from now on, and those in flight may end."""
        self.carry_out(managed, managed.core.close(why))

    def _close(self, managed: Managed) -> None:
        if managed.dial is not None and managed.dial is not asyncio.current_task():
            managed.dial.cancel()
        self._table.remove(managed)
        self._timers.cancel((managed, "age"))
        managed.handler._on_close = None
        managed.handler._shut(CLOSING)
        self._closings[managed] = self._tasks.start(self._finish_close(managed))

    async def _finish_close(self, managed: Managed) -> None:
        try:
            await run_callback(managed.strategy.close_async, managed)
            await run_callback(managed.handler._wait_closed)
        except Exception as error:
            text = safe_text(error, _secrets(managed))
            log.warning("%s: closing the connection failed: %s", managed.address, text)
        finally:
            self._closings.pop(managed, None)

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

    async def stop(self) -> None:
        """Stop the supervisor."""
        if self._supervising is not None:
            await self._supervisor.stop()


async def _sweep(background: weakref.ref[Background], every: float, ctx: Context) -> None:
    """Close unused connections, until the manager is stopped or garbage."""
    ctx.started()
    while True:
        await asyncio.sleep(every)
        if (found := background()) is None:
            return
        found.sweep()
        del found


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
