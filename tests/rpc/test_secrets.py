"""The token is shown nowhere: not in logs, reprs, keys, statistics, metrics, errors or records.

Each test runs a scenario with a recognizable token, and then searches everything that can be read
afterwards for it, verbatim and in its usual encodings.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import quote, quote_plus

import grpc  # type: ignore[import-untyped]
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.servers import free_port

from moored.rpc import (
    AsyncConnectionManager,
    AsyncRegularStrategy,
    ConfigError,
    ConnectFailed,
    ConnectionConfig,
    ConnectionManager,
    HttpTopology,
    ManagerClosed,
    Member,
    RegularStrategy,
    TokenCredentials,
    Topology,
    TopologyError,
    retry_on_rpc_failure,
)
from moored.rpc._dial import make_aio_channel, make_channel
from moored.rpc._errors import TopologyRefused
from moored.rpc._secrets import KEPT, Sent, safe_text, same_kind, secrets_of, without_secrets
from moored.rpc.milvus import MilvusTopology
from moored.rpc.milvus._config import MilvusConfig
from moored.rpc.prometheus import RpcCollector

from .handlers import ECHO, FAIL, METADATA, loss_noticed, loss_noticed_async
from .servers import EchoServer
from .sides import SIDES, Aio, Threads, aborted
from .topology_server import TopologyServer, body_of

LIMIT = 30.0
PASSWORD = "Zebra/Quagga+77=?"
TOKEN = f"keeper:{PASSWORD}"
SOURCES = ["userinfo", "token", "provider"]
both = pytest.mark.parametrize("kind", SIDES, ids=lambda kind: kind.__name__)
Kind = type[Threads] | type[Aio]


def forms(secret: str) -> set[str]:
    """Return the secret in its usual encodings."""
    raw = secret.encode()
    coded = {base64.b64encode(raw), base64.urlsafe_b64encode(raw), raw.hex().encode()}
    return {
        secret,
        quote(secret),
        quote(secret, safe=""),
        quote_plus(secret),
        json.dumps(secret)[1:-1],
        *(each.decode().rstrip("=") for each in coded),
    }


SECRETS = forms(TOKEN) | forms(PASSWORD)


class LogCollector(logging.Handler):
    """Collects the log lines of all loggers."""

    def __init__(self) -> None:
        super().__init__(level=1)
        self.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{self.format(record)} {record.args!r}")


class Search:
    """Collects everything that can be read, and searches it for the token."""

    def __init__(self) -> None:
        self.logs = LogCollector()
        self.read: list[tuple[str, str]] = []

    def add(self, what: str, thing: object) -> None:
        self.read.append((what, thing if isinstance(thing, str) else repr(thing)))

    def add_error(self, what: str, error: BaseException) -> None:
        """Add the error, its causes and contexts, and its traceback."""
        self.add(what, "".join(traceback.format_exception(error)))
        seen: set[int] = set()
        todo: list[BaseException | None] = [error]
        while todo:
            found = todo.pop()
            if found is None or id(found) in seen:
                continue
            seen.add(id(found))
            self.add(what, f"{found!s} {found!r} {found.args!r}")
            if isinstance(found, grpc.RpcError) and hasattr(found, "details"):
                self.add(what, f"{found.details()} {found.debug_error_string()}")
            todo += [found.__cause__, found.__context__]

    def add_manager(self, manager: ConnectionManager | AsyncConnectionManager) -> None:
        self.add("repr of the manager", manager)
        self.add("statistics", manager.get_stats())
        for managed in manager._table:
            self.add("repr of the connection", managed)
            for part in ("handler", "strategy", "live", "config"):
                self.add(f"repr of the {part}", getattr(managed, part))
            self.add("repr of the source", getattr(managed.strategy, "_source", None))
            self.add("repr of the credentials", managed.handler.gate.credentials)
        for event in manager.recorder.events():
            self.add("recorder", f"{event!r} {event.as_dict()!r}")
        for component in manager.recorder.components():
            self.add("explanation", manager.recorder.explain(component))
        registry = CollectorRegistry()
        registry.register(RpcCollector(manager))
        metrics = generate_latest(registry).decode()
        assert "moored_rpc_" in metrics
        self.add("metrics", metrics)
        self.add("threads", threading.enumerate())

    def end(self) -> None:
        self.read += [("log", line) for line in self.logs.lines]
        found = [
            (what, text) for what, text in self.read if any(secret in text for secret in SECRETS)
        ]
        assert not found, found[:5]
        assert len(self.read) > 10, "too little was collected"


@pytest.fixture
def search() -> Iterator[Search]:
    """Collect the logs of all loggers at the lowest level; search everything at the end."""
    root = logging.getLogger()
    names = ["moored", "moored.rpc", "moored.kernel", "grpc", "asyncio"]
    loggers = [root, *map(logging.getLogger, names)]
    levels = [log.level for log in loggers]
    made = Search()
    root.addHandler(made.logs)
    for log in loggers:
        log.setLevel(1)
    yield made
    root.removeHandler(made.logs)
    for log, level in zip(loggers, levels, strict=True):
        log.setLevel(level)
    made.end()


class Provider:
    """Credentials that do not come from the configuration."""

    def metadata(self) -> list[tuple[str, str | bytes]]:
        return [("authorization", TOKEN), ("secret-bin", TOKEN.encode())]

    def refresh(self) -> None:
        raise PermissionError(f"no new token for {TOKEN}")

    def __repr__(self) -> str:
        return "<Provider>"


def config_of(source: str, address: str, path: str = "") -> MilvusConfig:
    if source == "userinfo":
        user, password = quote("keeper", safe=""), quote(PASSWORD, safe="")
        return MilvusConfig.from_uri(f"http://{user}:{password}@{address}{path}")
    if source == "token":
        return MilvusConfig.from_uri(f"http://{address}{path}", token=TOKEN)
    return MilvusConfig.from_uri(f"http://{address}{path}")


def source_of(config: MilvusConfig) -> MilvusTopology:
    source = config.topology_source(attempts=1)
    assert source is not None
    return source


def options_of(source: str) -> dict[str, Any]:
    return {"credentials": lambda config: Provider()} if source == "provider" else {}


@contextmanager
def failing(search: Search, what: str, *kinds: type[BaseException]) -> Iterator[Any]:
    with pytest.raises(kinds) as caught:
        yield caught
    search.add_error(what, caught.value)


def test_search_finds_every_encoding_and_exception_contexts() -> None:
    """Check that the search itself can fail."""
    for form in SECRETS:
        search = Search()
        search.add("a text", f"before {form} after")
        with pytest.raises(AssertionError, match="a text"):
            search.end()
    search = Search()
    try:
        raise ValueError(TOKEN)
    except ValueError:
        try:
            raise KeyError("something else")
        except KeyError as error:
            search.add_error("an error", error)
    with pytest.raises(AssertionError, match="an error"):
        search.end()


# -- threads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
def test_lifecycle_of_a_thread_manager_hides_the_token(search: Search, source: str) -> None:
    with (
        EchoServer() as server,
        ConnectionManager(idle=0.05, probe=broken_probe, **options_of(source)) as manager,
    ):
        config = config_of(source, server.address)
        search.add("repr of the configuration", config)
        search.add("key", config.key)
        search.add("shown", config.shown)
        channel = manager.get_or_create(config)
        # The token is really sent.
        assert TOKEN in str(json.loads(channel.unary_unary(METADATA)(b"", timeout=LIMIT)))
        own = manager.get_or_create(config, dedicated=True)
        search.add_manager(manager)
        for code in ("UNAUTHENTICATED", "PERMISSION_DENIED", "INVALID_ARGUMENT"):
            with failing(search, code, grpc.RpcError):
                channel.unary_unary(FAIL)(code.encode(), timeout=LIMIT)
        threading.Event().wait(0.1)
        manager.get_or_create(config, timeout=LIMIT)  # the probe fails, and it recovers
        generation = channel.generation
        server.kill()
        with failing(search, "outage", grpc.RpcError):
            channel.unary_unary(ECHO)(b"", timeout=LIMIT)
        loss_noticed(channel, generation)
        with failing(search, "not sent", grpc.RpcError):
            channel.unary_unary(ECHO)(b"", timeout=0.3)
        with failing(search, "future", grpc.RpcError):
            channel.unary_unary(ECHO).future(b"", timeout=0.1).result()
        with failing(search, "retry", grpc.RpcError):
            retry_on_rpc_failure(handler=channel)(channel.unary_unary(ECHO))(b"", timeout=0.3)
        with suppress(ConnectFailed):
            manager.get_or_create(config, timeout=0.3)
        search.add_manager(manager)
        server.start()
        assert channel.unary_unary(ECHO)(b"a", timeout=LIMIT) == b"a"
        manager.release(own)
        with failing(search, "released", ManagerClosed):
            own.unary_unary(ECHO)(b"", timeout=LIMIT)
        with failing(search, "refused", ConnectFailed):
            manager.get_or_create(config_of(source, f"127.0.0.1:{free_port()}"), timeout=0.3)
        search.add_manager(manager)
    with failing(search, "closed", ManagerClosed):
        manager.get_or_create(config)
    search.add_manager(manager)


def broken_probe(channel: Any) -> bool:
    raise RuntimeError("the probe is broken")


@pytest.mark.parametrize("source", SOURCES)
def test_failing_topology_server_hides_the_token(
    search: Search, source: str, echo: EchoServer
) -> None:
    with TopologyServer(body_of(1, ("one", echo.uri, 3))) as server:
        config = config_of(source, f"127.0.0.1:{server.port}", "/global-cluster")
        nobody = config_of(source, f"127.0.0.1:{free_port()}", "/global-cluster")
        replies = bad_replies(server)
        # A token that was never sent to the server cannot be recognized in its answer.
        for reply in replies[: -1 if source == "provider" else None]:
            server.reply = reply
            asked = source_of(config)
            search.add("repr of the source", asked)
            with failing(search, "topology", TopologyError):
                asyncio.run(asked.fetch())
            with ConnectionManager(
                fetch_topology=source_of(config), **options_of(source)
            ) as manager:
                with failing(search, "topology", ConnectFailed):
                    manager.get_or_create(config, timeout=0.3)
                search.add_manager(manager)
        with failing(search, "nobody", TopologyError):
            asyncio.run(source_of(nobody).fetch())
        server.reply = server.tell
        with ConnectionManager(**options_of(source)) as manager:
            channel = manager.get_or_create(config)
            search.add_manager(manager)
            server.body = body_of(2, ("one", echo.uri, 1))
            with failing(search, "no primary", grpc.RpcError):
                channel.unary_unary(FAIL)(b"UNAVAILABLE", timeout=LIMIT)
            assert channel.unary_unary(ECHO)(b"a", timeout=LIMIT) == b"a"
            search.add_manager(manager)
    if source != "provider":
        assert any(TOKEN in headers["Authorization"] for _, headers in server.requests)


def bad_replies(server: TopologyServer) -> list[Callable[[Any], None]]:
    repeats = json.dumps({"code": 7, "message": f"{TOKEN} is wrong"}).encode()
    return [
        server.status(401),
        server.status(503),
        server.raw(b"{"),
        server.raw(b'{"code": 0, "data": {}}'),
        server.status(302, Location="http://elsewhere.test/"),
        server.raw(repeats),
    ]


# -- asyncio ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
async def test_lifecycle_of_an_asyncio_manager_hides_the_token(search: Search, source: str) -> None:
    with EchoServer() as server:
        config = config_of(source, server.address)
        async with AsyncConnectionManager(
            idle=0.05, probe=broken_probe, **options_of(source)
        ) as manager:
            channel = await manager.get_or_create(config)
            answer = await channel.unary_unary(METADATA)(b"", timeout=LIMIT)
            assert TOKEN in str(json.loads(answer))
            own = await manager.get_or_create(config, dedicated=True)
            search.add_manager(manager)
            with failing(search, "UNAUTHENTICATED", grpc.RpcError):
                await channel.unary_unary(FAIL)(b"UNAUTHENTICATED", timeout=LIMIT)
            await asyncio.sleep(0.1)
            await manager.get_or_create(config, timeout=LIMIT)
            await asyncio.to_thread(server.kill)
            with failing(search, "outage", grpc.RpcError):
                await channel.unary_unary(ECHO)(b"", timeout=LIMIT)
            call = channel.unary_unary(ECHO)(b"", timeout=0.3)
            search.add("tasks", asyncio.all_tasks())
            search.add("call", call)
            with failing(search, "not sent", grpc.RpcError):
                await call
            search.add("call", call)
            search.add_manager(manager)
            await asyncio.to_thread(server.start)
            assert await channel.unary_unary(ECHO)(b"a", timeout=LIMIT) == b"a"
            await manager.release(own)
            with failing(search, "released", ManagerClosed):
                await own.unary_unary(ECHO)(b"", timeout=LIMIT)
            away = config_of(source, f"127.0.0.1:{free_port()}")
            with failing(search, "refused", ConnectFailed):
                await manager.get_or_create(away, timeout=0.3)
            search.add_manager(manager)
        search.add_manager(manager)


# -- servers and functions that quote the token ---------------------------------------------------


class QuotingService(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A service that quotes the token in an error that ends the connection."""

    def __init__(self) -> None:
        self.asked, self.may_answer = threading.Event(), threading.Event()
        self.may_answer.set()

    def service(self, details: Any) -> Any:
        if details.method.startswith("/grpc.health"):
            return None
        sent = dict(details.invocation_metadata)["authorization"]

        def tell(request: bytes, context: Any) -> bytes:
            self.asked.set()
            assert self.may_answer.wait(LIMIT)
            context.abort(grpc.StatusCode.ABORTED, f"no backend for {sent}, {quote(sent)}")
            raise AssertionError

        return grpc.unary_unary_rpc_method_handler(tell)


