"""The collectors for Prometheus as observable instruments."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Protocol

from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation, get_meter

from moored._version import __version__

if TYPE_CHECKING:
    from moored.kernel.prometheus import Metric

__all__ = ["export_metrics"]

#: The ends of the names of a metric's samples, by the type of the metric.
SUFFIXES = {
    "counter": ("_total",),
    "histogram": ("_bucket", "_sum", "_count"),
    "info": ("_info",),
}
GAUGES = ("gauge", "info", "unknown")
#: Seconds that an export waits for an event loop.
TIMEOUT = 5.0


class MetricSource(Protocol):
    """A Prometheus registry, or one collector."""

    def collect(self) -> Iterable[Metric]:
        """Return the metrics with their current values."""


def export_metrics(source: MetricSource, meter_provider: MeterProvider | None = None) -> None:
    """Export the metrics of a Prometheus registry or collector, with the same names and labels.

    Call it once, when the source has all its metrics: for an app, after its start, with
    `app.service.registry`. The source is read when the SDK exports; if there is a running event
    loop now, it is read on that loop. A histogram becomes counters (`_bucket`, `_sum`, `_count`).
    """
    families = list(source.collect())
    kinds = {
        family.name + suffix: family
        for family in families
        for suffix in SUFFIXES.get(family.type, ("",))
    }
    scrapes = _Scrapes(source, list(kinds))
    meter = get_meter("moored", __version__, meter_provider)
    for name, family in kinds.items():
        is_gauge = family.type in GAUGES
        create = meter.create_observable_gauge if is_gauge else meter.create_observable_counter
        read = partial(scrapes.observe, name)
        create(name, callbacks=[read], description=family.documentation)


class _Scrapes:
    """Reads the source once for each export, which calls back for each instrument."""

    def __init__(self, source: MetricSource, names: list[str]) -> None:
        self._source = source
        self._names = names
        self._lock = threading.Lock()
        # What the instruments have not read yet of the last scrape.
        self._unread: dict[str, list[Observation]] = {}
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None

    def observe(self, name: str, _: CallbackOptions) -> Iterable[Observation]:
        """Return the samples of one instrument."""
        with self._lock:
            if name not in self._unread:
                found = self._read()
                self._unread = {each: found.get(each, []) for each in self._names}
            return self._unread.pop(name)

    def _read(self) -> Mapping[str, list[Observation]]:
        loop = self._loop
        if loop is None or _is_running_here(loop):
            return self._collect()
        done: Future[Mapping[str, list[Observation]]] = Future()
        try:
            loop.call_soon_threadsafe(self._collect_for, done)
            return done.result(TIMEOUT)
        except (RuntimeError, TimeoutError):
            return {}  # the loop is closed, or blocked

    def _collect_for(self, done: Future[Mapping[str, list[Observation]]]) -> None:
        try:
            done.set_result(self._collect())
        except Exception as error:
            done.set_exception(error)

    def _collect(self) -> Mapping[str, list[Observation]]:
        found: defaultdict[str, list[Observation]] = defaultdict(list)
        for family in self._source.collect():
            for sample in family.samples:
                found[sample.name].append(Observation(sample.value, sample.labels))
        return found


def _is_running_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
