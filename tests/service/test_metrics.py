"""Events are counted with a bounded number of time series."""

from __future__ import annotations

import pytest

from moored.kernel import Recorder
from moored.service._metrics import OTHERS, EventCounter

pytestmark = pytest.mark.pure


def test_events_are_counted_by_component_and_kind() -> None:
    recorder, counter = Recorder(), EventCounter()
    recorder.subscribe(counter)
    recorder.record("db", "lost", kind="failure")
    recorder.record("db", "lost", kind="failure")
    recorder.record("db", "found")
    assert counter.counts() == {("db", "failure"): 2, ("db", "info"): 1}


def test_components_beyond_the_limit_are_counted_as_others() -> None:
    recorder, counter = Recorder(), EventCounter(max_components=2)
    recorder.subscribe(counter)
    for number in range(5):
        recorder.record(f"account {number}", "up")
    recorder.record("account 0", "up")
    assert counter.counts() == {
        ("account 0", "info"): 2,
        ("account 1", "info"): 1,
        (OTHERS, "info"): 3,
    }