@contextmanager
def quoting_server() -> Iterator[tuple[QuotingService, str]]:
    handler, port = QuotingService(), free_port()
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield handler, f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


class LaterProvider:
    """Credentials that must be awaited."""

    async def metadata(self) -> list[tuple[str, str]]:
        return [("authorization", f"Bearer {TOKEN}")]

    def __repr__(self) -> str:
        return "<LaterProvider>"


@pytest.mark.parametrize(
    ("kind", "source"),
    [*itertools.product(SIDES, SOURCES), (Aio, "later")],
    ids=lambda value: getattr(value, "__name__", value),
)
async def test_token_quoted_by_a_server_is_hidden_in_records(
    search: Search, kind: Kind, source: str
) -> None:
    options = options_of(source)
    if source == "later":
        options = {"credentials": lambda config: LaterProvider()}
    with quoting_server() as (_, address):
        async with kind(classify=aborted, **options) as side:
            channel = await side.get(config_of(source, address))
            with pytest.raises(grpc.RpcError) as caught:
                await side.call(channel, ECHO)
            assert TOKEN in caught.value.details(), "the caller's own error must be unchanged"
            search.add_manager(side.manager)
            told = [str(event.because) for event in side.manager.recorder.events()]
            assert any("no backend for ***, ***" in each for each in told), told


