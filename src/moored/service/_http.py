"""The HTTP service as a supervised child: uvicorn on our loop, with our sockets and our signals."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator, Sequence

import uvicorn
from starlette.types import ASGIApp

from moored.kernel import Child, Context, StatusMonitor

from ._errors import ServiceError
from ._health import Status
from ._hub import Hub

__all__ = ["READY", "http_child"]

NAME = "http"
READY = "http_ready"
#: How long a request that is under way may take to end when the service stops.
GRACE = 2


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: the service has its own, and an order of stopping."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started
        self.servers = []

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Say when requests are taken."""
        await super().startup(sockets=sockets)
        self._on_started()

    def close(self) -> None:
        """Close what a shutdown that was cut short has left open."""
        for one in self.servers:
            one.close()


def http_child(
    app: ASGIApp,
    sockets: Sequence[socket.socket],
    hub: Hub,
    monitor: StatusMonitor[Status],
    *,
    access_log: bool = False,
) -> Child:
    """Serve the app on these sockets, which stay open from one start to the next."""

    async def run(ctx: Context) -> None:
        owner = asyncio.current_task()

        def started() -> None:
            ctx.started()
            monitor.set(READY, owner=owner)

        server = _Server(_settings(app, access_log), started)
        hub.open()
        # Uvicorn closes what it is given, so it is given copies.
        copies = [one.dup() for one in sockets]
        serving = asyncio.create_task(server.serve(copies), name=f"{ctx.path}: uvicorn")
        try:
            await asyncio.wait({serving})
        finally:
            hub.close()
            server.should_exit = True
            await _to_the_end(serving)
            server.close()
        serving.result()
        raise ServiceError("the HTTP server ended by itself")

    return Child(NAME, run, shutdown=GRACE + 5.0)


def _settings(app: ASGIApp, access_log: bool) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=access_log,
        server_header=False,
        timeout_graceful_shutdown=GRACE,
        # Whoever is in front is not to be believed about where a request comes from.
        proxy_headers=False,
    )


async def _to_the_end(serving: asyncio.Task[None]) -> None:
    """Wait for the end of the server; being cancelled meanwhile hurries it."""
    cancelled: asyncio.CancelledError | None = None
    while not serving.done():
        try:
            await asyncio.wait({serving})
        except asyncio.CancelledError as error:
            cancelled = error
            serving.cancel()
    if cancelled is not None:
        raise cancelled
