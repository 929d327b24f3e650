"""What the tests of the RPC manager share: one server that no test harms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .servers import EchoServer


@pytest.fixture(scope="session")
def echo() -> Iterator[EchoServer]:
    """A running server, for tests that leave it alone."""
    with EchoServer() as server:
        yield server