@both
async def test_token_quoted_by_a_failing_classify_function_is_hidden_in_logs(
    search: Search, kind: Kind
) -> None:
    """A failing classify function is logged with its place in the code."""

    def classify(error: BaseException) -> bool:
        raise LookupError(f"unknown error: {error}")

    with quoting_server() as (_, address):
        async with kind(classify=classify) as side:
            channel = await side.get(config_of("token", address))
            with pytest.raises(grpc.RpcError):
                await side.call(channel, ECHO)
            search.add_manager(side.manager)
            told = [line for line in search.logs.lines if "LookupError: unknown error" in line]
            assert told
            assert all("***" in line and "in classify" in line for line in told)


@both
async def test_token_quoted_in_the_last_failure_is_hidden_from_later_callers(
    search: Search, kind: Kind
) -> None:
    """Later calls report the last failure."""
    with quoting_server() as (_, address):
        config = config_of("token", address)
        # No more dials, so that this failure stays the last one.
        refuse = threading.Event()
        make = make_channel if kind is Threads else make_aio_channel

        def factory(config: ConnectionConfig) -> Any:
            if refuse.is_set():
                raise OSError(f"nothing for {config.token}")
            return make(config, 1)

        async with kind(classify=aborted, handler_factory=factory) as side:
            channel = await side.get(config)
            refuse.set()
            with pytest.raises(grpc.RpcError):
                await side.call(channel, ECHO)
            with failing(search, "not sent", grpc.RpcError) as caught:
                await side.call(channel, ECHO, b"", 0.3)
            with failing(search, "unreached", ConnectFailed):
                await side.get(config, timeout=0.3)
            search.add_manager(side.manager)
            assert "***" in caught.value.details()


