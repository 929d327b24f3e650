"""Every kind of transport keeps the same promises, on real sockets and in the simulation."""

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
from tests.sessions.ears import Ear, Echo, Raises, tcp_server, websocket_server

from moored.sessions.transport import _stream, _tcp_dial
from moored.sessions.transport._endpoints import InMemory, Tcp, WebSocket
from moored.sessions.transport._transport import Endpoint, Receiver, Transport
from moored.testing import FaultProxy, Sim, run_one, scaled, simulate

KINDS = ["memory", "tcp", "tls", "websocket", "wss"]


class Tls:
    """A certificate for localhost, and who trusts it."""

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
    """A server that echoes, and where it is."""
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


# -- what every transport promises ---------------------------------------------------------------


@pytest.mark.every_loop
async def test_what_is_written_arrives_in_order(endpoint: Endpoint) -> None:
    ear = Ear()
    transport = await endpoint.dial(ear)
    expected = b""
    for number in range(200):
        piece = b"%d," % number * (number % 7 + 1)
        expected += piece
        transport.write(piece)
    assert await ear.hears(len(expected)) == expected
    transport.close()
    assert await ear.ended() is None
    assert transport.pending == 0


async def test_much_data_arrives_as_it_was(endpoint: Endpoint) -> None:
    ear = Ear()
    transport = await endpoint.dial(ear)
    data = random.Random(1).randbytes(900_000)
    transport.write(data)
    assert await ear.hears(len(data)) == data
    transport.close()
    assert await ear.ended() is None


async def test_after_the_end_nothing_happens(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    for end in ("close", "abort"):
        ear = Ear()
        transport = await endpoint.dial(ear)
        getattr(transport, end)()
        for _ in range(10):
            transport.write(b"too late")
        assert await ear.ended() is None
        transport.write(b"too late")
        transport.close()
        transport.abort()
        transport.write(b"too late")
        assert transport.pending == 0
        assert ear.data == b""
        assert repr(transport)
    assert "socket.send() raised exception" not in caplog.text, "what asyncio says of such writes"


async def test_a_receiver_that_raises_loses_its_link_and_is_told_why(endpoint: Endpoint) -> None:
    trouble: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: trouble.append(context))
    ear = Raises()
    transport = await endpoint.dial(ear)
    transport.write(b"hello")
    error = await ear.ended()
    assert isinstance(error, LookupError)
    assert ear.data == b"hello"
    assert trouble == []


async def test_a_receiver_may_end_the_link_from_within(endpoint: Endpoint) -> None:
    class Leaves(Ear):
        def received(self, data: bytes) -> None:
            super().received(data)
            transport.close()

    ear = Leaves()
    transport = await endpoint.dial(ear)
    for _ in range(5):
        transport.write(b"x" * 100)
        await asyncio.sleep(0)
    assert await ear.ended() is None
    assert ear.size >= 100


@pytest.mark.parametrize("kind", KINDS)
async def test_a_dial_that_is_cancelled_leaves_nothing_behind(kind: str, tls: Tls) -> None:
    async with AsyncExitStack() as stack:
        endpoint = await serve(stack, kind, tls)
        (await endpoint.dial(warm := Ear())).close()
        await warm.ended()
        # Whatever looks names up has its threads and descriptors from now on.
        before = descriptors()
        done = 0
        for turns in range(25):
            ear = Ear()
            dial = asyncio.create_task(endpoint.dial(ear))
            for _ in range(turns):
                await asyncio.sleep(0.0002)
            dial.cancel()
            try:
                transport = await dial
            except asyncio.CancelledError:
                assert not ear.end.done(), "a receiver heard of a dial that was cancelled"
            else:
                done += 1
                transport.abort()
                await ear.ended()
        async with asyncio.timeout(10):
            while descriptors() > before:  # noqa: ASYNC110 (nobody tells when one is closed)
                await asyncio.sleep(0.01)
        assert done < 25


# -- TCP -------------------------------------------------------------------------------------------


