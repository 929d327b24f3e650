"""Each transition leaves an event with its cause and is counted; the metrics for Prometheus."""

from __future__ import annotations

import asyncio
import gc
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from moored.kernel import Event
from moored.kernel.prometheus import LinksCollector
from moored.rpc import ConnectFailed, ConnectionConfig, ConnectionManager, Member, Topology
from moored.rpc._counters import Counters
from moored.rpc.prometheus import _COUNTERS, RpcCollector

from .handlers import ECHO, loss_noticed_async, report_broken
from .servers import EchoServer
from .sides import LIMIT, SIDES, Aio, Threads

both = pytest.mark.parametrize("kind", SIDES, ids=lambda kind: kind.__name__)
Kind = type[Threads] | type[Aio]
Side = Threads | Aio
SECRET = "opensesame-7531"


class Client:
    """A client object, for `client=`."""


class Scrape:
    """The metrics of a collector, parsed."""

    def __init__(
        self, collector: RpcCollector | LinksCollector, prefix: str = "moored_rpc_"
    ) -> None:
        self._prefix = prefix
        registry = CollectorRegistry()
        registry.register(collector)
        self.text = generate_latest(registry).decode()
        self._samples = [
            sample
            for family in text_string_to_metric_families(self.text)
            for sample in family.samples
        ]

    def __call__(self, name: str, /, **labels: str) -> float | None:
        found = [
            sample.value
            for sample in self._samples
            if sample.name == f"{self._prefix}{name}" and sample.labels == labels
        ]
        assert len(found) <= 1, f"{name} has two values for one label set"
        return found[0] if found else None


def config(server: EchoServer) -> ConnectionConfig:
    return ConnectionConfig.from_uri(f"http://{SECRET}@{server.address}")


def counters(side: Side) -> dict[str, int]:
    found: dict[str, int] = side.manager.get_stats()["counters"]
    return found


def events(side: Side, server: EchoServer) -> list[Event]:
    return side.manager.recorder.events(f"rpc.{server.address}")


def recorded(side: Side, server: EchoServer) -> list[tuple[str, str]]:
    """Return the events of a connection as pairs of text and cause."""
    return [(each.text, each.because[0] if each.because else "") for each in events(side, server)]


async def until(holds: Any) -> None:
    async with asyncio.timeout(LIMIT):
        while not holds():  # noqa: ASYNC110 - no notification
            await asyncio.sleep(0.01)


async def fails(side: Side, channel: Any, timeout: float = 5.0) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        await side.call(channel, ECHO, b"", timeout)
    return caught.value.code()


async def loses(side: Side, channel: Any) -> grpc.StatusCode:
    """Fail a call, and wait until the loss of the connection is noticed."""
    with pytest.raises(grpc.RpcError) as caught:
        await side.call(channel, ECHO, b"", 5.0)
    await loss_noticed_async(channel)
    return caught.value.code()


# -- events ----------------------------------------------------------------------------------------


@both
async def test_outage_is_recorded_step_by_step(kind: Kind) -> None:
    with EchoServer() as server:
        async with kind() as side:
            channel = await side.get(config(server))
            assert recorded(side, server) == [
                ("at off / resting", ""),
                ("at connecting / dialing", "a caller needs it"),
                ("at up / serving", "generation 1 is connected"),
            ]
            server.kill()
            assert await loses(side, channel) is grpc.StatusCode.UNAVAILABLE
            unsent = [fails(side, channel, 0.5) for _ in range(5)]
            assert set(await asyncio.gather(*unsent)) == {grpc.StatusCode.DEADLINE_EXCEEDED}
            server.start()
            assert await side.call(channel, ECHO, b"hello") == b"hello"
        events = recorded(side, server)[3:]
        texts = [text for text, _ in events]
        assert texts[0] in ("at down / waiting", "at connecting / dialing")
        assert texts[-2:] == ["at up / serving", "at off / stopped"]
        assert texts.count("calls are not sent: no connection within their timeout") == 1
        assert all(why for _, why in events), "an event has no cause"
        assert events[-2:] == [
            ("at up / serving", "generation 2 is connected"),
            ("at off / stopped", "everything is closed"),
        ]
        now = counters(side)
        assert (now["connects"], now["recoveries"], now["calls_unsent"]) == (2, 1, 5)
        assert now["calls_waited"] >= 5
        assert now["connect_failures"] >= 1