@both
async def test_replaced_token_quoted_by_a_server_is_hidden(search: Search, kind: Kind) -> None:
    """The token is replaced while the call is in flight."""
    credentials = TokenCredentials(TOKEN)
    with quoting_server() as (handler, address):
        async with kind(classify=aborted, credentials=lambda config: credentials) as side:
            channel = await side.get(config_of("provider", address))
            handler.may_answer.clear()
            calling = asyncio.create_task(side.call(channel, ECHO))
            await asyncio.to_thread(handler.asked.wait, LIMIT)
            credentials.replace("something-else")
            handler.asked.clear()
            other = asyncio.create_task(side.call(channel, ECHO))
            await asyncio.to_thread(handler.asked.wait, LIMIT)
            handler.may_answer.set()
            outcomes = await asyncio.gather(calling, other, return_exceptions=True)
            assert any(TOKEN in str(each) for each in outcomes)
            search.add_manager(side.manager)


@both
@pytest.mark.parametrize("kinds", [(OSError, ConnectFailed), (NameError, ConfigError)])
async def test_token_quoted_by_a_channel_factory_is_hidden(
    search: Search, kind: Kind, kinds: tuple[type[Exception], type[Exception]]
) -> None:
    raises, expected = kinds

    def factory(config: ConnectionConfig) -> Any:
        try:
            raise KeyError(config.token)
        except KeyError as error:
            raise raises(f"nothing for {config.token}") from error

    async with kind(handler_factory=factory) as side:
        with failing(search, "a factory", expected):
            # An OSError is retried until the timeout.
            timeout = 0.5 if raises is OSError else LIMIT
            await side.get(config_of("token", "127.0.0.1:1"), timeout=timeout)
        search.add_manager(side.manager)


