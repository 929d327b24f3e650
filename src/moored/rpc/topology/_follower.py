"""What follows a topology: where a channel should lead, and when to ask anew.

What is learned is kept here, the asking is done by a source. It is written once, async: it runs on
the user's own loop, or on the private one of users of threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeAlias

from moored.kernel import Clock, Recorder, describe, refuse

from .._config import ConnectionConfig
from .._dial import CredentialProvider, TokenCredentials
from .._errors import ConfigError, TopologyError, TopologyRefused
from .._secrets import secrets_of, without_secrets
from ._refresher import EVERY, Refresher
from ._source_pacing import PACE, SourcePacing
from ._sources import CallableTopology, Found, HttpTopology, TopologySource
from ._topology import Advice, Role, Topology, TopologyMixin, address_of, config_for, pick

__all__ = ["FetchTopology", "Follower", "HandlerFactory", "Managed", "source_of"]

log = logging.getLogger("moored.rpc")

#: How long a recovery waits for a fresh topology before it goes on with what is known.
PATIENCE = 1.0
#: For how long it is remembered which replicas were tried.
MEMORY = 60.0

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


class Follower(TopologyMixin):
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
        #: As whom calls are made, and who is told that the topology was refused; a manager gives
        #: its own. They mean nothing to a source that was given.
        self.credentials: CredentialProvider | None = None
        self.on_refused: Callable[[], object] | None = None
        self._factory = handler_factory
        self._channels = channels
        self._source = None if fetch_topology is None else source_of(fetch_topology)
        # Whether the source is asked with the token of the credentials.
        self._follows_token = False
        self._latencies = latencies
        self._refresh_every = refresh_every
        self._patience = patience
        self._clock = clock
        self._recorder = recorder
        self._pacing: SourcePacing | None = None
        # Who looks at the topology more often than that has said so.
        self._pace = min(PACE, refresh_every)
        self._tokens: tuple[Callable[[], str], ...] = ()
        self._name = "rpc.topology"
        self._tried: set[str] = set()
        self._tried_at = float("-inf")
        self._refresher: Refresher | None = None
        self._following: asyncio.Task[None] | None = None
        # Counted up at the end, so that what began before it does not start anything after it.
        self._closings = 0

    @property
    def trouble(self) -> str:
        """Why there is no topology so far; "" if nothing is known to be wrong."""
        if self.topology is not None or self._source is None or not self._source.trouble:
            return ""
        return f"the topology could not be had so far: {self._source.trouble}"

    @property
    def choices(self) -> int:
        """How many members a connection may lead to."""
        known = self.topology
        if known is None or (self.role == "primary" and not known.equal):
            return 1
        return len(known.primaries if self.role == "primary" else known.readable)

    # -- where to ------------------------------------------------------------------------------

    async def _locate(self, config: ConnectionConfig) -> ConnectionConfig:
        """Where a channel that is made now should lead."""
        closings = self._closings
        token = partial(_token, self.credentials, config)
        if self._source is None:
            self._source = HttpTopology.of(config, clock=self._clock, token=token)
            self._follows_token = _stands_for(self.credentials, config)
        self._name = f"rpc.{config.address}.topology"
        self._tokens = (token, lambda: config.token)
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
        chance = (self._clock or Clock.current()).random
        chosen = pick(known, self.role, latencies, avoid=self._tried, chance=chance)
        address = address_of(chosen)
        if address in self._tried:
            # All have been tried: begin again.
            self._tried.clear()
        self._tried.add(address)
        return chosen

    def arrived(self, address: str) -> None:
        """The channel to this member is connected: it need not be avoided, unless it fails."""
        self._tried.discard(address)

    def _forget(self) -> None:
        """What was tried long ago may well work by now."""
        now = self._now()
        if now - self._tried_at > MEMORY:
            self._tried.clear()
        self._tried_at = now

    async def _reconsider(self, managed: Managed) -> bool:
        """The member in use is unreachable: fetch the topology, if that does not take long."""
        self._forget()
        self._tried.add(managed.address)
        if self._source is not None:
            await self._hurry(self._source, managed.address)
        advice = self.advise(managed.address)
        self._record(f"{managed.address} is unavailable: {advice.value}", "info")
        # The primary that is unchanged may have restarted, and gRPC alone would take seconds.
        return True

    async def _hurry(self, source: TopologySource, in_use: str) -> None:
        """Fetch the topology within `patience`, or have it fetched soon."""
        pacing, now = self._pacing_of(source), self._now()
        if pacing.last is not None and now - pacing.answered_at < self._pace:
            self._take_quietly(pacing.last)
            if self.advise(in_use) is Advice.MOVE:
                return  # these are the news that brought us here
        if pacing.refused(now) and not source.renewed:
            return
        if pacing.distrusted(now) or pacing.rest(self._pace, now) > 0:
            self.hurry()
            return
        try:
            async with asyncio.timeout(self._patience):
                await self._learn(source)
        except TimeoutError:
            pacing.failed(None, self._now())
            self.counters.topology_fetch_failures += 1
            self._record(f"no fresh topology within {self._patience:g} s: the old one is kept")
            self.hurry()
        except (TopologyError, ConfigError) as error:
            self._record("the old topology is kept", cause=error)
            self.hurry()

    async def has_left(self, in_use: str) -> bool:
        """Whether the member at this address is not wanted any more, by a fresh topology."""
        if self._source is not None:
            await self._hurry(self._source, in_use)
        return self.advise(in_use) is Advice.MOVE

    def hurry(self) -> None:
        """Have the topology fetched soon, without waiting for it."""
        if self._refresher is not None:
            self._refresher.trigger()

    # -- what is known -------------------------------------------------------------------------

    def _pacing_of(self, source: TopologySource) -> SourcePacing:
        if self._pacing is None:
            self._pacing = SourcePacing.of(source, self._clock)
        return self._pacing

    async def _learn(self, source: TopologySource) -> None:
        """Fetch the topology, unless it was fetched a moment ago."""
        pacing = self._pacing_of(source)
        if pacing.last is not None and pacing.rest(self._pace, self._now()) > 0:
            self._take(pacing.last)
            return
        now = self._now()
        renewed = pacing.refused(now) and source.renewed
        if (pause := pacing.pause(self._pace, now)) > 0 and not renewed:
            await asyncio.sleep(pause)
        self._take(await pacing.ask(lambda: self._ask(source, pacing)))

    async def _ask(self, source: TopologySource, pacing: SourcePacing) -> Topology:
        try:
            found = await source.fetch()
        except Exception as error:
            self.counters.topology_fetch_failures += 1
            pacing.failed(error, self._now())
            failure = self._failure(source, error)
            if isinstance(error, TopologyRefused) and self._follows_token and not source.renewed:
                self._tell_refused()
        else:
            self.counters.topology_fetches += 1
            pacing.answered(found, self._pace, self._now())
            return found
        # Not in the handler: the error that it handles may repeat the token.
        raise failure

    def _tell_refused(self) -> None:
        if self.on_refused is not None:
            self.on_refused()

    def _failure(self, source: TopologySource, error: Exception) -> Exception:
        """The error to raise, without the token."""
        kept = without_secrets(
            error, [form for tell in self._tokens for form in secrets_of(tell())]
        )
        if isinstance(error, TopologyRefused) and self.topology is not None:
            log.warning("%s: the old topology is kept: %s", self._name, kept)
        if isinstance(kept, (TopologyError, ConfigError)):
            return kept
        failure = TopologyError(f"{source!r} failed: {describe(kept)}")
        failure.__cause__ = kept
        return failure

    def _take_quietly(self, found: Topology) -> None:
        with contextlib.suppress(TopologyError):
            self._take(found)

    def _take(self, found: Topology) -> None:
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
            self._record("the callback for a new topology failed", cause=error)

    def _follow(self, source: TopologySource) -> None:
        """Start the task that fetches the topology regularly."""
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
        pacing, now = self._pacing_of(source), self._now()
        if pacing.refused(now) and not source.renewed:
            return
        if (rest := pacing.rest(self._pace, now)) > 0:
            await asyncio.sleep(rest)
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


def _token(credentials: CredentialProvider | None, config: ConnectionConfig) -> str:
    if isinstance(credentials, TokenCredentials):
        return credentials.token_for(config)
    return config.token


def _stands_for(credentials: CredentialProvider | None, config: ConnectionConfig) -> bool:
    return isinstance(credentials, TokenCredentials) and credentials.stands_for(config)


def source_of(given: FetchTopology) -> TopologySource:
    """A source for a function or a source of the user."""
    if not isinstance(given, TopologySource) and not callable(given):
        raise ConfigError(
            "fetch_topology must be a function or a source, as HttpTopology is, not "
            f"{type(given).__name__}"
        )
    return given if isinstance(given, TopologySource) else CallableTopology(given)
