"""A DNS name with several addresses: connections spread over them, and avoid dead ones."""

from __future__ import annotations

import asyncio
import socket
from random import Random
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest

from moored.rpc import ConnectionConfig, DnsTopology, Member, Topology, TopologyError
from moored.rpc.topology._topology import Advice, TopologyMixin, address_of, pick

from .handlers import ECHO
from .servers import EchoServer
from .sides import LIMIT, Aio, Kind, both
from .test_live_servers import Reader

ONE, TWO = Member("one", "http://one:1"), Member("two", "http://two:1")
EQUAL = Topology(1, (ONE, TWO), equal=True)


def test_equal_members_are_chosen_at_random_and_failed_ones_avoided() -> None:
    chance = Random(1)
    assert {pick(EQUAL, chance=chance) for _ in range(50)} == {ONE, TWO}
    for _ in range(20):
        assert pick(EQUAL, chance=chance, avoid={"one:1"}) is TWO
    assert {pick(EQUAL, chance=chance, avoid={"one:1", "two:1"}) for _ in range(50)} == {ONE, TWO}
    assert pick(EQUAL) is ONE
    ordered = Topology(1, (ONE, TWO))
    assert pick(ordered, chance=chance, avoid={"one:1"}) is ONE, (
        "an ordered topology must use its primary"
    )
    with pytest.raises(TopologyError, match="no primary"):
        pick(Topology(1, (Member("r", "http://r:1", 1),), equal=True))


def test_connection_stays_with_any_equal_member() -> None:
    known = TopologyMixin()
    known.accept(EQUAL)
    for member in (ONE, TWO):
        assert known.advise(address_of(member)) is Advice.RECONNECT
    assert known.advise("three:1") is Advice.MOVE


def dns(server: EchoServer, *addresses: str) -> dict[str, Any]:
    """Return the options of a manager for a name with these addresses."""
    return {"fetch_topology": DnsTopology("orders", server.port, resolve=lambda *_: addresses)}


@both
async def test_refusing_address_does_not_block_connections(kind: Kind) -> None:
    """Each connection tries the dead address first or second."""
    with EchoServer(host="127.0.0.2") as server:
        config = ConnectionConfig.from_uri(f"http://orders:{server.port}")
        async with kind(**dns(server, "127.0.0.1", "127.0.0.2")) as side:
            for _ in range(6):
                channel = await side.get(config, dedicated=True, timeout=LIMIT)
                assert await side.call(channel, ECHO, b"a") == b"a"
                assert channel.address == server.address


@both
async def test_connections_spread_over_the_addresses(kind: Kind) -> None:
    first = EchoServer(host="127.0.0.1")
    second = EchoServer(host="127.0.0.2", port=first.port)
    with first, second:
        config = ConnectionConfig.from_uri(f"http://orders:{first.port}")
        async with kind(**dns(first, "127.0.0.1", "127.0.0.2")) as side:
            used: set[str] = set()
            for _ in range(40):  # by chance, so with only one of them once in 10^12 runs
                used.add((await side.get(config, dedicated=True, timeout=LIMIT)).address)
                if len(used) == 2:
                    break
            assert used == {first.address, second.address}


@both
async def test_killed_address_is_replaced_by_the_other(kind: Kind) -> None:
    first = EchoServer(host="127.0.0.1")
    second = EchoServer(host="127.0.0.2", port=first.port)
    servers = {each.address: each for each in (first, second)}
    with first, second:
        config = ConnectionConfig.from_uri(f"http://orders:{first.port}")
        async with kind(**dns(first, "127.0.0.1", "127.0.0.2")) as side:
            channel = await side.get(config, timeout=LIMIT)
            used = channel.address
            servers[used].kill()
            async with asyncio.timeout(LIMIT):
                while channel.address == used:
                    try:
                        await side.call(channel, ECHO, b"a")
                    except grpc.RpcError:
                        await asyncio.sleep(0.01)
            assert await side.call(channel, ECHO, b"a") == b"a"


@both
async def test_stream_continues_when_its_channel_is_renewed_at_another_address(
    kind: Kind,
) -> None:
    first = EchoServer(host="127.0.0.1")
    second = EchoServer(host="127.0.0.2", port=first.port)
    with first, second:
        config = ConnectionConfig.from_uri(f"http://orders:{first.port}")
        options = dns(first, "127.0.0.1", "127.0.0.2")
        async with kind(grace=0.1, max_age=0.2, **options) as side:
            channel = await side.get(config, timeout=LIMIT)
            reader = Reader(side, channel)
            addresses, read = {channel.address}, 0
            while len(addresses) < 2 or read < 60:
                assert await reader.read() == str(read).encode()
                addresses.add(channel.address)
                read += 1
            reader.cancel()


async def test_silent_address_leaves_time_for_the_other() -> None:
    with EchoServer(host="127.0.0.2") as server, socket.socket() as silent:
        silent.bind(("127.0.0.1", server.port))
        silent.listen()
        config = ConnectionConfig.from_uri(f"http://orders:{server.port}")
        options = dns(server, "127.0.0.1", "127.0.0.2")
        async with Aio(connect_timeout=8.0, **options) as side:
            channels = await asyncio.gather(*[side.get(config, dedicated=True) for _ in range(4)])
            assert {channel.address for channel in channels} == {server.address}