@both
async def test_probes_are_recorded(kind: Kind) -> None:
    healthy = True
    with EchoServer() as server:
        async with kind(idle=0.1, probe=lambda channel: healthy) as side:
            await side.get(config(server))
            for healthy in (True, False):  # noqa: B007 - the probe looks at it
                await asyncio.sleep(0.2)
                await side.get(config(server), timeout=LIMIT)
        assert ("at up / probing", "it was idle for too long") in recorded(side, server)
        assert ("at up / serving", "the server answers") in recorded(side, server)
        causes = [why for _, why in recorded(side, server)]
        assert "the server did not answer the probe" in causes
        now = counters(side)
        assert (now["probes_healthy"], now["probes_unhealthy"]) == (1, 1)
        assert (now["recoveries"], now["connects"]) == (1, 2)


@both
async def test_renewal_and_idle_close_are_recorded(kind: Kind, echo: EchoServer) -> None:
    async with kind(max_age=0.3, linger=1.0) as side:
        client = Client()
        channel = await side.get(config(echo), client=client)
        await until(lambda: channel.generation >= 2)
        del client
        gc.collect()
        await until(lambda: side.manager.get_stats()["total_connections"] == 0)
        assert ("at up / renewing", "the channel is old") in recorded(side, echo)
        await until(lambda: recorded(side, echo)[-1] == ("at off / resting", "no client uses it"))
        now = counters(side)
        assert now["renewals"] == now["connects"] - 1 >= 1
        assert now["recoveries"] == 0


@both
async def test_refresh_of_credentials_is_recorded(kind: Kind) -> None:
    class Provider:
        token = "old"

        def metadata(self) -> Any:
            return (("authorization", self.token),)

        def refresh(self) -> None:
            self.token = SECRET

    with EchoServer(token=SECRET) as server:
        async with kind(credentials=lambda config: Provider()) as side:
            channel = await side.get(config(server))
            assert await fails(side, channel) is grpc.StatusCode.UNAUTHENTICATED
            await until(lambda: counters(side)["credential_refreshes"] == 1)
            assert recorded(side, server)[-1] == (
                "the credentials were refreshed",
                "the server refused the previous ones",
            )


@both
async def test_move_of_the_primary_is_recorded(kind: Kind) -> None:
    with EchoServer() as north, EchoServer() as south:
        version, primary = 1, north

        def topology() -> Topology:
            members = [
                Member(each.address, each.uri, 3 if each is primary else 1)
                for each in (north, south)
            ]
            return Topology(version, tuple(members))

        async with kind(fetch_topology=topology) as side:
            channel = await side.get(config(north))
            version, primary = 2, south
            (managed,) = side.manager._table
            managed.strategy._refresher.trigger()
            await until(lambda: channel.address == south.address and channel.generation)
            assert await side.call(channel, ECHO, b"hello") == b"hello"
            now = counters(side)
            assert (now["moves"], now["topology_fetches"]) == (1, 2)
            assert now["topology_fetch_failures"] == 0
            scrape = Scrape(RpcCollector(side.manager))
            assert scrape("moves_total", address=north.address) == 1.0
            assert scrape("topology_fetches_total", address=north.address) == 2.0
        causes = [why for _, why in recorded(side, north)]
        assert "version 2 of the topology has another primary" in causes
        moves = [each for each in recorded(side, north) if each[0].startswith("moved")]
        assert moves == [
            (f"moved to {south.address}", f"it was connected to {north.address} before")
        ]
        events = side.manager.recorder.events(f"rpc.{north.address}.topology")
        known = [each.text for each in events if each.kind == "info"]
        assert known[:2] == [
            "version 1 of the topology is known",
            "version 2 of the topology is known",
        ]


@both
async def test_restart_is_not_a_move_and_failed_topology_fetches_are_counted(kind: Kind) -> None:
    with EchoServer() as server:
        away = False

        def topology() -> Topology:
            if away:
                raise OSError("away")
            return Topology(1, (Member(server.address, server.uri),))

        async with kind(fetch_topology=topology) as side:
            channel = await side.get(config(server))
            away = True
            server.kill()
            await loses(side, channel)
            server.start()
            assert await side.call(channel, ECHO, b"hello") == b"hello"
            now = counters(side)
            assert (now["moves"], now["topology_fetches"], now["connects"]) == (0, 1, 2)
            assert now["topology_fetch_failures"] >= 1
            scrape = Scrape(RpcCollector(side.manager))
            assert (scrape("topology_fetch_failures_total", address=server.address) or 0) >= 1


