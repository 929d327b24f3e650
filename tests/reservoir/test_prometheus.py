"""The metrics of real pools, as Prometheus reads them."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import psycopg
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families
from tests.leases.virtual import in_virtual_time
from tests.reservoir.stand_in import (
    Journal,
    Server,
    SqlError,
    pool_of,
    reservoir,
    wait_until,
)

from moored.reservoir import (
    AsyncConnectionPool,
    ConnectionPool,
    PoolTimeout,
    Reservoir,
    ReservoirConfig,
)
from moored.reservoir._statistics import BUCKETS
from moored.reservoir.prometheus import ReservoirCollector
from moored.testing import Sim

Labels = dict[str, str]
ORDERS = {"service": "orders", "pool": "main"}


class Scrape:
    """What Prometheus gets, read back."""

    def __init__(self, collector: ReservoirCollector) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(collector)
        self.text = generate_latest(self.registry).decode()
        self.families = {found.name: found for found in text_string_to_metric_families(self.text)}

    def __call__(self, name: str, **labels: str) -> float | None:
        found = [
            sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == f"moored_reservoir_{name}" and sample.labels == labels
        ]
        assert len(found) <= 1, f"{name} has two values for one label set"
        return found[0] if found else None

    def kind(self, name: str) -> str:
        return str(self.families[f"moored_reservoir_{name}"].type)


def named(url: str, **more: Any) -> AsyncConnectionPool[psycopg.AsyncConnection[Any]]:
    return AsyncConnectionPool(url, **{"name": "main", "service": "orders", "max_size": 3, **more})


# -- the table of metrics, line by line ------------------------------------------------------------


async def test_line_1_size_is_a_gauge(postgres_url: str) -> None:
    async with named(postgres_url) as pool:
        await pool.wait()
        scrape = Scrape(ReservoirCollector(pool))
        assert scrape.kind("size") == "gauge"
        assert scrape("size", **ORDERS) == 3
        async with pool.connection():
            assert Scrape(ReservoirCollector(pool))("size", **ORDERS) == 2


async def test_line_2_checkouts_is_a_counter(postgres_url: str) -> None:
    async with named(postgres_url) as pool:
        await pool.wait()
        for _ in range(5):
            async with pool.connection() as conn:
                await conn.execute("select 1")
        scrape = Scrape(ReservoirCollector(pool))
        assert scrape.kind("checkouts") == "counter"
        assert scrape("checkouts_total", **ORDERS) == 5


async def test_line_3_empty_is_a_counter(postgres_url: str) -> None:
    async with named(postgres_url, max_size=1) as pool:
        await pool.wait()
        async with pool.connection():
            with pytest.raises(PoolTimeout):
                await pool.getconn(timeout=0.01)
        scrape = Scrape(ReservoirCollector(pool))
        assert scrape.kind("empty") == "counter"
        assert scrape("empty_total", **ORDERS) == 1


async def test_line_4_discards_is_a_counter_with_reasons(postgres_url: str) -> None:
    async with named(postgres_url) as pool:
        await pool.wait()
        with pytest.raises(psycopg.errors.AdminShutdown):
            async with pool.connection() as conn:
                await conn.execute("select pg_terminate_backend(pg_backend_pid())")
        await pool.wait()
        await pool.drain()
        scrape = Scrape(ReservoirCollector(pool))
        assert scrape.kind("discards") == "counter"
        assert scrape("discards_total", **ORDERS, reason="bad") == 1
        assert scrape("discards_total", **ORDERS, reason="drained") == 3
        # What has not happened yet is there as well, so that a rate sees its first event.
        assert scrape("discards_total", **ORDERS, reason="reservoir_full") == 0
        assert scrape("refill_failures_total", **ORDERS, reason="token") == 0
        assert scrape("discards_total", **ORDERS, reason="unknown") is None


async def test_line_5_refills_is_a_counter(postgres_url: str) -> None:
    async with named(postgres_url) as pool:
        await pool.wait()
        scrape = Scrape(ReservoirCollector(pool))
        assert scrape.kind("refills") == "counter"
        assert scrape("refills_total", **ORDERS) == 3


async def test_line_6_refill_failures_is_a_counter_with_reasons(postgres_url: str) -> None:
    def no_token() -> str:
        raise LookupError("no credentials")

    config = ReservoirConfig(max_size=1, start_stagger=0.0)
    async with named(postgres_url, config=config, max_size=1, tokens=no_token) as pool:
        with pytest.raises(PoolTimeout):
            await pool.getconn(timeout=0.2)
        scrape = Scrape(ReservoirCollector(pool))
        assert scrape.kind("refill_failures") == "counter"
        assert (scrape("refill_failures_total", **ORDERS, reason="token") or 0) >= 1


# -- the others ------------------------------------------------------------------------------------


async def test_the_latency_of_acquires_is_a_histogram(postgres_url: str) -> None:
    async with named(postgres_url, max_size=1) as pool:
        await pool.wait()
        async with pool.connection():
            waiting = asyncio.create_task(pool.getconn())
            await asyncio.sleep(0.15)
        await pool.putconn(await waiting)
        scrape = Scrape(ReservoirCollector(pool))
        assert scrape.kind("acquire_seconds") == "histogram"
        counts = [
            scrape("acquire_seconds_bucket", **ORDERS, le=str(end)) for end in [*BUCKETS, "+Inf"]
        ]
        assert set(counts[: BUCKETS.index(0.1) + 1]) == {1}
        assert counts[-1] == 2
        assert scrape("acquire_seconds_count", **ORDERS) == 2
        assert scrape("acquire_seconds_sum", **ORDERS) == pytest.approx(0.15, abs=0.5)
        assert (scrape("acquire_seconds_sum", **ORDERS) or 0) >= 0.1


@in_virtual_time
async def test_gauges_of_current_numbers(sim: Sim) -> None:
    journal = Journal()
    server = Server(journal)
    settings = {"max_size": 4, "target_ready": 3, "rate": 10.0, "burst": 8}
    async with (
        journal.leases() as leases,
        pool_of(server, leases=leases, name="main", service="orders", **settings) as pool,
    ):
        collector = ReservoirCollector(pool)
        await asyncio.sleep(0.005)
        assert Scrape(collector)("in_flight", **ORDERS) == 3
        await wait_until(lambda: pool.statistics().size == 3)
        server.error = SqlError("53300")
        conns = [await pool.getconn() for _ in range(3)]
        waiting = [asyncio.create_task(pool.getconn()) for _ in range(2)]
        await asyncio.sleep(0.5)
        scrape = Scrape(collector)
        assert scrape("waiting", **ORDERS) == 2
        assert scrape("in_use", **ORDERS) == 3
        assert scrape("target", **ORDERS) == 3
        assert scrape("leases_held", **ORDERS) == 3
        assert scrape("refill_failures_total", **ORDERS, reason="connect") == 1
        assert scrape("rate_tokens_left", **ORDERS) == pool.statistics().rate_tokens_left
        for name in ("waiting", "in_use", "target", "in_flight", "leases_held"):
            assert scrape.kind(name) == "gauge"
        assert scrape.kind("rate_tokens_left") == "gauge"
        for conn in conns:
            await pool.putconn(conn)
        for task in waiting:
            await pool.putconn(await task)


async def test_metrics_are_read_at_each_scrape(postgres_url: str) -> None:
    async with named(postgres_url) as pool:
        collector = ReservoirCollector(pool)
        registry = CollectorRegistry()
        registry.register(collector)
        await pool.wait()
        for number in range(3):
            value = registry.get_sample_value("moored_reservoir_checkouts_total", ORDERS)
            assert value == number
            async with pool.connection():
                pass


async def test_all_metrics_in_the_format_of_openmetrics(postgres_url: str) -> None:
    async with named(postgres_url) as pool:
        await pool.wait()
        registry = CollectorRegistry()
        registry.register(ReservoirCollector(pool))
        text = openmetrics.generate_latest(registry).decode()  # type: ignore[no-untyped-call]
        families = openmetrics_parser.text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
        found = {family.name for family in families}
    names = ["size", "target", "in_use", "in_flight", "waiting", "leases_held", "rate_tokens_left"]
    names += ["longest_wait_seconds", "silent_seconds"]
    names += ["checkouts", "empty", "refills", "discards", "refill_failures", "acquire_seconds"]
    names += ["refused", "timeouts"]
    assert found == {f"moored_reservoir_{name}" for name in names}


# -- which pools -----------------------------------------------------------------------------------


def test_a_pool_for_threads_and_a_reservoir(postgres_url: str) -> None:
    config = ReservoirConfig(max_size=2)
    water: Reservoir[Any] = Reservoir(postgres_url, config=config, name="water", service="orders")
    with ConnectionPool(postgres_url, max_size=1, name="threads", service="orders") as pool:
        pool.wait()
        scrape = Scrape(ReservoirCollector(pool, water))
        assert scrape("size", service="orders", pool="threads") == 1
        assert scrape("target", service="orders", pool="water") == 2


def two(**names: str) -> list[Reservoir[Any]]:
    return [
        reservoir(Server(), service=names.get("service", "orders")),
        reservoir(Server(), service=names.get("other", "orders")),
    ]


@in_virtual_time
async def test_pools_can_be_added_and_removed(sim: Sim) -> None:
    one, other = two(other="bills")
    collector = ReservoirCollector()
    assert Scrape(collector)("target", service="orders", pool="r") is None
    collector.add(one)
    collector.add(one)
    collector.add(other)
    scrape = Scrape(collector)
    assert scrape("target", service="orders", pool="r") == 1
    assert scrape("target", service="bills", pool="r") == 1
    collector.remove(one)
    collector.remove(one)
    scrape = Scrape(collector)
    assert scrape("target", service="orders", pool="r") is None
    assert scrape("target", service="bills", pool="r") == 1


@in_virtual_time
async def test_a_garbage_collected_pool_has_no_metrics(sim: Sim) -> None:
    (one, other) = two(other="bills")
    collector = ReservoirCollector(one, other)
    del one
    gc.collect()
    scrape = Scrape(collector)
    assert scrape("target", service="orders", pool="r") is None
    assert scrape("target", service="bills", pool="r") == 1


@in_virtual_time
async def test_two_pools_with_the_same_name_are_refused(sim: Sim) -> None:
    one, other = two()
    with pytest.raises(ValueError, match="two pools of orders are named r"):
        ReservoirCollector(one, other)


@in_virtual_time
async def test_a_new_pool_takes_the_place_of_a_closed_one(sim: Sim) -> None:
    one, other = two()
    collector = ReservoirCollector(one)
    async with one:
        await wait_until(lambda: one.statistics().size)
    collector.add(other)
    assert Scrape(collector)("refills_total", service="orders", pool="r") == 0


@in_virtual_time
async def test_two_collectors_of_one_registry_would_clash(sim: Sim) -> None:
    registry = CollectorRegistry()
    registry.register(ReservoirCollector())
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(ReservoirCollector())
