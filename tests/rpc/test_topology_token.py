"""A replaced token is also used for queries to a real topology server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

from moored.rpc import (
    AsyncGlobalStrategy,
    ConfigError,
    ConnectFailed,
    ConnectionConfig,
    GlobalStrategy,
    HttpTopology,
    TokenCredentials,
    TopologyError,
)
from moored.rpc.milvus._config import MilvusConfig

from .handlers import FAIL
from .servers import EchoServer
from .sides import LIMIT, Aio, Kind, both
from .topology_server import Conversation, TopologyServer, body_of

OLD, NEW = "old-secret", "new-secret"


class GuardedTopologyServer(TopologyServer):
    """Returns the topology only to clients with the token."""

    def __init__(self) -> None:
        super().__init__()
        self.token = OLD
        self.reply = self.check
        #: Requests with the old token are answered when this is set.
        self.patient = threading.Event()
        self.patient.set()

    def check(self, talk: Conversation) -> None:
        if talk.headers.get("Authorization") == f"Bearer {OLD}":
            self.patient.wait(LIMIT)
        if talk.headers.get("Authorization") == f"Bearer {self.token}":
            self.tell(talk)
        else:
            talk.send(401, b"{}")

    @property
    def config(self) -> ConnectionConfig:
        return MilvusConfig.from_uri(f"{self.url}/global-cluster", token=OLD)


@pytest.fixture
def directory(echo: EchoServer) -> Iterator[GuardedTopologyServer]:
    made = GuardedTopologyServer()
    made.body = body_of(1, ("first", echo.uri, 3))
    with made:
        yield made


@pytest.fixture(scope="module")
def other() -> Iterator[EchoServer]:
    with EchoServer() as server:
        yield server


@both
@pytest.mark.parametrize("how", ["replaced", "refreshed"])
async def test_new_primary_is_found_with_the_new_token(
    kind: Kind, how: str, directory: GuardedTopologyServer, other: EchoServer
) -> None:
    credentials = TokenCredentials(OLD, fetch=lambda: NEW)
    async with kind(credentials=lambda config: credentials) as side:
        channel = await side.get(directory.config)
        directory.token = NEW
        directory.body = body_of(2, ("second", other.uri, 3))
        if how == "replaced":
            credentials.replace(NEW)
        async with asyncio.timeout(LIMIT):
            while channel.address != other.address:
                with contextlib.suppress(grpc.RpcError):
                    await side.call(channel, FAIL, b"UNAVAILABLE")
                await asyncio.sleep(0.01)
        counters = side.manager.get_stats()["counters"]
        assert counters["credential_refreshes"] == (how == "refreshed")
    asked = [headers["Authorization"] for _, headers in directory.requests]
    assert asked.count(f"Bearer {OLD}") == (2 if how == "refreshed" else 1), (
        "the refused token was sent repeatedly"
    )


@both
async def test_refused_first_token_is_refreshed(
    kind: Kind, directory: GuardedTopologyServer
) -> None:
    directory.token = NEW
    credentials = TokenCredentials(OLD, fetch=lambda: NEW)
    async with kind(credentials=lambda config: credentials) as side, asyncio.timeout(LIMIT):
        with pytest.raises(TopologyError, match="does not accept the token"):
            await side.get(directory.config)
        while True:
            with contextlib.suppress(TopologyError):
                assert (await side.get(directory.config)).generation == 1
                break
            await asyncio.sleep(0.05)


@both
async def test_source_with_its_own_token_does_not_refresh_the_credentials(
    kind: Kind, directory: GuardedTopologyServer
) -> None:
    directory.token = NEW
    credentials = TokenCredentials(OLD, fetch=lambda: NEW)
    source = HttpTopology(directory.url, "another")
    async with kind(credentials=lambda config: credentials, fetch_topology=source) as side:
        with pytest.raises(TopologyError, match="does not accept the token"):
            await side.get(ConnectionConfig.from_uri("http://orders"))
        assert not side.manager.get_stats()["counters"]["credential_refreshes"]


@both
async def test_late_refusal_of_the_old_token_does_not_refresh_the_new_one(
    kind: Kind, directory: GuardedTopologyServer
) -> None:
    """A call refreshes the token while a query with the old one is in flight."""
    credentials = TokenCredentials(OLD, fetch=lambda: NEW)
    strategy = AsyncGlobalStrategy if kind is Aio else GlobalStrategy
    async with kind(
        credentials=lambda config: credentials, strategy=lambda config: strategy(refresh_every=0.1)
    ) as side:
        channel = await side.get(directory.config)
        directory.patient.clear()
        directory.token = NEW
        known = len(directory.requests)
        # The first of these may have been sent before.
        await asyncio.to_thread(directory.wait, lambda: len(directory.requests) > known)
        with pytest.raises(grpc.RpcError) as caught:
            await side.call(channel, FAIL, b"UNAUTHENTICATED")
        assert await side.handle_error(channel, caught.value)
        directory.patient.set()
        await asyncio.to_thread(directory.wait, lambda: _last(directory) == f"Bearer {NEW}")
        assert await side.handle_error(channel, caught.value), "the new token was taken for refused"
        assert side.manager.get_stats()["counters"]["credential_refreshes"] == 1


def _last(directory: GuardedTopologyServer) -> str:
    return directory.requests[-1][1]["Authorization"]


class UnrelatedCredentials:
    """Credentials without the token of the configuration."""

    def __init__(self) -> None:
        self.refreshed = 0

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("who", "me"),)

    def refresh(self) -> None:
        self.refreshed += 1


@both
async def test_unrelated_credentials_are_not_refreshed(
    kind: Kind, directory: GuardedTopologyServer
) -> None:
    directory.token = NEW
    unrelated = UnrelatedCredentials()
    fetched: list[str] = []

    def fetch() -> str:
        fetched.append(NEW)
        return NEW

    token = TokenCredentials("its own", fetch=fetch)
    for credentials in (unrelated, token):
        async with kind(credentials=lambda config, found=credentials: found) as side:
            with pytest.raises(TopologyError, match="does not accept the token"):
                await side.get(directory.config)
            await asyncio.sleep(0.1)  # time for a refresh that must not happen
    assert (unrelated.refreshed, fetched) == (0, [])


@both
async def test_new_token_is_hidden_in_errors_and_records(
    kind: Kind, directory: GuardedTopologyServer
) -> None:
    """The server quotes it in another encoding; the URI has no token."""
    credentials = TokenCredentials("user:" + NEW, encode=lambda text: text.encode().hex())
    directory.reply = directory.tell
    directory.body = {"code": 1, "message": f"user%3A{NEW} is not known"}
    async with kind(credentials=lambda config: credentials) as side:
        config = MilvusConfig.from_uri(f"{directory.url}/global-cluster")
        with pytest.raises(ConnectFailed, match="is not known") as caught:
            await side.get(config, timeout=1.0)
        told = [str(each.as_dict()) for each in side.manager.recorder.events()]
    assert NEW not in f"{caught.value} {caught.value.__cause__!r} {told}"


def test_credentials_decide_the_token_for_a_configuration() -> None:
    credentials = TokenCredentials(OLD)
    credentials.replace(NEW)
    given = [ConnectionConfig.from_uri("http://host", token=each) for each in (OLD, "", "its own")]
    assert [credentials.token_for(each) for each in given] == [NEW, NEW, "its own"]


def test_token_function_is_called_for_each_fetch(directory: GuardedTopologyServer) -> None:
    tokens = [OLD]
    source = HttpTopology(directory.url, lambda: tokens[-1], attempts=1)
    assert asyncio.run(source.fetch()).version == 1
    assert [source.renewed] == [False]
    directory.token = NEW
    with pytest.raises(TopologyError, match="does not accept the token"):
        asyncio.run(source.fetch())
    assert [source.renewed] == [False]
    tokens.append(NEW)
    assert [source.renewed] == [True]
    assert asyncio.run(source.fetch()).version == 1
    # The server may quote either token.
    directory.reply = directory.tell
    directory.body = {"code": 1, "message": f"{OLD}, then {NEW}"}
    with pytest.raises(TopologyError, match=r"\*\*\*, then \*\*\*"):
        asyncio.run(source.fetch())
    tokens.append("two\nlines")
    with pytest.raises(ConfigError, match="control character"):
        asyncio.run(source.fetch())
    tokens.clear()
    assert [source.renewed] == [False], "the next fetch must raise the error"


def test_refusal_concerns_the_token_that_was_sent(directory: GuardedTopologyServer) -> None:
    """Two concurrent fetches use the old and the new token."""
    tokens, failures = [OLD], []
    source = HttpTopology(directory.url, lambda: tokens[-1], attempts=1)
    directory.patient.clear()
    directory.token = NEW

    def ask() -> None:
        try:
            asyncio.run(source.fetch())
        except TopologyError as error:
            failures.append(error)

    first = threading.Thread(target=ask, daemon=True)
    first.start()
    directory.wait(lambda: len(directory.requests) == 1)
    tokens.append(NEW)
    assert asyncio.run(source.fetch()).version == 1
    directory.patient.set()
    first.join(LIMIT)
    assert "does not accept the token" in str(failures[0])
    assert source.renewed


async def _later() -> str:
    return NEW


@pytest.mark.parametrize("tell", [lambda: None, lambda: b"secret", _later])
def test_token_function_must_return_a_str(directory: GuardedTopologyServer, tell: Any) -> None:
    with pytest.raises(ConfigError, match="must be a str, not"):
        asyncio.run(HttpTopology(directory.url, tell).fetch())
