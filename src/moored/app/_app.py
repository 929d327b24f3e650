"""`App`: where a service is put together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

from moored.kernel import Recorder, Tree, call_on_signals, extra, first_of, refuse, unmet
from moored.postgres import Outbox
from moored.service import (
    KINDS,
    READY_STATES,
    Config,
    Declared,
    Part,
    Service,
    ServiceError,
    Status,
    connection_string,
    fields_of,
    load_config,
    parameters_of,
    serve,
    values_of,
)

from ._asgi import AppEndpoint
from ._component import Run, component_part
from ._consumed import Consumed, EventsOfOutbox, TransactionsOfStream
from ._consumer import Handle, consumer_part
from ._parked import OnPoison
from ._parts import Judgement, PartEntry
from ._shared_outbox import SharedOutbox

if TYPE_CHECKING:
    from moored.broker import Authenticator, Broker
    from moored.leases import Leases
    from moored.postgres import Postgres
    from moored.reservoir import AsyncConnectionPool
    from moored.sessions import Sessions

    from ._channel import AppChannel

__all__ = ["App", "AppError"]

H = TypeVar("H", bound=Handle)

#: Names that no part may have: the child that serves HTTP, and the keys of the status.
TAKEN = frozenset(
    {
        *("http", "status", "sentence", "parts", "conditions_of", "kinds", "outages", "version"),
        *("python", "pid", "address", "started_at", "uptime", "conditions", "machines", "tree"),
        *("events", "ready", "started", "degraded", "sentence_for", "answer", "nodes"),
    }
)


#: The parameters of a pool that are in its configuration, under other names.
_OF_CONFIG = ("config", "creation_rate", "creation_burst")


class AppError(ServiceError):
    """The app is used in a wrong order, or one of its parts is declared wrongly."""


class App:
    """The parts of a service, started in order, supervised, shown and stopped in reverse order.

    ::

        app = moored.App("orders")
        db = app.pool("postgresql://app@db/orders", max_size=50)

        api = FastAPI(lifespan=app.lifespan)      # or: async with app: …, app.run(), moored serve
        api.mount("/moored", app.asgi)            # health, status, metrics and the live page

    Every part has a name, which is its place in the tree, the status, `explain` and the metrics.
    `required=False`, the default of brokers and consumers, lets the app be ready without it
    (degraded), and `after=["db"]` starts it when these parts are ready. An app is started once.

    :param name: the name of the service, and of the root of its tree.
    :param config: address, tokens and logging; by default from the environment and moored.toml.
    """

    def __init__(
        self, name: str = "app", *, config: Config | None = None, recorder: Recorder | None = None
    ) -> None:
        if not name or "/" in name:
            raise AppError(f"App(name={name!r}): the name must not be empty or contain '/'")
        self.name = name
        self.recorder = recorder or Recorder()
        self._config = config
        self._parts: dict[str, Part] = {}
        #: The names of the parts that stream changes.
        self._streams: dict[Postgres, str] = {}
        self._outboxes: dict[Outbox, SharedOutbox] = {}
        self._service: Service | None = None
        self._stack: AsyncExitStack | None = None
        #: The HTTP app: health, status, explanations, metrics and the page. Mount it at any path.
        self.asgi = AppEndpoint(self)

    # -- parts ---------------------------------------------------------------------------------

    def pool(
        self,
        conninfo: str,
        *,
        name: str = "pool",
        required: bool = True,
        after: Iterable[str] = (),
        **options: Any,
    ) -> AsyncConnectionPool[Any]:
        """Add a connection pool; `options` are those of `AsyncConnectionPool`."""
        from moored.reservoir import AsyncConnectionPool

        from ._systems import pool_part

        entry = self._entry(name, required, after)
        if "connect" not in options:  # another driver may have another format
            _check_url(name, conninfo)
        pool: AsyncConnectionPool[Any] = AsyncConnectionPool(
            conninfo, open=False, name=entry.name, recorder=self.recorder, **options
        )
        self._add(
            pool_part(entry, pool, "server" if "connect" in options else "PostgreSQL"),
            lambda: (
                *fields_of(pool.reservoir.config),
                *parameters_of(AsyncConnectionPool, options, but=_OF_CONFIG),
            ),
        )
        return pool

    def postgres(
        self,
        url: str,
        *,
        name: str = "postgres",
        required: bool = True,
        after: Iterable[str] = (),
        **options: Any,
    ) -> Postgres:
        """Add a connection manager for Postgres; `options` are those of `Postgres`."""
        from moored.postgres import Postgres

        from ._systems import postgres_part

        entry = self._entry(name, required, after)
        _check_url(name, url)
        pg = Postgres(url, recorder=self.recorder, **options)
        self._add(
            postgres_part(entry, pg),
            lambda: parameters_of(Postgres, {**options, **values_of(pg.settings)}),
        )
        self._streams[pg] = entry.name
        return pg

    def channel(
        self,
        target: str,
        *,
        name: str = "channel",
        required: bool = True,
        after: Iterable[str] = (),
        tls: bool = False,
        **options: Any,
    ) -> AppChannel:
        """Add a gRPC channel, for stubs of `grpc.aio`, that outlives its server.

        :param target: "host:port", or a URI for `ConnectionConfig.from_uri`.
        :param options: `token`, `ca`, `channel_options` and the others of `from_uri`.
        """
        with extra("grpc", "app.channel()"):
            from ._channel import AppChannel, channel_part

        entry = self._entry(name, required, after)
        channel = AppChannel(target, tls, options)
        given = {"target": channel.config.address}
        self._add(
            channel_part(entry, channel, self.recorder),
            lambda: parameters_of(App.channel, given, but=("options",)),
        )
        return channel

    def sessions(
        self,
        *,
        name: str = "sessions",
        required: bool = True,
        after: Iterable[str] = (),
        server: str | None = None,
        **options: Any,
    ) -> Sessions:
        """Add the sessions of accounts; `options` are those of `Sessions`.

        :param server: the server of the accounts as "host:port", or a name for it on the map.
        """
        from moored.sessions import Sessions

        from ._systems import sessions_part

        entry = self._entry(name, required, after)
        sessions = Sessions(name=entry.name, recorder=self.recorder, **options)
        self._add(
            sessions_part(entry, sessions, server=server),
            lambda: parameters_of(Sessions, options),
        )
        return sessions

    def leases(
        self,
        url: str,
        *,
        name: str = "leases",
        required: bool = True,
        after: Iterable[str] = (),
        **options: Any,
    ) -> Leases:
        """Add a client of a lease store, for `leases=` of pools and sessions and for your own use.

        Add it before the parts that use it. `options` are those of `moored.leases.connect`; with
        on_unavailable="refuse" the app does not start while the store is unavailable.
        """
        from moored.leases import connect

        from ._systems import leases_part

        entry = self._entry(name, required, after)
        client = connect(url, name=entry.name, recorder=self.recorder, **options)
        given = {"url": url, **options}
        self._add(leases_part(entry, client, url), lambda: parameters_of(connect, given))
        return client

    def broker(
        self,
        source: Any,
        *,
        name: str = "broker",
        required: bool = False,
        after: Iterable[str] = (),
        authenticate: Authenticator | None = None,
        origins: Iterable[str] = (),
        **options: Any,
    ) -> Broker:
        """Add a broker of live events; `options` are those of `Broker`.

        :param source: the outbox of a Postgres of this app (`pg.outbox`), one of a pool
            (`Outbox(db, listener=pg.listener)`), or an `EventSource`.
        :param authenticate: serve the streams at `v1/subscribe` of this app, to clients with these
            tokens; without it, mount a `BrokerApp` where you like.
        :param origins: the origins of pages that may open streams (CORS).
        """
        from moored.broker import Broker, BrokerApp

        from ._systems import broker_part, event_source

        entry = self._entry(name, required, after)
        reads = event_source(source)
        broker = Broker(reads, name=entry.name, recorder=self.recorder, **options)
        served = authenticate and BrokerApp(broker, authenticate, origins=origins)
        outbox = self._shared(source) if isinstance(source, Outbox) else None
        ties = [part for pg, part in self._streams.items() if source is pg.outbox]
        self._add(
            broker_part(entry, broker, outbox, served, ties),
            lambda: parameters_of(Broker, {"source": reads, **options}),
        )
        return broker

    @overload
    def component(self, run: Run, /) -> Run: ...

    @overload
    def component(
        self,
        /,
        *,
        name: str | None = None,
        required: bool = True,
        after: Iterable[str] = (),
        once: bool = False,
        shutdown: float = 5.0,
        uses: Iterable[str] | None = None,
        runs: Iterable[str] = (),
        kind: str = "component",
    ) -> Callable[[Run], Run]: ...

    def component(
        self,
        run: Run | None = None,
        /,
        *,
        name: str | None = None,
        required: bool = True,
        after: Iterable[str] = (),
        once: bool = False,
        shutdown: float = 5.0,
        uses: Iterable[str] | None = None,
        runs: Iterable[str] = (),
        kind: str = "component",
    ) -> Any:
        """Add a coroutine function as a part: it is restarted when it fails, and stopped in order.

        Use it as a decorator, with or without arguments. The function gets a `ComponentContext`.

        :param once: whether the component is ready when the function has returned, and not when it
            has begun: for a migration that other parts come after.
        :param shutdown: the seconds that the function may take to end after it is cancelled.
        :param uses: the parts that it calls, if they are others than `after`: while one of them is
            down, the component waits for it.
        :param runs: the servers that it runs, as "host:port": parts that use them depend on it.
        :param kind: what the page calls it, such as "importer"; no kind of Moored's own parts.
        """
        servers = tuple(runs)
        if kind in KINDS and kind != "component":
            raise AppError(
                f"kind={kind!r} is a kind of parts that Moored runs: choose another word for what "
                "your component is"
            )

        def add(run: Run) -> Run:
            entry = self._entry(name or _name_of(run), required, after)
            if uses is not None:
                entry = replace(entry, uses=self._known(entry.name, "uses", uses))
            _check_async(entry.name, run)
            assumed: Judgement = ("starting", "it runs") if once else ("active", "")
            more = {"runs": servers, "kind": kind, "server": kind}
            given = {**more, "once": once, "shutdown": shutdown, "uses": entry.uses}
            self._add(
                component_part(entry, run, assumed=assumed, shutdown=shutdown, **more),
                lambda: parameters_of(App.component, given),
            )
            return run

        return add if run is None else add(run)

    def consumer(
        self,
        source: Postgres | Outbox,
        consumer: str,
        *,
        tables: Iterable[str] = (),
        channels: Iterable[str] = (),
        tenant: str | None = None,
        on_poison: Literal["stop", "park"] = "stop",
        tries: int = 5,
        max_parked: int = 100,
        name: str | None = None,
        required: bool = False,
        after: Iterable[str] = (),
    ) -> Callable[[H], H]:
        """Call the decorated function for each item, and acknowledge the item when it returns.

        Items are the transactions of a Postgres or the events of an outbox; the function also gets
        each `Reset`. If it fails, it is called again with the same item, after a pause. A consumer
        comes after its Postgres, and runs in the replica that streams, also that of an outbox: the
        others stand by. It is ready when its tables are published, or its cursor is
        stored: a part that comes after it finds each of its own changes delivered.

        :param source: a Postgres of this app or its outbox (`pg.outbox`), or an outbox of a pool.
        :param tables: the tables of a Postgres to follow; without any, all published tables.
        :param channels: the channels of an outbox to read; without any, all.
        :param tenant: the tenant of an outbox whose events to read; None for the events of all.
        :param on_poison: "stop" tries an item until the function handles it; the items after it
            wait. "park" stores it after `tries` failures in the table `moored.parked`, and goes on
            with the next one: the order is lost, and `moored consumers` lists, retries and drops
            what is parked.
        :param tries: how often the function gets an item before it is parked.
        :param max_parked: with so many parked items, the consumer stops: what all of them need is
            broken.
        :param required: whether the app is not ready while the consumer is not. It is degraded
            instead by default: an app can serve requests while a transaction waits.
        """
        outbox = isinstance(source, Outbox)
        given = {
            "source": source,
            "tables": tables,
            "channels": channels,
            "tenant": tenant,
            "on_poison": on_poison,
            "tries": tries,
            "max_parked": max_parked,
            "required": required,
        }
        refuse(
            f"the consumer {consumer!r}",
            unmet(
                ("source", source, getattr(source, "table", True), "an outbox with a table"),
                ("tables", tables, not (outbox and tables), "empty for an outbox"),
                ("channels", channels, outbox or not channels, "empty for a Postgres"),
                ("tenant", tenant, outbox or tenant is None, "None for a Postgres"),
                ("on_poison", on_poison, on_poison in ("stop", "park"), '"stop" or "park"'),
                ("tries", tries, tries >= 1, "at least 1"),
                ("max_parked", max_parked, max_parked >= 1, "at least 1"),
            ),
        )
        of = source.postgres if isinstance(source, Outbox) else source
        streams = [part for pg, part in self._streams.items() if pg is of]
        if of is not None and not streams:
            raise AppError(
                f"the consumer {consumer!r} follows a Postgres that is not a part of the app "
                f"{self.name}: nothing would open it; add it with app.postgres(…)"
            )

        def add(handle: H) -> H:
            entry = self._entry(name or f"consumer-{consumer}", required, after)
            others = tuple(dict.fromkeys((*streams, *entry.after)))
            entry = replace(entry, after=others)
            _check_async(entry.name, handle)
            consumed: Consumed
            if isinstance(source, Outbox):
                shared = self._shared(source)
                consumed = EventsOfOutbox(source, shared, consumer, channels, tenant)
            else:
                consumed = TransactionsOfStream(source, consumer, tables)
            park = OnPoison(tries, max_parked) if on_poison == "park" else None
            self._add(
                consumer_part(entry, consumed, handle, park),
                lambda: parameters_of(App.consumer, given),
            )
            return handle

        return add

    def add(self, part: Part) -> None:
        """Add a part of another kind: see `moored.service.Part`."""
        self._add(part)

    def _shared(self, outbox: Outbox) -> SharedOutbox:
        return self._outboxes.setdefault(outbox, SharedOutbox(outbox))

    def _entry(self, name: str, required: bool, after: Iterable[str]) -> PartEntry:
        return PartEntry(name, required, self._known(name, "after", after))

    def _known(self, name: str, option: str, parts: Iterable[str]) -> tuple[str, ...]:
        parts = (parts,) if isinstance(parts, str) else tuple(parts)
        unknown = [each for each in parts if each not in self._parts]
        if unknown:
            raise AppError(
                f"{name}: {option}={unknown[0]!r} names no part that was added before it; those "
                f"are: {', '.join(self._parts) or 'none'}"
            )
        return parts

    def _add(self, part: Part, settings: Callable[[], Iterable[Declared]] | None = None) -> None:
        if self._service is not None:
            raise AppError(f"{part.name} cannot be added: the app {self.name} has been started")
        if part.name in {*self._parts, *TAKEN, "", ".", ".."} or "/" in part.name:
            raise AppError(
                f"the name {part.name!r} of a part is taken, empty, a dot or has a '/': "
                "choose another with name="
            )
        for path in part.public:
            if any(path in each.public for each in self._parts.values()):
                raise AppError(
                    f"{part.name} would serve {path} too: leave out authenticate= and mount a "
                    "BrokerApp elsewhere"
                )
        self._parts[part.name] = part if settings is None else replace(part, settings=settings)

    # -- running -------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        service = self._make(self._config or load_config(), ())
        self._stack = AsyncExitStack()
        await self._stack.enter_async_context(service)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._stack is not None:
            await self._stack.aclose()

    @asynccontextmanager
    async def lifespan(self, _: object = None) -> AsyncIterator[None]:
        """Run the app within the lifespan of FastAPI, Starlette or Litestar.

        At SIGTERM the open streams of the page and of brokers end, because the server waits for
        all responses before it ends the lifespan.
        """
        async with self:
            with call_on_signals(self._running().drain):
                yield

    def run(self, config: Config | None = None) -> int:
        """Run the app with an HTTP server until a signal stops it; returns the exit code."""
        return serve(config or self._config or load_config(), self._make)

    def _make(self, config: Config, sockets: Any, **options: Any) -> Service:
        if self._service is not None:
            raise AppError(
                f"the app {self.name} was started before, and its pools and streams are closed for "
                "good: create the app and its parts in a function, and call it for each start"
            )
        if not self._parts:
            raise AppError(f"the app {self.name} has no parts: add one, such as app.pool(…)")
        self._service = Service(
            config,
            sockets,
            recorder=self.recorder,
            parts=list(self._parts.values()),
            name=self.name,
            **options,
        )
        return self._service

    async def ready(self, timeout: float | None = None) -> None:
        """Wait until the app is ready; the error after the timeout names what is missing.

        The error of a required part that no retry can mend, such as a wrong password, is raised at
        once.
        """
        service = self._running()
        ready = service.monitor.wait_until(lambda status: status in READY_STATES, timeout)
        await first_of(ready, asyncio.shield(service.failed))

    # -- state ---------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        """The health of the app: the worst of its parts; "starting" after the app has stopped."""
        return self._running().view.status

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parts, in the order in which they start."""
        return tuple(self._parts)

    def tree(self) -> Tree:
        """Return the supervision tree, with the trees of all parts."""
        return self._running().view.shown_tree()

    def explain(self, part: str) -> str:
        """Return why a part is in its present state."""
        view = self._running().view
        found = view.find(part)
        if len(found) != 1:
            known = ", ".join(found or view.parts())
            raise AppError(f"there is no one component {part!r}; there are {known}")
        return str(view.explain(found[0])["explanation"])

    @property
    def service(self) -> Service | None:
        """The running service; None before the start."""
        return self._service

    def _running(self) -> Service:
        if self._service is None:
            raise AppError(
                f"the app {self.name} has not been started: async with app, or app.run()"
            )
        return self._service

    def __repr__(self) -> str:
        state = "new" if self._service is None else self._service.view.status
        return f"<App {self.name}: {state}, parts {', '.join(self._parts) or 'none'}>"


def _name_of(run: Any) -> str:
    if not (name := getattr(run, "__name__", "")).isidentifier():
        raise AppError(f"{run!r} has no name: give the component one with name=")
    return name


def _check_url(name: str, url: object) -> None:
    try:
        if url and isinstance(url, str):  # a function that returns it is checked by its first call
            connection_string(url)
    except ValueError as error:
        raise AppError(f"the URL of {name} is wrong: {error}") from None


def _check_async(name: str, function: Any) -> None:
    if not any(map(iscoroutinefunction, (function, getattr(function, "__call__", None)))):  # noqa: B004
        raise TypeError(
            f"{name}: {function!r} is not a coroutine function: define it with async def"
        )
