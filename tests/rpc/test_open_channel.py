"""`rpc.channel()` and `rpc.aio.channel()`: a channel by its address, with or without TLS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

from moored import rpc
from moored.rpc._open import config_of

from .handlers import ECHO
from .servers import EchoServer, make_authority
from .sides import LIMIT


@pytest.fixture(autouse=True)
def own_instance() -> Iterator[None]:
    """Close the manager of the process after each test."""
    yield
    rpc.ConnectionManager.get_instance().close()


def test_channel_opens_an_address(echo: EchoServer) -> None:
    channel = rpc.channel(echo.address, connect=True, timeout=LIMIT)
    assert isinstance(channel, grpc.Channel)
    assert channel.unary_unary(ECHO)(b"a", timeout=LIMIT) == b"a"
    assert rpc.channel(f"http://{echo.address}") is channel


async def test_aio_channel_opens_an_address(echo: EchoServer) -> None:
    channel = await rpc.aio.channel(echo.address, connect=True, timeout=LIMIT)
    assert isinstance(channel, grpc.aio.Channel)
    assert await channel.unary_unary(ECHO)(b"a", timeout=LIMIT) == b"a"
    assert await rpc.aio.channel(echo.address, connect=True) is channel
    await rpc.AsyncConnectionManager.get_instance().close()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.mark.parametrize("own", [False, True])
def test_channel_with_tls_argument_is_encrypted(authority: Path, own: bool) -> None:
    ca = (authority / "ca.pem").read_bytes()
    with EchoServer(tls=authority) as server:
        options: dict[str, Any] = {"tls": True, "ca": ca}
        if own:
            options = {"tls": grpc.ssl_channel_credentials(ca)}
        channel = rpc.channel(
            server.address, server_name="server.test", connect=True, timeout=LIMIT, **options
        )
        assert channel.unary_unary(ECHO)(b"a", timeout=LIMIT) == b"a"
        assert rpc.channel(server.address, server_name="server.test", **options) is channel


@pytest.mark.parametrize("own", [False, True])
async def test_aio_channel_with_tls_argument_is_encrypted(authority: Path, own: bool) -> None:
    ca = (authority / "ca.pem").read_bytes()
    with EchoServer(tls=authority) as server:
        options: dict[str, Any] = {"tls": True, "ca": ca}
        if own:
            options = {"tls": grpc.ssl_channel_credentials(ca)}
        options["server_name"] = "server.test"
        channel = await rpc.aio.channel(server.address, connect=True, timeout=LIMIT, **options)
        assert await channel.unary_unary(ECHO)(b"a", timeout=LIMIT) == b"a"
        await rpc.AsyncConnectionManager.get_instance().close()


@pytest.mark.parametrize(
    ("target", "tls", "address", "secure"),
    [
        ("greeter:50051", False, "greeter:50051", False),
        ("greeter:50051", True, "greeter:50051", True),
        ("greeter", False, "greeter:80", False),
        ("greeter", True, "greeter:443", True),
        ("http://greeter", True, "greeter:80", True),
        ("https://greeter", False, "greeter:443", True),
        ("[::1]:50051", False, "[::1]:50051", False),
        ("unix:/run/app.sock", False, "unix:/run/app.sock", False),
        ("greeter:50051", grpc.ssl_channel_credentials(), "greeter:50051", True),
    ],
)
def test_target_and_tls_decide_address_and_encryption(
    target: str, tls: Any, address: str, secure: bool
) -> None:
    config = config_of(target, tls, {})
    assert (config.address, config.secure) == (address, secure)


def test_invalid_target_or_tls_is_refused() -> None:
    with pytest.raises(rpc.ConfigError, match=r"tls must be True, False or grpc.ChannelCredential"):
        config_of("greeter:1", "yes", {})
    with pytest.raises(rpc.ConfigError, match="must be a str, not int"):
        config_of(50051, False, {})  # type: ignore[arg-type]
