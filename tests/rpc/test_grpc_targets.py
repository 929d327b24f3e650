"""Targets that gRPC resolves itself: names, lists of addresses, sockets."""

from __future__ import annotations

from contextlib import suppress

import grpc  # type: ignore[import-untyped]
import pytest

from moored.rpc import ConfigError, ConnectionConfig
from moored.rpc._dial import channel_options
from moored.rpc._open import config_of

from .handlers import ECHO, PID
from .servers import EchoServer
from .sides import LIMIT, Kind, both

pytestmark = pytest.mark.every_loop


@both
async def test_calls_are_spread_over_the_addresses_of_a_target(kind: Kind) -> None:
    with EchoServer() as one, EchoServer() as other:
        target = f"ipv4:{one.address},{other.address}"
        config = ConnectionConfig.from_uri(target, policy="round_robin")
        async with kind() as side:
            channel = await side.get(config, timeout=LIMIT)
            seen: set[int] = set()
            while len(seen) < 2:  # the second connection may be made later
                seen.add(int(await side.call(channel, PID)))
            assert seen == {one.pid, other.pid}
            assert channel.generation == 1


@both
async def test_target_whose_servers_all_restart_is_connected_again(kind: Kind) -> None:
    with EchoServer() as one, EchoServer() as other:
        config = ConnectionConfig.from_uri(f"ipv4:{one.address},{other.address}")
        async with kind() as side:
            channel = await side.get(config, timeout=LIMIT)
            assert await side.call(channel, ECHO, b"a") == b"a"
            one.kill()
            other.kill()
            other.start()
            answer = b""
            while not answer:  # a call that finds the loss fails
                with suppress(grpc.RpcError):
                    answer = await side.call(channel, ECHO, b"b")
            assert answer == b"b"


@both
async def test_name_is_resolved_by_grpc(kind: Kind, echo: EchoServer) -> None:
    async with kind() as side:
        config = config_of(f"dns:///localhost:{echo.port}", False, {})
        channel = await side.get(config, timeout=LIMIT)
        assert await side.call(channel, ECHO, b"a") == b"a"
        assert channel.address == f"dns:///localhost:{echo.port}"


@pytest.mark.parametrize(
    "target",
    [
        *("dns:///greeter:50051", "dns:greeter", "ipv4:10.0.0.1:1,10.0.0.2:1", "ipv6:[::1]:1"),
        *("unix:/run/app.sock", "unix-abstract:app", "xds:///greeter"),
    ],
)
def test_target_is_passed_on_as_it_is(target: str) -> None:
    config = config_of(target, False, {"token": "secret"})
    assert (config.address, config.path, config.token) == (target, "", "secret")
    assert not config.secure
    assert config_of(target, True, {}).secure


@pytest.mark.parametrize("target", ["dns:", "dns:///", "ipv4:", "unix://", "xds:///"])
def test_target_without_a_server_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="names no"):
        ConnectionConfig.from_uri(target)


def test_policy_is_part_of_what_is_shared() -> None:
    plain = ConnectionConfig.from_uri("dns:///greeter:1")
    spread = ConnectionConfig.from_uri("dns:///greeter:1", policy="round_robin")
    assert plain.key != spread.key
    assert ("grpc.lb_policy_name", "round_robin") in channel_options(spread, 1)
    assert "grpc.lb_policy_name" not in dict(channel_options(plain, 1))
