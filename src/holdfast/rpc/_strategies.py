"""How a channel is made, and what an outage means: for one server, and for one that moves.

A strategy belongs to one connection. It makes the channel of each generation (`create_handler`),
is asked when calls fail whether a new one may help (`on_unavailable`), and lets go of what it has
at the end. It never holds a lock while it waits.

The two global ones follow a topology. What they learn is kept here, the asking is done by a source,
and the work in the background is written once, async: on the user's own loop, or on the private one
of users of threads.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeAlias

from holdfast.kernel import Clock, LoopThread, Recorder, SingleFlight, describe, refuse

from ._channel_pool import pooled, pooled_async
from ._config import ConnectionConfig
from ._errors import TopologyError
from ._fork import inside
from ._refresher import EVERY, Refresher
from ._sources import CallableTopology, Found, HttpTopology, TopologySource
from ._topology import Role, Topology, TopologyMixin, address_of, config_for, pick

__all__ = [
    "AsyncGlobalStrategy",
    "AsyncRegularStrategy",
    "ConnectionStrategy",
    "GlobalStrategy",
    "Managed",
    "RegularStrategy",
]

#: How long a recovery waits for a fresh topology before it goes on with what is known.
PATIENCE = 1.0
#: For how long after a failure it does not wait at all: the refresher goes on asking.
DISTRUST = 10.0
#: For how long it is remembered which replicas were tried.
MEMORY = 60.0

# A number for each channel of the process, so that no two share a connection.
_numbers = itertools.count(1)

HandlerFactory: TypeAlias = Callable[[ConnectionConfig], Any]
FetchTopology: TypeAlias = TopologySource | Callable[[], Found | Awaitable[Found]]


class Managed(Protocol):
    """What a strategy looks at in a managed connection."""

    @property
    def handler(self) -> Any:
        """What is closed at the end."""

    @property
    def config(self) -> ConnectionConfig:
        """As the user gave it."""

    @property
    def address(self) -> str:
        """Where the channel in use leads."""


class ConnectionStrategy(ABC):
    """How one connection is made, and made again; its methods may be plain or async."""

    #: Where the channel that was made last leads; None, if the configuration says it.
    address: str | None = None
    #: Whether `on_unavailable` always says yes, so that calls need not fail until it is asked.
    always_recovers = False

    @abstractmethod
    def create_handler(self, config: ConnectionConfig) -> Any:
        """A channel for a new generation."""

    @abstractmethod
    def on_unavailable(self, managed: Managed) -> bool | Awaitable[bool]:
        """The server cannot be reached: whether a new channel may help."""

    @abstractmethod
    def close(self, managed: Managed) -> None:
        """Let go of everything, the handler too."""

    async def close_async(self, managed: Managed) -> None:
        """Let go of everything, from a loop."""
        self.close(managed)


class RegularStrategy(ConnectionStrategy):
    """One server, which may restart.

    :param handler_factory: makes a channel; gRPC's own, if it is not given.
    :param channels: how many of them are used as one, for a server that limits the calls of each.
    """

    always_recovers = True

    def __init__(self, *, handler_factory: HandlerFactory | None = None, channels: int = 1) -> None:
        self._factory = pooled(handler_factory or _channel, channels)

    def create_handler(self, config: ConnectionConfig) -> Any:
        """A channel to the server."""
        with inside():
            return self._factory(config)

    def on_unavailable(self, managed: Managed) -> bool:
        """Always: a new channel does not inherit the pauses of the old one."""
        return True

    def close(self, managed: Managed) -> None:
        """Close the handler."""
        managed.handler.close()


class AsyncRegularStrategy(ConnectionStrategy):
    """One server, which may restart; for asyncio. Parameters: see `RegularStrategy`."""

    always_recovers = True

    def __init__(self, *, handler_factory: HandlerFactory | None = None, channels: int = 1) -> None:
        self._factory = pooled_async(handler_factory or _aio_channel, channels)

    async def create_handler(self, config: ConnectionConfig) -> Any:
        """A channel to the server."""
        return await _outcome(self._factory(config))

    async def on_unavailable(self, managed: Managed) -> bool:
        """Always: a new channel does not inherit the pauses of the old one."""
        return True

    def close(self, managed: Managed) -> None:
        """Nothing: the handler can only be closed with `close_async`."""

    async def close_async(self, managed: Managed) -> None:
        """Close the handler."""
        await _outcome(managed.handler.close())


class _GlobalStrategyMixin(TopologyMixin):
    """What follows a topology; all of it runs on one loop.

    :param role: "primary" is the first member that takes writes, "any" the nearest readable one.
    :param handler_factory: makes a channel; gRPC's own, if it is not given.
    :param channels: how many of them are used as one, for a server that limits the calls of each.
    :param fetch_topology: a source, or a function of yours; Milvus's REST interface at the URI,
        if it is not given.
    :param latencies: seconds by address, as you have measured them, for "any".
    :param refresh_every: seconds between two looks at the topology.
    :param patience: how long a recovery waits for a fresh topology before it goes on with what is
        known: whoever has the topology must not hold up a primary that has merely restarted.
    """

    always_recovers = True

    def __init__(
        self,
        *,
        role: Role = "primary",
        handler_factory: HandlerFactory | None = None,
        channels: int = 1,
        fetch_topology: FetchTopology | None = None,
        latencies: Callable[[], Mapping[str, float]] | None = None,
        refresh_every: float = EVERY,
        patience: float = PATIENCE,
        clock: Clock | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(role)
        mistakes = [] if patience > 0 else [f"patience={patience!r} must be more than 0 seconds"]
        if not refresh_every > 0:
            mistakes.append(f"refresh_every={refresh_every!r} must be more than 0 seconds")
        refuse(type(self).__name__, mistakes)
        self.address: str | None = None
        #: Called, on the loop, when a newer topology replaces another: `advise` with the address
        #: in use says whether to move.
        self.on_change: Callable[[Topology], object] | None = None
        self._factory = handler_factory
        self._channels = channels
        self._source = None if fetch_topology is None else _source(fetch_topology)
        self._latencies = latencies
        self._refresh_every = refresh_every
        self._patience = patience
        self._clock = clock
        self._recorder = recorder
        self._flight = SingleFlight()
        self._name = "rpc.topology"
        self._tried: set[str] = set()
        self._tried_at = float("-inf")
        self._failed_at = float("-inf")
        self._refresher: Refresher | None = None
        self._following: asyncio.Task[None] | None = None
        # Counted up at the end, so that what began before it does not start anything after it.
        self._closings = 0

    # -- where to ------------------------------------------------------------------------------

    async def _locate(self, config: ConnectionConfig) -> ConnectionConfig:
        """Where a channel that is made now should lead."""
        closings = self._closings
        if self._source is None:
            self._source = HttpTopology.of(config, clock=self._clock)
        self._name = f"rpc.{config.address}.topology"
        if self.topology is None:
            await self._learn(self._source)
        if closings == self._closings:
            self._follow(self._source)
        target = config_for(config, self._choose())
        self.address = target.address
        return target

    def _choose(self) -> Any:
        known = self.topology
        if known is None:
            raise TopologyError("no topology is known")
        self._forget()
        latencies = self._latencies() if self._latencies is not None else None
        chosen = pick(known, self.role, latencies, avoid=self._tried)
        address = address_of(chosen)
        if address in self._tried:
            # All have been tried: begin again.
            self._tried.clear()
        self._tried.add(address)
        return chosen

    def _forget(self) -> None:
        """What was tried long ago may well work by now."""
        now = self._now()
        if now - self._tried_at > MEMORY:
            self._tried.clear()
        self._tried_at = now

    async def _reconsider(self, managed: Managed) -> bool:
        """The member in use cannot be reached: learn who is wanted now, if that can be had soon."""
        self._forget()
        self._tried.add(managed.address)
        if self._source is not None and not await self._hurry(self._source) and self._refresher:
            self._refresher.trigger()
        advice = self.advise(managed.address)
        self._record(f"{managed.address} is unavailable: {advice.value}", "info")
        # The primary that is unchanged may have restarted, and gRPC alone would take seconds.
        return True

    async def _hurry(self, source: TopologySource) -> bool:
        """Learn within a moment; whether that was possible."""
        if self._now() - self._failed_at < DISTRUST:
            return False
        try:
            async with asyncio.timeout(self._patience):
                await self._learn(source)
        except TimeoutError:
            self._failed_at = self._now()
            self._record(f"no fresh topology within {self._patience:g} s: the old one is kept")
        except TopologyError as error:
            self._record("the old topology is kept", cause=error)
        else:
            return True
        return False

    # -- what is known -------------------------------------------------------------------------

    async def _learn(self, source: TopologySource) -> None:
        """Ask, once for all who want to know at the same time."""
        await self._flight.do("topology", lambda: self._ask(source))

    async def _ask(self, source: TopologySource) -> None:
        try:
            found = await source.fetch_async()
        except Exception as error:
            self._failed_at = self._now()
            if isinstance(error, TopologyError):
                raise
            raise TopologyError(f"{source!r} failed: {describe(error)}") from error
        self._failed_at = float("-inf")
        before = self.topology
        if not self.accept(found):
            return
        self._record(f"version {found.version} of the topology is known", "info")
        if before is not None:
            self._tell(found)

    def _tell(self, found: Topology) -> None:
        if self.on_change is None:
            return
        try:
            self.on_change(found)
        except Exception as error:
            self._record("who is told of the new topology has failed", cause=error)

    def _follow(self, source: TopologySource) -> None:
        """See to it that somebody looks at the topology again and again."""
        if not source.changes or (self._following is not None and not self._following.done()):
            return
        # Only weakly: a strategy that everybody has forgotten must be able to go.
        method = weakref.WeakMethod(self._refresh)

        async def refresh() -> None:
            if (call := method()) is not None:
                await call(source)

        refresher = self._refresher = Refresher(
            refresh,
            every=self._refresh_every,
            name=self._name,
            clock=self._clock,
            recorder=self._recorder,
        )
        self._following = asyncio.create_task(refresher.run(), name=self._name)
        weakref.finalize(self, refresher.stop).atexit = False

    async def _refresh(self, source: TopologySource) -> None:
        await self._learn(source)

    def _stop(self) -> None:
        self._closings += 1
        if self._refresher is not None:
            self._refresher.stop()

    def _now(self) -> float:
        return (self._clock or Clock.current()).monotonic()

    def _record(self, text: str, kind: str = "failure", cause: BaseException | None = None) -> None:
        if self._recorder is not None:
            self._recorder.record(self._name, text, kind=kind, cause=cause)

    def __repr__(self) -> str:
        known = self.topology
        state = "no topology yet" if known is None else f"version {known.version}"
        return f"<{type(self).__name__} to {self.role}: {state}, at {self.address or 'nobody'}>"


class GlobalStrategy(_GlobalStrategyMixin, ConnectionStrategy):
    __doc__ = f"A server that moves, for threads.\n{_GlobalStrategyMixin.__doc__}"

    def create_handler(self, config: ConnectionConfig) -> Any:
        """A channel to the member that is wanted; the first time, the topology is fetched."""
        target = LoopThread.shared().run(self._locate(config))
        with inside():
            return pooled(self._factory or _channel, self._channels)(target)

    def on_unavailable(self, managed: Managed) -> bool:
        """Fetch a fresh topology, if that can be had soon; a new channel may help in any case."""
        return LoopThread.shared().run(self._reconsider(managed))

    def close(self, managed: Managed) -> None:
        """Stop following the topology, and close the handler."""
        self._stop()
        managed.handler.close()


class AsyncGlobalStrategy(_GlobalStrategyMixin, ConnectionStrategy):
    __doc__ = f"A server that moves, for asyncio.\n{_GlobalStrategyMixin.__doc__}"

    async def create_handler(self, config: ConnectionConfig) -> Any:
        """A channel to the member that is wanted; the first time, the topology is fetched."""
        target = await self._locate(config)
        make = pooled_async(self._factory or _aio_channel, self._channels)
        return await _outcome(make(target))

    async def on_unavailable(self, managed: Managed) -> bool:
        """Fetch a fresh topology, if that can be had soon; a new channel may help in any case."""
        return await self._reconsider(managed)

    def close(self, managed: Managed) -> None:
        """Stop following the topology; the handler can only be closed with `close_async`."""
        self._stop()

    async def close_async(self, managed: Managed) -> None:
        """Stop following the topology, and close the handler."""
        self._stop()
        if (following := self._following) is not None:
            await asyncio.wait((following,))
        await _outcome(managed.handler.close())


def _source(given: FetchTopology) -> TopologySource:
    return given if isinstance(given, TopologySource) else CallableTopology(given)


def _channel(config: ConnectionConfig) -> Any:
    from ._dial import make_channel

    return make_channel(config, next(_numbers))


def _aio_channel(config: ConnectionConfig) -> Any:
    from ._dial import make_aio_channel

    return make_aio_channel(config, next(_numbers))


async def _outcome(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
