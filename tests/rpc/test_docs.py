"""The pages about `moored.rpc` agree with the code, and their programs run."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import re
import types
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import httpx
import pytest
from fastapi import FastAPI
from tests.docs import pages
from tests.docs.pages import block_with, blocks

from moored.rpc import ConnectionConfig, ConnectionManager, RetryInterceptor
from moored.rpc._endpoint import CHART
from moored.rpc.calls._retry import RETRIED_CODES

from .handlers import ECHO, FAIL, PID
from .servers import EchoServer, make_stubs
from .topology_server import TopologyServer, body_of

FASTAPI = pages.page("howto/grpc-fastapi")
MOVING = pages.page("howto/moving-primary")
TOPIC = pages.page("topics/rpc")
LIMIT = 30.0


# -- gRPC in FastAPI -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stubs(tmp_path_factory.mktemp("stubs"))


@pytest.fixture
def server(stubs: Path) -> Iterator[EchoServer]:
    with EchoServer(stubs=stubs) as running:
        yield running


@pytest.fixture
def page(server: EchoServer, stubs: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the page's program defines."""
    monkeypatch.syspath_prepend(str(stubs))
    importlib.invalidate_caches()
    monkeypatch.setenv("GREETER_URI", server.uri)
    names: dict[str, Any] = {}
    exec(blocks(FASTAPI)[0], names)
    return names


@contextlib.asynccontextmanager
async def browsing(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://app", timeout=LIMIT
        ) as client:
            yield client


async def test_application_survives_a_restart_of_its_server(
    page: dict[str, Any], server: EchoServer
) -> None:
    async with browsing(page["app"]) as client:
        assert (await client.get("/once/ann")).json() == {"text": "hello ann"}
        assert (await client.get("/ready")).status_code == 200
        server.kill()
        assert (await client.get("/live")).status_code == 200
        while page["app"].state.manager.get_stats()["connections"][0]["state"].startswith("up"):
            assert (await client.get("/ready")).status_code == 503
        late = await client.get("/once/ann")
        assert (late.status_code, late.json()) == (504, {"error": "DEADLINE_EXCEEDED"})
        waiting = asyncio.create_task(client.get("/hello/bob"))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await asyncio.to_thread(server.start)
        assert (await waiting).json() == {"text": "hello bob"}
        assert (await client.get("/ready")).status_code == 200


async def test_call_in_flight_at_a_kill_fails_or_is_retried(
    page: dict[str, Any], server: EchoServer
) -> None:
    async with browsing(page["app"]) as client:
        assert (await client.get("/once/ann")).status_code == 200
        server.kill()
        assert (await client.get("/once/ann")).status_code == 503
        waiting = asyncio.create_task(client.get("/hello/bob"))
        await asyncio.to_thread(server.start)
        assert (await waiting).status_code == 200


async def test_openapi_schema_lists_the_endpoints(page: dict[str, Any]) -> None:
    async with browsing(page["app"]) as client:
        described = (await client.get("/openapi.json")).json()
        assert set(described["paths"]) == {"/once/{name}", "/hello/{name}", "/live", "/ready"}
        (name,) = described["paths"]["/once/{name}"]["get"]["parameters"]
        assert (name["name"], name["in"]) == ("name", "path")


