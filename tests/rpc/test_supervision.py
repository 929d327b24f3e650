"""The background work of both managers is supervised, and its restarts are visible."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from moored.kernel import Tree
from moored.rpc import ConnectionConfig, ManagedConnection

from .servers import EchoServer
from .sides import LIMIT, Kind, both, config_of


async def reaches(found: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT):
        while not found():  # noqa: ASYNC110 - no notification
            await asyncio.sleep(0.005)


def states(tree: Tree) -> dict[str, str]:
    return {path: node.state for path, node in tree.paths()}


@both
async def test_sweeper_and_topologies_are_in_the_tree(kind: Kind, echo: EchoServer) -> None:
    async with kind(fetch_topology=lambda: [echo.uri]) as side:
        assert side.manager.tree().state == "new"
        await side.get(ConnectionConfig.from_uri("http://orders"), timeout=LIMIT)
        topology = "rpc/rpc.orders:80.topology.refresher"
        expected = {"rpc", "rpc/sweeper", topology, f"{topology}/refresh"}
        await reaches(lambda: states(side.manager.tree()) == dict.fromkeys(expected, "running"))
    assert states(side.manager.tree()) == {"rpc": "stopped", "rpc/sweeper": "stopped"}


@both
async def test_sweeper_that_fails_is_restarted(
    kind: Kind, echo: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept, failures = ManagedConnection.swept, [OSError("once")]

    def failing(self: ManagedConnection, *given: Any) -> Any:
        if failures:
            raise failures.pop()
        return swept(self, *given)

    monkeypatch.setattr(ManagedConnection, "swept", failing)
    async with kind(linger=0.1) as side:
        channel = await side.get(config_of(echo), timeout=LIMIT)
        await side.run(side.manager.release, channel)
        await reaches(lambda: not side.manager.get_stats()["total_connections"])
        (sweeper,) = side.manager.tree().children
        assert (sweeper.state, sweeper.restarts) == ("running", 1)
        assert sweeper.last_failure == "once (OSError)"