async def test_a_tcp_link_has_the_options_of_a_long_lived_one() -> None:
    async with tcp_server() as port:
        ear = Ear()
        stream: Any = await Tcp("127.0.0.1", port).dial(ear)
        sock = stream._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
        assert repr(stream) == f"<Stream to 127.0.0.1:{port}, open, 0 bytes pending>"
        stream.close()
        await ear.ended()
        assert repr(stream) == "<Stream, closed>"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def test_a_refused_port_is_told_in_words() -> None:
    port = free_port()
    with pytest.raises(ConnectionRefusedError) as caught:
        await Tcp("127.0.0.1", port).dial(Ear())
    assert caught.value.strerror == f"cannot connect to 127.0.0.1:{port}: Connection refused"
    with pytest.raises(ConnectionRefusedError, match=rf"ws://127.0.0.1:{port}/: Connection ref"):
        await WebSocket(f"ws://127.0.0.1:{port}/").dial(Ear())


async def test_a_name_that_does_not_resolve_is_told_in_words() -> None:
    with pytest.raises(socket.gaierror, match=r"to nowhere\.invalid:1: the name cannot be resol"):
        await Tcp("nowhere.invalid", 1).dial(Ear())
    for wrong in ("x" * 70 + ".invalid", "nul\0.invalid"):
        with pytest.raises(OSError, match="is no name of a host"):
            await Tcp(wrong, 1).dial(Ear())
    with pytest.raises(OSError, match="is no name for TLS"):
        await Tcp(".invalid", 1, tls=ssl.create_default_context()).dial(Ear())


async def test_all_addresses_of_a_name_are_tried() -> None:
    async with tcp_server() as port:  # on IPv4 alone
        ear = Ear()
        transport = await Tcp("localhost", port).dial(ear)
        transport.write(b"hello")
        await ear.hears(5)
        transport.close()
        await ear.ended()


class Greeter:
    """Listens on some addresses of this host, says hello, and counts who is there."""

    def __init__(self) -> None:
        self.there = 0

    async def listen(self, stack: AsyncExitStack, *addresses: str) -> int:
        server = await asyncio.start_server(self._greet, list(addresses), free_port())
        stack.push_async_callback(server.wait_closed)
        stack.callback(server.close)
        port: int = server.sockets[0].getsockname()[1]
        return port

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.there += 1
        writer.write(b"hello")
        try:
            await reader.read()
        except ConnectionResetError:
            pass  # one of those that came too late
        finally:
            self.there -= 1
            writer.close()


@pytest.mark.every_loop
async def test_an_address_that_refuses_is_passed_over() -> None:
    async with AsyncExitStack() as stack:
        port = await Greeter().listen(stack, "127.0.0.1")
        stream = await _tcp_dial._race(["127.0.0.2", "127.0.0.3", "127.0.0.1"], port)
        stream.adopt(ear := Ear())
        assert await ear.hears(5) == b"hello"
        stream.abort()
        await ear.ended()
        with pytest.raises(ConnectionRefusedError):
            await _tcp_dial._race(["127.0.0.2", "127.0.0.3"], port)


@pytest.mark.every_loop
async def test_an_address_that_does_not_answer_is_not_waited_for() -> None:
    async with AsyncExitStack() as stack:
        silent = stack.enter_context(socket.socket())
        port = await Greeter().listen(stack, "127.0.0.1")
        silent.bind(("127.0.0.2", port))
        silent.listen(0)
        # Two fill what it can take without accepting: from then on it does not answer.
        fill = [stack.enter_context(socket.socket()) for _ in range(2)]
        for each in fill:
            each.setblocking(False)
            each.connect_ex(("127.0.0.2", port))
        before = descriptors()
        async with asyncio.timeout(10):
            stream = await _tcp_dial._race(["127.0.0.2", "127.0.0.1"], port)
        assert stream._transport.get_extra_info("peername")[0] == "127.0.0.1"
        stream.adopt(ear := Ear())
        await ear.hears(5)
        assert descriptors() <= before + 2  # both ends of one connection
        stream.close()
        await ear.ended()


