"""The loop of a manager: it carries out what endpoints decide, and takes what calls report.

It runs on one event loop: the user's own, or the private one of the manager for threads. Nothing
else changes an endpoint, so there is no lock; calls in other threads post their reports to it.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import grpc  # type: ignore[import-untyped]

from moored.kernel import (
    Child,
    Clock,
    Context,
    Deadline,
    Recorder,
    Supervisor,
    Tasks,
    Timers,
    Tree,
    describe,
    forget_frames,
    in_thread,
    is_cancelled,
    raise_if_cancelled,
    run_callback,
)

from ._dial import (
    PROBE_TIMEOUT,
    answers,
    close_channel,
    close_unused,
    unavailable,
    until_ready,
    with_rarer_pings,
)
from ._endpoint import TOO_MANY, Act, Endpoint, Live, Orders
from ._errors import ConnectFailed
from ._fork import inside, leaves_soon, used
from ._gate import BaseGate
from ._grpc_internals import cut, cut_async, has_connection, is_connected
from ._manager_options import RENEW, ManagerOptions
from ._secrets import hidden, safe_text, secrets_of, trace, without_secrets
from ._table import Table
from ._tls_hints import with_hint
from ._verdicts import Verdict, judge, raised, where
from .topology._follower import Follower
from .topology._topology import Advice, TopologyMixin

__all__ = ["AtOnce", "Background", "Posting"]

log = logging.getLogger("moored.rpc")

#: Pauses between checks of a connection after a call over it ended with UNAVAILABLE. gRPC reports
#: the loss of the connection a few milliseconds after that, and later on a busy machine.
CHECK_PAUSES = (0.001, 0.004, 0.015, 0.08)


class Posting(Protocol):
    """How a change gets to the loop."""

    def post(self, change: Callable[[], object]) -> None:
        """Make a change on the loop, now or soon."""

    def settle(self) -> None:
        """Wait until the changes that this thread has posted are made, but not for long."""


class AtOnce:
    """Makes changes at once, for asyncio: everything runs on the user's loop."""

    def post(self, change: Callable[[], object]) -> None:
        try:
            change()
        except Exception as error:  # which must not replace the error of a call
            log.error("a change of the manager failed\n%s", trace(error, ()))

    def settle(self) -> None:
        """Do nothing: the change was made."""


