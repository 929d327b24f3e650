"""What tests of sessions share: a server that misbehaves on request, and sessions in a hurry."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, settings

from moored.kernel import Backoff
from moored.sessions import Sessions
from moored.testing.demo import DemoServer

# On a busy machine, the time that a pure test takes says nothing about it.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture
def server() -> DemoServer:
    return DemoServer()


@pytest.fixture
async def sessions() -> AsyncIterator[Sessions]:
    """They come back at once, so that tests need not wait."""
    async with Sessions(backoff=Backoff(0.01, 0.05)) as opened:
        yield opened