async def test_plain_function_endpoints_work(page: dict[str, Any], server: EchoServer) -> None:
    """As the page recommends: a manager for threads, and `grpc.intercept_channel`."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with ConnectionManager() as manager:
            channel = await asyncio.to_thread(manager.get_or_create, page["CONFIG"])
            patient = grpc.intercept_channel(channel, RetryInterceptor(channel))
            app.state.greeter = page["GreeterStub"](patient)
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/hello/{name}")
    def hello(name: str) -> dict[str, str]:
        greeting = app.state.greeter.Greet(page["Name"](name=name), timeout=LIMIT)
        return {"text": greeting.text}

    async with browsing(app) as client:
        assert (await client.get("/hello/ann")).json() == {"text": "hello ann"}
        server.kill()
        waiting = asyncio.create_task(client.get("/hello/bob"))
        await asyncio.to_thread(server.start)
        assert (await waiting).json() == {"text": "hello bob"}


async def test_stub_as_a_dependency_works(page: dict[str, Any]) -> None:
    exec(blocks(FASTAPI)[1], page)
    app = page["app"]
    async with browsing(app):
        for _ in range(2):
            stub = await page["greeter"](app)
            assert (await stub.Greet(page["Name"](name="ann"))).text == "hello ann"
        (line,) = app.state.manager.get_stats()["connections"]
        assert line["client_count"] == 2  # the lifespan, and the application


async def test_token_program_of_the_page_works(echo: EchoServer) -> None:
    names: dict[str, Any] = {}
    exec("from moored.rpc import AsyncConnectionManager\n" + blocks(FASTAPI)[2], names)
    async with names["manager"] as manager:
        channel = await manager.get_or_create(ConnectionConfig.from_uri(echo.uri))
        sent = await channel.unary_unary("/test.Echo/Metadata")(b"")
        assert b'"tuesday"' in sent


def test_retry_codes_of_the_page_match_the_code() -> None:
    row = next(line for line in FASTAPI.splitlines() if "fails for another reason" in line)
    ended, _, repeated = row.partition(";")
    assert not set(re.findall(r"[A-Z]+_?[A-Z]+", ended)) & {code.name for code in RETRIED_CODES}
    assert set(re.findall(r"[A-Z]+_?[A-Z]+", repeated)) == {code.name for code in RETRIED_CODES}


# -- a moving primary ------------------------------------------------------------------------------


def run(block: str, names: dict[str, Any], **replaced: str) -> Any:
    """Run a block of the page with other addresses, and return the address of its channel."""
    for old, new in replaced.items():
        block = block.replace(PLACES[old], new)
    exec(block, names)
    with names["manager"]:
        if "channel" not in names:
            config = ConnectionConfig.from_uri("http://orders")
            names["channel"] = names["manager"].get_or_create(config)
        pid: bytes = names["channel"].unary_unary(PID)(b"", timeout=LIMIT)
        return int(pid)


PLACES = {
    "milvus": "https://global-cluster.example.com",
    "directory": "https://directory.example.com",
    "orders": "https://orders.example.com",
    "name": "orders.internal",
    "port": "50051",
    "first": "http://10.0.0.1:50051",
    "second": "http://10.0.0.2:50051",
}


@pytest.fixture
def directory(echo: EchoServer) -> dict[str, Any]:
    """The names that the first block defines."""
    names: dict[str, Any] = {"directory": {"orders": {"berlin": echo.uri, "paris": "http://p:1"}}}
    assert run(block_with(MOVING, 'row = directory["orders"]'), names) == echo.pid
    return {name: value for name, value in names.items() if name not in ("manager", "channel")}


def test_function_source_of_the_page_works(directory: dict[str, Any]) -> None:
    assert directory["members"]()[0].writable


def test_strategy_by_configuration_of_the_page_works(
    directory: dict[str, Any], echo: EchoServer
) -> None:
    assert run(block_with(MOVING, "def strategy(config)"), directory) == echo.pid


def test_classify_function_of_the_page_works(directory: dict[str, Any], echo: EchoServer) -> None:
    directory["ConnectionManager"] = ConnectionManager
    assert run(block_with(MOVING, "def lost_its_place"), directory) == echo.pid
    assert not directory["lost_its_place"](ValueError())


def test_http_source_of_the_page_works(echo: EchoServer) -> None:
    with TopologyServer(body_of(1, ("one", echo.uri, 3))) as topology:
        place = f"{topology.url}/global-cluster"
        assert run(block_with(MOVING, "https://global-cluster"), {}, milvus=place) == echo.pid
        path, headers = topology.requests[0]
        assert path == "/global-cluster/topology"
        assert headers["Authorization"] == "Bearer secret"
        block = block_with(MOVING, "HttpTopology(")
        places = {"directory": topology.url, "orders": "http://orders.example.com"}
        assert run(block, {}, **places) == echo.pid


def test_dns_source_of_the_page_works(echo: EchoServer) -> None:
    places = {"name": "localhost", "port": str(echo.port)}
    assert run(block_with(MOVING, "DnsTopology("), {}, **places) == echo.pid


def test_replica_program_of_the_page_works(echo: EchoServer) -> None:
    with EchoServer() as other:
        other.kill()
        places = {"first": other.uri, "second": echo.uri}
        assert run(block_with(MOVING, "StaticTopology("), {}, **places) == echo.pid


# -- the topic -------------------------------------------------------------------------------------


def test_state_chart_of_the_page_is_that_of_the_code() -> None:
    assert CHART.text() in blocks(TOPIC, "text")


def test_program_of_the_topic_runs(echo: EchoServer) -> None:
    names: dict[str, Any] = {"VectorServiceStub": lambda channel: channel}
    first, apart, repeated = blocks(TOPIC)
    block = first.replace("https://user:pass@vectors:19530", echo.uri)
    exec(block, names)
    assert names["stub"].unary_unary(ECHO)(b"hello", timeout=LIMIT) == b"hello"
    assert isinstance(names["stub"], grpc.Channel)
    names["stub"] = types.SimpleNamespace(Search=names["channel"].unary_unary(ECHO))
    exec(repeated, names)
    assert names["search"](b"tea", timeout=LIMIT) == b"tea"
    assert names["patient"].unary_unary(ECHO)(b"tea", timeout=LIMIT) == b"tea"
    names["manager"].close()
    exec(apart, names)
    with names["manager"] as manager:
        channel = manager.get_or_create(ConnectionConfig.from_uri(echo.uri))
        for code, generation in ((b"UNAVAILABLE", 1), (b"ABORTED", 2)):
            with pytest.raises(grpc.RpcError, match="as asked"):
                channel.unary_unary(FAIL)(code, timeout=LIMIT)
            assert channel.unary_unary(ECHO)(b"", timeout=LIMIT) == b""
            assert channel.generation == generation
