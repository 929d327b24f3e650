"""The base class of collectors: sources are added and removed, and name clashes are detected."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from moored.kernel.prometheus import Metric, SourceCollector, counter, gauge

pytestmark = pytest.mark.pure


class Source:
    def __init__(self, name: str, value: float) -> None:
        self.name = name
        self.value = value


class SourcesCollector(SourceCollector[Source]):
    def families(self, sources: Sequence[Source]) -> Iterator[Metric]:
        samples = [((source.name,), source.value) for source in sources]
        yield gauge("now", "Now.", ("name",), samples)
        yield counter("ever", "Ever.", ("name",), samples)


def scrape(collector: SourcesCollector) -> list[str]:
    registry = CollectorRegistry()
    registry.register(collector)
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if not line.startswith("#"))


def test_sources_are_read_at_each_scrape() -> None:
    a, b = Source("a", 1), Source("b", 2)
    collector = SourcesCollector(a)
    assert scrape(collector) == ['ever_total{name="a"} 1.0', 'now{name="a"} 1.0']
    a.value = 3
    collector.add(b)
    assert scrape(collector)[2:] == ['now{name="a"} 3.0', 'now{name="b"} 2.0']
    collector.remove(a)
    collector.remove(a)
    assert scrape(collector) == ['ever_total{name="b"} 2.0', 'now{name="b"} 2.0']


def test_a_collected_source_disappears() -> None:
    a = Source("a", 1)
    collector = SourcesCollector(a)
    del a
    gc.collect()
    assert scrape(collector) == []


def test_a_registry_refuses_two_collectors_of_the_same_names_before_they_have_sources() -> None:
    registry = CollectorRegistry()
    registry.register(SourcesCollector())
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(SourcesCollector())