class Background:
    """The background of one manager.

    :param kind: the kind of its channels: `grpc.Channel` or `grpc.aio.Channel`.
    :param make_strategy: makes the strategy of an endpoint.
    """

    def __init__(
        self,
        kind: type,
        options: ManagerOptions,
        clock: Clock,
        recorder: Recorder,
        table: Table,
        posting: Posting,
        make_strategy: Callable[[Endpoint], Any],
    ) -> None:
        self.posting = posting
        self._kind = kind
        self._options = options
        self._clock = clock
        self._recorder = recorder
        self._table = table
        self._make_strategy = make_strategy
        self._tasks = Tasks()
        self._timers = Timers()
        self._waiters: dict[Endpoint, list[asyncio.Future[None]]] = {}
        # By key: the next attempt waits for the end of one that was given up.
        self._dials: dict[str, asyncio.Task[None]] = {}
        self._closings: dict[Endpoint, asyncio.Task[None]] = {}
        #: Set when an endpoint has no replaced channels left.
        self._emptied: dict[Endpoint, asyncio.Event] = {}
        sweep = partial(_sweep, weakref.ref(self), options.linger / 4)
        self._supervisor = Supervisor(
            "rpc",
            children=[Child("sweeper", sweep, restart="transient")],
            intensity=None,
            recorder=recorder,
            clock=clock,
        )
        self._supervising: asyncio.Task[None] | None = None

    # -- what endpoints decide -----------------------------------------------------------------

    def tell(
        self, endpoint: Endpoint, event: Callable[..., Orders | None], *given: Any, **named: Any
    ) -> bool:
        """Tell an endpoint of an event, and carry out what it decides; on the loop.

        Return False if the endpoint does not want what the event brings.
        """
        orders = event(*given, self._clock.monotonic(), **named)
        if orders is None:
            return False
        gate: BaseGate = endpoint.handler.gate
        for act, attempt, live in orders:
            try:
                match act:
                    case Act.DIAL:
                        self._start_dial(endpoint, attempt)
                    case Act.PUT:
                        gate.put()
                    case Act.WAKE:
                        self._wake(endpoint, None)
                    case Act.FAIL if endpoint.verdict is not None:
                        self._wake(endpoint, endpoint.verdict)
                        gate.fail(endpoint.verdict)
                    case Act.REFRESH:
                        self._tasks.start(self._refresh(endpoint))
                    case Act.REST | Act.STOP:
                        self._end(endpoint, gate)
                    case Act.PROBE if live is not None:
                        self._tasks.start(self._probe(endpoint, live))
                    case Act.CHECK if live is not None:
                        self._tasks.start(self._check(endpoint, live))
                    case Act.RETIRE if live is not None:
                        gate.watch(live)
                    case Act.REVIEW if live is not None:
                        stays = self._may_stay(endpoint, live)
                        self.tell(endpoint, endpoint.reviewed, live, stays)
                    case Act.CLOSE if live is not None:
                        self._tasks.start(self._close_channel(endpoint, live))
            except Exception as defect:
                _log_defect(endpoint, defect)  # the other acts do not depend on it
        if (at := endpoint.next_at) is None:
            self._timers.cancel(endpoint)
        else:
            # By the loop's clock: the manager's clock may be simulated by a test.
            delay = max(0.0, at - self._clock.monotonic())
            due = partial(self.tell, endpoint, endpoint.due)
            self._timers.set(endpoint, Clock.current().monotonic() + delay, due)
        return True

    def post(self, endpoint: Endpoint, event: Callable[..., Orders], *given: Any) -> None:
        """Tell an endpoint of an event, from any thread."""
        self.posting.post(partial(self.tell, endpoint, event, *given))

    # -- callers that wait for a channel, on the loop ------------------------------------------

    async def wait(self, endpoint: Endpoint, deadline: Deadline) -> None:
        """Wait for a change of the connection; raise `ConnectFailed` after the deadline."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(endpoint, []).append(waiter)
        self.tell(endpoint, endpoint.waits)
        try:
            async with asyncio.timeout(deadline.timeout):
                await waiter
        except TimeoutError:
            raise _unreached(endpoint) from endpoint.last_error
        finally:
            waiters = self._waiters.get(endpoint, [])
            if waiter in waiters:
                waiters.remove(waiter)
            if not waiters:
                self._waiters.pop(endpoint, None)
            self.tell(endpoint, endpoint.leaves)

    def _wake(self, endpoint: Endpoint, verdict: BaseException | None) -> None:
        """Wake the waiting callers; each checks the state of the connection itself."""
        for waiter in self._waiters.pop(endpoint, ()):
            if waiter.done():
                continue
            if verdict is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(raised(verdict, endpoint.config.address))
                waiter.exception()  # mark it as retrieved: the waiter may have left

    def requested(self, endpoint: Endpoint) -> None:
        """A caller requests the connection."""
        self.tell(endpoint, endpoint.requested, endpoint.handler.gate.used_at)

    # -- reports of calls, from any thread -----------------------------------------------------

    def call_failed(
        self, endpoint: Endpoint, error: grpc.RpcError, live: Live, credential: int
    ) -> None:
        """Note the error of a call."""
        ask = getattr(error, "code", None)  # a bare RpcError of an interceptor has none
        code = ask() if callable(ask) else None
        if code is grpc.StatusCode.UNAVAILABLE:
            if len(live.unavailable) < TOO_MANY:
                live.unavailable.append(None)
        elif code is grpc.StatusCode.UNAUTHENTICATED and endpoint.refusals is not None:
            endpoint.handler.gate.tell(endpoint.refused, credential)
        try:
            what = self._options.classify(error)
        except Exception as defect:
            _log_defect(endpoint, defect)
            return
        if what:
            change = partial(self.broken, endpoint, live.number, error, renew=what == RENEW)
            self.posting.post(change)

    def safely(self, endpoint: Endpoint, callback: Callable[[], object]) -> None:
        """Call a callback of the user's for a call; its exception is logged."""
        try:
            callback()
        except Exception as defect:
            _log_defect(endpoint, defect)

    def refused(self, endpoint: Endpoint) -> None:
        """The topology server has refused the credentials."""
        self.tell(endpoint, endpoint.refused, endpoint.credential)

    def release(self, gate: BaseGate, client: object | None) -> None:
        """Return a channel."""
        endpoint = gate.endpoint
        if endpoint.is_last(client):
            gate.refuse()  # at once, for calls of this thread
        gate.tell(endpoint.given_back, client)

    def settle(self) -> None:
        """Wait until the reports of this thread are taken, but not for long."""
        self.posting.settle()

    # -- failures ------------------------------------------------------------------------------

    def broken(
        self,
        endpoint: Endpoint,
        generation: int | None,
        cause: BaseException | str,
        *,
        renew: bool = False,
    ) -> None:
        """An error over a generation asks for a new connection; without a number, guess it."""
        live, connected = endpoint.live, False
        if generation is None:
            generation = endpoint.blamed(self._clock.monotonic())
        if isinstance(cause, BaseException):
            try:
                ask = getattr(endpoint.strategy, "renews", None)
                renew = renew or (ask is not None and bool(ask(cause)))
            except Exception as defect:
                _log_defect(endpoint, defect)
            connected = (renew or unavailable(cause)) and self._is_connected(live)
            if endpoint.heeds(generation, connected):
                cause = without_secrets(cause, _secrets(endpoint))
        self.tell(
            endpoint,
            partial(
                endpoint.broken,
                generation,
                cause,
                connected=connected,
                keep=not (endpoint.strategy is None or endpoint.strategy.always_recovers),
                renew=renew,
                follows=isinstance(endpoint.strategy, Follower),
            ),
        )

    def _is_connected(self, live: Live | None) -> bool:
        if live is None or self._kind is not grpc.Channel:
            return live is not None and is_connected(live.channel)
        with inside():
            return is_connected(live.channel)

    def renew(self, endpoint: Endpoint) -> bool:
        """Make a new connection beside a live one; return whether it is being made."""
        self.tell(endpoint, endpoint.renew, "the program asks for it")
        return endpoint.machine.at("renewing")

    async def _check(self, endpoint: Endpoint, live: Live) -> None:
        """Check whether a channel lost its connection, or its server answered UNAVAILABLE."""
        for pause in CHECK_PAUSES:
            await asyncio.sleep(pause)
            if not (connected := live is endpoint.live and self._is_connected(live)):
                break
        keep = not (endpoint.strategy is None or endpoint.strategy.always_recovers)
        self.tell(endpoint, endpoint.checked, live, connected, keep=keep)
        if connected and isinstance(endpoint.strategy, Follower):
            endpoint.strategy.hurry()  # the server may no longer be the primary

    def moved(self, endpoint: Endpoint, why: str) -> None:
        """Replace the connection if the topology wants another member."""
        advise = getattr(endpoint.strategy, "advise", None)
        if advise is not None and advise(endpoint.address) is Advice.MOVE:
            self.broken(endpoint, endpoint.generation, why)

    async def _probe(self, endpoint: Endpoint, live: Live) -> None:
        healthy = False
        try:
            async with asyncio.timeout(PROBE_TIMEOUT):
                healthy = await answers(self._kind, live.channel, self._options.probe)
        except (Exception, asyncio.CancelledError) as error:
            raise_if_cancelled(error)
            text = safe_text(error, _secrets(endpoint))
            log.info("%s: the probe failed: %s", endpoint.address, text)
        self.tell(endpoint, endpoint.probed, live, healthy)

    # -- attempts to connect -------------------------------------------------------------------

    def _start_dial(self, endpoint: Endpoint, attempt: int) -> None:
        if self._kind is grpc.Channel:
            used()
        if self._supervising is None:
            self._supervising = self._tasks.start(self._supervisor.start())
        try:
            if endpoint.strategy is None:
                self.give_strategy(endpoint)
        except Exception as error:
            self.tell(endpoint, endpoint.unable, without_secrets(error, _secrets(endpoint)))
            return
        key, before = endpoint.key, self._dials.get(endpoint.key)
        self._dials[key] = task = self._tasks.start(self._dial(endpoint, attempt, before))

        def ended(task: asyncio.Task[None]) -> None:
            if self._dials.get(key) is task:
                del self._dials[key]

        task.add_done_callback(ended)

    def give_strategy(self, endpoint: Endpoint) -> None:
        """Give an endpoint a strategy, and a place among those that have a connection."""
        strategy = self._make_strategy(endpoint)
        if isinstance(strategy, TopologyMixin):
            strategy.serve(endpoint, self)
        endpoint.uses(strategy)
        self._table.wake(endpoint)

    async def _dial(
        self, endpoint: Endpoint, attempt: int, before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await asyncio.wait({before})
        try:
            await self._dial_once(endpoint, attempt)
        except asyncio.CancelledError as given_up:
            # The task keeps this error, whose frames, or those of its context, may hold a call. A
            # closed `grpc.aio` channel goes on connecting while a call over it is referenced.
            forget_frames(given_up)
            raise

    async def _dial_once(self, endpoint: Endpoint, attempt: int) -> None:
        channel, strategy = None, endpoint.strategy
        limit = asyncio.timeout(time_limit := endpoint.connect_timeout)
        try:
            async with limit:
                # The strategy is asked about an outage only, not about the renewal of a channel.
                if (
                    endpoint.recovering
                    and not await run_callback(strategy.on_unavailable, endpoint)
                    and endpoint.live is not None
                ):
                    self.tell(endpoint, endpoint.kept, attempt)
                    return
                if endpoint.recovering and endpoint.live is not None:
                    self.tell(endpoint, endpoint.dropped)
                config = with_rarer_pings(endpoint.config, endpoint.ping_factor)
                channel = await run_callback(strategy.create_handler, config, unwanted=close_unused)
                if (choices := getattr(strategy, "choices", 1)) > 1:
                    # A member that does not answer leaves time for the other members.
                    time_limit /= choices
                    limit.reschedule(asyncio.get_running_loop().time() + time_limit)
                await until_ready(self._kind, channel)
        except TimeoutError as error:
            silent = ConnectFailed(
                _trouble(endpoint)
                or f"{endpoint.config.address} has not answered for {time_limit:g} s"
            )
            # Another TimeoutError comes from the channel factory and is reported as it is.
            await self._fail(endpoint, attempt, channel, silent if limit.expired() else error)
        except asyncio.CancelledError:
            if not is_cancelled():
                foreign = ConnectFailed("the factory, strategy or topology raised CancelledError")
                await self._fail(endpoint, attempt, channel, foreign)
                return
            if channel is not None:
                await self._discard(channel)
            raise
        except Exception as error:
            await self._fail(endpoint, attempt, channel, error)
        else:
            await self._arrive(endpoint, attempt, channel)

    async def _arrive(self, endpoint: Endpoint, attempt: int, channel: Any) -> None:
        address = getattr(endpoint.strategy, "address", None) or endpoint.config.address
        if not self.tell(endpoint, endpoint.dialed, attempt, channel, address):
            await self._discard(channel)
        elif isinstance(endpoint.strategy, TopologyMixin):
            if isinstance(endpoint.strategy, Follower):
                endpoint.strategy.arrived(address)
            self.moved(endpoint, "the primary has moved meanwhile")

    async def _fail(self, endpoint: Endpoint, attempt: int, channel: Any, error: Exception) -> None:
        verdict = judge(error, made=channel is not None)
        kept, text = _error_and_text(endpoint, error, verdict, made=channel is not None)
        level = logging.INFO if verdict is Verdict.RETRY else logging.WARNING
        log.log(level, "%s: %s", endpoint.address, text)
        if channel is not None:
            await self._discard(channel)
        forget_frames(kept)
        self.tell(endpoint, partial(endpoint.failed, attempt, kept, verdict=verdict))

    async def _discard(self, channel: Any) -> None:
        """Close an unused channel completely, also if this task is cancelled meanwhile."""
        try:
            await asyncio.shield(self._tasks.start(close_channel(channel)))
        except Exception as error:  # the caller must still report the failure to the endpoint
            log.info("closing an unused channel failed: %s", type(error).__name__)

    # -- credentials ---------------------------------------------------------------------------

    async def _refresh(self, endpoint: Endpoint) -> None:
        """Refresh refused credentials, once for all callers."""
        failure: BaseException | None = asyncio.CancelledError()
        try:
            try:
                async with asyncio.timeout(endpoint.connect_timeout):
                    await run_callback(endpoint.handler.gate.credentials.refresh)
                failure = None
            except Exception as error:
                failure = error
            self._record_refresh(endpoint, failure)
        finally:
            self.tell(endpoint, endpoint.refreshed, failure)

    def _record_refresh(self, endpoint: Endpoint, failure: BaseException | None) -> None:
        kind, text = "info", "the credentials were refreshed"
        why = "the server refused the previous ones"
        if failure is not None:
            kind, text = "failure", "the credentials were not refreshed"
            why = safe_text(failure, _secrets(endpoint))
            log.warning("%s: %s: %s", endpoint.address, text, why)
        self._recorder.record(endpoint.machine.name, text, kind=kind, cause=why)

    # -- the end -------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Let endpoints rest that had no client, call or waiter for `linger` seconds."""
        linger = self._options.linger
        for endpoint in self._table:
            gate = endpoint.handler.gate
            self.tell(endpoint, endpoint.swept, gate.calls, gate.used_at, linger)

    def close(self, endpoint: Endpoint, why: str) -> None:
        """Close an endpoint: it refuses new calls from now on, and those in flight may end."""
        self.tell(endpoint, endpoint.close, why)

    def _end(self, endpoint: Endpoint, gate: BaseGate) -> None:
        """Give up the attempt and the strategy of an endpoint that rests or is closed."""
        dial = self._dials.get(endpoint.key)
        if dial is not None and dial is not asyncio.current_task():
            dial.cancel()
        if endpoint.closed:
            self._table.remove(endpoint)
            gate.shut()
        else:
            self._table.rest(endpoint)
        strategy = endpoint.strategy
        endpoint.uses(None)
        self._closings[endpoint] = self._tasks.start(self._finish(endpoint, strategy))

    async def _finish(self, endpoint: Endpoint, strategy: Any) -> None:
        try:
            try:
                if strategy is not None:
                    await run_callback(strategy.close_async, endpoint)
            except Exception as error:
                text = safe_text(error, _secrets(endpoint))
                log.warning("%s: closing the strategy failed: %s", endpoint.address, text)
            while endpoint.old:
                await self._emptied.setdefault(endpoint, asyncio.Event()).wait()
        finally:
            if self._closings.get(endpoint) is asyncio.current_task():
                del self._closings[endpoint]

    async def _close_channel(self, endpoint: Endpoint, live: Live) -> None:
        """Close a replaced channel; its calls, if there are any, end with UNAVAILABLE."""
        why = "its channel was closed" if endpoint.closed else "its connection was replaced"
        why = f"cut off from {live.address}: {why}; the server may have executed the call"
        try:
            if self._kind is grpc.Channel:  # closing may block
                await in_thread(partial(_cut, live.channel, why), name="moored-rpc-close")
            else:
                await cut_async(live.channel, why)
        except Exception:
            log.exception("closing generation %d to %s failed", live.number, live.address)
        finally:
            if live.calls:  # which were cut
                leaves_soon()
            self._gone(endpoint, live)

    def _gone(self, endpoint: Endpoint, live: Live) -> None:
        endpoint.gone(live)
        if not endpoint.old and (emptied := self._emptied.pop(endpoint, None)) is not None:
            emptied.set()
        endpoint.handler.gate.notify()

    def _may_stay(self, endpoint: Endpoint, live: Live) -> bool:
        """Whether the calls of a replaced channel may go on after their grace."""
        with inside():
            if not has_connection(live.channel):
                return False
        if live.address == endpoint.address:
            return True
        follower = endpoint.strategy
        return isinstance(follower, Follower) and follower.advise(live.address) is not Advice.MOVE

    async def closed(self, endpoint: Endpoint) -> None:
        """Wait until an endpoint is closed."""
        if (closing := self._closings.get(endpoint)) is not None:
            await asyncio.wait({closing})

    async def all_closed(self) -> None:
        """Wait for all endpoints that are being closed."""
        if self._closings:
            await asyncio.wait(list(self._closings.values()))

    async def drained(self) -> None:
        """Wait until all background tasks have ended."""
        await self._tasks.drain()

    async def stop(self) -> None:
        """Stop the supervisor."""
        if self._supervising is not None:
            await self._supervisor.stop()

    def tree(self) -> Tree:
        """Return the tree of the supervisor, with those of the topologies below it."""
        own = self._supervisor.tree()
        strategies = (endpoint.strategy for endpoint in self._table)
        followed = [each.tree() for each in strategies if isinstance(each, Follower)]
        return replace(own, children=(*own.children, *(tree for tree in followed if tree)))


async def _sweep(background: weakref.ref[Background], every: float, ctx: Context) -> None:
    """Let unused endpoints rest, until the manager is stopped or garbage."""
    ctx.started()
    while True:
        await asyncio.sleep(every)
        if (found := background()) is None:
            return
        found.sweep()
        del found


def _cut(channel: Any, why: str) -> None:
    with inside():
        cut(channel, why)


def _log_defect(endpoint: Endpoint, defect: Exception) -> None:
    # Without the exception's context, the error of the call, which may repeat the token.
    text = trace(defect, _secrets(endpoint))
    log.error("a callback for a call to %s failed\n%s", endpoint.address, text)


def _secrets(endpoint: Endpoint) -> list[str]:
    """The secrets of an endpoint, in all forms."""
    return secrets_of(endpoint.config.token, *endpoint.handler.gate.sent.lately)


def _trouble(endpoint: Endpoint) -> str:
    """Why the current attempt makes no progress; "" if that is not known."""
    return str(getattr(endpoint.strategy, "trouble", ""))


def _unreached(endpoint: Endpoint) -> ConnectFailed:
    """Return the error for a caller whose timeout has expired."""
    last = endpoint.last_error
    why = describe(last) if last is not None else _trouble(endpoint) or "the server does not answer"
    return ConnectFailed(f"no connection to {endpoint.config.address} in time: {why}")


def _error_and_text(
    endpoint: Endpoint, error: Exception, verdict: Verdict, *, made: bool
) -> tuple[BaseException, str]:
    """Return the error to keep and the text to log, also for an error that cannot be printed."""
    secrets = _secrets(endpoint)
    # An error before there is a channel comes from the user's program, not from the server.
    found = with_hint(endpoint.config, error, known=endpoint.generation > 0) if made else error
    kept = without_secrets(found, secrets)
    return kept, hidden(where(error, verdict), secrets) or safe_text(kept, secrets)
