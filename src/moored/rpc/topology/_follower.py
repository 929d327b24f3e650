"""Follow a topology: choose the member that a channel leads to, and refresh the topology.

It is async: it runs on the user's own loop, or on the private loop thread of managers for threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeAlias

from moored.kernel import Clock, Recorder, Tree, describe, refuse

from .._config import ConnectionConfig
from .._dial import CredentialProvider, TokenCredentials
from .._errors import ConfigError, TopologyError, TopologyRefused
from .._secrets import secrets_of, without_secrets
from ._refresher import EVERY, Refresher
from ._source_pacing import PACE, SourcePacing
from ._sources import CallableTopology, Found, TopologySource
from ._topology import Advice, Role, Topology, TopologyMixin, address_of, config_for, pick, wanted

__all__ = ["FetchTopology", "Follower", "HandlerFactory", "Managed", "source_of"]

log = logging.getLogger("moored.rpc")

#: Seconds that a recovery waits for a fresh topology before it uses the known one.
PATIENCE = 1.0
#: Seconds for which members that were tried are remembered.
MEMORY = 60.0

HandlerFactory: TypeAlias = Callable[[ConnectionConfig], Any]
FetchTopology: TypeAlias = TopologySource | Callable[[], Found | Awaitable[Found]]


class Managed(Protocol):
    """What a strategy reads of a managed connection."""

    #: The channel that users hold.
    handler: Any
    #: The user's configuration.
    config: ConnectionConfig
    #: The address of the current channel.
    address: str


class Follower(TopologyMixin):
    """Follows a topology, on one event loop.

    :param role: "primary" is the first writable member, "any" the nearest readable one.
    :param handler_factory: makes a channel; by default gRPC's own.
    :param channels: the number of channels to use as one, for a server that limits the calls of
        each.
    :param fetch_topology: a source, or a function; by default the one that the URI names.
    :param latencies: returns measured latencies in seconds, by address, for "any".
    :param refresh_every: seconds between two regular fetches of the topology.
    :param patience: how long a recovery waits for a fresh topology before it uses the known one: a
        slow topology server must not delay the recovery of a primary that has merely restarted.
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
        #: The credentials of calls, for a topology server that has the same; see `serve`.
        self._credentials: CredentialProvider | None = None
        # The endpoint that gets its channels, and the manager's background, which is told when the
        # topology has changed, or the topology server has refused the credentials.
        self._endpoint: Any = None
        self._user: Any = None
        self._factory = handler_factory
        self._channels = channels
        self._source = None if fetch_topology is None else source_of(fetch_topology)
        # Whether the source uses the token of the credentials.
        self._follows_token = False
        self._latencies = latencies
        self._refresh_every = refresh_every
        self._patience = patience
        self._clock = clock
        self._recorder = recorder
        self._pacing: SourcePacing | None = None
        # A shorter `refresh_every` also raises the rate limit of fetches.
        self._pace = min(PACE, refresh_every)
        self._tokens: tuple[Callable[[], str], ...] = ()
        self._name = "rpc.topology"
        self._tried: set[str] = set()
        self._tried_at = float("-inf")
        self._refresher: Refresher | None = None
        # Incremented by `_stop`: a fetch that began before it must not start the refresher.
        self._closings = 0

    @property
    def trouble(self) -> str:
        """Why there is no topology yet; "" if no failure is known."""
        if self.topology is not None or self._source is None or not self._source.trouble:
            return ""
        return f"the topology could not be fetched so far: {self._source.trouble}"

    @property
    def choices(self) -> int:
        """The number of members that a connection may lead to."""
        return 1 if self.topology is None else len(wanted(self.topology, self.role))

    def serve(self, endpoint: Any, user: Any) -> None:
        """Follow the topology for an endpoint of a manager, and report to its background.

        Its credentials are used for the topology that the URI names, not with a given source.
        """
        super().serve(endpoint, user)
        self._endpoint, self._user = endpoint, user
        self._credentials = endpoint.handler.gate.credentials

    # -- the choice of a member ----------------------------------------------------------------

    async def _locate(self, config: ConnectionConfig) -> ConnectionConfig:
        """Return the configuration for a new channel, with the address of the chosen member."""
        closings = self._closings
        own = self._credentials if isinstance(self._credentials, TokenCredentials) else None
        token = (lambda: config.token) if own is None else partial(own.token_for, config)
        if self._source is None:
            self._source = config.topology_source(clock=self._clock, token=token)
            if self._source is None:
                raise ConfigError(f"{config.shown} names no topology: give fetch_topology")
            self._follows_token = own is not None and own.stands_for(config)
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
            # All members have been tried: begin again.
            self._tried.clear()
        self._tried.add(address)
        return chosen

    def arrived(self, address: str) -> None:
        """Note that the channel to this member is connected: it is not avoided any longer."""
        self._tried.discard(address)

    def _forget(self) -> None:
        """Forget members that were tried long ago: they may work by now."""
        now = self._now()
        if now - self._tried_at > MEMORY:
            self._tried.clear()
        self._tried_at = now

    async def _reconsider(self, managed: Managed) -> bool:
        """The member in use is unreachable: fetch the topology, if that is possible soon."""
        self._forget()
        self._tried.add(managed.address)
        if self._source is not None:
            await self._hurry(self._source, managed.address)
        advice = self.advise(managed.address)
        self._record(f"{managed.address} is unavailable: {advice.value}", "info")
        # An unchanged primary may have restarted, and gRPC alone would take seconds to reconnect.
        return True

    async def _hurry(self, source: TopologySource, in_use: str) -> None:
        """Fetch the topology within `patience`, or have it fetched soon."""
        pacing, now = self._pacing_of(source), self._now()
        if pacing.last is not None and now - pacing.answered_at < self._pace:
            with contextlib.suppress(TopologyError):
                self._take(pacing.last)
            if self.advise(in_use) is Advice.MOVE:
                return  # this topology is what started the recovery
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
        """Whether a fresh topology no longer wants the member at this address."""
        if self._source is not None:
            await self._hurry(self._source, in_use)
        return self.advise(in_use) is Advice.MOVE

    def hurry(self) -> None:
        """Have the topology fetched soon, without waiting for it."""
        if self._refresher is not None:
            self._refresher.trigger()

    # -- fetching the topology -----------------------------------------------------------------

    def _pacing_of(self, source: TopologySource) -> SourcePacing:
        if self._pacing is None:
            self._pacing = SourcePacing.of(source, self._clock)
        return self._pacing

    async def _learn(self, source: TopologySource) -> None:
        """Fetch the topology, or use the last one if the rate limit allows no fetch now."""
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
            refused = isinstance(error, TopologyRefused) and not source.renewed
            if refused and self._follows_token:
                self._user.refused(self._endpoint)
        else:
            self.counters.topology_fetches += 1
            pacing.answered(found, self._pace, self._now())
            return found
        # Outside of the except clause: the error's context may repeat the token.
        raise failure

    def _failure(self, source: TopologySource, error: Exception) -> Exception:
        """Return the error to raise, without the token."""
        kept = without_secrets(
            error, [form for token in self._tokens for form in secrets_of(token())]
        )
        if isinstance(error, TopologyRefused) and self.topology is not None:
            log.warning("%s: the old topology is kept: %s", self._name, kept)
        if isinstance(kept, (TopologyError, ConfigError)):
            return kept
        failure = TopologyError(f"{source!r} failed: {describe(kept)}")
        failure.__cause__ = kept
        return failure

    def _take(self, found: Topology) -> None:
        before = self.topology
        if not self.accept(found):
            return
        self._record(f"version {found.version} of the topology is known", "info")
        if before is not None and self._user is not None:
            why = f"version {found.version} of the topology has another primary"
            self._user.moved(self._endpoint, why)

    def _follow(self, source: TopologySource) -> None:
        """Start the task that fetches the topology regularly."""
        if not source.changes or (self._refresher is not None and not self._refresher.task.done()):
            return
        # Weakly, so that an unreferenced strategy can be collected.
        method = weakref.WeakMethod(self._refresh)

        async def refresh() -> None:
            if (call := method()) is not None:
                await call(source)

        refresher = self._refresher = Refresher(
            refresh,
            every=self._refresh_every,
            name=f"{self._name}.refresher",
            clock=self._clock,
            recorder=self._recorder,
        )
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

    def tree(self) -> Tree | None:
        """Return the supervision tree of the refresher; None if there is none."""
        return None if self._refresher is None else self._refresher.supervisor.tree()

    def _now(self) -> float:
        return (self._clock or Clock.current()).monotonic()

    def _record(self, text: str, kind: str = "failure", cause: BaseException | None = None) -> None:
        if self._recorder is not None:
            self._recorder.record(self._name, text, kind=kind, cause=cause)

    def __repr__(self) -> str:
        known = self.topology
        state = "no topology yet" if known is None else f"version {known.version}"
        where = self.address or "no member"
        return f"<{type(self).__name__} to {self.role}: {state}, at {where}>"


def source_of(given: FetchTopology) -> TopologySource:
    """Return a source for the option `fetch_topology`: a source, or a function."""
    if not isinstance(given, TopologySource) and not callable(given):
        raise ConfigError(
            "fetch_topology must be a function or a source, as HttpTopology is, not "
            f"{type(given).__name__}"
        )
    return given if isinstance(given, TopologySource) else CallableTopology(given)