@pytest.mark.every_loop
async def test_of_two_that_are_connected_one_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tcp_dial, "_STAGGER", 0.0)
    async with AsyncExitStack() as stack:
        greeter = Greeter()
        port = await greeter.listen(stack, "127.0.0.1", "127.0.0.2", "127.0.0.3")
        for _ in range(20):
            stream = await _tcp_dial._race(["127.0.0.1", "127.0.0.2", "127.0.0.3"], port)
            stream.adopt(ear := Ear())
            assert await ear.hears(5) == b"hello"
            stream.close()
            await ear.ended()
        async with asyncio.timeout(10):
            while greeter.there:  # noqa: ASYNC110 (each is told by its own end)
                await asyncio.sleep(0.01)


async def test_a_reset_is_told_as_an_error() -> None:
    async with tcp_server() as port, FaultProxy("127.0.0.1", port) as proxy:
        ear = Ear()
        transport = await Tcp(proxy.host, proxy.port).dial(ear)
        transport.write(b"hello")
        await ear.hears(5)
        assert proxy.reset() == 1
        assert isinstance(await ear.ended(), ConnectionResetError)
        transport.write(b"hello?")


async def test_a_server_that_closes_is_no_error() -> None:
    async with tcp_server(lambda reader, writer: writer.write(b"bye")) as port:
        ear = Ear()
        await Tcp("127.0.0.1", port).dial(ear)
        assert await ear.ended() is None


async def test_what_waits_is_seen_in_pending_and_close_sends_it() -> None:
    data = random.Random(2).randbytes(12_000_000)
    heard = asyncio.get_running_loop().create_future()
    may_read = asyncio.Event()

    async def reads_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_read.wait()
        heard.set_result(await reader.read(-1))

    async with tcp_server(reads_late) as port:
        ear = Ear()
        transport = await Tcp("127.0.0.1", port).dial(ear)
        transport.write(data)
        assert 0 < transport.pending < len(data)
        transport.close()
        assert not ear.end.done()
        may_read.set()
        assert await ear.ended() is None
        assert await heard == data


async def test_abort_drops_what_waits_here_and_in_the_system() -> None:
    may_read = asyncio.Event()
    heard = asyncio.get_running_loop().create_future()

    async def reads_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_read.wait()
        try:
            heard.set_result(len(await reader.read(-1)))
        except ConnectionResetError as error:
            heard.set_result(error)

    async with tcp_server(reads_late) as port:
        ear = Ear()
        transport = await Tcp("127.0.0.1", port).dial(ear)
        transport.write(bytes(12_000_000))
        transport.abort()
        assert await ear.ended() is None
        may_read.set()
        assert isinstance(await heard, ConnectionResetError)


async def stuck(sim: Sim) -> float:
    """A server that reads no more cannot keep a closed link open."""
    await sim.serve(lambda reader, writer: reader.read(), host="server", port=1)
    ear = Ear()
    transport = await Tcp("server", 1).dial(ear)
    sim.network.pause("server")
    transport.write(bytes(10_000_000))
    transport.close()
    before = sim.now
    assert transport.pending
    await ear.end
    return sim.now - before


def test_a_peer_that_reads_nothing_delays_the_end_for_seconds_only() -> None:
    assert run_one(stuck, 1).result() == _stream._CLOSING_TIME


# -- TLS -------------------------------------------------------------------------------------------


async def test_a_certificate_of_a_stranger_is_refused(tls: Tls) -> None:
    async with tcp_server(tls=tls.server) as port:
        quiet(asyncio.get_running_loop())
        endpoint = Tcp("localhost", port, tls=ssl.create_default_context())
        with pytest.raises(ssl.SSLCertVerificationError) as caught:
            await endpoint.dial(Ear())
        assert f"cannot connect to localhost:{port} (TLS): the server's cert" in str(caught.value)
        assert caught.value.verify_code


