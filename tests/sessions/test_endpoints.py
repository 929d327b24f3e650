"""The contract of all transports, on real sockets and in the simulation."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.postgres.certificates import Authority
from tests.sessions.transport_peers import (
    Echo,
    FailingReceiver,
    RecordingReceiver,
    tcp_server,
    websocket_server,
)
from tests.stream_server import stream_server

from moored.sessions.transport import _stream, _tcp_dial
from moored.sessions.transport._endpoints import InMemory, Tcp, WebSocket
from moored.sessions.transport._transport import Endpoint, Receiver, Transport
from moored.testing import FaultProxy, Sim, run_one, scaled, simulate

KINDS = ["memory", "tcp", "tls", "websocket", "wss"]


class Tls:
    """A server context with a certificate for localhost, and a client context that trusts it."""

    def __init__(self, directory: Path) -> None:
        openssl = shutil.which("openssl")
        assert openssl is not None
        authority = Authority(openssl, directory, "authority")
        signed = authority.sign("server", "localhost")
        self.server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.server.load_cert_chain(signed.certificate, signed.key)
        self.client = ssl.create_default_context(cafile=str(authority.root))


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return Tls(tmp_path_factory.mktemp("certificates"))


async def serve(stack: AsyncExitStack, kind: str, tls: Tls) -> Endpoint:
    """Start an echo server, and return its endpoint."""
    match kind:
        case "memory":
            return InMemory(Echo)
        case "tcp":
            return Tcp("127.0.0.1", await stack.enter_async_context(tcp_server()))
        case "tls":
            port = await stack.enter_async_context(tcp_server(tls=tls.server))
            return Tcp("localhost", port, tls=tls.client)
        case "websocket":
            port = await stack.enter_async_context(websocket_server())
            return WebSocket(f"ws://127.0.0.1:{port}/chat")
    port = await stack.enter_async_context(websocket_server(tls=tls.server))
    return WebSocket(f"wss://localhost:{port}/chat", tls=tls.client)


@pytest.fixture(params=KINDS)
async def endpoint(request: pytest.FixtureRequest, tls: Tls) -> AsyncIterator[Endpoint]:
    async with AsyncExitStack() as stack:
        yield await serve(stack, request.param, tls)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# -- the contract of every transport ---------------------------------------------------------------


@pytest.mark.every_loop
async def test_data_arrives_in_the_order_of_writing(endpoint: Endpoint) -> None:
    receiver = RecordingReceiver()
    transport = await endpoint.dial(receiver)
    expected = b""
    for number in range(200):
        piece = b"%d," % number * (number % 7 + 1)
        expected += piece
        transport.write(piece)
    assert await receiver.receives(len(expected)) == expected
    transport.close()
    assert await receiver.ended() is None
    assert transport.pending == 0


async def test_large_write_arrives_unchanged(endpoint: Endpoint) -> None:
    receiver = RecordingReceiver()
    transport = await endpoint.dial(receiver)
    data = random.Random(1).randbytes(900_000)
    transport.write(data)
    assert await receiver.receives(len(data)) == data
    transport.close()
    assert await receiver.ended() is None


async def test_calls_after_close_or_abort_do_nothing(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    for end in ("close", "abort"):
        receiver = RecordingReceiver()
        transport = await endpoint.dial(receiver)
        getattr(transport, end)()
        for _ in range(10):
            transport.write(b"too late")
        assert await receiver.ended() is None
        transport.write(b"too late")
        transport.close()
        transport.abort()
        transport.write(b"too late")
        assert transport.pending == 0
        assert receiver.data == b""
        assert repr(transport)
    assert "socket.send() raised exception" not in caplog.text, (
        "asyncio's warning about such writes"
    )


async def test_receiver_that_raises_loses_its_link_with_that_error(endpoint: Endpoint) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    receiver = FailingReceiver()
    transport = await endpoint.dial(receiver)
    transport.write(b"hello")
    error = await receiver.ended()
    assert isinstance(error, LookupError)
    assert receiver.data == b"hello"
    assert reported == []


async def test_receiver_can_close_the_link_while_it_receives(endpoint: Endpoint) -> None:
    class ClosesOnData(RecordingReceiver):
        def received(self, data: bytes) -> None:
            super().received(data)
            transport.close()

    receiver = ClosesOnData()
    transport = await endpoint.dial(receiver)
    for _ in range(5):
        transport.write(b"x" * 100)
        await asyncio.sleep(0)
    assert await receiver.ended() is None
    assert receiver.size >= 100


@pytest.mark.parametrize("kind", KINDS)
async def test_cancelled_dial_leaves_no_descriptors_and_reports_nothing(
    kind: str, tls: Tls
) -> None:
    async with AsyncExitStack() as stack:
        endpoint = await serve(stack, kind, tls)
        (await endpoint.dial(warm := RecordingReceiver())).close()
        await warm.ended()
        # The resolver's threads and descriptors exist from here on.
        before = descriptors()
        done = 0
        for turns in range(25):
            receiver = RecordingReceiver()
            dial = asyncio.create_task(endpoint.dial(receiver))
            for _ in range(turns):
                await asyncio.sleep(0.0002)
            dial.cancel()
            try:
                transport = await dial
            except asyncio.CancelledError:
                assert not receiver.end.done(), "a cancelled dial reported an end"
            else:
                done += 1
                transport.abort()
                await receiver.ended()
        async with asyncio.timeout(10):
            while descriptors() > before:  # noqa: ASYNC110 (a closed descriptor notifies nobody)
                await asyncio.sleep(0.01)
        assert done < 25


# -- TCP -------------------------------------------------------------------------------------------


async def test_tcp_link_sets_nodelay_and_keepalive() -> None:
    async with tcp_server() as port:
        receiver = RecordingReceiver()
        stream: Any = await Tcp("127.0.0.1", port).dial(receiver)
        sock = stream._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
        stream.close()
        await receiver.ended()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def test_error_for_a_refused_port_names_the_address() -> None:
    port = free_port()
    with pytest.raises(ConnectionRefusedError) as caught:
        await Tcp("127.0.0.1", port).dial(RecordingReceiver())
    assert caught.value.strerror == f"cannot connect to 127.0.0.1:{port}: Connection refused"
    with pytest.raises(ConnectionRefusedError, match=rf"ws://127.0.0.1:{port}/: Connection ref"):
        await WebSocket(f"ws://127.0.0.1:{port}/").dial(RecordingReceiver())


async def test_error_for_an_unresolvable_name_names_the_host() -> None:
    with pytest.raises(socket.gaierror, match=r"to nowhere\.invalid:1: the name cannot be resol"):
        await Tcp("nowhere.invalid", 1).dial(RecordingReceiver())
    for wrong in ("x" * 70 + ".invalid", "nul\0.invalid"):
        with pytest.raises(OSError, match="is not a valid host name"):
            await Tcp(wrong, 1).dial(RecordingReceiver())
    with pytest.raises(OSError, match="is not a valid TLS name"):
        await Tcp(".invalid", 1, tls=ssl.create_default_context()).dial(RecordingReceiver())


async def test_all_addresses_of_a_name_are_tried() -> None:
    async with tcp_server() as port:  # IPv4 only
        receiver = RecordingReceiver()
        transport = await Tcp("localhost", port).dial(receiver)
        transport.write(b"hello")
        await receiver.receives(5)
        transport.close()
        await receiver.ended()


class Greeter:
    """Listens on some addresses of this host, sends "hello", and counts its connections."""

    def __init__(self) -> None:
        self.connected = 0

    async def listen(self, stack: AsyncExitStack, *addresses: str) -> int:
        server = stream_server(self._greet, addresses, port=free_port())
        return await stack.enter_async_context(server)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connected += 1
        writer.write(b"hello")
        try:
            await reader.read()
        finally:
            self.connected -= 1


@pytest.mark.every_loop
async def test_address_that_refuses_is_skipped() -> None:
    async with AsyncExitStack() as stack:
        port = await Greeter().listen(stack, "127.0.0.1")
        stream = await _tcp_dial._race(["127.0.0.2", "127.0.0.3", "127.0.0.1"], port)
        stream.adopt(receiver := RecordingReceiver())
        assert await receiver.receives(5) == b"hello"
        stream.abort()
        await receiver.ended()
        with pytest.raises(ConnectionRefusedError):
            await _tcp_dial._race(["127.0.0.2", "127.0.0.3"], port)


@pytest.mark.every_loop
async def test_address_that_does_not_answer_is_not_waited_for() -> None:
    async with AsyncExitStack() as stack:
        silent = stack.enter_context(socket.socket())
        port = await Greeter().listen(stack, "127.0.0.1")
        silent.bind(("127.0.0.2", port))
        silent.listen(0)
        # Two connections fill its backlog: from then on, it does not answer.
        fill = [stack.enter_context(socket.socket()) for _ in range(2)]
        for each in fill:
            each.setblocking(False)
            each.connect_ex(("127.0.0.2", port))
        before = descriptors()
        async with asyncio.timeout(10):
            stream = await _tcp_dial._race(["127.0.0.2", "127.0.0.1"], port)
        assert stream._transport.get_extra_info("peername")[0] == "127.0.0.1"
        stream.adopt(receiver := RecordingReceiver())
        await receiver.receives(5)
        assert descriptors() <= before + 2  # both ends of one connection
        stream.close()
        await receiver.ended()


@pytest.mark.every_loop
async def test_race_keeps_one_of_several_connected_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_tcp_dial, "_STAGGER", 0.0)
    async with AsyncExitStack() as stack:
        greeter = Greeter()
        port = await greeter.listen(stack, "127.0.0.1", "127.0.0.2", "127.0.0.3")
        for _ in range(20):
            stream = await _tcp_dial._race(["127.0.0.1", "127.0.0.2", "127.0.0.3"], port)
            stream.adopt(receiver := RecordingReceiver())
            assert await receiver.receives(5) == b"hello"
            stream.close()
            await receiver.ended()
        async with asyncio.timeout(10):
            while greeter.connected:  # noqa: ASYNC110 (the server closes each on its own)
                await asyncio.sleep(0.01)


async def test_reset_is_reported_as_an_error() -> None:
    async with tcp_server() as port, FaultProxy("127.0.0.1", port) as proxy:
        receiver = RecordingReceiver()
        transport = await Tcp(proxy.host, proxy.port).dial(receiver)
        transport.write(b"hello")
        await receiver.receives(5)
        assert proxy.reset() == 1
        assert isinstance(await receiver.ended(), ConnectionResetError)
        transport.write(b"hello?")


async def test_close_by_the_server_is_not_an_error() -> None:
    async with tcp_server(lambda reader, writer: writer.write(b"bye")) as port:
        receiver = RecordingReceiver()
        await Tcp("127.0.0.1", port).dial(receiver)
        assert await receiver.ended() is None


async def test_pending_counts_unsent_data_and_close_flushes_it() -> None:
    data = random.Random(2).randbytes(12_000_000)
    heard = asyncio.get_running_loop().create_future()
    may_read = asyncio.Event()

    async def reads_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_read.wait()
        heard.set_result(await reader.read(-1))

    async with tcp_server(reads_late) as port:
        receiver = RecordingReceiver()
        transport = await Tcp("127.0.0.1", port).dial(receiver)
        transport.write(data)
        assert 0 < transport.pending < len(data)
        transport.close()
        assert not receiver.end.done()
        may_read.set()
        assert await receiver.ended() is None
        assert await heard == data


async def test_abort_drops_unsent_data_here_and_in_the_kernel() -> None:
    may_read = asyncio.Event()
    heard = asyncio.get_running_loop().create_future()

    async def reads_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_read.wait()
        try:
            heard.set_result(len(await reader.read(-1)))
        except ConnectionResetError as error:
            heard.set_result(error)

    async with tcp_server(reads_late) as port:
        receiver = RecordingReceiver()
        transport = await Tcp("127.0.0.1", port).dial(receiver)
        transport.write(bytes(12_000_000))
        transport.abort()
        assert await receiver.ended() is None
        may_read.set()
        assert isinstance(await heard, ConnectionResetError)


async def close_without_reader(sim: Sim) -> float:
    """Return how long a link takes to close when its server does not read."""
    await sim.serve(lambda reader, writer: reader.read(), host="server", port=1)
    receiver = RecordingReceiver()
    transport = await Tcp("server", 1).dial(receiver)
    sim.network.pause("server")
    transport.write(bytes(10_000_000))
    transport.close()
    before = sim.now
    assert transport.pending
    await receiver.end
    return sim.now - before


def test_peer_that_reads_nothing_delays_close_by_a_limit_only() -> None:
    assert run_one(close_without_reader, 1).result() == _stream._CLOSING_TIME


# -- TLS -------------------------------------------------------------------------------------------


async def test_certificate_of_an_untrusted_authority_is_refused(tls: Tls) -> None:
    async with tcp_server(tls=tls.server) as port:
        ignore_loop_errors(asyncio.get_running_loop())
        endpoint = Tcp("localhost", port, tls=ssl.create_default_context())
        with pytest.raises(ssl.SSLCertVerificationError) as caught:
            await endpoint.dial(RecordingReceiver())
        assert f"cannot connect to localhost:{port} (TLS): the server's cert" in str(caught.value)
        assert caught.value.verify_code


async def test_certificate_for_another_name_is_refused(tls: Tls) -> None:
    async with tcp_server(tls=tls.server) as port:
        ignore_loop_errors(asyncio.get_running_loop())
        with pytest.raises(ssl.SSLCertVerificationError, match=r"is not accepted: .*mismatch"):
            await Tcp("127.0.0.1", port, tls=tls.client).dial(RecordingReceiver())
        receiver = RecordingReceiver()
        named = Tcp("127.0.0.1", port, tls=tls.client, server_name="localhost")
        (await named.dial(receiver)).close()
        assert await receiver.ended() is None


async def test_error_for_a_server_without_tls_says_that_tls_failed(tls: Tls) -> None:
    async with tcp_server() as port:  # sends the ClientHello back
        with pytest.raises(ssl.SSLError, match=rf"to localhost:{port} \(TLS\): TLS failed: "):
            await Tcp("localhost", port, tls=tls.client).dial(RecordingReceiver())
    async with tcp_server(lambda reader, writer: None) as port:
        with pytest.raises(ConnectionResetError, match="cannot connect to localhost"):
            await Tcp("localhost", port, tls=tls.client).dial(RecordingReceiver())


async def test_pending_counts_data_that_tls_has_encrypted(tls: Tls) -> None:
    async with tcp_server(tls=tls.server) as port, FaultProxy("127.0.0.1", port) as proxy:
        receiver = RecordingReceiver()
        transport = await Tcp("localhost", proxy.port, tls=tls.client).dial(receiver)
        proxy.stall()
        transport.write(bytes(12_000_000))
        assert transport.pending > 1_000_000
        transport.abort()
        assert await receiver.ended() is None


def ignore_loop_errors(loop: asyncio.AbstractEventLoop) -> None:
    """Ignore the server's errors about handshakes that the client refused."""
    loop.set_exception_handler(lambda loop, context: None)


