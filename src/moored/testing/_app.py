"""Run an app in a test, and fail if it leaves something behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ._errors import AppLeaked

if TYPE_CHECKING:
    from moored.app import App

__all__ = ["running_app"]

#: Seconds that the transports of a closed app may take to disappear.
SETTLE = 5.0


@asynccontextmanager
async def running_app(app: App, *, timeout: float = 60.0) -> AsyncIterator[App]:
    """Start an app, wait until it is ready, and stop it after the block.

    Raises `AppLeaked` if tasks or sockets are left. As a fixture::

        @pytest_asyncio.fixture
        async def app():
            async with running_app(make_app()) as app:
                yield app

    :param timeout: the seconds within which it must be ready; the error names what is missing.
    """
    tasks, sockets = asyncio.all_tasks(), _sockets()
    async with app:
        await app.ready(timeout)
        yield app
    deadline = asyncio.get_running_loop().time() + SETTLE
    while left := _left(tasks, sockets):
        if asyncio.get_running_loop().time() > deadline:
            raise AppLeaked(f"{app.name} has stopped and left {'; '.join(left)}")
        await asyncio.sleep(0.01)


def _left(tasks: set[asyncio.Task[object]], sockets: set[str]) -> list[str]:
    left = [f"the task {task.get_name()}" for task in asyncio.all_tasks() - tasks]
    return left + [f"the open {name}" for name in sorted(_sockets() - sockets)]


def _sockets() -> set[str]:
    """Return the open sockets of this process, where the system lists them."""
    found = set()
    for path in Path("/proc/self/fd").glob("*"):
        try:
            name = os.readlink(path)
        except OSError:
            continue  # closed meanwhile
        if name.startswith("socket:"):
            found.add(name)
    return found
