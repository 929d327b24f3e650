"""The HTTP server as a supervised child: uvicorn on the service's loop, sockets and signals."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator, Sequence

import uvicorn
from starlette.types import ASGIApp

from moored.kernel import Child, Context, StatusMonitor, patiently

from ._browser_streams import BrowserStreams
from ._connections import BACKLOG, MAX_HEAD, Connections, protocol_of
from ._errors import ServiceError
from ._health import Status

__all__ = ["READY", "http_child"]

NAME = "http"
READY = "http_ready"
#: Seconds that a request in flight may take while the service stops.
GRACE = 2


class _UvicornServer(uvicorn.Server):
    """Uvicorn without its signal handlers: the service has its own, and stops parts in order."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started
        self.servers = []

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Install no signal handlers."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept requests, then call `on_started`."""
        await super().startup(sockets=sockets)
        self._on_started()

    def close(self) -> None:
        """Close the listening sockets that an interrupted shutdown left open."""
        for one in self.servers:
            one.close()


def http_child(
    app: ASGIApp,
    sockets: Sequence[socket.socket],
    streams: BrowserStreams,
    monitor: StatusMonitor[Status],
    connections: Connections,
    *,
    access_log: bool = False,
) -> Child:
    """Serve the app on these sockets, which stay open from one start to the next."""

    async def run(ctx: Context) -> None:
        owner = asyncio.current_task()

        def started() -> None:
            ctx.started()
            monitor.set(READY, owner=owner)

        server = _UvicornServer(_settings(app, connections, access_log), started)
        streams.open()
        # Copies, because uvicorn closes its sockets.
        copies = [one.dup() for one in sockets]
        serving = asyncio.create_task(server.serve(copies), name=f"{ctx.path}: uvicorn")
        try:
            await asyncio.wait({serving})
        finally:
            streams.close()
            server.should_exit = True
            await patiently(serving, serving.cancel)
            server.close()
        serving.result()
        raise ServiceError("the HTTP server ended by itself")

    return Child(NAME, run, shutdown=GRACE + 5.0)


def _settings(app: ASGIApp, connections: Connections, access_log: bool) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol_of(connections),
        h11_max_incomplete_event_size=MAX_HEAD,
        backlog=BACKLOG,
        lifespan="off",
        log_config=None,
        access_log=access_log,
        server_header=False,
        timeout_graceful_shutdown=GRACE,
        # The client address in a proxy's headers is not trusted.
        proxy_headers=False,
    )