# -- in memory -------------------------------------------------------------------------------------


class Pair:
    """Both ends of a link in memory."""

    def __init__(self) -> None:
        self.near, self.far = RecordingReceiver(), RecordingReceiver()

    def serve(self, transport: Transport) -> Receiver:
        self.server = transport
        return self.far

    async def dial(self) -> Transport:
        return await InMemory(self.serve).dial(self.near)


async def test_in_memory_link_delivers_in_a_later_loop_iteration() -> None:
    pair = Pair()
    transport = await pair.dial()
    transport.write(b"one")
    transport.write(b"two")
    assert transport.pending == 6
    assert pair.far.pieces == []
    await asyncio.sleep(0)
    assert pair.far.pieces == [b"one", b"two"]
    assert transport.pending == 0


async def test_in_memory_close_delivers_pending_data_and_abort_does_not() -> None:
    pair = Pair()
    transport = await pair.dial()
    pair.server.write(b"an answer")
    transport.write(b"last words")
    transport.close()
    assert (await pair.far.ended(), await pair.near.ended()) == (None, None)
    assert pair.far.data == b"last words"
    assert pair.near.data == b"", "a closed side receives nothing more"

    pair = Pair()
    transport = await pair.dial()
    transport.write(b"last words")
    pair.server.write(b"an answer")
    transport.abort()
    assert await pair.near.ended() is None
    assert isinstance(await pair.far.ended(), ConnectionResetError)
    assert pair.far.data == pair.near.data == b""