@both
@pytest.mark.parametrize("used", [True, False], ids=["used", "unused"])
async def test_token_quoted_by_a_strategy_factory_at_wake_up_is_hidden(
    search: Search, kind: Kind, used: bool, echo: EchoServer
) -> None:
    """The unused connection was closed; a call needs a new one."""
    failing_now = threading.Event()

    def strategy(config: ConnectionConfig) -> Any:
        if failing_now.is_set():
            raise OSError(f"unknown token {config.token}")
        return AsyncRegularStrategy() if kind is Aio else RegularStrategy()

    async with kind(linger=0.2, strategy=strategy) as side:
        channel = await side.get(config_of("token", echo.address), timeout=LIMIT)
        if used:
            await side.call(channel, ECHO)
        await side.run(channel.close)
        async with asyncio.timeout(LIMIT):
            while side.manager.get_stats()["total_connections"]:  # noqa: ASYNC110 - no notification
                await asyncio.sleep(0.01)
        failing_now.set()
        with failing(search, "asleep", ConnectFailed) as caught:
            await side.call(channel, ECHO)
        assert "unknown token ***" in str(caught.value)
        search.add_manager(side.manager)


@both
async def test_token_quoted_by_a_topology_function_or_probe_is_hidden(
    search: Search, kind: Kind, echo: EchoServer
) -> None:
    fails = False

    def topology() -> Topology:
        if fails:
            raise OSError(f"nothing for {TOKEN}")
        return Topology(1, (Member("one", echo.uri),))

    def probe(channel: Any) -> bool:
        raise OSError(f"nothing for {TOKEN}")

    config = config_of("token", echo.address)
    async with kind(fetch_topology=topology, probe=probe, idle=0.05) as side:
        channel = await side.get(config)
        fails = True
        await asyncio.sleep(0.1)
        await side.get(config, timeout=LIMIT)
        with pytest.raises(grpc.RpcError):
            await side.call(channel, FAIL, b"UNAVAILABLE")
        assert await side.call(channel, ECHO, b"a") == b"a"
        with failing(search, "no topology", ConnectFailed):
            await side.get(config, dedicated=True, timeout=0.3)
        search.add_manager(side.manager)
        told = [str(event.because) for event in side.manager.recorder.events()]
        assert any("nothing for ***" in each for each in told), told


