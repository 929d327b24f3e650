"""Idle HTTP connections are closed, and do not lock out other clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

import pytest
from starlette.types import Receive, Scope, Send
from tests.service.test_service import LIMIT, House, Lamp, house
from websockets.asyncio.client import connect

from moored.service import Config, Part, _connections, _login

pytestmark = pytest.mark.every_loop

Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def line(it: House, sent: bytes = b"") -> AsyncIterator[Line]:
    """Open a connection and send these bytes."""
    place = urlsplit(it.service.view.address)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        writer.write(sent)
        yield reader, writer
    finally:
        writer.close()


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """Return the bytes that arrive until the service closes the connection."""
    try:
        return await asyncio.wait_for(reader.read(), LIMIT)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("sent", [b"", b"GET /v1/health HT", b"GET /v1/health HTTP/1.1\r\nHost: x"])
async def test_a_connection_without_a_whole_request_is_closed(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(_connections, "HEAD_TIMEOUT", 0.1)
    async with house() as it, line(it, sent) as (reader, _):
        assert await rest_of(reader) == b""
        monkeypatch.undo()  # the next request may take its time
        assert (
            'moored_http_closed_total{reason="timed_out"} 1.0'
            in (await it.client.get("/metrics")).text
        )


async def test_half_a_request_after_a_whole_one_is_closed_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_connections, "HEAD_TIMEOUT", 1.0)
    request = b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with house() as it, line(it, request) as (reader, writer):
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT)
        writer.write(b"GET /v1/he")
        assert (await rest_of(reader)).endswith(b"}")


async def test_a_stream_and_a_request_in_time_are_not_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_connections, "HEAD_TIMEOUT", 1.0)
    async with (
        house() as it,
        it.client.stream("GET", "/v1/events?events") as stream,
        line(it) as (idle, _),
    ):
        assert await rest_of(idle) == b""  # so more than the limit has passed
        lines = stream.aiter_lines()
        # In one block with the first event: some clients take a block of its own for an event.
        assert [await anext(lines) for _ in range(2)] == ["retry: 1000", "event: state"]
        await it.light()
        async for text in lines:
            if "somebody lit it" in text:
                break


async def _answers_once(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    await receive()
    await send({"type": "websocket.send", "text": "still here"})
    await send({"type": "websocket.close"})


async def test_a_websocket_over_which_nothing_is_sent_is_not_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_connections, "HEAD_TIMEOUT", 1.0)
    lamp = Lamp()
    part = Part("lamp", lamp.build, conditions=("lamp_lit",), mounts={"/v1/lamp": _answers_once})
    async with house(part=part) as it:
        url = it.service.view.address.replace("http", "ws") + "/v1/lamp/"
        async with connect(url, proxy=None, open_timeout=LIMIT) as socket, line(it) as (idle, _):
            assert await rest_of(idle) == b""  # so more than the limit has passed
            await socket.send("anybody here?")
            assert await asyncio.wait_for(socket.recv(), LIMIT) == "still here"


async def test_idle_connections_are_closed_for_new_ones_with_requests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_connections, "MAX_CONNECTIONS", 5)
    async with house() as it, AsyncExitStack() as stack:
        lines = [await stack.enter_async_context(line(it, b"GET ")) for _ in range(20)]
        for _ in range(3):
            assert (await it.client.get("/v1/health")).status_code == 202
        for reader, _ in lines[:14]:
            assert await rest_of(reader) == b""
        told = [each for each in caplog.records if each.name == "moored.http"]
        assert len(told) == 1
        assert "the limit of 5 HTTP connections is reached" in told[0].getMessage()


async def test_the_newest_is_refused_if_all_others_are_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_connections, "MAX_CONNECTIONS", 2)
    async with house() as it, AsyncExitStack() as stack:
        request = b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
        for _ in range(2):
            reader, _ = await stack.enter_async_context(line(it, request))
            await asyncio.wait_for(reader.readuntil(b"retry"), LIMIT)
        refused, _ = await stack.enter_async_context(line(it, request))
        assert await rest_of(refused) == b""


async def test_connections_with_half_a_form_are_closed_for_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_connections, "MAX_CONNECTIONS", 5)
    async with house(Config(port=0, admin_token="correct-horse")) as it, AsyncExitStack() as stack:
        lines = [await stack.enter_async_context(line(it, FORM)) for _ in range(20)]
        assert (await it.client.get("/v1/health")).status_code == 202
        for reader, _ in lines[:15]:
            assert await rest_of(reader) == b""


@pytest.mark.parametrize("end", [b"\r\n\r\n", b""])
async def test_a_head_that_is_too_long_is_refused(end: bytes) -> None:
    async with house() as it:
        sent = b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\nCookie: " + b"a" * 40_000
        async with line(it, sent + end) as (reader, _):
            answer = await asyncio.wait_for(reader.readline(), LIMIT)
            assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))


async def test_a_head_of_30_kilobytes_in_two_parts_is_accepted() -> None:
    async with house() as it:
        sent = b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\nCookie: " + b"a" * 30_000
        async with line(it, sent) as (reader, writer):
            await writer.drain()
            # The first part has been read when another client gets its response.
            assert (await it.client.get("/v1/health")).status_code == 202
            writer.write(b"\r\n\r\n")
            answer = await asyncio.wait_for(reader.readline(), LIMIT)
            assert answer.startswith(b"HTTP/1.1 202")


FORM = (
    b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n"
    b"Content-Type: application/x-www-form-urlencoded\r\n\r\ntoken=ab"
)


async def test_a_login_cut_off_by_the_client_is_not_logged_as_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with house(Config(port=0, admin_token="correct-horse")) as it:
        async with line(it, FORM) as (_, writer):
            await writer.drain()
            assert (await it.client.get("/v1/health")).status_code == 202
        assert (await it.client.get("/v1/health")).status_code == 202
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


async def test_a_login_that_never_ends_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_login, "FORM_TIMEOUT", 0.1)
    async with (
        house(Config(port=0, admin_token="correct-horse")) as it,
        line(it, FORM) as (reader, _),
    ):
        assert (await rest_of(reader)).startswith(b"HTTP/1.1 408")