async def test_two_echoing_sides_in_memory_do_not_block_the_loop() -> None:
    class EchoingReceiver(RecordingReceiver):
        transport: Transport

        def received(self, data: bytes) -> None:
            super().received(data)
            self.transport.write(data)

    near, far = EchoingReceiver(), EchoingReceiver()

    def server(transport: Transport) -> Receiver:
        far.transport = transport
        return far

    near.transport = await InMemory(server).dial(near)
    near.transport.write(b"x")
    for _ in range(10):
        await asyncio.sleep(0)
    assert 3 <= near.size <= 11
    near.transport.abort()
    await near.ended()


async def test_in_memory_server_can_refuse_a_dial() -> None:
    def refuses(transport: Transport) -> Receiver:
        raise ConnectionRefusedError(111, "not today")

    with pytest.raises(ConnectionRefusedError, match="cannot connect to memory server: not today"):
        await InMemory(refuses, name="memory server").dial(RecordingReceiver())


# -- in the simulation -----------------------------------------------------------------------------


async def sim_echo(sim: Sim) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)

    await sim.serve(echo, host="server", port=7)
    receiver = RecordingReceiver()
    transport = await Tcp("server", 7).dial(receiver)
    expected = b""
    for number in range(50):
        piece = struct.pack("!I", number) * sim.rng.randint(1, 50)
        expected += piece
        transport.write(piece)
        await asyncio.sleep(sim.random(0, 0.01))
    assert await receiver.receives(len(expected)) == expected
    sim.network.reset("server")
    assert isinstance(await receiver.ended(), ConnectionResetError)


