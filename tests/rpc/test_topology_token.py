"""A token that changes is also the one with which a real topology server is asked."""

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

from .handlers import FAIL
from .servers import EchoServer
from .sides import LIMIT, Aio, Kind, both
from .topology_server import Conversation, TopologyServer, body_of

OLD, NEW = "old-secret", "new-secret"


class Directory(TopologyServer):
    """Tells the topology to who has the token."""

    def __init__(self) -> None:
        super().__init__()
        self.token = OLD
        self.reply = self.check
        #: Who comes with the old token is answered when this is set.
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
        return ConnectionConfig.from_uri(f"{self.url}/global-cluster", token=OLD)


@pytest.fixture
def directory(echo: EchoServer) -> Iterator[Directory]:
    made = Directory()
    made.body = body_of(1, ("first", echo.uri, 3))
    with made:
        yield made


@pytest.fixture(scope="module")
def other() -> Iterator[EchoServer]:
    with EchoServer() as server:
        yield server


@both
@pytest.mark.parametrize("how", ["replaced", "refreshed"])
async def test_the_primary_is_found_with_the_new_token(
    kind: Kind, how: str, directory: Directory, other: EchoServer
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
        counters = side.manager.get_stats()["counters"]
        assert counters["credential_refreshes"] == (how == "refreshed")
    asked = [headers["Authorization"] for _, headers in directory.requests]
    assert asked.count(f"Bearer {OLD}") == (2 if how == "refreshed" else 1), "not again and again"


@both
async def test_a_first_token_that_is_refused_is_refreshed(kind: Kind, directory: Directory) -> None:
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
async def test_a_source_of_its_own_has_a_token_of_its_own(kind: Kind, directory: Directory) -> None:
    directory.token = NEW
    credentials = TokenCredentials(OLD, fetch=lambda: NEW)
    source = HttpTopology(directory.url, "another")
    async with kind(credentials=lambda config: credentials, fetch_topology=source) as side:
        with pytest.raises(TopologyError, match="does not accept the token"):
            await side.get(ConnectionConfig.from_uri("http://orders"))
        assert not side.manager.get_stats()["counters"]["credential_refreshes"]


@both
async def test_a_refusal_that_comes_late_says_nothing_of_the_new_token(
    kind: Kind, directory: Directory
) -> None:
    """The topology is asked for with the old one, and a call has it refreshed meanwhile."""
    credentials = TokenCredentials(OLD, fetch=lambda: NEW)
    strategy = AsyncGlobalStrategy if kind is Aio else GlobalStrategy
    async with kind(
        credentials=lambda config: credentials, strategy=lambda config: strategy(refresh_every=0.1)
    ) as side:
        channel = await side.get(directory.config)
        directory.patient.clear()
        directory.token = NEW
        known = len(directory.requests)
        # The first of these may have been on its way.
        await asyncio.to_thread(directory.wait, lambda: len(directory.requests) > known)
        with pytest.raises(grpc.RpcError) as caught:
            await side.call(channel, FAIL, b"UNAUTHENTICATED")
        assert await side.handle_error(channel, caught.value)
        directory.patient.set()
        await asyncio.to_thread(directory.wait, lambda: _last(directory) == f"Bearer {NEW}")
        assert await side.handle_error(channel, caught.value), "the new one was not refused"
        assert side.manager.get_stats()["counters"]["credential_refreshes"] == 1


def _last(directory: Directory) -> str:
    return directory.requests[-1][1]["Authorization"]


class Others:
    """Credentials that have nothing to do with the token of the configuration."""

    def __init__(self) -> None:
        self.refreshed = 0

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("who", "me"),)

    def refresh(self) -> None:
        self.refreshed += 1


@both
async def test_credentials_that_were_not_refused_are_not_refreshed(
    kind: Kind, directory: Directory
) -> None:
    directory.token = NEW
    others = Others()
    fetched: list[str] = []

    def fetch() -> str:
        fetched.append(NEW)
        return NEW

    token = TokenCredentials("its own", fetch=fetch)
    for credentials in (others, token):
        async with kind(credentials=lambda config, found=credentials: found) as side:
            with pytest.raises(TopologyError, match="does not accept the token"):
                await side.get(directory.config)
            await asyncio.sleep(0.1)  # for what must not come
    assert (others.refreshed, fetched) == (0, [])


@both
async def test_the_new_token_is_not_shown_either(kind: Kind, directory: Directory) -> None:
    """The server repeats it, in another form; the URI has none."""
    credentials = TokenCredentials("user:" + NEW, encode=lambda text: text.encode().hex())
    directory.reply = directory.tell
    directory.body = {"code": 1, "message": f"user%3A{NEW} is not known"}
    async with kind(credentials=lambda config: credentials) as side:
        config = ConnectionConfig.from_uri(f"{directory.url}/global-cluster")
        with pytest.raises(ConnectFailed, match="is not known") as caught:
            await side.get(config, timeout=1.0)
        told = [str(each.as_dict()) for each in side.manager.recorder.events()]
    assert NEW not in f"{caught.value} {caught.value.__cause__!r} {told}"


def test_which_token_is_meant() -> None:
    credentials = TokenCredentials(OLD)
    credentials.replace(NEW)
    given = [ConnectionConfig.from_uri("http://host", token=each) for each in (OLD, "", "its own")]
    assert [credentials.token_for(each) for each in given] == [NEW, NEW, "its own"]


def test_a_function_tells_the_token(directory: Directory) -> None:
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
    # Either may be repeated by the server.
    directory.reply = directory.tell
    directory.body = {"code": 1, "message": f"{OLD}, then {NEW}"}
    with pytest.raises(TopologyError, match=r"\*\*\*, then \*\*\*"):
        asyncio.run(source.fetch())
    tokens.append("two\nlines")
    with pytest.raises(ConfigError, match="control character"):
        asyncio.run(source.fetch())
    tokens.clear()
    assert [source.renewed] == [False], "who fetches is told what is wrong"


def test_what_is_refused_is_what_was_sent(directory: Directory) -> None:
    """Two ask at the same time, with one token and the next."""
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
def test_what_is_no_text_is_no_token(directory: Directory, tell: Any) -> None:
    with pytest.raises(ConfigError, match="must be a str, not"):
        asyncio.run(HttpTopology(directory.url, tell).fetch())
