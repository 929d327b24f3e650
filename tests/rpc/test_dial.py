"""Dialling: generations share no connection or backoff, and failures are reported immediately."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
import pytest
from tests.servers import free_port

from moored.rpc._config import ConnectionConfig
from moored.rpc._dial import (
    DEFAULTS,
    TokenCredentials,
    channel_options,
    close_channel,
    make_aio_channel,
    make_channel,
    ready,
)
from moored.rpc._errors import ConfigError, ConnectFailed

from .handlers import ECHO
from .servers import EchoServer, make_authority

Make = Callable[..., Any]

both = pytest.mark.parametrize("make", [make_channel, make_aio_channel])


async def ask(channel: Any, method: str = ECHO, request: bytes = b"a") -> bytes:
    method_of = channel.unary_unary(method)
    if isinstance(channel, grpc.aio.Channel):
        return bytes(await method_of(request, timeout=10))
    return bytes(await asyncio.to_thread(method_of, request, 10))


def connections_to(port: int) -> int:
    tables = (Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6"))
    return "".join(tables).count(f":{port:04X} 01 ")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_authority(tmp_path_factory.mktemp("tls"))


# -- options ---------------------------------------------------------------------------------------


def test_channel_options_have_the_expected_defaults() -> None:
    config = ConnectionConfig.from_uri("http://db:1")
    options = dict(channel_options(config, 7))
    assert options == {
        **DEFAULTS,
        "grpc.use_local_subchannel_pool": 1,
        "moored.generation": 7,
    }


@pytest.mark.parametrize("kind", [dict, list, tuple])
def test_options_of_the_user_override_the_defaults(kind: Any) -> None:
    own = {"grpc.keepalive_time_ms": 1, "grpc.use_local_subchannel_pool": 0, "mine": 2}
    given = own if kind is dict else kind(own.items())
    config = ConnectionConfig.from_uri("http://db:1", channel_options=given)
    options = channel_options(config, 7)
    assert len(options) == len(dict(options))
    assert dict(options)["grpc.keepalive_time_ms"] == 1
    assert dict(options)["mine"] == 2
    # Without this one, a new generation would inherit the backoff of the old.
    assert dict(options)["grpc.use_local_subchannel_pool"] == 1


def test_missing_certificate_file_is_named() -> None:
    config = ConnectionConfig.from_uri("https://db:1", ca=Path("/nowhere/ca.pem"))
    with pytest.raises(ConfigError, match=r"option ca .*nowhere"):
        make_channel(config, 1)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EMFILE, OSError),
        (errno.ESTALE, OSError),
        (errno.EIO, OSError),
        (errno.EACCES, ConfigError),
        (errno.EISDIR, ConfigError),
        (errno.ENOTDIR, ConfigError),
        (errno.ENAMETOOLONG, ConfigError),
    ],
)
def test_temporarily_unreadable_file_is_not_a_config_error(
    number: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path) -> bytes:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "read_bytes", read)
    config = ConnectionConfig.from_uri("https://db:1", ca=Path("/somewhere/ca.pem"))
    with pytest.raises(kind, match="somewhere"):
        make_channel(config, 1)


def test_token_is_hidden_in_repr() -> None:
    token = TokenCredentials("secret", encode=lambda token: token[::-1])
    assert token.metadata() == (("authorization", "terces"),)
    assert "secret" not in repr(token) + str(vars(token).keys())
    assert "terces" not in repr(token)
    token.replace("")
    assert list(token.metadata()) == []
    assert repr(token) == "TokenCredentials('')"


# -- ready -----------------------------------------------------------------------------------------


@both
async def test_channel_to_a_running_server_becomes_ready(make: Make, echo: EchoServer) -> None:
    channel = make(ConnectionConfig.from_uri(echo.uri), 1)
    await asyncio.wait_for(ready(channel), 10)
    assert await ask(channel) == b"a"
    await close_channel(channel)


@both
async def test_refused_connection_fails_immediately_with_the_reason(make: Make) -> None:
    config = ConnectionConfig.from_uri(f"http://127.0.0.1:{free_port()}")
    channel = make(config, 1)
    began = time.monotonic()
    with pytest.raises(ConnectFailed) as raised:
        await ready(channel)
    assert time.monotonic() - began < 10
    assert config.address in str(raised.value)
    assert "onnection refused" in str(raised.value)
    await close_channel(channel)


@both
async def test_silent_server_is_waited_for(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        channel = make(ConnectionConfig.from_uri(uri), 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ready(channel), 0.3)
        await close_channel(channel)


@both
async def test_channel_closed_meanwhile_never_becomes_ready(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        channel = make(ConnectionConfig.from_uri(uri), 1)
        waiting = asyncio.create_task(ready(channel))
        await asyncio.sleep(0.05)
        await close_channel(channel)
        with pytest.raises((ConnectFailed, asyncio.CancelledError)):
            await waiting


@both
async def test_server_without_the_probed_method_is_ready(make: Make) -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = make(ConnectionConfig.from_uri(f"http://127.0.0.1:{port}"), 1)
    await asyncio.wait_for(ready(channel), 10)
    await close_channel(channel)
    await server.stop(None)


@both
async def test_new_generation_does_not_inherit_the_backoff(make: Make) -> None:
    server = EchoServer()
    config = ConnectionConfig.from_uri(server.uri)
    with contextlib.ExitStack() as stack:
        stack.callback(server.kill)
        # The first channel fails often enough for a long backoff, and stays open.
        old = make(config, 1)
        for _ in range(3):
            with pytest.raises(ConnectFailed):
                await ready(old)
        server.start()
        # gRPC's first pause alone is about a second. Of several connects one is undisturbed.
        times = [await connect_time(make(config, number)) for number in range(2, 5)]
        assert min(times) < 0.7
    await close_channel(old)


async def connect_time(channel: Any) -> float:
    """Connect, call, and close the channel; return the seconds that the connect took."""
    began = time.monotonic()
    await asyncio.wait_for(ready(channel), 10)
    took = time.monotonic() - began
    assert await ask(channel) == b"a"
    await close_channel(channel)
    return took


async def test_generations_do_not_share_a_connection(echo: EchoServer) -> None:
    config = ConnectionConfig.from_uri(echo.uri)
    channels = [make_aio_channel(config, number) for number in (1, 2, 3)]
    for channel in channels:
        await ready(channel)
    assert connections_to(echo.port) >= 3
    for channel in channels:
        await channel.close()


async def test_cancelled_wait_leaves_nothing_behind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = ConnectionConfig.from_uri(f"http://127.0.0.1:{silent.getsockname()[1]}")
        few = threading.active_count()
        for number in range(5):
            channel = make_channel(config, number)
            task = asyncio.create_task(ready(channel))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await close_channel(channel)
        gc.collect()
        # Only the thread that closed them stays for reuse.
        assert threading.active_count() <= few + 2


# -- TLS -------------------------------------------------------------------------------------------


@both
async def test_tls_with_a_custom_authority_connects(make: Make, authority: Path) -> None:
    with EchoServer(tls=authority) as server:
        uri = f"https://{server.address}"
        ca = authority / "ca.pem"
        for given in (ca, str(ca), ca.read_bytes(), ca.read_text()):
            config = ConnectionConfig.from_uri(uri, ca=given, server_name="server.test")
            channel = make(config, 1)
            await asyncio.wait_for(ready(channel), 10)
            assert await ask(channel) == b"a"
            await close_channel(channel)


@both
@pytest.mark.parametrize("trusted", [True, False])
async def test_tls_with_a_wrong_name_or_authority_fails(
    make: Make, authority: Path, trusted: bool
) -> None:
    options = {"ca": authority / "ca.pem"} if trusted else {"server_name": "server.test"}
    with EchoServer(tls=authority) as server:
        config = ConnectionConfig.from_uri(f"https://{server.address}", **options)
        channel = make(config, 1)
        with pytest.raises(ConnectFailed) as raised:
            await asyncio.wait_for(ready(channel), 10)
        assert "CERTIFICATE_VERIFY_FAILED" in str(raised.value) or "name" in str(raised.value)
        await close_channel(channel)


async def test_given_grpc_credentials_are_used(authority: Path) -> None:
    own = grpc.ssl_channel_credentials((authority / "ca.pem").read_bytes())
    with EchoServer(tls=authority) as server:
        config = ConnectionConfig.from_uri(
            server.uri,
            channel_credentials=own,
            channel_options={"grpc.ssl_target_name_override": "server.test"},
        )
        for make in (make_channel, make_aio_channel):
            channel = make(config, 1)
            await asyncio.wait_for(ready(channel), 10)
            await close_channel(channel)


async def test_unix_socket_is_an_address(tmp_path: Path) -> None:
    path = tmp_path / "echo.sock"
    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(_echo)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Echo", {"Echo": method}),)
    )
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    for make in (make_channel, make_aio_channel):
        channel = make(ConnectionConfig.from_uri(f"unix://{path}"), 1)
        await asyncio.wait_for(ready(channel), 10)
        assert await ask(channel, request=json.dumps("a").encode()) == b'"a"'
        await close_channel(channel)
    await server.stop(None)


async def _echo(request: bytes, context: Any) -> bytes:
    return request
