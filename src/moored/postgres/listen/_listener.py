"""`Listener`: the connection that LISTENs, its heartbeat, its canary, and its subscriptions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

import psycopg

from moored.kernel import (
    SECRETS,
    Child,
    Clock,
    Condition,
    Context,
    Dial,
    Link,
    Machine,
    Recorder,
    StatusMonitor,
    Supervisor,
    Tree,
    duration,
    first_of,
    refuse,
    sleep_until,
    unmet,
)

from .._errors import ConfigurationError, PostgresError
from ..report import Health
from ..server import FaultVerdict, Resolver, diagnose
from ._canary import POOLED_LIMIT, Canary, NoListener
from ._core import CHART, ListenerCore
from ._direct import DirectConnection, direct_conninfo, open_direct
from ._events import Notification, NotifyRefused, check_channels, check_payload, quoted
from ._notify import PooledPath
from ._report import ListenerFigures, explain, report
from ._subscription import Subscription

__all__ = ["Listener"]

log = logging.getLogger("moored.postgres")

#: Shares of the server's notification queue at which a warning is logged.
QUEUE_WARNINGS = (0.5, 0.1)
CONDITIONS = ("connected", "listening", "canary")


class Listener:
    """A direct connection that LISTENs, reconnects by itself, and reports what may be missing.

    Use it with `async with`, which waits for the first attempt: it raises `ConfigurationError` if
    an operator must change something (a pooler, a wrong password). If the server is down, the
    listener goes on trying.

    :param url: the URL of the server itself, not of a pooler (by convention port 5432 instead of
        6432).
    :param notify_through: sends notifications: a pool (of Moored, psycopg_pool or asyncpg), or a
        URL. Without it, `notify()` is not available, and no test notifications are sent.
    :param heartbeat: seconds between two queries that prove that the server answers; they read the
        usage of the notification queue.
    :param canary_every: seconds between two test notifications ("canaries") that are sent through
        `notify_through` to this listener. Each wakes every listener of the database: raise the
        interval if there are hundreds of listeners; None sends none.
    :param optional: if the URL leads to a pooler, log a warning and turn the listener off, instead
        of raising `PoolerRefused`.
    :param name: the name in metrics and logs.
    :param application_name: the `application_name` of the connection, unless the URL has one.
    """

    def __init__(
        self,
        url: str,
        *,
        notify_through: Any = None,
        heartbeat: float = 1.0,
        canary_every: float | None = 5.0,
        optional: bool = False,
        name: str = "listener",
        application_name: str = "moored listener",
        clock: Clock | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        SECRETS.add_from(url)
        if isinstance(notify_through, str):
            SECRETS.add_from(notify_through)
        refuse(
            "Listener",
            unmet(
                ("heartbeat", heartbeat, heartbeat > 0, "more than 0 seconds"),
                (
                    "canary_every",
                    canary_every,
                    canary_every is None or canary_every > 0,
                    "more than 0 seconds, or None",
                ),
            ),
        )
        self.name = name
        #: Called if an operator must change something, according to the first attempt.
        self.on_refused: Callable[[ConfigurationError], None] = lambda error: None
        #: Called by the first subscription, if the listener was not opened before: starts it in a
        #: task, for which every subscription waits.
        self.on_first_use: Callable[[], asyncio.Task[Any]] | None = None
        #: Returns whether the pooled path is closed on purpose, so that no canary can be sent.
        self.stands_by: Callable[[], bool] = lambda: False
        self._url = url
        self._pooled = None if notify_through is None else PooledPath(notify_through)
        self._heartbeat = heartbeat
        self._canary_every = canary_every
        self._application_name = application_name
        self._resolver = Resolver(timeout=3.0)
        self._clock = clock or Clock.current()
        self._recorder = recorder or Recorder(clock=self._clock)
        self._figures = ListenerFigures()
        self._refused: ConfigurationError | None = None
        self._state = "new"
        self._starting: asyncio.Task[Any] | None = None
        self._settled = asyncio.Event()
        self._changed = asyncio.Event()
        self._supervisor: Supervisor | None = None
        self.machine = Machine(name, CHART, clock=self._clock, recorder=self._recorder)
        self._canary = Canary(
            None if canary_every is None else self._pooled,
            self._figures,
            self._clock,
            optional=optional,
        )
        self._core = ListenerCore(self.machine, self._clock, self._canary.channels)
        self.monitor: StatusMonitor[Health] = StatusMonitor(
            CONDITIONS,
            self._health_of,
            name=f"{name}.status",
            clock=self._clock,
            recorder=self._recorder,
        )

    # -- open and close ------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect; `async with` calls this. Returns after the first attempt, whatever came of it.

        :raises ConfigurationError: an operator must change something.
        """
        self._supervisor = Supervisor(
            self.name,
            children=[self.child("connection")],
            intensity=None,
            recorder=self._recorder,
            clock=self._clock,
        )
        await self._supervisor.start()
        try:
            await self.settled()
        except BaseException:
            await self.close()
            raise

    def child(self, name: str = "listener") -> Child:
        """Return the listener as a child of a supervisor, in place of `open()` and `close()`."""
        return Child(name, self._run, restart="transient", shutdown=POOLED_LIMIT + 5.0)

    async def settled(self) -> None:
        """Wait for the end of the first attempt; raise `ConfigurationError` if it was refused."""
        await self._settled.wait()
        if self._refused is not None:
            raise self._refused

    async def close(self) -> None:
        """End all subscriptions, and close the connection."""
        if self._supervisor is not None:
            await self._supervisor.stop()
        self.end()

    def end(self, error: ConfigurationError | None = None) -> None:
        """End all subscriptions, with this error; nothing can be subscribed any more."""
        self._state = "closed"
        self._refused = error or self._refused
        for condition in CONDITIONS:
            self.monitor.clear(condition, error or "the listener is closed")
        for subscription in self._core.subscribers:
            self._core.remove(subscription)
            subscription.end(error)
        self._settled.set()
        self._pulse()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- use -----------------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        """Whether the listener is connected and listens to all its channels."""
        return self._core.link.is_up and self._state == "open"

    @property
    def is_open(self) -> bool:
        """Whether the listener has been started, and neither closed nor turned off."""
        return self._state == "open"

    @property
    def health(self) -> Health:
        """The health: ACTIVE, STARTING before the first connection, DEGRADED while it is down."""
        return self.monitor.status()

    def link(self, server: str) -> Link:
        """Return what is known about the connection to the server at this address."""
        core = self._core
        up = True if self.up else None if core.failure is None else False
        why = "" if up else core.failure or ""
        return Link(server, up, core.last_heard, why, of="listener", vital=False)

    def link_machines(self) -> list[tuple[str, str, Machine]]:
        """Return the state machine of the connection, for `LinksCollector`."""
        return [("listener", self.name, self.machine)] if self.is_open else []

    def subscribe(self, *channels: str, buffer: int = 1000) -> Subscription:
        """Return the events of these channels: `async with …  as events`, then `async for`.

        While the listener is up, entering the block waits until it listens to the channels. While
        it is down, entering returns at once, and the first event is a `Gap`.

        :param buffer: the most notifications that wait for the subscriber; later ones are dropped,
            and it gets a `Gap` with the reason "slow".
        """
        if buffer < 1:
            raise ValueError(f"subscribe(): buffer={buffer!r} must be at least 1")
        return Subscription(self, channels, buffer)

    async def notify(self, channel: str, payload: str = "") -> None:
        """Send a notification through `notify_through`, in a transaction of its own.

        :raises NotifyRefused: the name or the payload is too long; nothing was sent.
        """
        check_channels((channel,))
        check_payload(channel, payload)
        if self._pooled is None:
            raise PostgresError(
                "notify() has no path: pass notify_through=, a pool or a URL, to Listener; the "
                "direct connection only listens"
            )
        await self._pooled.notify(channel, payload)

    async def wait_until_up(self, timeout: float | None = None) -> None:
        """Wait until the listener is up; raises `WaitTimeout`, which names what is missing."""
        await self.settled()
        await self.monitor.wait_until(lambda health: health is Health.ACTIVE, timeout)

    def statistics(self) -> dict[str, Any]:
        """Return the whole state as plain data."""
        return report(self.name, self._core, self.monitor, self._figures, self._clock)

    def explain(self) -> str:
        """Return as text what the listener is doing, why, and what to do about it."""
        return explain(self.statistics())

    def tree(self) -> Tree:
        """Return the supervision tree of a listener that runs alone."""
        if self._supervisor is None:
            raise PostgresError(f"{self!r} is not open, or is a part of another tree")
        return self._supervisor.tree()

    def __repr__(self) -> str:
        return f"<Listener {self.name}: {self.machine.state}, {len(self._core.channels)} channels>"

    # -- subscriptions -------------------------------------------------------------------------

    async def _subscribe(self, subscription: Subscription) -> None:
        if self.on_first_use is not None:
            self._starting = self._starting or self.on_first_use()
            await asyncio.shield(self._starting)
        if self._state != "new":
            await self.settled()
        if self._state != "open":
            raise PostgresError(f"{self!r} is not open: use `async with`")
        self._core.add(subscription)
        try:
            await self._listening_to(subscription)
        except BaseException:
            self._unsubscribe(subscription)
            raise

    async def _change(self, subscription: Subscription, channels: frozenset[str]) -> None:
        self._core.change(subscription, channels)
        await self._listening_to(subscription)

    def _unsubscribe(self, subscription: Subscription) -> None:
        self._core.remove(subscription)
        subscription.end()
        self._pulse()

    async def _listening_to(self, subscription: Subscription) -> None:
        """Wait until the channels are listened to, or the listener is down."""
        self._pulse()
        listens_to = self._core.listens_to
        while self.up and not subscription.ended and not listens_to(subscription.channels):
            await self._changed.wait()

    def _pulse(self) -> None:
        """Wake all tasks that wait for a change of the state or of the channels."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # -- the connection ------------------------------------------------------------------------

    async def _run(self, ctx: Context) -> None:
        """Keep a connection, until cancelled; the subscriptions outlive a restart."""
        core, link = self._core, self._core.link
        core.lost(link.number, "the listener was restarted")
        if link.machine.at("off"):
            link.want(self._clock.monotonic(), "the listener was started")
        self._state = "open"
        ctx.started(self)
        try:
            if self._pooled is not None:
                await self._pooled.open()
            while link.next_dial_at is not None:
                await sleep_until(link.next_dial_at, self._clock)
                if isinstance(what := link.due(self._clock.monotonic()), Dial):
                    try:
                        await self._connect_and_listen(what.number)
                    except Exception as error:
                        self._failed(what.number, error)
        except asyncio.CancelledError:
            core.lost(link.number, "the listener is closing")
            link.rest("the listener is closing")
            raise
        finally:
            await self._canary.end()
            if self._pooled is not None:
                await self._pooled.close()

    async def _connect_and_listen(self, token: int) -> None:
        conninfo = direct_conninfo(await self._resolver.conninfo(self._url), self._application_name)
        direct = await open_direct(conninfo, partial(self._receive, token))
        try:
            self._core.connected(token)
            self.monitor.set("connected", owner="nobody")
            await self._canary.probe(direct, conninfo, was_up=self._core.was_up)
            self._core.probed(token)
            await self._sync(token, direct)
            self._went_up(token)
            watches = [self._beat(token, direct)]
            if self._pooled is not None and self._canary_every is not None:
                watches.append(self._send_canaries(direct, self._canary_every))
            await first_of(*watches)
        finally:
            direct.close()

    def _receive(self, token: int, notification: Notification | None) -> None:
        self._core.heard(token)
        if notification is None:
            return
        if notification.channel == self._canary.channel:
            self._canary.received(notification.payload)
        else:
            self._core.deliver(token, notification)

    async def _sync(self, token: int, direct: DirectConnection) -> None:
        """LISTEN and UNLISTEN until the server knows the channels of all subscriptions."""
        while (change := self._core.next_change()) is not None:
            words = [f"LISTEN {quoted(channel)}" for channel in change.listen]
            words += [f"UNLISTEN {quoted(channel)}" for channel in change.unlisten]
            try:
                await direct.query("; ".join(words))
                self._core.listened(token, change.listen)
            except psycopg.DataError:
                # The encoding of the database lacks a character of a name: find out of which one.
                for channel, word in zip(change.listen + change.unlisten, words, strict=True):
                    try:
                        await direct.query(word)
                    except psycopg.DataError as error:
                        self._refuse(channel, error)
            self._pulse()

    def _refuse(self, channel: str, error: psycopg.DataError) -> None:
        """End the subscriptions of a channel that the server does not accept."""
        for subscription in self._core.subscribers:
            if channel in subscription.channels:
                self._core.remove(subscription)
                subscription.end(NotifyRefused(f"the server refuses {channel!r}: {error}"))

    async def _beat(self, token: int, direct: DirectConnection) -> None:
        """Follow the wishes of the subscribers, and query the server at each heartbeat."""
        due = self._clock.monotonic()
        while True:
            changed = self._changed
            await self._sync(token, direct)
            if self._clock.monotonic() >= due:
                await self._query_usage(direct)
                due = self._clock.monotonic() + self._heartbeat
            waiting: asyncio.Future[Any] = asyncio.ensure_future(changed.wait())
            try:
                left = due - self._clock.monotonic()
                await asyncio.wait(
                    {waiting, direct.lost}, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                waiting.cancel()
            if direct.lost.done():
                direct.lost.result()

    async def _query_usage(self, direct: DirectConnection) -> None:
        """Query the share of the notification queue that is in use: the heartbeat."""
        began = self._clock.monotonic()
        answer = await direct.query("SELECT pg_catalog.pg_notification_queue_usage()")
        usage = float(answer or 0.0)
        self._figures.heartbeat(self._clock.monotonic(), began)
        level = next((mark for mark in QUEUE_WARNINGS if usage >= mark), 0.0)
        if level > self._figures.queue_level:
            log.warning(
                "the notification queue of the server is %.0f %% full: a listener does not read, "
                "or is in a long transaction; when it is full, every NOTIFY of the cluster fails "
                "(find the oldest in pg_stat_activity, by state and wait_event)",
                100 * usage,
            )
        self._figures.queue_usage, self._figures.queue_level = usage, level

    async def _send_canaries(self, direct: DirectConnection, every: float) -> None:
        """Send a canary through the pooled path at each interval; raise if one is lost."""
        while True:
            began = self._clock.monotonic()
            if self.stands_by():
                self.monitor.clear("canary", "no canary is sent while this instance stands by")
            elif (failure := await self._canary.send(direct)) is not None:
                self.monitor.clear("canary", f"the pooled path does not work: {failure}")
            else:
                self.monitor.set("canary", owner="nobody")
            await sleep_until(began + every, self._clock)

    # -- outcomes ------------------------------------------------------------------------------

    def _went_up(self, token: int) -> None:
        outage = self._figures.outage(self._clock.monotonic())
        if outage is not None and self._core.was_up:
            log.info("the listener is back after %s: %s", duration(outage), self._core.failure)
        self._core.went_up(token)
        self._figures.down_since = None
        self._refused = None
        self.monitor.set("listening", owner="nobody")
        self._settled.set()
        self._pulse()

    def _failed(self, token: int, error: Exception) -> None:
        """Record a failed attempt or a lost connection, and choose what to do about it."""
        diagnosis = diagnose(error)
        reason = str(diagnosis)
        refused = None
        if diagnosis.verdict is FaultVerdict.FATAL and not self._core.was_up:
            kind = type(error) if isinstance(error, ConfigurationError) else ConfigurationError
            refused = self._refused = kind(reason)
        if isinstance(refused, NoListener):
            log.warning("%s", reason)
            self._core.link.refuse(reason)
            self.end(refused)
            return
        self._wait_for_next(token, reason)
        for condition in CONDITIONS:
            self.monitor.clear(condition, reason)
        if refused is not None and not self._settled.is_set():
            self.on_refused(refused)
        self._settled.set()
        self._pulse()

    def _wait_for_next(self, token: int, reason: str) -> None:
        was_up, before = self._core.link.is_up, self._core.failure
        now = self._clock.monotonic()
        exhausted = self._core.lost(token, reason)
        wait = (self._core.link.next_dial_at or now) - now
        if self._figures.down_since is None:
            self._figures.down_since = now
        what = "the listener has lost its connection" if was_up else "the listener cannot connect"
        if exhausted:
            level = logging.ERROR
        else:
            level = logging.WARNING if was_up or reason != before else logging.DEBUG
        log.log(level, "%s: %s; next try in %s", what, reason, duration(wait))

    def _health_of(self, conditions: Mapping[str, Condition]) -> Health:
        if conditions["listening"].met:
            return Health.ACTIVE
        return Health.DEGRADED if self._core.was_up else Health.STARTING