@both
async def test_error_of_an_old_generation_is_counted_and_changes_nothing(
    kind: Kind, echo: EchoServer
) -> None:
    async with kind(max_age=0.3) as side:
        channel = await side.get(config(echo))
        await until(lambda: channel.generation >= 2)
        old = grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata()
        )
        report_broken(channel, old, 1)
        now = counters(side)
        assert (now["stale_errors"], now["recoveries"]) == (1, 0)


@both
async def test_token_is_shown_nowhere(kind: Kind) -> None:
    with EchoServer() as server:
        async with kind() as side:
            channel = await side.get(config(server))
            await side.call(channel, ECHO)
            server.kill()
            await fails(side, channel)
            shown = [
                Scrape(RpcCollector(side.manager)).text,
                str(side.manager.get_stats()),
                str([each.as_dict() for each in side.manager.recorder.events()]),
                side.manager.recorder.explain(f"rpc.{server.address}"),
                repr(side.manager) + repr(channel) + repr(channel.endpoint),
            ]
            for text in shown:
                assert SECRET not in text
            (line,) = side.manager.get_stats()["connections"]
            digest = line["key"].partition("|")[2]
            assert digest
            assert digest not in shown[0]


# -- statistics and metrics ------------------------------------------------------------------------


@both
async def test_statistics_have_the_documented_keys(kind: Kind, echo: EchoServer) -> None:
    async with kind() as side:
        await side.get(config(echo))
        found = side.manager.get_stats()
        assert list(found) == [
            *("total_connections", "shared_connections", "dedicated_connections"),
            *("connections", "counters"),
        ]
        assert list(found["connections"][0]) == [
            *("key", "address", "age", "idle_time"),
            *("client_count", "dedicated", "generation", "state"),
        ]
        assert found["counters"] == {**asdict(Counters()), "connects": 1}


@both
async def test_metrics_sum_several_managers(kind: Kind, echo: EchoServer) -> None:
    async with kind() as side, kind() as other:
        client = Client()
        channel = await side.get(config(echo), client=client)
        await other.get(config(echo))
        await side.get(config(echo), dedicated=True)
        collector = RpcCollector(side.manager)
        collector.add(other.manager)
        sleeping = asyncio.create_task(side.call(channel, "/test.Echo/Sleep", b"0.5"))
        await until(lambda: channel.calls == 1)
        scrape = Scrape(collector)
        here = {"address": echo.address}
        links = Scrape(LinksCollector(side.manager, other.manager), "moored_")
        assert links("links", system="rpc", name=echo.address, state="up/serving") == 3.0
        assert scrape("clients", **here) == 3.0
        assert scrape("calls", **here) == 1.0
        assert scrape("waiting", **here) == 0.0
        assert scrape("connects_total", **here) == 3.0
        assert scrape("probes_total", **here, outcome="healthy") == 0.0
        for name in _COUNTERS:
            assert scrape(f"{name}_total", **here) is not None
        await sleeping
        collector.remove(other.manager)
        collector.remove(other.manager)
        assert Scrape(collector)("connects_total", **here) == 2.0


async def test_every_counter_is_a_metric_and_documented() -> None:
    probes = {"probes_healthy", "probes_unhealthy"}
    assert set(_COUNTERS) | probes == set(asdict(Counters()))
    page = (Path(__file__).parents[2] / "docs" / "topics" / "rpc.md").read_text()
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| `(\w+)", page, re.MULTILINE)
    named = {name for names, _ in rows for name in re.findall(r"\w+", names)}
    assert named == set(asdict(Counters()))
    metrics = {f"moored_rpc_{name}_total" for name in (*_COUNTERS, "probes")}
    assert {metric for _, metric in rows} == metrics


@both
async def test_failed_connects_are_counted(kind: Kind) -> None:
    server = EchoServer()
    async with kind() as side:
        with pytest.raises(ConnectFailed):
            await side.get(config(server), timeout=2.0)
        scrape = Scrape(RpcCollector(side.manager))
        assert (scrape("connect_failures_total", address=server.address) or 0) >= 1
        assert scrape("connects_total", address=server.address) == 0.0


def test_garbage_collected_manager_has_no_metrics() -> None:
    manager = ConnectionManager()
    collector = RpcCollector(manager)
    manager._table.counters["there:1"] = Counters(connects=1)
    assert "there:1" in Scrape(collector).text
    del manager
    gc.collect()
    assert "there:1" not in Scrape(collector).text


def test_second_collector_in_one_registry_is_refused() -> None:
    registry = CollectorRegistry()
    registry.register(RpcCollector())
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(RpcCollector())
