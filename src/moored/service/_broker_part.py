"""Live events as a part of the service: a broker, its source, and its routes.

Subscribers have tokens of their own, never the admin token, so the routes are public here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

from moored.broker import (
    ApiKeys,
    Authenticator,
    Broker,
    BrokerApp,
    BrokerOff,
    EventSource,
    Identity,
    Jwt,
    canonical_tenant,
    canonical_uuid,
)
from moored.broker.postgres import ListenerEvents, OutboxEvents
from moored.broker.prometheus import BrokerCollector
from moored.kernel import Child, Context, Tree, awaited, counted
from moored.postgres import Postgres

from ._config import Config
from ._connections import max_connections
from ._errors import ServiceError
from ._health import Status
from ._part import Part, Wiring

__all__ = ["BROKER_PATHS", "DRAIN", "broker_health", "broker_parts"]

NAME = "broker"
READY = "broker_ready"
BROKER_PATHS = ("/v1/subscribe", "/v1/subscribe.js", "/v1/tickets")
#: What names a tenant, by `broker_tenant_form`.
CANONICAL = {"text": canonical_tenant, "uuid": canonical_uuid}
#: Seconds between two looks at the source.
LOOK = 0.5
#: Seconds within which the streams end, one by one, before HTTP stops.
DRAIN = 2.0


def broker_parts(config: Config) -> Iterator[Part]:
    """Yield the broker as a part, if channels are configured."""
    if config.broker_channels:
        public: dict[str, ASGIApp] = {}

        def build(wiring: Wiring) -> Sequence[Child]:
            live = LiveEvents(config, wiring)
            public.update(dict.fromkeys(BROKER_PATHS, live.app))
            wiring.collectors.append(BrokerCollector(live.broker))
            wiring.before_stop.append(lambda: live.broker.drain(over=DRAIN))
            return [Child("streams", live.run)]

        yield Part(
            NAME,
            build,
            conditions=(READY,),
            public=public,
            streams=config.broker_max_streams,
            required=False,
            ties=["postgres"],
            kind="broker",
        )


def broker_health(broker: Broker) -> tuple[Status, str]:
    """Return the health of a broker, with the reason."""
    now = broker.status()
    if now["state"] == "off":
        return "active", "it is off, because it has no source: streams are refused"
    if not now["up"]:
        return "degraded", now["last_error"] or "the source has not begun yet"
    if now["delayed"]:
        return "degraded", now["delayed"]
    return "active", counted(now["subscribers"], "stream")


class LiveEvents:
    """The broker of the service, which is shown while it runs."""

    def __init__(self, config: Config, wiring: Wiring) -> None:
        self._wiring = wiring
        self._postgres = _CurrentPostgres(wiring)
        self._install = config.is_embedded and config.broker_source == "outbox"
        try:
            self.broker = Broker(
                self._source(config),
                channels=config.broker_channels,
                tenant=config.broker_tenant,
                user=config.broker_user,
                canonical=CANONICAL[config.broker_tenant_form],
                max_streams=min(config.broker_max_streams, _room(config)),
                recorder=wiring.recorder,
                clock=wiring.clock,
            )
            self.app = BrokerApp(self.broker, _authenticator(config), origins=config.broker_origins)
        except (OSError, ValueError) as error:
            raise ServiceError(f"the broker cannot start: {error}") from error

    def _source(self, config: Config) -> EventSource | None:
        self._redis = None
        if config.broker_source == "outbox":
            return OutboxEvents(self._postgres.outbox)
        if config.broker_source == "listener":
            listener = ListenerEvents(self._postgres.listener, config.broker_channels)
            return None if config.notify_url == "" else listener
        from moored.broker.redis import RedisEvents

        self._redis = RedisEvents(config.broker_source)
        return self._redis

    async def run(self, ctx: Context) -> None:
        """Run the broker, and report its health."""
        ctx.started()
        self._report()
        async with self._sources_open(), self.broker:
            self._wiring.systems[ctx.path] = self
            try:
                while True:
                    self._report()
                    await asyncio.sleep(LOOK)
            finally:
                del self._wiring.systems[ctx.path]

    @asynccontextmanager
    async def _sources_open(self) -> AsyncIterator[None]:
        if self._redis is not None:
            try:
                yield
            finally:
                await self._redis.close()
            return
        pg = await self._postgres.wait()
        if self._install:
            await pg.outbox.install()
        yield

    def _report(self) -> None:
        self._wiring.health(NAME, *broker_health(self.broker))

    # -- what the service shows ----------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """Return the state of the broker."""
        return self.broker.status()

    def explain(self) -> str:
        """Return nothing: the health of the part says it."""
        return ""

    def tree(self) -> Tree:
        """Return the supervision tree of the broker."""
        return self.broker.tree()


class _CurrentPostgres:
    """The connection manager that runs now: another one follows if the embedded server moves."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self.outbox: Any = _Current(self, "outbox")
        self.listener: Any = _Current(self, "listener")

    def get(self) -> Postgres:
        for each in self._wiring.systems.values():
            if isinstance(each, Postgres):
                return each
        raise BrokerOff("PostgreSQL has not been started yet")

    async def wait(self) -> Postgres:
        while True:
            try:
                return self.get()
            except BrokerOff:
                await asyncio.sleep(LOOK / 10)


@dataclass(frozen=True)
class _Current:
    """The outbox or the listener of the current manager."""

    postgres: _CurrentPostgres
    part: str

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(self.postgres.get(), self.part), name)


def _authenticator(config: Config) -> Authenticator:
    """Return the authenticator: for API keys, JSON web tokens, or both."""
    known: list[Authenticator] = []
    if config.broker_keys is not None:
        known.append(ApiKeys(config.broker_keys))
    if config.broker_jwt_key is not None or config.broker_jwks_url is not None:
        file, url = config.broker_jwt_key, config.broker_jwks_url
        key = None if file is None else file.read_text().strip()
        given = config.sources.get("broker_jwt_algorithm") is not None
        known.append(
            Jwt(
                key,
                jwks=url,
                algorithms=[config.broker_jwt_algorithm] if given or key else None,
                claim=config.broker_tenant,
                subject=config.broker_user and "sub",
            )
        )

    async def authenticate(token: str) -> Identity | None:
        for each in known:
            found: Identity | None = await awaited(each(token))
            if found is not None:
                return found
        return None

    return authenticate


def _room(config: Config) -> int:
    """Return how many streams leave a quarter of the connections to the other routes."""
    return max_connections(config.broker_max_streams) * 3 // 4
