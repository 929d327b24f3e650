"""TLS through both managers, with an authority of the test's own."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

from holdfast.rpc import ConfigError, ConnectFailed, ConnectionConfig

from .handlers import ECHO, METADATA, PID
from .servers import EchoServer, make_authority
from .sides import LIMIT, SIDES, Aio, Threads

both = pytest.mark.parametrize("kind", SIDES, ids=lambda kind: kind.__name__)
Kind = type[Threads] | type[Aio]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_authority(tmp_path_factory.mktemp("authority"))


def config(server: EchoServer, ca: Path | None, **more: Any) -> ConnectionConfig:
    options = {"ca": ca, "server_name": "server.test", **more}
    return ConnectionConfig.from_uri(f"https://opensesame@{server.address}", **options)


@both
async def test_it_recovers_from_a_kill(kind: Kind, authority: Path) -> None:
    with EchoServer(tls=authority) as server:
        async with kind() as side:
            channel = await side.get(config(server, authority / "ca.pem"), timeout=LIMIT)
            assert b"opensesame" in await side.call(channel, METADATA)
            pid = await side.call(channel, PID)
            server.kill()
            with pytest.raises(grpc.RpcError):
                await side.call(channel, ECHO, b"", 5.0)
            waiting = [asyncio.create_task(side.call(channel, ECHO, b"hi")) for _ in range(10)]
            await asyncio.sleep(0.5)
            assert not any(each.done() for each in waiting)
            server.start()
            assert await asyncio.gather(*waiting) == [b"hi"] * 10
            assert channel.generation == 2
            assert await side.call(channel, PID) != pid


@both
async def test_a_wrong_authority_is_named_as_what_is_wrong(
    kind: Kind, authority: Path, tmp_path: Path
) -> None:
    stranger = make_authority(tmp_path)
    with EchoServer(tls=authority) as server:
        async with kind() as side:
            began = time.monotonic()
            with pytest.raises(ConnectFailed, match=r"(?i)certificate.verify.failed") as caught:
                await side.get(config(server, stranger / "ca.pem"), timeout=1.0)
            assert time.monotonic() - began < 3.0
            assert server.address in str(caught.value)
            assert "opensesame" not in str(caught.value)


@both
async def test_a_wrong_name_is_named_as_what_is_wrong(kind: Kind, authority: Path) -> None:
    with EchoServer(tls=authority) as server:
        async with kind() as side:
            wanted = config(server, authority / "ca.pem", server_name="other.test")
            with pytest.raises(ConnectFailed, match=r"(?i)name|peer"):
                await side.get(wanted, timeout=1.0)


@both
async def test_who_speaks_no_tls_is_not_reached(kind: Kind, authority: Path) -> None:
    with EchoServer(tls=authority) as server:
        async with kind() as side:
            with pytest.raises(ConnectFailed, match=server.address):
                await side.get(ConnectionConfig.from_uri(server.uri), timeout=1.0)


@both
async def test_an_authority_that_cannot_be_read_is_named(kind: Kind, tmp_path: Path) -> None:
    async with kind() as side:
        with pytest.raises(ConnectFailed, match="option ca cannot be read") as caught:
            await side.get(config(EchoServer(), tmp_path / "missing.pem"), timeout=0.5)
        assert isinstance(caught.value.__cause__, ConfigError)


@both
async def test_with_and_without_tls_are_two_connections(kind: Kind, authority: Path) -> None:
    with EchoServer(tls=authority) as server:
        async with kind() as side:
            secure = await side.get(config(server, authority / "ca.pem"), timeout=LIMIT)
            with pytest.raises(ConnectFailed):
                await side.get(
                    ConnectionConfig.from_uri(f"http://opensesame@{server.address}"), timeout=0.5
                )
            assert await side.call(secure, ECHO, b"hi") == b"hi"
