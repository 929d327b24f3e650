"""Fixtures of the tests of the RPC managers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.logs import silent

from moored.rpc import _fork

from .servers import EchoServer


@pytest.fixture(scope="session")
def echo() -> Iterator[EchoServer]:
    """A running server that all tests share."""
    with EchoServer() as server:
        yield server


@pytest.fixture
def forkable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For simulations, which fork, and whose channels are scripted: there is no gRPC in them.

    A manager in a child refuses to work if a `grpc.aio` channel was open at the fork; one may be
    left from an earlier test until the garbage collector frees it. The log is silent: each
    simulated failure would write a line.
    """
    monkeypatch.setattr(_fork, "_polled", lambda: False)
    with silent("moored"):
        yield
