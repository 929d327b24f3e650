"""The metrics of an app, as the SDK of OpenTelemetry exports them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint, Sum
from prometheus_client import CollectorRegistry, Gauge

from moored.app import App, ComponentContext
from moored.kernel.prometheus import Metric, counter
from moored.otel import export_metrics
from moored.service import Config

Points = dict[str, list[NumberDataPoint]]


def points(reader: InMemoryMetricReader) -> Points:
    """Export, and return the data points by metric."""
    data = reader.get_metrics_data()
    if data is None:
        return {}
    (resource,) = data.resource_metrics
    (scope,) = resource.scope_metrics
    return {each.name: list(each.data.data_points) for each in scope.metrics}  # type: ignore[arg-type]


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


@pytest.fixture
def provider(reader: InMemoryMetricReader) -> Iterator[MeterProvider]:
    made = MeterProvider([reader])
    yield made
    made.shutdown()


class Requests:
    """A collector with a counter, which counts how often it is read."""

    def __init__(self) -> None:
        self.reads = 0

    def collect(self) -> Iterator[Metric]:
        self.reads += 1
        labels: Any = ("code",)
        yield counter("requests", "Requests.", labels, [(("200",), 7.0), (("500",), 1.0)])
        yield counter("failures", "Failures.", (), [])


def test_a_counter_keeps_its_name_labels_and_values(
    reader: InMemoryMetricReader, provider: MeterProvider
) -> None:
    source = Requests()
    export_metrics(source, provider)
    for export in range(2, 5):
        found = points(reader)["requests_total"]
        values = {each.attributes["code"]: each.value for each in found if each.attributes}
        assert values == {"200": 7.0, "500": 1.0}
        assert source.reads == export  # once for each export, however many metrics there are


def test_counters_are_monotonic(reader: InMemoryMetricReader, provider: MeterProvider) -> None:
    export_metrics(Requests(), provider)
    data = reader.get_metrics_data()
    assert data is not None
    (metric,) = data.resource_metrics[0].scope_metrics[0].metrics
    assert isinstance(metric.data, Sum)
    assert metric.data.is_monotonic
    assert metric.description == "Requests."


async def test_all_metrics_of_an_app_are_exported_from_another_thread(
    reader: InMemoryMetricReader, provider: MeterProvider
) -> None:
    app = App("orders", config=Config())
    app.pool("postgresql://app@127.0.0.1:9/orders", name="db", required=False)

    @app.component
    async def importer(ctx: ComponentContext) -> None:
        await asyncio.Event().wait()

    async with app:
        assert app.service is not None
        export_metrics(app.service.registry, provider)
        await app.ready(30)
        found = await asyncio.to_thread(points, reader)
        (active,) = found["moored_active"]
        assert active.value == 1.0
        (size,) = found["moored_reservoir_size"]
        assert size.attributes is not None
        assert size.attributes["pool"] == "db"
        assert "moored_reservoir_acquire_seconds_bucket" in found
        assert "moored_child_restarts_total" in found
        assert points(reader)["moored_active"][0].value == 1.0  # also on the loop itself


def test_after_the_end_of_its_loop_nothing_is_exported(
    reader: InMemoryMetricReader, provider: MeterProvider
) -> None:
    registry = CollectorRegistry()
    Gauge("lamp", "A lamp.", registry=registry).set(1)

    async def begin() -> None:
        export_metrics(registry, provider)
        assert points(reader)["lamp"][0].value == 1.0

    asyncio.run(begin())
    assert points(reader) == {}