async def test_a_certificate_for_another_name_is_refused(tls: Tls) -> None:
    async with tcp_server(tls=tls.server) as port:
        quiet(asyncio.get_running_loop())
        with pytest.raises(ssl.SSLCertVerificationError, match=r"is not accepted: .*mismatch"):
            await Tcp("127.0.0.1", port, tls=tls.client).dial(Ear())
        ear = Ear()
        named = Tcp("127.0.0.1", port, tls=tls.client, server_name="localhost")
        (await named.dial(ear)).close()
        assert await ear.ended() is None


async def test_a_server_without_tls_is_told_in_words(tls: Tls) -> None:
    async with tcp_server() as port:  # sends the greeting back
        with pytest.raises(ssl.SSLError, match=rf"to localhost:{port} \(TLS\): TLS failed: "):
            await Tcp("localhost", port, tls=tls.client).dial(Ear())
    async with tcp_server(lambda reader, writer: None) as port:
        with pytest.raises(ConnectionResetError, match="cannot connect to localhost"):
            await Tcp("localhost", port, tls=tls.client).dial(Ear())


async def test_pending_counts_what_tls_has_encrypted(tls: Tls) -> None:
    async with tcp_server(tls=tls.server) as port, FaultProxy("127.0.0.1", port) as proxy:
        ear = Ear()
        transport = await Tcp("localhost", proxy.port, tls=tls.client).dial(ear)
        proxy.stall()
        transport.write(bytes(12_000_000))
        assert transport.pending > 1_000_000
        transport.abort()
        assert await ear.ended() is None


def quiet(loop: asyncio.AbstractEventLoop) -> None:
    """A server may complain about a client that does not like it."""
    loop.set_exception_handler(lambda loop, context: None)


# -- in memory -------------------------------------------------------------------------------------


class Pair:
    """Both ends of a link in memory."""

    def __init__(self) -> None:
        self.near, self.far = Ear(), Ear()

    def serve(self, transport: Transport) -> Receiver:
        self.server = transport
        return self.far

    async def dial(self) -> Transport:
        return await InMemory(self.serve).dial(self.near)


async def test_memory_delivers_in_a_later_turn() -> None:
    pair = Pair()
    transport = await pair.dial()
    transport.write(b"one")
    transport.write(b"two")
    assert transport.pending == 6
    assert pair.far.pieces == []
    await asyncio.sleep(0)
    assert pair.far.pieces == [b"one", b"two"]
    assert transport.pending == 0


async def test_memory_close_delivers_first_and_abort_does_not() -> None:
    pair = Pair()
    transport = await pair.dial()
    pair.server.write(b"an answer")
    transport.write(b"last words")
    transport.close()
    assert (await pair.far.ended(), await pair.near.ended()) == (None, None)
    assert pair.far.data == b"last words"
    assert pair.near.data == b"", "who has closed hears nothing more"

    pair = Pair()
    transport = await pair.dial()
    transport.write(b"last words")
    pair.server.write(b"an answer")
    transport.abort()
    assert await pair.near.ended() is None
    assert isinstance(await pair.far.ended(), ConnectionResetError)
    assert pair.far.data == pair.near.data == b""


async def test_two_who_answer_at_once_do_not_hold_up_the_loop() -> None:
    class Chatty(Ear):
        transport: Transport

        def received(self, data: bytes) -> None:
            super().received(data)
            self.transport.write(data)

    near, far = Chatty(), Chatty()

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


async def test_a_server_in_memory_may_refuse() -> None:
    def refuses(transport: Transport) -> Receiver:
        raise ConnectionRefusedError(111, "not today")

    with pytest.raises(ConnectionRefusedError, match="cannot connect to there: not today"):
        await InMemory(refuses, name="there").dial(Ear())


# -- in the simulation -----------------------------------------------------------------------------


