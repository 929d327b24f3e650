"""Fixtures of the tests of the RPC managers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.logs import silent

from .servers import EchoServer


@pytest.fixture(scope="session")
def echo() -> Iterator[EchoServer]:
    """A running server that all tests share."""
    with EchoServer() as server:
        yield server


@pytest.fixture
def forkable() -> Iterator[None]:
    """A silent log, for simulations: each simulated failure would write a line."""
    with silent("moored"):
        yield
