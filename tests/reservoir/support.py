"""Helpers of the tests of the pools."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from urllib.parse import urlsplit, urlunsplit

from moored.testing import FaultProxy

__all__ = ["PATIENCE", "eventually", "eventually_async", "through"]

#: How long anything may take that is certain to come.
PATIENCE = 10.0


def through(proxy: FaultProxy, url: str) -> str:
    """The same URL, through a proxy."""
    parts = urlsplit(url)
    who = parts.netloc.rpartition("@")[0]
    return urlunsplit(parts._replace(netloc=f"{who}@{proxy.host}:{proxy.port}"))


def eventually(condition: Callable[[], object]) -> None:
    """Poll until a condition holds."""
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends, "it did not come in time"
        time.sleep(0.001)


async def eventually_async(condition: Callable[[], object]) -> None:
    """Poll until a condition holds, under asyncio."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.001)
