"""The broker: hands the events of a source to the subscribers of each tenant."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, NamedTuple, Self

from moored.kernel import (
    Backoff,
    Child,
    Clock,
    Context,
    Recorder,
    RestartRequested,
    Supervisor,
    Tree,
    describe,
    refuse,
)

from ._audience import Audience, SlowPolicy, StreamBuffer
from ._events import (
    DEFECTS,
    BrokerOff,
    EventSource,
    HistoryLost,
    LiveEvent,
    ReplaySource,
    SourceEvent,
    SourceGap,
    TooManyStreams,
)
from ._recent import RecentEvents
from ._replays import Replays
from ._stream import LiveStream
from ._tenants import Tenants, Untold, canonical_tenant

__all__ = ["Broker", "BrokerStatistics"]

log = logging.getLogger("moored.broker")

#: Seconds that entering the broker waits for the source. A stream that is opened before the source
#: has begun gets a reset then; over HTTP it is refused.
READY = 3.0
#: Tenants in the status: there may be thousands.
SHOWN_TENANTS = 5
#: Seconds after a drain at a signal. A program that still runs then has not ended because of it.
STOPPED = 10.0
#: The names of events that are not channels.
RESERVED = ("expired", "keepalive", "reset", "skipped", "start")


class BrokerStatistics(NamedTuple):
    """The counters of a broker since it was made."""

    #: Open streams, and tenants with at least one.
    subscribers: int
    tenants: int
    #: Events of the source, and their deliveries to a subscriber's buffer.
    events: int
    delivered: int
    #: Events read from the history for subscribers that resumed.
    replayed: int
    #: Events that no subscriber got, and deliveries that a full buffer refused, by reason.
    dropped: dict[str, int]
    #: Resets that subscribers got, by reason: `gap` or `history`.
    resets: dict[str, int]
    #: Streams that were refused, by reason: the limits `total` and `tenant`, and `token_…`.
    refused: dict[str, int]
    #: The most events that a subscriber's buffer has held.
    buffer_high_water: int


class Newest(NamedTuple):
    """Where a client resumes whose stream begins, or is reset, now.

    The events of all tenants up to it were handed out.
    """

    id: str = ""
    position: Any = None


class Broker:
    """Hands the events of a source to the subscribers of each tenant.

    ::

        async with Broker(source, channels=["orders", "refunds"]) as broker:
            async with broker.subscribe(tenant) as events:
                async for event in events:
                    ...

    :param source: yields the events; None for a broker that is off, whose streams are refused.
    :param channels: the channels that subscribers may have; an event on another one is dropped. By
        default, all channels of the source.
    :param replay: the history from which a subscriber resumes; by default the source itself if it
        is a `ReplaySource`, or else the last events, which are kept in memory.
    :param tenant: the field of the payload (a JSON object) that names the tenant, or a function of
        the event that returns its name or None. An event without a tenant is dropped.
    :param user: the field of the payload that names the only user of the tenant who gets the event;
        an event without the field is for all of the tenant. By default, all events are.
    :param canonical: returns the canonical form of a tenant's name, or raises `ValueError`; by
        default `canonical_tenant`, for any text. With `canonical_uuid`, the name must be a UUID.
    :param buffer: the most events that wait for one subscriber.
    :param buffer_bytes: the most bytes of payload that wait for one subscriber.
    :param slow: what happens if a buffer is full. `disconnect`: the stream ends, and the client
        resumes after its last event. `drop`: new events are dropped, and the client gets their
        number. `latest`: all but the newest event are dropped, and the client gets their number.
    :param history: the number of events that are kept in memory, without `replay`.
    :param max_streams: the most streams.
    :param max_streams_per_tenant: the most streams of one tenant.
    """

    def __init__(
        self,
        source: EventSource | None,
        *,
        channels: Iterable[str] | None = None,
        replay: ReplaySource | None = None,
        tenant: str | Callable[[SourceEvent], str | None] = "org_id",
        user: str | None = None,
        canonical: Callable[[Any], str] = canonical_tenant,
        buffer: int = 64,
        buffer_bytes: int = 1024 * 1024,
        slow: SlowPolicy = "disconnect",
        history: int = 1024,
        max_streams: int = 10_000,
        max_streams_per_tenant: int = 1_000,
        name: str = "broker",
        recorder: Recorder | None = None,
        clock: Clock | None = None,
    ) -> None:
        given = (channels,) if isinstance(channels, str) else channels
        #: The channels that subscribers may have; None for all.
        self.channels = None if given is None else frozenset(given)
        numbers = {
            "buffer": buffer,
            "buffer_bytes": buffer_bytes,
            "history": history,
            "max_streams": max_streams,
            "max_streams_per_tenant": max_streams_per_tenant,
        }
        refuse("Broker", self._mistakes(numbers, slow))
        self.name = name
        self._source = source
        if replay is None and source is not None and isinstance(source, ReplaySource):
            replay = source
        self._recent: RecentEvents | None = None
        self._history: RecentEvents | Replays
        if replay is None:
            self._history = self._recent = RecentEvents(history, history * 16 * 1024)
        else:
            self._history = Replays(replay, self._admit)
        self._tenants = Tenants(tenant, canonical, user)
        self._limits = buffer, buffer_bytes, slow
        #: The most streams, of all tenants.
        self.max_streams = max_streams
        self._max_per_tenant = max_streams_per_tenant
        self._audience = Audience()
        self._newest = Newest()
        self._events = self._delivered = self._replayed = self._high_water = 0
        self._dropped: Counter[str] = Counter()
        self._resets: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        #: Whether the source is connected; False while it is started again after an error.
        self.up = False
        self._begun = asyncio.Event()
        self.last_error = ""
        #: Whether the broker refuses new streams, and ends the open ones.
        self.draining = False
        #: Whether it does so because the program has got a signal to end.
        self.stopping = False
        feed = Child("source", self._run, backoff=Backoff(0.5, 5.0, jitter="half"))
        self._supervisor = Supervisor(
            name,
            children=() if source is None else (feed,),
            intensity=None,
            recorder=recorder,
            clock=clock,
        )

    def _mistakes(self, numbers: dict[str, int], slow: str) -> Iterator[str]:
        for name, value in numbers.items():
            if value < 1:
                yield f"{name}={value}: must be at least 1"
        if slow not in ("disconnect", "drop", "latest"):
            yield f"slow={slow!r}: must be 'disconnect', 'drop' or 'latest'"
        if self.channels is not None and not self.channels:
            yield "channels: at least one is needed"
        for channel in self.channels or ():
            if not _is_channel(channel):
                yield (
                    f"channel {channel!r}: must be printable, without a comma, and none of "
                    f"{', '.join(RESERVED)}"
                )

    # -- lifetime ------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self._supervisor.start()
        try:
            if self._source is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(READY):
                        await self._begun.wait()
        except BaseException:  # cancelled
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for subscriber in list(self._audience):
            subscriber.end("drained")
        await self._supervisor.stop()
        if isinstance(self._history, Replays):
            await self._history.close()

    async def drain(self, over: float = 5.0) -> None:
        """Refuse new streams, and end the others one by one within `over` seconds.

        Clients then reconnect one by one, too, for example to another node.
        """
        self.draining = True
        left = list(self._audience)
        random.shuffle(left)
        at_once = math.ceil(len(left) / 100)
        for number, subscriber in enumerate(left):
            subscriber.keepalive(*self._newest)  # an idle client resumes from the present
            subscriber.end("drained")
            if number % at_once == 0:
                await asyncio.sleep(over / 100)

    async def drain_at_signal(self, over: float) -> None:
        """Drain at a signal that ends most programs; if this one goes on, accept new streams again.

        An interactive interpreter, for example, goes on after Ctrl-C.
        """
        if not self.draining:
            asyncio.get_running_loop().call_later(over + STOPPED, self._go_on)
        self.stopping = True
        await self.drain(over)

    def _go_on(self) -> None:
        self.draining = self.stopping = False

    # -- the source ----------------------------------------------------------------------------

    async def _run(self, ctx: Context) -> None:
        assert self._source is not None
        ctx.started()
        try:
            async with aclosing(self._source.events()) as items:
                async for item in items:
                    first, self.up = not self._begun.is_set(), True
                    self._begun.set()
                    if isinstance(item, SourceGap):
                        self._gap(item, kind="info" if first else "failure")
                    elif item is not None:
                        self._publish_or_reset(item)
            raise BrokerOff("the source has ended")
        except DEFECTS as error:
            self.last_error = describe(error)
            raise
        except Exception as error:
            # One line without a traceback, and once for a cause: sources lose their connections.
            known = not self.up and self.last_error == describe(error)
            self.last_error = describe(error)
            log.log(
                logging.DEBUG if known else logging.WARNING,
                "%s: the source has failed and is started again: %s",
                self.name,
                self.last_error,
            )
            raise RestartRequested(self.last_error) from error
        finally:
            self.up = False

    def _publish_or_reset(self, found: SourceEvent) -> None:
        try:
            self._publish(found)
        except Exception:
            # The source goes on with the next event, and some subscribers do not have this one.
            self._gap(SourceGap("the broker has failed", self._newest.id), kind="failure")
            raise

    def _publish(self, found: SourceEvent) -> None:
        """Hand an event to the subscribers of its tenant and channel."""
        self._events += 1
        event = self._admit(found)
        newest = event or found
        if newest.id:
            self._newest = Newest(newest.id, newest.position)
        if event is None:
            return
        ended = []
        for subscriber in self._audience.hearers(event.tenant, event.channel):
            if not subscriber.may_have(event):
                continue
            if reason := subscriber.push(event):
                self._dropped[reason] += 1
                if subscriber.end_reason:
                    ended.append(subscriber)
            else:
                self._delivered += 1
        for subscriber in ended:
            self._audience.mute(subscriber)

    def _admit(self, found: SourceEvent) -> LiveEvent | None:
        """Return the event with its tenant; None if it must not be sent to anyone."""
        try:
            if not self.has_channel(found.channel):
                raise Untold("unknown_channel")
            tenant, user = self._tenants.of(found), self._tenants.user_of(found)
        except Untold as error:
            self._dropped[str(error)] += 1
            return None
        if found.position is None and self._recent is not None:
            return self._recent.add(found.channel, found.payload, tenant, user)
        return LiveEvent(found.channel, found.payload, tenant, found.id, found.position, user)

    def _gap(self, gap: SourceGap, kind: str) -> None:
        id, position = gap.id if self._recent is None else self._recent.cut(), None
        with suppress(HistoryLost, ValueError):  # without an id
            position = self._history.position(id)
        self._newest = Newest(id, position)
        for subscriber in list(self._audience):
            subscriber.reset(_public(gap.reason), id)
            self._resets["gap"] += 1
        self._supervisor.recorder.record(self.name, f"gap: {gap.reason}", kind=kind)

    # -- subscribers ---------------------------------------------------------------------------

    def canonical(self, tenant: str) -> str:
        """Return the canonical form of a tenant's name; raise `ValueError` for an invalid one."""
        return self._tenants.canonical(tenant)

    def has_channel(self, name: str) -> bool:
        """Return whether subscribers may have a channel."""
        return _is_channel(name) if self.channels is None else name in self.channels

    @property
    def begun(self) -> bool:
        """Whether the source has begun once; until then, no event can reach a stream."""
        return self._source is None or self._begun.is_set()

    @asynccontextmanager
    async def subscribe(
        self,
        tenant: str,
        channels: Iterable[str] | None = None,
        *,
        after: str | None = None,
        user: str | None = None,
    ) -> AsyncIterator[LiveStream]:
        """Open a stream of a tenant's events.

        :param channels: all channels by default.
        :param after: the id of the last event that the subscriber has; the stream begins with the
            events after it, or with a `StreamReset` if they are not known any more.
        :param user: the user of the tenant, for events that are meant for one.
        :raises BrokerOff: the broker has no source, or is stopping.
        :raises TooManyStreams: the limit of streams is reached.
        """
        stream = self.open(tenant, channels, after=after, user=user)
        try:
            yield stream
        finally:
            self.close(stream)

    def open(
        self,
        tenant: str,
        channels: Iterable[str] | None = None,
        *,
        after: str | None = None,
        user: str | None = None,
    ) -> LiveStream:
        """Open a stream as `subscribe` does; the caller must `close` it."""
        wanted = self.channels if channels is None else frozenset(channels)
        if unknown := [each for each in wanted or () if not self.has_channel(each)]:
            raise ValueError(f"not a channel of the broker: {', '.join(sorted(unknown))}")
        self._check_room(tenant := self.canonical(tenant))
        position, lost = None, ""
        if after:
            try:
                position = self._history.position(after)
            except (HistoryLost, ValueError) as error:
                lost = str(error)
        # Registered before the history is read: an event is in one of both, or in both.
        subscriber = StreamBuffer(
            tenant, wanted, self._limits, replaying=position is not None, user=user
        )
        self._audience.add(subscriber)
        if lost:
            self._lost(subscriber, lost)
        start = "" if after else self._newest.id
        return LiveStream(
            subscriber,
            self._history,
            position,
            start,
            after or start,
            on_replayed=self._count_replayed,
            on_lost=self._lost,
        )

    def keepalive(self, stream: LiveStream) -> None:
        """Let an idle stream send the id after which its client may resume now."""
        stream.subscriber.keepalive(*self._newest)

    def _count_replayed(self, events: int) -> None:
        self._replayed += events

    def _lost(self, subscriber: StreamBuffer, reason: str) -> None:
        self._resets["history"] += 1
        subscriber.reset(_public(reason), self._newest.id)

    def count_refused(self, reason: str) -> None:
        """Count a stream that was not opened."""
        self._refused[reason] += 1

    def close(self, stream: LiveStream) -> None:
        """Close a stream."""
        subscriber = stream.subscriber
        stream.stop_reading()
        self._audience.remove(subscriber)
        subscriber.end("closed")
        self._high_water = max(self._high_water, subscriber.high_water)

    def _check_room(self, tenant: str) -> None:
        if self._source is None:
            raise BrokerOff("live events are off: the broker has no source")
        if self.draining or self._supervisor.state != "running":
            raise BrokerOff("the broker is stopping, or was not started")
        total, each = self.max_streams, self._max_per_tenant
        if len(self._audience) >= total:
            self.count_refused("total")
            raise TooManyStreams(f"{total} streams are open (max_streams)", None)
        if self._audience.of_tenant[tenant] >= each:
            self.count_refused("tenant")
            raise TooManyStreams(
                f"the tenant has {each} streams open (max_streams_per_tenant)", tenant
            )

    # -- state ---------------------------------------------------------------------------------

    def statistics(self) -> BrokerStatistics:
        """Return the counters."""
        open_now = list(self._audience)
        return BrokerStatistics(
            subscribers=len(open_now),
            tenants=len(self._audience.of_tenant),
            events=self._events,
            delivered=self._delivered,
            replayed=self._replayed,
            dropped=dict(self._dropped),
            resets=dict(self._resets),
            refused=dict(self._refused),
            buffer_high_water=max([self._high_water, *(each.high_water for each in open_now)]),
        )

    def status(self) -> dict[str, Any]:
        """Return the state as a JSON-compatible dict."""
        state = "off" if self._source is None else self._supervisor.state
        return {
            "state": state,
            "up": self.up,
            "last_error": self.last_error,
            "delayed": self.delayed,
            **self.statistics()._asdict(),
            # Open streams of the tenants that have the most.
            "largest_tenants": dict(self._audience.of_tenant.most_common(SHOWN_TENANTS)),
        }

    @property
    def delayed(self) -> str:
        """Why events come late, if its source says so; empty if they do not."""
        try:
            return getattr(self._source, "delayed", "")
        except BrokerOff:
            return ""

    def tree(self) -> Tree:
        """Return the supervision tree."""
        return self._supervisor.tree()

    def __repr__(self) -> str:
        found = self.status()
        return f"<Broker {self.name!r}: {found['state']}, {found['subscribers']} subscribers>"


def _public(reason: str) -> str:
    """Return a reason for subscribers, without the numbers of a server, which are for operators."""
    short = re.sub(r" ?\([^()]*\)", "", reason)
    return "the history of the source has changed" if re.search(r"\d", short) else short


def _is_channel(name: str) -> bool:
    return bool(name) and name.isprintable() and "," not in name and name not in RESERVED
