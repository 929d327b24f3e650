"""Fixtures of the tests of sessions: a demo server, and sessions with a short backoff."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from moored.kernel import Backoff
from moored.sessions import Sessions
from moored.testing.demo import DemoServer


@pytest.fixture
def server() -> DemoServer:
    return DemoServer()


@pytest.fixture
async def sessions() -> AsyncIterator[Sessions]:
    """Sessions that reconnect almost immediately."""
    async with Sessions(backoff=Backoff(0.01, 0.05)) as opened:
        yield opened
