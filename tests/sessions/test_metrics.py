"""The Prometheus metrics of sessions: all counters, and no names of accounts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from tests.sessions.support import until

from moored.kernel import Backoff
from moored.kernel.prometheus import LinksCollector
from moored.sessions import Sessions, Text
from moored.sessions.prometheus import _COUNTERS, SessionsCollector
from moored.testing.demo import Demo, DemoServer


def scrape(collector: Collector) -> tuple[str, dict[tuple[str, ...], float]]:
    registry = CollectorRegistry()
    registry.register(collector)
    text = generate_latest(registry).decode()
    return text, {
        (
            sample.name.removeprefix("moored_").removeprefix("sessions_"),
            *_labels(sample.labels),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def _labels(labels: dict[str, str]) -> list[str]:
    return [labels[name] for name in ("protocol", "name", "state", "outcome") if name in labels]


async def test_metrics_are_labelled_by_protocol_and_outlive_their_session() -> None:
    server = DemoServer()
    async with Sessions(backoff=Backoff(0.01, 0.05)) as sessions:
        collector = SessionsCollector(sessions)
        ann = await sessions.connect("very-secret-ann", Demo(server), on_event=lambda event: None)
        await sessions.connect("very-secret-ben", Demo(server))
        for _ in range(3):
            await ann.send("very-secret-recipient", Text("very secret"))
        server.reject("very-secret-recipient", 463)
        await ann.send("very-secret-recipient", b"", outcome=True)
        server.cut("very-secret-ann")
        await until(lambda: ann.generation == 2)
        await ann.online(30)
        server.deliver("very-secret-ann", Text("very secret"))
        await until(lambda: ann.status()["received"])
        text, found = scrape(collector)
        assert found["sends_total", "demo", "acked"] == 3
        assert found["sends_total", "demo", "rejected"] == 1
        assert found["reconnects_total", "demo"] == 1
        assert found["received_total", "demo"] == 1
        assert found["sending", "demo"] == 0
        assert {(f"{name}_total", "demo") for name in _COUNTERS} <= set(found)
        assert "very" not in text
        await sessions.stop(ann)
        text, after = scrape(collector)
        assert after["sends_total", "demo", "acked"] == 3
        collector.remove(sessions)
        assert scrape(collector)[1] == {}


async def test_links_are_counted_by_protocol_and_state() -> None:
    server = DemoServer()
    async with Sessions(backoff=Backoff(60.0, 60.0)) as sessions:
        links = LinksCollector(sessions)
        ann = await sessions.connect("very-secret-ann", Demo(server))
        await sessions.connect("very-secret-ben", Demo(server))
        assert scrape(links)[1]["links", "demo", "up"] == 2
        await ann.disconnect()
        server.cut("very-secret-ben")
        await until(lambda: scrape(links)[1]["links", "demo", "down/waiting"] == 1)
        text, found = scrape(links)
        assert found["links", "demo", "off/resting"] == 1
        assert found["links", "demo", "up"] == found["links", "demo", "off/refused"] == 0
        assert "very" not in text
        await sessions.stop(ann)
        assert sum(scrape(links)[1].values()) == 1
