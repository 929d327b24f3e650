"""Fixtures of the tests of sessions: a demo server, and sessions with a short backoff."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, settings

from moored.kernel import Backoff
from moored.sessions import Sessions
from moored.testing.demo import DemoServer

# On a busy machine, hypothesis's time limits fail tests for no reason.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture
def server() -> DemoServer:
    return DemoServer()


@pytest.fixture
async def sessions() -> AsyncIterator[Sessions]:
    """Sessions that reconnect almost immediately."""
    async with Sessions(backoff=Backoff(0.01, 0.05)) as opened:
        yield opened
