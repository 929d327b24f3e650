"""The WebSocket transport against the server of the `websockets` package."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import pytest
from tests.sessions.support import LIMIT
from tests.sessions.transport_peers import RecordingReceiver, tcp_server, websocket_server
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from moored.sessions import (
    Acked,
    CloseClass,
    Closing,
    Confirmed,
    Dialogue,
    Outgoing,
    Protocol,
    ProtocolError,
    Ready,
    Sessions,
    Unknown,
)
from moored.sessions._protocol import DialogueEvent
from moored.sessions.transport._endpoints import WebSocket
from moored.sessions.transport._websocket import WebSocketClosed, WebSocketRefused
from moored.testing import FaultProxy, Sim, run_one, scaled, simulate


@pytest.mark.every_loop
async def test_each_write_is_one_binary_message_in_both_directions() -> None:
    received: list[Any] = []

    async def handler(connection: ServerConnection) -> None:
        received.append(await connection.recv())
        received.append(await connection.recv())
        await connection.send(b"one")
        await connection.send([b"in ", b"three ", b"parts"])

    async with websocket_server(handler) as port:
        receiver = RecordingReceiver()
        transport = await WebSocket(f"ws://127.0.0.1:{port}").dial(receiver)
        transport.write(b"first")
        transport.write(b"second")
        assert await receiver.ended() is None
        assert received == [b"first", b"second"]
        assert receiver.pieces == [b"one", b"in three parts"]


async def test_pings_of_the_server_are_answered() -> None:
    answered = asyncio.get_running_loop().create_future()

    async def handler(connection: ServerConnection) -> None:
        answered.set_result(await (await connection.ping()))

    async with websocket_server(handler) as port:
        receiver = RecordingReceiver()
        await WebSocket(f"ws://127.0.0.1:{port}").dial(receiver)
        async with asyncio.timeout(10):
            await answered
        assert await receiver.ended() is None
        assert receiver.pieces == []


@pytest.mark.every_loop
async def test_close_sends_pending_data_and_code_1000() -> None:
    closed = asyncio.get_running_loop().create_future()

    async def handler(connection: ServerConnection) -> None:
        try:
            async for message in connection:
                await connection.send(message)
        finally:
            closed.set_result((connection.close_code, connection.close_reason))

    async with websocket_server(handler) as port:
        receiver = RecordingReceiver()
        transport = await WebSocket(f"ws://127.0.0.1:{port}").dial(receiver)
        transport.write(b"last words")
        transport.close()
        assert await receiver.ended() is None
        assert await closed == (1000, "")
        assert receiver.pieces == [], "nothing is received after close()"


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (1000, "", None),
        (1001, "restart", None),
        (1008, "too much", "the server closed the WebSocket with code 1008 (too much)"),
        (4000, "", "the server closed the WebSocket with code 4000"),
    ],
)
async def test_close_codes_other_than_1000_and_1001_are_errors(
    code: int, reason: str, expected: str | None
) -> None:
    async def handler(connection: ServerConnection) -> None:
        await connection.close(code, reason)

    async with websocket_server(handler) as port:
        receiver = RecordingReceiver()
        await WebSocket(f"ws://127.0.0.1:{port}").dial(receiver)
        error = await receiver.ended()
        if expected is None:
            assert error is None
        else:
            assert isinstance(error, WebSocketClosed)
            assert str(error) == expected


async def test_end_without_a_close_frame_is_an_error() -> None:
    async with websocket_server() as port, FaultProxy("127.0.0.1", port) as proxy:
        receiver = RecordingReceiver()
        await WebSocket(f"ws://127.0.0.1:{proxy.port}").dial(receiver)
        proxy.reset()
        assert isinstance(await receiver.ended(), ConnectionResetError)

    async def handler(connection: ServerConnection) -> None:
        connection.transport.close()

    async with websocket_server(handler) as port:
        receiver = RecordingReceiver()
        await WebSocket(f"ws://127.0.0.1:{port}").dial(receiver)
        error = await receiver.ended()
        assert isinstance(error, WebSocketClosed)
        assert "without a WebSocket close frame" in str(error)


@pytest.mark.parametrize("message", [bytes(1001), [bytes(600), bytes(600)]])
async def test_message_above_max_size_ends_the_link(message: bytes | list[bytes]) -> None:
    close_code = asyncio.get_running_loop().create_future()

    async def handler(connection: ServerConnection) -> None:
        try:
            await connection.send(message)
            await connection.recv()
        finally:
            await connection.wait_closed()
            close_code.set_result(connection.close_code)

    async with websocket_server(handler) as port:
        receiver = RecordingReceiver()
        await WebSocket(f"ws://127.0.0.1:{port}", max_size=1000).dial(receiver)
        error = await receiver.ended()
        assert isinstance(error, WebSocketClosed)
        assert str(error) == "the server sent a message that is longer than max_size=1000"
        assert receiver.pieces == []
        assert await close_code == 1009


async def test_text_frame_on_a_binary_link_ends_the_link() -> None:
    async def handler(connection: ServerConnection) -> None:
        await connection.send("a text")
        await connection.wait_closed()

    async with websocket_server(handler) as port:
        receiver = RecordingReceiver()
        await WebSocket(f"ws://127.0.0.1:{port}").dial(receiver)
        error = await receiver.ended()
        assert isinstance(error, WebSocketClosed)
        assert str(error) == "the server sent a text frame"

        receiver = RecordingReceiver()
        transport = await WebSocket(f"ws://127.0.0.1:{port}", text=True).dial(receiver)
        assert await receiver.receives(6) == b"a text"
        transport.close()
        assert await receiver.ended() is None


async def test_invalid_frames_end_the_link() -> None:
    async def handler(connection: ServerConnection) -> None:
        connection.transport.write(b"\xff\xff\xff\xff")
        await connection.wait_closed()

    async with websocket_server(handler) as port:
        receiver = RecordingReceiver()
        await WebSocket(f"ws://127.0.0.1:{port}").dial(receiver)
        error = await receiver.ended()
        assert isinstance(error, WebSocketClosed)
        assert "violated the protocol" in str(error)


# -- the handshake ---------------------------------------------------------------------------------


async def test_handshake_carries_path_headers_authorization_and_subprotocol() -> None:
    seen: list[Any] = []

    async def handler(connection: ServerConnection) -> None:
        request = connection.request
        assert request is not None
        seen.append((request.path, request.headers["X-Key"], request.headers["Authorization"]))
        seen.append(connection.subprotocol)

    async with websocket_server(handler, subprotocols=["mqtt"]) as port:
        receiver = RecordingReceiver()
        url = f"ws://me:p%40ss@127.0.0.1:{port}/a/b?c=d"
        endpoint = WebSocket(url, subprotocol="mqtt", headers=[("X-Key", "1")])
        await endpoint.dial(receiver)
        assert await receiver.ended() is None
    basic = base64.b64encode(b"me:p@ss").decode()
    assert seen == [("/a/b?c=d", "1", f"Basic {basic}"), "mqtt"]


async def test_server_without_the_subprotocol_is_refused() -> None:
    async with websocket_server() as port:
        endpoint = WebSocket(f"ws://127.0.0.1:{port}", subprotocol="mqtt")
        with pytest.raises(
            WebSocketRefused, match=r"to ws://.*: the server does not support 'mqtt'"
        ):
            await endpoint.dial(RecordingReceiver())


async def test_http_error_status_is_a_refusal_with_that_status() -> None:
    def forbid(connection: ServerConnection, request: Request) -> Response:
        return connection.respond(HTTPStatus.FORBIDDEN, "no")

    async with websocket_server(process_request=forbid) as port:
        with pytest.raises(WebSocketRefused, match="the server answered with HTTP 403") as caught:
            await WebSocket(f"ws://127.0.0.1:{port}?token=secret").dial(RecordingReceiver())
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "answer", [b"220 smtp ready\r\n", b"x" * 100_000, b"HTTP/1.1 200 OK\r\n\r\n", b""]
)
async def test_server_that_speaks_another_protocol_is_refused(answer: bytes) -> None:
    async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()

    async with tcp_server(says) as port:
        expected = WebSocketRefused if answer else ConnectionResetError
        with pytest.raises(expected, match="cannot connect to ws://"):
            await WebSocket(f"ws://127.0.0.1:{port}").dial(RecordingReceiver())


# -- in the simulation -----------------------------------------------------------------------------


async def sim_echo(sim: Sim) -> None:
    listening = asyncio.Event()

    async def main() -> None:
        async def echo(connection: ServerConnection) -> None:
            try:
                async for message in connection:
                    await connection.send(message)
            except ConnectionClosed:
                pass

        async with serve(echo, "server", 80, ping_interval=None, compression=None):
            listening.set()
            await asyncio.Event().wait()

    sim.host("server", main)
    await listening.wait()
    receiver = RecordingReceiver()
    transport = await WebSocket("ws://server").dial(receiver)
    sent = [sim.rng.randbytes(sim.rng.randint(1, 500)) for _ in range(20)]
    for message in sent:
        transport.write(message)
    await receiver.receives(sum(map(len, sent)))
    assert receiver.pieces == sent
    transport.close()
    assert await receiver.ended() is None


def test_messages_arrive_unchanged_however_the_bytes_are_split() -> None:
    simulate(sim_echo, scaled(200, least=8))


async def close_without_answer(sim: Sim) -> float:
    """Return how long a close takes if the server does not answer the closing handshake."""
    listening = asyncio.Event()

    async def main() -> None:
        async def sleeps(connection: ServerConnection) -> None:
            await asyncio.sleep(1000)

        async with serve(sleeps, "server", 80, ping_interval=None, compression=None):
            listening.set()
            await asyncio.Event().wait()

    sim.host("server", main)
    await listening.wait()
    receiver = RecordingReceiver()
    transport = await WebSocket("ws://server").dial(receiver)
    sim.network.blackhole("server")
    before = sim.now
    transport.close()
    await receiver.end
    return sim.now - before


def test_close_waits_five_seconds_for_the_closing_handshake() -> None:
    assert run_one(close_without_answer, 1).result() == 5.0


class Words(Protocol):
    """A protocol in which each WebSocket message is one id."""

    name = "words"
    keepalive = None

    def __init__(self, endpoint: WebSocket) -> None:
        self._endpoint = endpoint

    @property
    def endpoint(self) -> WebSocket:
        return self._endpoint

    def begin(self, profile: str, credentials: bytes | None, memory: Any) -> Dialogue:
        return WordsDialogue()


class WordsDialogue(Dialogue):
    def hello(self) -> bytes:
        return b"hello"

    def feed(self, data: bytes) -> Iterator[DialogueEvent]:
        if data == b"garbage":
            raise ProtocolError("garbage")
        if data == b"restarting":
            yield Closing(CloseClass.TRANSIENT, farewell=b"bye")
        yield Ready() if data == b"welcome" else Confirmed(data.decode())

    def write(self, outgoing: Outgoing) -> bytes:
        return outgoing.id.encode()


@pytest.mark.every_loop
async def test_sends_of_one_loop_iteration_are_separate_messages() -> None:
    received: list[Any] = []

    async def handler(connection: ServerConnection) -> None:
        async for message in connection:
            received.append(message)
            await connection.send("welcome" if message == "hello" else message)

    async with websocket_server(handler) as port, Sessions() as sessions:
        protocol = Words(WebSocket(f"ws://127.0.0.1:{port}", text=True))
        alice = await sessions.connect("alice", protocol)
        ids = [f"send-{number}" for number in range(10)]
        outcomes = await asyncio.gather(
            *(alice.send("bob", b"", id=id, outcome=True, timeout=5) for id in ids)
        )
        assert outcomes == [Acked(id) for id in ids]
        assert received == ["hello", *ids]


@pytest.mark.every_loop
async def test_stop_returns_after_the_socket_of_a_slow_server_is_closed() -> None:
    async def handler(connection: ServerConnection) -> None:
        async for _ in connection:
            await connection.send("welcome")

    async with (
        websocket_server(handler) as port,
        FaultProxy("127.0.0.1", port) as proxy,
        Sessions() as sessions,
    ):
        endpoint = WebSocket(f"ws://127.0.0.1:{proxy.port}", text=True)
        alice = await sessions.connect("alice", Words(endpoint))
        assert alice._runtime.connection is not None
        link = alice._runtime.connection.link
        assert link is not None
        proxy.stall()
        asyncio.get_running_loop().call_later(0.2, proxy.resume)
        async with asyncio.timeout(LIMIT):
            await alice.stop()
        assert link.over


@pytest.mark.every_loop
@pytest.mark.parametrize("message", [b"garbage", b"restarting"])
async def test_message_that_ends_the_link_together_with_a_close_frame_is_no_crash(
    sessions: Sessions, message: bytes
) -> None:
    links = 0

    async def handler(connection: ServerConnection) -> None:
        nonlocal links
        links += 1
        await connection.recv()
        await connection.send("welcome")
        if links == 1:
            await connection.recv()
            connection.protocol.send_text(message)
            connection.protocol.send_close(1001)
            connection.transport.write(b"".join(connection.protocol.data_to_send()))
        await connection.wait_closed()

    async with websocket_server(handler) as port:
        endpoint = WebSocket(f"ws://127.0.0.1:{port}", text=True)
        alice = await sessions.connect("alice", Words(endpoint))
        assert isinstance(await alice.send("bob", b"", outcome=True, timeout=LIMIT), Unknown)
        await alice.online(LIMIT)
        assert (links, alice.status()["crashes"]) == (2, 0)
        await alice.stop()