def test_tcp_transport_works_in_the_simulation() -> None:
    simulate(sim_echo, scaled(200, least=8))


async def sim_refused(sim: Sim) -> None:
    sim.host("server")
    with pytest.raises(ConnectionRefusedError, match="to server:7: Connection refused"):
        await Tcp("server", 7).dial(RecordingReceiver())
    sim.network.blackhole("server")
    dial = asyncio.create_task(Tcp("server", 7).dial(RecordingReceiver()))
    await asyncio.sleep(5)
    dial.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dial


def test_refused_dials_raise_in_the_simulation() -> None:
    simulate(sim_refused, 10)


class CountingServer:
    """A server that counts its connections."""

    def __init__(self) -> None:
        self.connected = 0

    async def stay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connected += 1
        try:
            await reader.read()
        finally:
            self.connected -= 1
            writer.close()


async def sim_race(sim: Sim) -> None:
    """A race keeps one connection; a cancelled race keeps none."""
    server = CountingServer()
    names = ["a", "b", "c"]
    for name in names:
        await sim.serve(server.stay, host=name, port=7)
    race = asyncio.create_task(_tcp_dial._race(names, 7))
    if sim.rng.random() < 0.5:
        await asyncio.sleep(sim.random(0, 0.2))
        race.cancel()
    try:
        stream = await race
    except asyncio.CancelledError:
        stream = None
    await asyncio.sleep(10)
    assert server.connected == (stream is not None)
    if stream is not None:
        stream.abort()