async def sim_echo(sim: Sim) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)

    await sim.serve(echo, host="server", port=7)
    ear = Ear()
    transport = await Tcp("server", 7).dial(ear)
    expected = b""
    for number in range(50):
        piece = struct.pack("!I", number) * sim.rng.randint(1, 50)
        expected += piece
        transport.write(piece)
        await asyncio.sleep(sim.random(0, 0.01))
    assert await ear.hears(len(expected)) == expected
    sim.network.reset("server")
    assert isinstance(await ear.ended(), ConnectionResetError)


def test_tcp_in_the_simulation() -> None:
    simulate(sim_echo, scaled(200, least=8))


async def sim_refused(sim: Sim) -> None:
    sim.host("server")
    with pytest.raises(ConnectionRefusedError, match="to server:7: Connection refused"):
        await Tcp("server", 7).dial(Ear())
    sim.network.blackhole("server")
    dial = asyncio.create_task(Tcp("server", 7).dial(Ear()))
    await asyncio.sleep(5)
    dial.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dial


def test_refusals_in_the_simulation() -> None:
    simulate(sim_refused, 10)


class Guests:
    """A server that knows who is there."""

    def __init__(self) -> None:
        self.there = 0

    async def stay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.there += 1
        try:
            await reader.read()
        finally:
            self.there -= 1
            writer.close()


async def sim_race(sim: Sim) -> None:
    """Of all that are connected one is kept; of a race that is cancelled, none."""
    guests = Guests()
    names = ["a", "b", "c"]
    for name in names:
        await sim.serve(guests.stay, host=name, port=7)
    race = asyncio.create_task(_tcp_dial._race(names, 7))
    if sim.rng.random() < 0.5:
        await asyncio.sleep(sim.random(0, 0.2))
        race.cancel()
    try:
        stream = await race
    except asyncio.CancelledError:
        stream = None
    await asyncio.sleep(10)
    assert guests.there == (stream is not None)
    if stream is not None:
        stream.abort()


def test_a_race_leaves_one_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tcp_dial, "_STAGGER", 0.0)
    simulate(sim_race, scaled(1000, least=40))


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_race_in_which_all_arrive_at_once(
    cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = _tcp_dial._attempt

    async def scenario(sim: Sim) -> None:
        guests, barrier = Guests(), asyncio.Barrier(3)
        names = ["a", "b", "c"]
        for name in names:
            await sim.serve(guests.stay, host=name, port=7)

        async def together(address: str, port: int) -> _stream.Stream:
            stream = await attempt(address, port)
            try:
                await barrier.wait()
            except asyncio.CancelledError:
                stream.abort()  # as one does that is cancelled before it is done
                raise
            if cancelled:
                # They are done, and the race has not looked yet.
                asyncio.get_running_loop().call_soon(race.cancel)
            return stream

        monkeypatch.setattr(_tcp_dial, "_attempt", together)
        race = asyncio.create_task(_tcp_dial._race(names, 7))
        await asyncio.wait({race})
        await asyncio.sleep(10)
        assert cancelled or not race.cancelled()
        assert guests.there == (not race.cancelled())
        if not race.cancelled():
            race.result().abort()

    simulate(scenario, 20)


# -- mistakes --------------------------------------------------------------------------------------


def test_endpoints_tell_nothing_secret() -> None:
    endpoint = WebSocket("ws://user:secret@host:81/path?token=secret", headers=[("A", "secret")])
    assert str(endpoint) == "ws://host:81/path?…"
    assert "secret" not in repr(endpoint)
    assert str(Tcp("::1", 5)) == "[::1]:5"
    assert repr(Tcp("host", 5)) == "<Tcp host:5>"


def test_mistakes_are_told_at_once() -> None:
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
    with pytest.raises(ValueError, match="a header has"):
        WebSocket("ws://host", headers=[("A", "b\r\nC: d")])
    with pytest.raises(ValueError, match="use wss://"):
        WebSocket("ws://host", tls=ssl.create_default_context())