class NewTokenPerCall:
    """Credentials with a new token for each call."""

    def __init__(self) -> None:
        self.numbers = itertools.count()

    def metadata(self) -> list[tuple[str, str]]:
        return [("authorization", f"{TOKEN}-{next(self.numbers)}-of-them")]


@both
async def test_one_of_many_tokens_quoted_by_a_server_is_hidden(search: Search, kind: Kind) -> None:
    """Later calls have used other tokens."""
    credentials = NewTokenPerCall()
    with quoting_server() as (handler, address):
        async with kind(classify=aborted, credentials=lambda config: credentials) as side:
            channel = await side.get(config_of("provider", address))
            handler.may_answer.clear()
            calling = asyncio.create_task(side.call(channel, ECHO))
            await asyncio.to_thread(handler.asked.wait, LIMIT)
            for _ in range(10):
                with suppress(grpc.RpcError):
                    await side.call(channel, "/grpc.health.v1.Health/Nothing")
            handler.may_answer.set()
            with pytest.raises(grpc.RpcError, match="-0-of-them"):
                await calling
            search.add_manager(side.manager)
            told = [str(event.because) for event in side.manager.recorder.events()]
            assert any("no backend for ***, ***" in each for each in told), told


def test_recently_sent_metadata_is_remembered_up_to_a_limit() -> None:
    sent, theirs = Sent(), [("a", "first")]
    for _ in range(3):
        sent.add(theirs)
        sent.add((("a", "other"),))
    theirs[0] = ("a", "second")
    sent.add(theirs)
    assert sent.lately == ((("a", "first"),), (("a", "other"),), (("a", "second"),))
    for number in range(KEPT):
        sent.add((("a", str(number)),))
    assert len(sent.lately) == KEPT
    assert sent.lately[0] == (("a", "0"),)


# -- hiding secrets must not break recovery -------------------------------------------------------


class InvalidCredentials:
    """Credentials whose token may be unsendable."""

    token: Any = None

    def metadata(self) -> list[tuple[str, Any]]:
        return [("authorization", self.token)]


@pytest.mark.parametrize("odd", [None, 7, "\ud800 and more"])
@both
async def test_unsendable_credentials_do_not_end_recovery(kind: Kind, odd: Any) -> None:
    credentials = InvalidCredentials()
    with EchoServer() as server:
        async with kind(credentials=lambda config: credentials, connect_timeout=LIMIT) as side:
            channel = await side.get(config_of("provider", server.address))
            credentials.token = odd
            with suppress(Exception):  # gRPC decides what it raises
                await side.call(channel, ECHO)
            credentials.token = "good"
            assert await side.call(channel, ECHO, b"a") == b"a"
            server.kill()
            with pytest.raises(grpc.RpcError):
                await side.call(channel, ECHO)
            await loss_noticed_async(channel)
            server.start()
            assert await side.call(channel, ECHO, b"b") == b"b"
            assert channel.generation == 2, "gRPC reconnected by itself"


class UnusualDetails(Exception):
    """An error whose `details` takes an argument."""

    def details(self, language: str) -> str:
        return language


