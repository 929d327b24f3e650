"""STARTTLS: links that begin in plain text and switch to TLS when the protocol asks for it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.postgres.certificates import Authority
from tests.servers import require_server
from tests.sessions.support import until

from moored.kernel import Backoff
from moored.sessions import (
    Acked,
    Confirmed,
    Dialogue,
    NotConnected,
    Outgoing,
    Protocol,
    Ready,
    Sessions,
    StartTls,
    Tcp,
)
from moored.sessions._protocol import DialogueEvent

pytestmark = pytest.mark.every_loop


class Plain(Protocol):
    """A line protocol: STARTTLS, then a name, then sends."""

    name = "plain"
    keepalive = None

    def __init__(self, endpoint: Tcp, *, strict: bool = True) -> None:
        self._endpoint = endpoint
        self._strict = strict

    @property
    def endpoint(self) -> Tcp:
        return self._endpoint

    def begin(self, profile: str, credentials: bytes | None, memory: Any) -> Dialogue:
        return PlainDialogue(profile, self._strict)


class PlainDialogue(Dialogue):
    def __init__(self, profile: str, strict: bool) -> None:
        self._profile = profile
        self._strict = strict

    def hello(self) -> bytes:
        return b"STARTTLS\n" if self._strict else b"LOGIN\n"

    def secured(self) -> bytes:
        return f"NAME {self._profile}\n".encode()

    def feed(self, data: bytes) -> Iterator[DialogueEvent]:
        for line in data.decode().splitlines():
            match line.split():
                case ["PROCEED"]:
                    yield StartTls()
                case ["WELCOME"]:
                    yield Ready()
                case ["ACK", id]:
                    yield Confirmed(id)

    def write(self, outgoing: Outgoing) -> bytes:
        return f"SEND {outgoing.id}\n".encode()


class Server:
    """A server of that protocol; records each line, and whether it was encrypted."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        self.received: list[tuple[bool, str]] = []
        #: Plain text that follows the PROCEED in the same packet.
        self.injected = b""
        self.port = 0
        self.serving: set[asyncio.Task[None] | None] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        secure = False
        self.serving.add(task := asyncio.current_task())
        with contextlib.suppress(OSError, ssl.SSLError):
            while line := (await reader.readline()).decode().strip():
                self.received.append((secure, line))
                match line.split():
                    case ["STARTTLS"]:
                        writer.write(b"PROCEED\n" + self.injected)
                        await writer.start_tls(self._context)
                        secure = True
                    case ["NAME", _] | ["LOGIN"]:
                        writer.write(b"WELCOME\n")
                    case ["SEND", id]:
                        writer.write(f"ACK {id}\n".encode())
        writer.close()
        self.serving.discard(task)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(require_server("openssl"), tmp_path_factory.mktemp("starttls"), "authority")


@pytest.fixture
def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authority.root)


@pytest.fixture
async def server(authority: Authority) -> AsyncIterator[Server]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    signed = authority.sign("server", "localhost")
    context.load_cert_chain(signed.certificate, signed.key)
    server = Server(context)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    yield server
    listener.close()
    await until(lambda: not server.serving)


@pytest.fixture
async def sessions(server: Server) -> AsyncIterator[Sessions]:  # closed before the server
    async with Sessions(backoff=Backoff(0.01, 0.02)) as opened:
        yield opened


async def test_link_switches_to_tls_when_the_protocol_requests_it(
    sessions: Sessions, server: Server, trusting: ssl.SSLContext
) -> None:
    endpoint = Tcp("localhost", server.port, tls=trusting, starttls=True)
    assert str(endpoint) == f"localhost:{server.port} (STARTTLS)"
    alice = await sessions.connect("alice", Plain(endpoint))
    assert isinstance(await alice.send("bob", b"", id="1"), Acked)
    assert server.received == [(False, "STARTTLS"), (True, "NAME alice"), (True, "SEND 1")]


async def test_refused_certificate_is_a_failed_attempt(sessions: Sessions, server: Server) -> None:
    endpoint = Tcp("localhost", server.port, tls=ssl.create_default_context(), starttls=True)
    alice = await sessions.start("alice", Plain(endpoint))
    await until(lambda: alice.generation > 2)
    assert "certificate is not accepted" in alice.status()["reason"]
    assert not any(line.startswith("NAME") for _, line in server.received)


async def test_plain_text_after_proceed_is_discarded(
    sessions: Sessions, server: Server, trusting: ssl.SSLContext
) -> None:
    server.injected = b"WELCOME\n"
    alice = await sessions.connect(
        "alice", Plain(Tcp("localhost", server.port, tls=trusting, starttls=True))
    )
    assert (True, "NAME alice") in server.received
    assert alice.generation == 1


async def test_link_without_the_required_tls_never_becomes_ready(
    sessions: Sessions, server: Server, trusting: ssl.SSLContext
) -> None:
    endpoint = Tcp("localhost", server.port, tls=trusting, starttls=True)
    alice = await sessions.start("alice", Plain(endpoint, strict=False))
    await until(lambda: alice.generation > 2)
    assert "no STARTTLS" in alice.status()["reason"]
    with pytest.raises(NotConnected):
        await alice.online(0.05)


def test_starttls_without_a_tls_context_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="starttls needs TLS: pass tls as well"):
        Tcp("localhost", 5222, starttls=True)
