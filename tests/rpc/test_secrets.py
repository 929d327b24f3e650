"""The token appears nowhere: not in logs, texts, keys, statistics, metrics, errors or records.

Every path is gone with a token that cannot be mistaken, and all that anybody could read afterwards
is searched for it, as it is and as it may be written otherwise.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import quote, quote_plus

import grpc  # type: ignore[import-untyped]
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.servers import free_port

from holdfast.rpc import (
    AsyncConnectionManager,
    ConfigError,
    ConnectFailed,
    ConnectionConfig,
    ConnectionManager,
    HttpTopology,
    ManagerClosed,
    TokenCredentials,
    TopologyError,
    retry_on_rpc_failure,
)
from holdfast.rpc.prometheus import RpcCollector

from .handlers import ECHO, FAIL, METADATA
from .servers import EchoServer
from .topology_server import TopologyServer, body_of

LIMIT = 30.0
PASSWORD = "Zebra/Quagga+77=?"
TOKEN = f"keeper:{PASSWORD}"
SOURCES = ["userinfo", "token", "provider"]


def forms(secret: str) -> set[str]:
    """How it may be written."""
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


class Ears(logging.Handler):
    """Hears all logs, whoever writes them."""

    def __init__(self) -> None:
        super().__init__(level=1)
        self.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{self.format(record)} {record.args!r}")


class Search:
    """Collects all that can be read, and looks for the token in it."""

    def __init__(self) -> None:
        self.ears = Ears()
        self.read: list[tuple[str, str]] = []

    def add(self, what: str, thing: object) -> None:
        self.read.append((what, thing if isinstance(thing, str) else repr(thing)))

    def add_error(self, what: str, error: BaseException) -> None:
        """The error, what it was raised from and with, and what is printed of it."""
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
        for managed in manager._book:
            self.add("repr of the connection", managed)
            for part in ("handler", "strategy", "core", "config"):
                self.add(f"repr of the {part}", getattr(managed, part))
            self.add("repr of the source", getattr(managed.strategy, "_source", None))
            self.add("repr of the credentials", managed.handler._credentials)
        for event in manager.recorder.events():
            self.add("recorder", event)
        for component in manager.recorder.components():
            self.add("explanation", manager.recorder.explain(component))
        registry = CollectorRegistry()
        registry.register(RpcCollector(manager))
        metrics = generate_latest(registry).decode()
        assert "holdfast_rpc_" in metrics
        self.add("metrics", metrics)
        self.add("threads", threading.enumerate())

    def end(self) -> None:
        self.read += [("log", line) for line in self.ears.lines]
        found = [
            (what, text) for what, text in self.read if any(secret in text for secret in SECRETS)
        ]
        assert not found, found[:5]
        assert len(self.read) > 20, "there was something to read"


@pytest.fixture
def search() -> Iterator[Search]:
    """Everything that is logged is heard, down to the last word of anybody."""
    root = logging.getLogger()
    names = ["holdfast", "holdfast.rpc", "holdfast.kernel", "grpc", "asyncio"]
    loggers = [root, *map(logging.getLogger, names)]
    levels = [log.level for log in loggers]
    made = Search()
    root.addHandler(made.ears)
    for log in loggers:
        log.setLevel(1)
    yield made
    root.removeHandler(made.ears)
    for log, level in zip(loggers, levels, strict=True):
        log.setLevel(level)
    made.end()


class Provider:
    """Credentials that do not come from the configuration."""

    def metadata(self) -> list[tuple[str, str | bytes]]:
        return [("authorization", TOKEN), ("secret-bin", TOKEN.encode())]

    def refresh(self) -> None:
        raise PermissionError(f"nobody gives a new one for {TOKEN}")

    def __repr__(self) -> str:
        return "<Provider>"


def config_of(source: str, address: str, path: str = "") -> ConnectionConfig:
    if source == "userinfo":
        user, password = quote("keeper", safe=""), quote(PASSWORD, safe="")
        return ConnectionConfig.from_uri(f"http://{user}:{password}@{address}{path}")
    if source == "token":
        return ConnectionConfig.from_uri(f"http://{address}{path}", token=TOKEN)
    return ConnectionConfig.from_uri(f"http://{address}{path}")


def options_of(source: str) -> dict[str, Any]:
    return {"credentials": lambda config: Provider()} if source == "provider" else {}


@contextmanager
def failing(search: Search, what: str, *kinds: type[BaseException]) -> Iterator[None]:
    with pytest.raises(kinds) as caught:
        yield
    search.add_error(what, caught.value)


def test_the_forms_are_found() -> None:
    """The search itself can fail."""
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
def test_a_life_of_threads(search: Search, source: str) -> None:
    with (
        EchoServer() as server,
        ConnectionManager(idle=0.05, probe=broken_probe, **options_of(source)) as manager,
    ):
        config = config_of(source, server.address)
        search.add("repr of the configuration", config)
        search.add("key", config.key)
        search.add("shown", config.shown)
        channel = manager.get_or_create(config)
        # It is used, after all.
        assert TOKEN in str(json.loads(channel.unary_unary(METADATA)(b"", timeout=LIMIT)))
        own = manager.get_or_create(config, dedicated=True)
        search.add_manager(manager)
        for code in ("UNAUTHENTICATED", "PERMISSION_DENIED", "INVALID_ARGUMENT"):
            with failing(search, code, grpc.RpcError):
                channel.unary_unary(FAIL)(code.encode(), timeout=LIMIT)
        threading.Event().wait(0.1)
        manager.get_or_create(config, timeout=LIMIT)  # the probe fails, and it recovers
        server.kill()
        with failing(search, "outage", grpc.RpcError):
            channel.unary_unary(ECHO)(b"", timeout=LIMIT)
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
def test_a_topology(search: Search, source: str, echo: EchoServer) -> None:
    with TopologyServer(body_of(1, ("one", echo.uri, 3))) as server:
        config = config_of(source, f"127.0.0.1:{server.port}", "/global-cluster")
        nobody = config_of(source, f"127.0.0.1:{free_port()}", "/global-cluster")
        replies = bad_replies(server)
        # One that it was never sent cannot be known to be a token.
        for reply in replies[: -1 if source == "provider" else None]:
            server.reply = reply
            asked = HttpTopology.of(config, attempts=1)
            search.add("repr of the source", asked)
            with failing(search, "topology", TopologyError):
                asked.fetch(5.0)
            with ConnectionManager(
                fetch_topology=HttpTopology.of(config, attempts=1), **options_of(source)
            ) as manager:
                with failing(search, "topology", ConnectFailed):
                    manager.get_or_create(config, timeout=0.3)
                search.add_manager(manager)
        with failing(search, "nobody", TopologyError):
            HttpTopology.of(nobody, attempts=1).fetch(5.0)
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
async def test_a_life_of_asyncio(search: Search, source: str) -> None:
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


# -- what cannot be read at all --------------------------------------------------------------------


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
def test_a_uri_that_is_wrong(uri: str) -> None:
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
def test_a_token_that_cannot_be_sent(mark: str, echo: EchoServer) -> None:
    """gRPC refuses it, and must not show it."""
    search = Search()
    wrong = f"{TOKEN}{mark}"
    config = ConnectionConfig.from_uri(echo.uri, token=wrong)
    search.add("repr of the configuration", config)
    with ConnectionManager() as manager:
        with failing(search, "token", grpc.RpcError, ConfigError):
            manager.get_or_create(config).unary_unary(ECHO)(b"", timeout=LIMIT)
        search.add_manager(manager)
    search.add("repr of the credentials", TokenCredentials(wrong))
    for _ in range(20):
        search.add("filler", "nothing")
    search.end()