def test_race_keeps_one_connection_or_none_if_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tcp_dial, "_STAGGER", 0.0)
    simulate(sim_race, scaled(1000, least=40))


@pytest.mark.parametrize("cancelled", [True, False])
def test_race_keeps_one_connection_if_all_attempts_finish_together(
    cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = _tcp_dial._attempt

    async def scenario(sim: Sim) -> None:
        server, barrier = CountingServer(), asyncio.Barrier(3)
        names = ["a", "b", "c"]
        for name in names:
            await sim.serve(server.stay, host=name, port=7)

        async def together(address: str, port: int) -> _stream.Stream:
            stream = await attempt(address, port)
            try:
                await barrier.wait()
            except asyncio.CancelledError:
                stream.abort()  # as a cancelled attempt does
                raise
            if cancelled:
                # The attempts are done, and the race has not run since.
                asyncio.get_running_loop().call_soon(race.cancel)
            return stream

        monkeypatch.setattr(_tcp_dial, "_attempt", together)
        race = asyncio.create_task(_tcp_dial._race(names, 7))
        await asyncio.wait({race})
        await asyncio.sleep(10)
        assert cancelled or not race.cancelled()
        assert server.connected == (not race.cancelled())
        if not race.cancelled():
            race.result().abort()

    simulate(scenario, 20)


# -- invalid arguments ------------------------------------------------------------


def test_str_and_repr_of_endpoints_hide_secrets() -> None:
    endpoint = WebSocket("ws://user:secret@host:81/path?token=secret", headers=[("A", "secret")])
    assert str(endpoint) == "ws://host:81/path?…"
    assert "secret" not in repr(endpoint)
    assert str(Tcp("::1", 5)) == "[::1]:5"
    assert repr(Tcp("host", 5)) == "<Tcp host:5>"


def test_invalid_addresses_are_refused_at_construction() -> None:
    with pytest.raises(ValueError, match="host is empty; port is 0, and must be from 1 to 65535; "):
        Tcp("", 0, server_name="x")
    for url in (
        "http://user:secret@host",
        "ws://",
        "ws://user:secret@h:x",
        "ws://u@h",
        "ws://h#f",
        "ws://u:%ff@h",
    ):
        with pytest.raises(ValueError, match="WebSocket") as caught:
            WebSocket(url)
        assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match="a header contains"):
        WebSocket("ws://host", headers=[("A", "b\r\nC: d")])
    with pytest.raises(ValueError, match="use wss://"):
        WebSocket("ws://host", tls=ssl.create_default_context())
