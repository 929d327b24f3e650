"""TLS through both managers, with a test certificate authority."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

from moored.rpc import ConfigError, ConnectFailed, ConnectionConfig, TopologyError
from moored.rpc._tls_hints import with_hint

from .handlers import ECHO, METADATA, PID, loss_noticed_async
from .servers import EchoServer, make_authority, make_certificate
from .sides import LIMIT, SIDES, Aio, Threads

both = pytest.mark.parametrize("kind", SIDES, ids=lambda kind: kind.__name__)
Kind = type[Threads] | type[Aio]
Pair = dict[str, Path]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def pair(authority: Path) -> Pair:
    """A certificate for a client, and its key."""
    certificate, key = make_certificate(authority, "client")
    return {"certificate": certificate, "private_key": key}


@pytest.fixture(scope="module")
def running(authority: Path) -> Iterator[EchoServer]:
    """A server that runs for all tests."""
    with EchoServer(tls=authority) as server:
        yield server


@pytest.fixture(scope="module")
def strict(authority: Path) -> Iterator[EchoServer]:
    """A server that requires client certificates of the authority."""
    with EchoServer(tls=authority, mutual=True) as server:
        yield server


def config(server: EchoServer, ca: Path | None, **more: Any) -> ConnectionConfig:
    options = {"ca": ca, "server_name": "server.test", **more}
    return ConnectionConfig.from_uri(f"https://opensesame@{server.address}", **options)


@both
async def test_encrypted_connection_recovers_from_a_kill(kind: Kind, authority: Path) -> None:
    with EchoServer(tls=authority) as server:
        async with kind() as side:
            channel = await side.get(config(server, authority / "ca.pem"), timeout=LIMIT)
            assert b"opensesame" in await side.call(channel, METADATA)
            pid = await side.call(channel, PID)
            server.kill()
            with pytest.raises(grpc.RpcError):
                await side.call(channel, ECHO, b"", 5.0)
            await loss_noticed_async(channel)
            waiting = [asyncio.create_task(side.call(channel, ECHO, b"hi")) for _ in range(10)]
            await asyncio.sleep(0.5)
            assert not any(each.done() for each in waiting)
            server.start()
            assert await asyncio.gather(*waiting) == [b"hi"] * 10
            assert channel.generation == 2
            assert await side.call(channel, PID) != pid


@both
async def test_error_names_a_wrong_certificate_authority(
    kind: Kind, authority: Path, running: EchoServer, tmp_path: Path
) -> None:
    stranger = make_authority(tmp_path)
    async with kind() as side:
        began = time.monotonic()
        with pytest.raises(ConnectFailed, match=r"(?i)certificate.verify.failed") as caught:
            await side.get(config(running, stranger / "ca.pem"), timeout=1.0)
        assert time.monotonic() - began < 10.0
        assert running.address in str(caught.value)
        assert "opensesame" not in str(caught.value)


@both
async def test_error_names_a_wrong_server_name(
    kind: Kind, authority: Path, running: EchoServer
) -> None:
    async with kind() as side:
        wanted = config(running, authority / "ca.pem", server_name="other.test")
        with pytest.raises(ConnectFailed, match="give that with the option server_name"):
            await side.get(wanted, timeout=1.0)


@both
async def test_plain_client_does_not_reach_a_tls_server(
    kind: Kind, authority: Path, running: EchoServer
) -> None:
    async with kind() as side:
        with pytest.raises(ConnectFailed, match="write https:// for http://") as caught:
            await side.get(ConnectionConfig.from_uri(running.uri), timeout=1.0)
        assert running.address in str(caught.value)


@both
async def test_error_names_a_server_without_tls(kind: Kind, echo: EchoServer) -> None:
    async with kind() as side:
        with pytest.raises(ConnectFailed, match="write http:// for https://"):
            await side.get(config(echo, None), timeout=1.0)


@both
async def test_error_names_an_unknown_certificate_authority(
    kind: Kind, running: EchoServer
) -> None:
    async with kind() as side:
        with pytest.raises(ConnectFailed, match="the option ca"):
            await side.get(config(running, None), timeout=1.0)


@both
async def test_unreadable_certificate_authority_is_named(kind: Kind, tmp_path: Path) -> None:
    async with kind() as side:
        began = time.monotonic()
        with pytest.raises(ConfigError, match="option ca cannot be read"):
            await side.get(config(EchoServer(), tmp_path / "missing.pem"), timeout=LIMIT)
        assert time.monotonic() - began < 10.0, "a hopeless attempt was retried"


@both
async def test_encrypted_and_plain_connections_are_not_shared(
    kind: Kind, authority: Path, running: EchoServer
) -> None:
    async with kind() as side:
        secure = await side.get(config(running, authority / "ca.pem"), timeout=LIMIT)
        with pytest.raises(ConnectFailed):
            await side.get(
                ConnectionConfig.from_uri(f"http://opensesame@{running.address}"), timeout=0.5
            )
        assert await side.call(secure, ECHO, b"hi") == b"hi"


@pytest.mark.parametrize("uri", ["http://localhost", "https://localhost"])
def test_topology_server_can_have_its_own_certificate(uri: str) -> None:
    for words in ("Socket closed", "CERTIFICATE_VERIFY_FAILED"):
        error = TopologyError(f"<HttpTopology> failed: {words}")
        assert with_hint(ConnectionConfig.from_uri(uri), error) is error


@pytest.mark.parametrize(
    ("why", "options", "told"),
    [
        (
            "certificate has expired: OK",
            {"ca": b"-----BEGIN"},
            "the server's certificate has expired",
        ),
        ("certificate is not yet valid: OK", {}, "perhaps a clock is wrong"),
        ("unable to get local issuer certificate", {}, "with the option ca"),
        ("self signed certificate", {"ca": b"-----BEGIN"}, "does not hold the server's authority"),
    ],
)
def test_hints_name_the_certificate_problem(why: str, options: dict[str, Any], told: str) -> None:
    wanted = ConnectionConfig.from_uri("https://localhost", **options)
    error = ConnectFailed(f"SSL_ERROR_SSL: CERTIFICATE_VERIFY_FAILED: {why}")
    assert told in str(with_hint(wanted, error))


@both
async def test_error_before_the_channel_is_made_gets_no_tls_hint(
    kind: Kind, echo: EchoServer
) -> None:
    def ask_elsewhere(config: ConnectionConfig) -> Any:
        raise ConnectionResetError("Connection reset by peer")

    async with kind(handler_factory=ask_elsewhere) as side:
        with pytest.raises(ConnectFailed, match="Connection reset by peer") as caught:
            await side.get(ConnectionConfig.from_uri(echo.uri), timeout=2.0)
        assert "TLS" not in str(caught.value)


def test_connection_that_worked_before_gets_no_tls_hint() -> None:
    error = ConnectFailed("Socket closed")
    assert with_hint(ConnectionConfig.from_uri("http://localhost"), error, known=True) is error


# -- both sides have a certificate -----------------------------------------------------------------


@both
async def test_client_with_a_certificate_is_accepted(
    kind: Kind, authority: Path, pair: Pair
) -> None:
    with EchoServer(tls=authority, mutual=True) as server:
        async with kind() as side:
            channel = await side.get(config(server, authority / "ca.pem", **pair), timeout=LIMIT)
            assert await side.call(channel, ECHO, b"hi") == b"hi"
            server.kill()
            with pytest.raises(grpc.RpcError):
                await side.call(channel, ECHO, b"", 5.0)
            await loss_noticed_async(channel)
            server.start()
            assert await side.call(channel, ECHO, b"again") == b"again"
            assert channel.generation == 2


@both
async def test_renewed_certificate_is_read_for_the_next_generation(
    kind: Kind, authority: Path, pair: Pair, tmp_path: Path
) -> None:
    make_authority(tmp_path)
    old = dict(zip(pair, make_certificate(tmp_path, "client"), strict=True))
    server = EchoServer(tls=authority)
    async with kind() as side:
        with server:
            channel = await side.get(config(server, authority / "ca.pem", **old), timeout=LIMIT)
            assert await side.call(channel, ECHO, b"hi") == b"hi"
        for name, path in old.items():
            path.write_bytes(pair[name].read_bytes())
        stricter = EchoServer(tls=authority, mutual=True)
        stricter.port = server.port
        with stricter:
            while channel.generation == 1:  # a call that fails is what tells the manager
                with contextlib.suppress(grpc.RpcError):
                    await side.call(channel, ECHO, b"", 5.0)
            assert await side.call(channel, ECHO, b"again") == b"again"
            assert channel.generation == 2


@both
async def test_error_names_the_missing_client_certificate(
    kind: Kind, authority: Path, strict: EchoServer
) -> None:
    async with kind() as side:
        wanted = config(strict, authority / "ca.pem")
        with pytest.raises(ConnectFailed, match="give the options certificate and private_key"):
            await side.get(wanted, timeout=1.0)


@both
async def test_error_names_a_client_certificate_of_another_authority(
    kind: Kind, authority: Path, strict: EchoServer, tmp_path: Path
) -> None:
    certificate, key = make_certificate(make_authority(tmp_path), "client")
    async with kind() as side:
        ours = {"certificate": certificate, "private_key": key}
        with pytest.raises(ConnectFailed, match="does not accept the client certificate"):
            await side.get(config(strict, authority / "ca.pem", **ours), timeout=1.0)


@both
async def test_mismatched_certificate_and_key_are_reported(
    kind: Kind, authority: Path, pair: Pair, strict: EchoServer
) -> None:
    swapped = {"certificate": pair["private_key"], "private_key": pair["certificate"]}
    async with kind() as side:
        for options in ({**pair, "private_key": authority / "server.key"}, swapped):
            wanted = config(strict, authority / "ca.pem", **options)
            began = time.monotonic()
            with pytest.raises(ConfigError, match="each must be PEM, and the key that of the"):
                await side.get(wanted, timeout=LIMIT)
            assert time.monotonic() - began < 10.0


@both
async def test_private_key_is_shown_nowhere(
    kind: Kind,
    authority: Path,
    pair: Pair,
    strict: EchoServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    text = pair["private_key"].read_text()
    ours = {"certificate": pair["certificate"].read_text(), "private_key": text}
    wanted = config(strict, authority / "ca.pem", **ours)
    async with kind() as side:
        channel = await side.get(wanted, timeout=LIMIT)
        assert await side.call(channel, ECHO, b"hi") == b"hi"
        shown = [repr(wanted), wanted.key, repr(channel), repr(side.manager.get_stats())]
    assert not [words for words in (*shown, caplog.text) if text.splitlines()[1] in words]
