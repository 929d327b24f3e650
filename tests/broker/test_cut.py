"""Cutting clients that do not read, and the checks of all streams that find them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from tests.broker.serving import KEYS, OTHER, frozen, reading, served

from moored.broker import ApiKeys, Broker, BrokerApp, MemorySource, _cut
from moored.broker._cut import ClientConnection


@pytest.fixture(autouse=True)
def _nothing_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cut, "_SOCKETS", _cut._Sockets())


@contextmanager
def connected(number: int) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Both ends of TCP connections of this process."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=number))
        found = []
        for _ in range(number):
            client = stack.enter_context(socket.create_connection(server.getsockname()))
            found.append((client, stack.enter_context(server.accept()[0])))
        yield found


def cut(client: socket.socket) -> bool:
    """Cut the connection of a client as a server does that has only its address."""
    at, server = client.getsockname(), client.getpeername()
    return ClientConnection({"client": at, "server": server}, None).cut()


def test_search_for_a_socket_leaves_the_others_as_they_are() -> None:
    with connected(3) as lines:
        socket.setdefaulttimeout(5.0)
        try:
            assert cut(lines[0][0])
        finally:
            socket.setdefaulttimeout(None)
        assert lines[0][0].recv(1) == b"", "it was cut"
        assert all(os.get_blocking(each.fileno()) for ends in lines[1:] for each in ends)


def test_later_search_queries_only_new_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cut, "FRESH", 0.0)

    def took(client: socket.socket) -> float:
        begin = time.thread_time()
        assert cut(client)
        return time.thread_time() - begin

    with connected(400) as lines:
        first = took(lines[0][0])
        assert took(lines[1][0]) < first / 20, "a listed socket is not searched for"
        with connected(1) as others:
            assert took(others[0][0]) < first / 2


class Unbreakable:
    """The `receive` of a server whose connection cannot be aborted."""

    def __init__(self, receive: Any) -> None:
        self.transport = self
        self._receive = receive

    async def receive(self) -> Any:
        return await self._receive()

    def abort(self) -> None:
        raise OSError("the transport has failed")


async def test_error_of_a_check_does_not_end_the_checks_of_other_streams(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = MemorySource()
    async with Broker(source, channels=["orders"], slow="drop") as broker:
        asgi = BrokerApp(broker, ApiKeys(KEYS), keepalive=0.1, send_timeout=0.5)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await asgi(scope, Unbreakable(receive).receive, send)

        async with served(app) as url, asyncio.timeout(60):
            with frozen(url, "other-key"):
                async with reading(url) as acme:
                    while "the transport has failed" not in caplog.text:
                        payload = {"org_id": OTHER, "text": "x" * 50_000}
                        source.publish("orders", json.dumps(payload))
                        await asyncio.sleep(0.01)
                    for _ in range(3):
                        await acme.until_comment()
                while broker.statistics().subscribers:  # noqa: ASYNC110 - no event for it
                    await asyncio.sleep(0.01)
