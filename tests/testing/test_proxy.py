"""Each fault of the proxy, in front of an echo server."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import socket
import struct
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from tests.stream_server import stream_server
from tests.testing.proxy_support import echo_server, read_all

from moored.testing._proxy_faults import Rate
from moored.testing.proxy import Caller, FaultProxy

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def proxy() -> AsyncIterator[FaultProxy]:
    async with echo_server() as port, FaultProxy("127.0.0.1", port) as proxy:
        yield proxy


async def connect(proxy: FaultProxy) -> Streams:
    return await asyncio.open_connection(proxy.host, proxy.port)


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    try:
        await writer.wait_closed()
    except ConnectionError:
        pass


async def send(streams: Streams, data: bytes) -> bytes:
    reader, writer = streams
    writer.write(data)
    return await reader.readexactly(len(data))


@pytest.mark.every_loop
async def test_bytes_and_the_end_of_the_stream_are_forwarded_both_ways(proxy: FaultProxy) -> None:
    streams = await connect(proxy)
    assert await send(streams, b"hello") == b"hello"
    streams[1].write(b"last words")
    streams[1].write_eof()
    assert await read_all(streams[0]) == (b"last words", False)
    await close(streams[1])
    counts = await proxy.wait_until(lambda counts: counts.open == 0)
    assert counts == (1, 0, 0, 0, 0, 15, 15, 0)


async def test_large_transfers_arrive_unchanged(proxy: FaultProxy) -> None:
    reader, writer = await connect(proxy)
    data = random.Random(1).randbytes(3_000_000)

    async def push() -> None:
        writer.write(data)
        await writer.drain()
        writer.write_eof()

    pushing = asyncio.create_task(push())
    echoed, reset = await read_all(reader)
    await pushing
    assert not reset
    assert hashlib.sha256(echoed).digest() == hashlib.sha256(data).digest()
    await close(writer)


@pytest.mark.every_loop
async def test_refuse_refuses_connections_and_keeps_the_port(proxy: FaultProxy) -> None:
    kept = await connect(proxy)
    port = proxy.port
    for _ in range(2):
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            await connect(proxy)
        # The port stays reserved.
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind((proxy.host, port))
        assert await send(kept, b"still here") == b"still here"
        proxy.refuse(False)
        again = await connect(proxy)
        assert await send(again, b"x") == b"x"
        assert proxy.port == port
        await close(again[1])
    await close(kept[1])


async def test_refuse_can_be_set_before_the_start() -> None:
    proxy = FaultProxy("127.0.0.1", 1, listen_port=0)
    proxy.refuse()
    async with proxy:
        assert "refusing" in repr(proxy)
        proxy.refuse(False)
        assert proxy.port


async def test_a_connection_over_the_limit_is_reset(proxy: FaultProxy) -> None:
    proxy.limit(0, 2)
    within = [await connect(proxy), await connect(proxy)]
    for streams in within:
        assert await send(streams, b"in") == b"in"
    over = await connect(proxy)
    assert await read_all(over[0]) == (b"", True)
    proxy.limit(None)
    free = await connect(proxy)
    assert await send(free, b"free") == b"free"
    for streams in (*within, over, free):
        await close(streams[1])
    counts = await proxy.wait_until(lambda counts: counts.open == 0)
    assert (counts.accepted, counts.limited) == (4, 1)


async def test_a_connection_over_the_limit_gets_the_answer(proxy: FaultProxy) -> None:
    async def busy(caller: Caller) -> None:
        name = await caller.read(3)
        await caller.write(b"sorry " + name)
        await caller.hang_up()

    proxy.limit(0, 0, answer=busy)
    reader, writer = await connect(proxy)
    writer.write(b"bob")
    assert await reader.readexactly(9) == b"sorry bob"
    assert await reader.read() == b""
    await close(writer)
    # A client that closes before the answer.
    _, writer = await connect(proxy)
    writer.write(b"b")
    await close(writer)
    counts = await proxy.wait_until(lambda counts: counts.open == 0 and counts.limited == 2)
    assert counts.resets == 1


@pytest.mark.every_loop
async def test_a_stall_loses_nothing(proxy: FaultProxy) -> None:
    streams = await connect(proxy)
    assert await send(streams, b"before") == b"before"
    proxy.stall()
    streams[1].write(b"during")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(streams[0].read(1), 0.05)
    proxy.resume()
    assert await streams[0].readexactly(6) == b"during"
    await close(streams[1])


async def test_a_stall_blocks_the_sender_when_buffers_are_full(proxy: FaultProxy) -> None:
    reader, writer = await connect(proxy)
    proxy.stall()
    data = random.Random(2).randbytes(48_000_000)

    async def push() -> None:
        writer.write(data)
        await writer.drain()
        writer.write_eof()

    pushing = asyncio.create_task(push())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(pushing), 0.3)
    proxy.resume()
    echoed, _ = await read_all(reader)
    await pushing
    is_same = echoed == data  # pytest would describe the difference
    assert is_same
    await close(writer)


async def test_a_stall_holds_back_the_end_of_the_stream(proxy: FaultProxy) -> None:
    reader, writer = await connect(proxy)
    assert await send((reader, writer), b"x") == b"x"
    proxy.stall()
    writer.write(b"last")
    writer.write_eof()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.05)
    proxy.resume()
    assert await read_all(reader) == (b"last", False)
    await close(writer)


@pytest.mark.every_loop
async def test_a_black_hole_drops_bytes_and_resume_resets(proxy: FaultProxy) -> None:
    old = await connect(proxy)
    assert await send(old, b"before") == b"before"
    untouched = await connect(proxy)
    assert await send(untouched, b"quiet") == b"quiet"
    proxy.black_hole()
    new = await connect(proxy)
    old[1].write(b"lost")
    new[1].write(b"lost too")
    await asyncio.wait_for(proxy.wait_until(lambda counts: counts.bytes_swallowed == 12), 10)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(old[0].read(1), 0.05)
    proxy.resume()
    # The connections that lost bytes are reset; the third lost none.
    assert await read_all(old[0]) == (b"", True)
    assert await read_all(new[0]) == (b"", True)
    assert await send(untouched, b"after") == b"after"
    for streams in (old, new, untouched):
        await close(streams[1])
    counts = await proxy.wait_until(lambda counts: counts.open == 0)
    assert counts.resets == 2


async def test_a_black_hole_drops_the_end_of_the_stream(proxy: FaultProxy) -> None:
    streams = await connect(proxy)
    assert await send(streams, b"x") == b"x"
    proxy.black_hole()
    await close(streams[1])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(proxy.wait_until(lambda counts: counts.open == 0), 0.05)
    proxy.stall()
    await asyncio.wait_for(proxy.wait_until(lambda counts: counts.open == 0), 10)


@pytest.mark.every_loop
async def test_reset_resets_every_open_connection(proxy: FaultProxy) -> None:
    every = [await connect(proxy) for _ in range(3)]
    for streams in every:
        assert await send(streams, b"x") == b"x"
    assert proxy.reset() == 3
    for reader, writer in every:
        assert await asyncio.wait_for(read_all(reader), 10) == (b"", True)
        await close(writer)
    counts = await proxy.wait_until(lambda counts: counts.open == 0)
    assert counts.resets == 3
    assert proxy.reset() == 0


async def test_a_connection_that_is_reset_before_its_task_runs_is_closed(proxy: FaultProxy) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        accepted = asyncio.Event()

        def until_reset() -> None:
            if proxy.reset():
                accepted.set()
            else:
                loop.call_soon(until_reset)

        await loop.sock_connect(client, (proxy.host, proxy.port))
        # In the turn in which the connection is accepted: its task has not run yet.
        until_reset()
        await accepted.wait()
        with pytest.raises(ConnectionResetError):
            await loop.sock_recv(client, 1)
    assert proxy.statistics().open == 0


async def test_a_reset_by_the_client_is_forwarded() -> None:
    was_reset: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        was_reset.set_result((await read_all(reader))[1])

    async with stream_server(serve) as port, FaultProxy("127.0.0.1", port) as proxy:
        _, writer = await connect(proxy)
        writer.write(b"x")
        await proxy.wait_until(lambda counts: counts.bytes_up == 1)
        client: socket.socket = writer.get_extra_info("socket")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()
        assert await asyncio.wait_for(was_reset, 10) is True
        assert (await proxy.wait_until(lambda counts: counts.open == 0)).resets == 1


@pytest.mark.every_loop
async def test_cut_after_so_many_bytes_down(proxy: FaultProxy) -> None:
    old = await connect(proxy)
    assert await send(old, b"before") == b"before"
    proxy.cut_after(5, "down")
    for streams in (old, await connect(proxy)):
        streams[1].write(b"1234567")
        assert await read_all(streams[0]) == (b"12345", True)
        await close(streams[1])
    proxy.cut_after(None)
    streams = await connect(proxy)
    assert await send(streams, b"1234567") == b"1234567"
    await close(streams[1])


async def test_cut_after_so_many_bytes_up(proxy: FaultProxy) -> None:
    proxy.cut_after(4, "up")
    streams = await connect(proxy)
    assert await send(streams, b"123") == b"123"
    streams[1].write(b"4567")
    # The echo of the fourth byte may arrive before the reset or not.
    data, reset = await read_all(streams[0])
    assert reset
    assert data in (b"", b"4")
    await close(streams[1])
    counts = await proxy.wait_until(lambda counts: counts.open == 0)
    assert counts.bytes_up == 4


@pytest.mark.every_loop
async def test_latency_delays_and_keeps_the_order(proxy: FaultProxy) -> None:
    loop = asyncio.get_running_loop()
    streams = await connect(proxy)
    await send(streams, b"x")
    proxy.latency(0.1)
    began = loop.time()
    numbers = b"".join(b"%3d" % number for number in range(100))
    for start in range(0, 300, 3):
        streams[1].write(numbers[start : start + 3])
        await asyncio.sleep(0)
    assert await streams[0].readexactly(300) == numbers
    assert loop.time() - began >= 0.2
    proxy.latency(0.0)
    await close(streams[1])


async def test_latency_does_not_limit_the_bandwidth(proxy: FaultProxy) -> None:
    loop = asyncio.get_running_loop()
    streams = await connect(proxy)
    await send(streams, b"x")
    proxy.latency(0.5, "up")
    began = loop.time()
    for _ in range(20):
        streams[1].write(b"0123456789")
        await asyncio.sleep(0.01)
    assert len(await streams[0].readexactly(200)) == 200
    took = loop.time() - began
    # With a delay after each write this would take ten seconds.
    assert 0.5 <= took < 5
    await close(streams[1])


@pytest.mark.every_loop(always=True)
async def test_throttle_counts_small_writes(proxy: FaultProxy) -> None:
    """The wait after each write is less than a millisecond, which uvloop rounds to zero."""
    loop = asyncio.get_running_loop()
    streams = await connect(proxy)
    proxy.throttle(10_000, "up")
    began = loop.time()
    for _ in range(500):
        streams[1].write(b"1234")
        await asyncio.sleep(0)
    assert len(await streams[0].readexactly(2000)) == 2000
    assert loop.time() - began >= 2000 / 10_000 - 0.05
    await close(streams[1])


@pytest.mark.every_loop
async def test_throttle_limits_the_rate(proxy: FaultProxy) -> None:
    loop = asyncio.get_running_loop()
    streams = await connect(proxy)
    proxy.throttle(20_000, "down")
    began = loop.time()
    assert len(await send(streams, b"x" * 4000)) == 4000
    # Without the wait after the last step.
    assert loop.time() - began >= 4000 / 20_000 - 0.05
    proxy.throttle(None)
    assert len(await send(streams, b"x" * 1_000_000)) == 1_000_000
    await close(streams[1])


async def wait_swallowed(proxy: FaultProxy, more_than: int) -> None:
    await proxy.wait_until(lambda counts: counts.bytes_swallowed > more_than)


async def test_nothing_arrives_after_dropped_bytes() -> None:
    """A TCP stream never has a gap, not even just before a reset."""
    numbers = b"".join(struct.pack("!I", number) for number in range(500_000))

    async def send_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for at in range(0, len(numbers), 4000):
            writer.write(numbers[at : at + 4000])
            await writer.drain()

    async with stream_server(send_all) as port, FaultProxy("127.0.0.1", port) as proxy:
        for _ in range(20):
            reader, writer = await connect(proxy)
            got = await reader.read(4000)
            proxy.black_hole()
            await wait_swallowed(proxy, proxy.statistics().bytes_swallowed)
            proxy.resume()
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(65536):
                    got += data
            assert numbers.startswith(got)
            await close(writer)


async def test_a_black_hole_drops_the_rest_of_a_throttled_write(proxy: FaultProxy) -> None:
    streams = await connect(proxy)
    proxy.throttle(1000, "up")
    streams[1].write(b"x" * 50_000)
    await proxy.wait_until(lambda counts: counts.bytes_up > 0)
    proxy.black_hole()
    counts = await proxy.wait_until(lambda counts: counts.bytes_swallowed > 0)
    # Echoed bytes are dropped, too.
    assert counts.bytes_swallowed <= 50_000
    assert counts.bytes_up < 25_000
    proxy.reset()
    await close(streams[1])


async def test_a_connection_to_a_missing_server_is_reset() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        async with FaultProxy("127.0.0.1", nobody.getsockname()[1]) as proxy:
            reader, writer = await connect(proxy)
            assert await read_all(reader) == (b"", True)
            await close(writer)
            assert proxy.statistics().refused == 1


async def test_a_server_on_a_unix_socket_is_reached(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with echo_server(path), FaultProxy(path) as proxy:
        assert proxy.upstream == str(path)
        streams = await connect(proxy)
        assert await send(streams, b"hello") == b"hello"
        proxy.reset()
        assert await read_all(streams[0]) == (b"", True)
        await close(streams[1])


async def test_the_proxy_listens_on_ipv6() -> None:
    try:
        proxy = FaultProxy("127.0.0.1", 1, listen_host="::1")
        await proxy.start()
    except OSError:
        pytest.skip("this machine has no ::1")
    try:
        reader, writer = await connect(proxy)
        assert await read_all(reader) == (b"", True)
        await close(writer)
    finally:
        await proxy.close()


@pytest.mark.every_loop
async def test_close_leaves_no_tasks_or_descriptors() -> None:
    before = set(asyncio.all_tasks())
    async with echo_server() as port:
        opened = psutil.Process().num_fds()
        proxy = FaultProxy("127.0.0.1", port)
        await proxy.start()
        every = [await connect(proxy) for _ in range(5)]
        for streams in every[:3]:
            assert await send(streams, b"x") == b"x"
        proxy.stall()
        every[0][1].write(b"stuck")
        await proxy.close()
        assert proxy.statistics().open == 0
        for reader, writer in every:
            assert (await asyncio.wait_for(read_all(reader), 10))[0] == b""
            await close(writer)
        with pytest.raises(ConnectionRefusedError):
            await connect(proxy)
    await asyncio.sleep(0)
    assert set(asyncio.all_tasks()) - before == set()
    assert psutil.Process().num_fds() <= opened


async def test_a_closed_proxy_can_be_started_again_on_its_port() -> None:
    async with echo_server() as port:
        proxy = FaultProxy("127.0.0.1", port)
        for _ in range(2):
            async with proxy:
                listening = proxy.port
                streams = await connect(proxy)
                assert await send(streams, b"x") == b"x"
                with pytest.raises(RuntimeError, match="running already"):
                    await proxy.start()
                await close(streams[1])
        assert proxy.port == listening


async def test_the_repr_names_the_active_faults(proxy: FaultProxy) -> None:
    here = f"{proxy.host}:{proxy.port} to {proxy.upstream}"
    assert repr(proxy) == f"<FaultProxy {here}: forwarding; 0 open, 0 accepted>"
    proxy.latency(0.2, "up")
    proxy.throttle(100, "down")
    proxy.cut_after(7)
    proxy.limit(20, 5)
    proxy.stall()
    assert repr(proxy) == (
        f"<FaultProxy {here}: stalling, latency up 0.2 s, reset after 7 bytes up, "
        "throttle down 100 bytes/s, reset after 7 bytes down, limit 20/s with a burst of 5; "
        "0 open, 0 accepted>"
    )
    proxy.refuse()
    proxy.black_hole()
    assert ": black hole, " in repr(proxy)
    assert ", refusing, limit" in repr(proxy)
    proxy.heal()
    assert repr(proxy) == f"<FaultProxy {here}: forwarding; 0 open, 0 accepted>"
    assert repr(FaultProxy("x", 1)).startswith("<FaultProxy not started, to x:1: ")


def test_faults_can_be_switched_from_other_threads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(ConnectionResetError):
                while data := connection.recv(100):
                    connection.sendall(data)

        echoing = threading.Thread(target=echo)
        echoing.start()
        with FaultProxy("127.0.0.1", server.getsockname()[1]).in_thread() as proxy:
            client = socket.create_connection((proxy.host, proxy.port))
            with client:
                client.sendall(b"x")
                assert client.recv(1) == b"x"
                proxy.stall()
                client.sendall(b"y")
                client.settimeout(0.05)
                with pytest.raises(TimeoutError):
                    client.recv(1)
                client.settimeout(10)
                proxy.resume()
                assert client.recv(1) == b"y"
                with pytest.raises(ValueError, match="latency must be 0 or more"):
                    proxy.latency(-1)
                assert proxy.reset() == 1
                with pytest.raises(ConnectionResetError):
                    client.recv(1)
        echoing.join()
    assert not [one for one in threading.enumerate() if one.name == "moored-fault-proxy"]


def test_rate_tokens_accrue_up_to_the_burst() -> None:
    rate = Rate(10, 3, now=100.0)
    assert [rate.take(100.0) for _ in range(4)] == [True, True, True, False]
    assert not rate.take(100.09)
    assert rate.take(100.11)
    assert not rate.take(100.11)
    # A long pause fills the bucket, not more.
    assert [rate.take(200.0) for _ in range(4)] == [True, True, True, False]


def test_invalid_fault_settings_are_value_errors() -> None:
    proxy = FaultProxy("x", 1)
    with pytest.raises(ValueError, match=r"latency must be 0 or more seconds, not -0\.1"):
        proxy.latency(-0.1)
    with pytest.raises(ValueError, match="must be 'up' or 'down'"):
        proxy.latency(0.1, "sideways")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="more than 0 bytes/s"):
        proxy.throttle(0)
    with pytest.raises(ValueError, match="rate and burst must be 0 or more"):
        Rate(-1, 1, now=0)
    with pytest.raises(ValueError, match="0 or more, not -1"):
        proxy.cut_after(-1)


async def test_a_hundred_connections_at_once_are_forwarded(proxy: FaultProxy) -> None:
    async def one(number: int) -> None:
        streams = await connect(proxy)
        text = os.urandom(100)
        for _ in range(10):
            assert await send(streams, text) == text
        await close(streams[1])

    await asyncio.gather(*(one(number) for number in range(100)))
    counts = await proxy.wait_until(lambda counts: counts.open == 0)
    assert counts == (100, 0, 0, 0, 0, 100_000, 100_000, 0)