class Unprintable(Exception):
    """An error whose `str()` and `repr()` raise."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


@pytest.mark.parametrize(
    "error", [UnusualDetails("away"), Unprintable()], ids=["unusual details", "unprintable"]
)
@both
async def test_unreadable_errors_do_not_end_recovery(
    kind: Kind, error: Exception, echo: EchoServer
) -> None:
    make = make_channel if kind is Threads else make_aio_channel
    failures = [error, error]

    def factory(config: ConnectionConfig) -> Any:
        if failures:
            raise failures.pop()
        return make(config, 1)

    async with kind(handler_factory=factory, connect_timeout=LIMIT) as side:
        channel = await side.get(config_of("token", echo.address))
        assert await side.call(channel, ECHO, b"a") == b"a"
        told = str([event.because for event in side.manager.recorder.events()])
        assert ("away" if isinstance(error, UnusualDetails) else "Unprintable") in told


class LosingCredentials:
    """Credentials whose refresh removes the token, and fails."""

    def __init__(self) -> None:
        self.token: str | None = TOKEN

    def metadata(self) -> list[tuple[str, Any]]:
        return [("authorization", self.token)]

    def refresh(self) -> None:
        old, self.token = self.token, None
        raise OSError(f"nothing new for {old}")


@both
async def test_refresh_that_removes_the_token_counts_as_failed(search: Search, kind: Kind) -> None:
    with EchoServer() as server:
        async with kind(credentials=lambda config: LosingCredentials()) as side:
            channel = await side.get(config_of("provider", server.address))
            with pytest.raises(grpc.RpcError):
                await side.call(channel, FAIL, b"UNAUTHENTICATED")
            async with asyncio.timeout(LIMIT):
                while channel.endpoint.refreshes:  # noqa: ASYNC110 - no notification
                    await asyncio.sleep(0.01)
            assert channel.endpoint.refusals.refused
            search.add_manager(side.manager)
            assert "nothing new for ***" in side.manager.recorder.explain(f"rpc.{server.address}")


def test_malformed_metadata_has_no_secrets() -> None:
    odd: list[Any] = [None, 7, ["ab"], [("a",), ("a", None), ("a", "word-a", 1), ("a", b"word-b")]]
    assert {"word-b"} <= set(secrets_of("", *odd))
    assert not any("word-a" in each for each in secrets_of("", *odd))
    assert secrets_of("\ud800\ud801 token")


@pytest.mark.parametrize("kind", [ConfigError, TopologyRefused, TopologyError])
def test_hiding_secrets_keeps_the_type_of_an_error(kind: type[Exception]) -> None:
    class Own(kind):  # type: ignore[misc, valid-type]
        pass

    for made in (kind, Own):
        found = without_secrets(made(f"nothing for {TOKEN}"), secrets_of(TOKEN))
        assert (type(found), str(found)) == (kind, "nothing for ***")
    assert type(same_kind(OSError(), "text")) is ConnectFailed
    assert "Unprintable" in safe_text(Unprintable(), [])
    assert type(without_secrets(Unprintable(), ["secret"])) is ConnectFailed


# -- malformed URIs and tokens ------------------------------------------------------------


CODED = quote(PASSWORD, safe="")


@pytest.mark.parametrize(
    "uri",
    [
        f"ftp://keeper:{CODED}@host",
        f"http://keeper:{CODED}@host:99999",
        f"http://keeper:{CODED}@host:port",
        f"http://keeper:{CODED}@",
        f"http://keeper:{CODED}@[::1",
        f"http://keeper:{CODED}@::1:80",
        f"keeper:{CODED}@host",
        f"http://keeper:{PASSWORD}@host",
        f"http://keeper:{PASSWORD} @host",
        f"http://keeper:[{PASSWORD}@host",
        f"http://{CODED}@host/db#part",
        f"http://host/db?token={CODED}",
        f"http://host/db?token={PASSWORD}",
        f"http://host/db#{CODED}",
    ],
)
def test_invalid_uri_hides_the_password(uri: str) -> None:
    search = Search()
    with failing(search, "configuration", ConfigError):
        ConnectionConfig.from_uri(uri)
    if "://" in uri:
        with failing(search, "topology", ConfigError):
            HttpTopology(uri, TOKEN)
    for _ in range(20):
        search.add("filler", "nothing")
    search.end()


@pytest.mark.parametrize("mark", ["\n", "\x00", "ü", "\u2028"])
def test_unsendable_token_is_refused_and_hidden(mark: str, echo: EchoServer) -> None:
    """It is refused before any call, and not shown."""
    search = Search()
    wrong = f"{TOKEN}{mark}"
    with failing(search, "token", ConfigError), ConnectionManager() as manager:
        config = ConnectionConfig.from_uri(echo.uri, token=wrong)
        search.add("repr of the configuration", config)
        manager.get_or_create(config)
    search.add_manager(manager)
    with failing(search, "credentials", ConfigError):
        TokenCredentials(wrong)
    for _ in range(20):
        search.add("filler", "nothing")
    search.end()
