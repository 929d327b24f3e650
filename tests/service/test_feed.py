"""How often the state is sent to the open pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.kernel.fake_clock import FakeClock

from moored.kernel import Recorder
from moored.service._browser_streams import BrowserStreams
from moored.service._feed import PAUSE, SETTLE, Feed

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(("took", "pause"), [(0.0, SETTLE), (0.3, 0.3 * PAUSE)])
async def test_a_state_that_takes_long_to_make_is_made_less_often(
    took: float, pause: float
) -> None:
    clock = FakeClock()

    def as_dict() -> dict[str, Any]:
        clock.advance(took)
        return {}

    feed = Feed(SimpleNamespace(clock=clock, as_dict=as_dict), BrowserStreams())  # type: ignore[arg-type]
    try:
        assert feed.join() is not None
        feed._publish(Recorder(clock=clock).record("db", "a connection was lost"))
        assert feed._timers.at("state") == pytest.approx(clock.monotonic() + pause)
    finally:
        feed.close()
