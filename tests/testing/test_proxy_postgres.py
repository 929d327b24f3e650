"""Each fault between a PostgreSQL client and a real server."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
from tests.testing.proxy_support import read_all

from moored.testing.proxy import FaultProxy, postgres_fatal


@pytest.fixture
async def proxy(postgres_url: str) -> AsyncIterator[FaultProxy]:
    server = urlsplit(postgres_url)
    assert server.hostname is not None
    async with FaultProxy(server.hostname, server.port) as proxy:
        yield proxy


@pytest.fixture
def url(proxy: FaultProxy, postgres_url: str) -> str:
    parts = urlsplit(postgres_url)
    login = parts.netloc.rpartition("@")[0]
    return urlunsplit(parts._replace(netloc=f"{login}@{proxy.host}:{proxy.port}"))


async def connect(url: str, **options: str) -> psycopg.AsyncConnection[tuple[int]]:
    return await psycopg.AsyncConnection.connect(url, autocommit=True, **options)  # type: ignore[arg-type]


async def one(connection: psycopg.AsyncConnection[tuple[int]]) -> int:
    cursor = await connection.execute("select 1")
    row = await cursor.fetchone()
    assert row is not None
    return row[0]


@pytest.mark.parametrize("sslmode", ["disable", "prefer"])
@pytest.mark.parametrize("gssencmode", ["disable", "prefer"])
async def test_a_connection_over_the_limit_gets_a_fatal_error(
    proxy: FaultProxy, url: str, sslmode: str, gssencmode: str
) -> None:
    proxy.limit(0, 1, answer=postgres_fatal("53400", "too many, says the proxy"))
    async with await connect(url, sslmode="disable", gssencmode="disable") as within:
        assert await one(within) == 1
        with pytest.raises(psycopg.OperationalError, match="FATAL:  too many, says"):
            await connect(url, sslmode=sslmode, gssencmode=gssencmode)
        assert await one(within) == 1
    assert proxy.statistics().limited >= 1
    assert proxy.statistics().resets == 0


async def test_refuse_rejects_new_connections_and_keeps_open_ones(
    proxy: FaultProxy, url: str
) -> None:
    async with await connect(url) as kept:
        proxy.refuse()
        with pytest.raises(psycopg.OperationalError, match=r"[Cc]onnection refused"):
            await connect(url)
        assert await one(kept) == 1
        proxy.refuse(False)
        async with await connect(url) as again:
            assert await one(again) == 1


@pytest.mark.every_loop
async def test_a_stalled_query_completes_after_resume(proxy: FaultProxy, url: str) -> None:
    async with await connect(url) as connection:
        await connection.execute("create table log (n int)")
        proxy.stall()
        query = asyncio.create_task(connection.execute("insert into log values (7)"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(query), 0.1)
        proxy.resume()
        await query
        cursor = await connection.execute("select count(*) from log")
        assert await cursor.fetchone() == (1,)


async def test_a_query_into_a_black_hole_gets_no_reply(proxy: FaultProxy, url: str) -> None:
    async with await connect(url) as connection:
        proxy.black_hole()
        query = asyncio.create_task(one(connection))
        with pytest.raises(psycopg.errors.ConnectionTimeout):
            await connect(url, connect_timeout="2")
        assert not query.done()
        assert proxy.statistics().bytes_swallowed > 0
        proxy.resume()
        with pytest.raises(psycopg.OperationalError):
            await query
    async with await connect(url) as connection:
        assert await one(connection) == 1


async def test_a_reset_is_reported_at_once(proxy: FaultProxy, url: str) -> None:
    async with await connect(url) as connection:
        query = asyncio.create_task(connection.execute("select pg_sleep(60)"))
        await asyncio.sleep(0)
        proxy.reset()
        with pytest.raises(psycopg.OperationalError):
            await asyncio.wait_for(query, 10)
        assert connection.broken


@pytest.mark.parametrize("size", [0, 1, 9, 100, 400])
async def test_a_cut_anywhere_is_an_operational_error(
    proxy: FaultProxy, url: str, size: int
) -> None:
    proxy.cut_after(size, "down")
    with pytest.raises(psycopg.OperationalError):
        async with await connect(url) as connection:
            await connection.execute("select repeat('x', 1000)")
    counts = await proxy.wait_until(lambda counts: counts.open == 0)
    assert counts.bytes_down % max(size, 1) == 0


@pytest.mark.every_loop
async def test_latency_delays_each_round_trip(proxy: FaultProxy, url: str) -> None:
    loop = asyncio.get_running_loop()
    async with await connect(url) as connection:
        proxy.latency(0.05)
        began = loop.time()
        for _ in range(3):
            assert await one(connection) == 1
        assert loop.time() - began >= 3 * 2 * 0.05


async def test_a_throttled_result_is_complete(proxy: FaultProxy, url: str) -> None:
    async with await connect(url) as connection:
        proxy.throttle(100_000, "down")
        cursor = await connection.execute("select g from generate_series(1, 2000) g")
        assert await cursor.fetchall() == [(number,) for number in range(1, 2001)]


async def talk(proxy: FaultProxy, *messages: bytes) -> tuple[list[bytes], bytes, bool]:
    """Send startup packets; return the one-byte replies, the rest, and whether it was a reset."""
    reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
    replies = []
    for number, message in enumerate(messages):
        writer.write(message)
        if number < len(messages) - 1:
            replies.append(await reader.readexactly(1))
    rest, reset = await asyncio.wait_for(read_all(reader), 10)
    writer.close()
    return replies, rest, reset


def packet(kind: int, rest: bytes = b"") -> bytes:
    return struct.pack("!II", len(rest) + 8, kind) + rest


async def test_the_answer_follows_the_startup_protocol() -> None:
    ssl, gss, startup = packet(80877103), packet(80877104), packet(196608, b"user\0x\0\0")
    async with FaultProxy("127.0.0.1", 1) as proxy:
        proxy.limit(0, 0, answer=postgres_fatal("53300", "full"))
        body = b"SFATAL\0VFATAL\0C53300\0Mfull\0\0"
        error = b"E" + struct.pack("!I", len(body) + 4) + body
        assert await talk(proxy, startup) == ([], error, False)
        assert await talk(proxy, ssl, startup) == ([b"N"], error, False)
        assert await talk(proxy, gss, ssl, startup) == ([b"N", b"N"], error, False)
        assert (await talk(proxy, packet(80877102, b"12345678")))[1] == b""
        assert (await talk(proxy, b"GET / HTTP/1.1\r\n\r\n"))[1] == b""


def test_a_sqlstate_must_have_five_characters() -> None:
    with pytest.raises(ValueError, match="'4711' is not a SQLSTATE"):
        postgres_fatal("4711")
