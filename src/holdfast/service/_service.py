"""The service: its parts, the HTTP service behind them, and what shows them, wired into one tree.

::

    holdfast          rest_for_one, so that HTTP is stopped before what it shows
    ├─ postgres       says started() as soon as it is under way: HTTP then tells what is missing
    │  ├─ server      when it is embedded
    │  └─ watch
    └─ http
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from holdfast.kernel import Clock, HoldfastError, Recorder, StatusChange, StatusMonitor, Supervisor

from . import _http
from ._app import make_app
from ._config import Config
from ._database import database_part
from ._feed import Feed
from ._hub import Hub
from ._metrics import EventCounter, registry_of
from ._part import Part, Wiring
from ._view import Status, View, status_of

__all__ = ["Service", "address_of"]

ROOT = "holdfast"


class Service:
    """One running Holdfast: made on the loop that runs it, with sockets that listen already.

    `parts` are the systems that it mounts; PostgreSQL alone unless given. Use it as an async
    context manager: entering starts the tree, leaving stops it, HTTP first.
    """

    def __init__(
        self,
        config: Config,
        sockets: Sequence[socket.socket],
        *,
        say: Callable[[str], None] = lambda text: None,
        recorder: Recorder | None = None,
        parts: Sequence[Part] | None = None,
    ) -> None:
        clock = Clock.current()
        parts = [database_part(config)] if parts is None else parts
        #: Done when the service is active for the first time; fails when a part gives up.
        self.first_active: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Marked as seen: when a stop comes first, nobody waits for it any more.
        self.first_active.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.recorder = recorder or Recorder(clock=clock)
        self.monitor: StatusMonitor[Status] = StatusMonitor(
            [*(name for part in parts for name in part.conditions), _http.READY],
            status_of,
            name=f"{ROOT}/status",
            clock=clock,
            recorder=self.recorder,
        )
        self._say = say
        self._clock = clock
        self._wiring = Wiring(self.monitor, self.recorder, clock, say, self._give_up)
        children = [
            Supervisor.child(
                part.name,
                children=part.build(self._wiring),
                strategy=part.strategy,
                intensity=part.intensity,
            )
            for part in parts
        ]
        self.view = View(
            lambda: self.root.tree(),
            self.monitor,
            self.recorder,
            clock,
            machines=self._wiring.machines,
            address=address_of(config, sockets),
        )
        hub = Hub()
        self._feed = Feed(self.view, hub)
        self._counter = EventCounter()
        app = make_app(
            config,
            self.view,
            self._feed,
            registry_of(self.view, self._counter, hub),
            mounts={path: app for part in parts for path, app in part.mounts.items()},
        )
        http = _http.http_child(
            app, sockets, hub, self.monitor, access_log=config.log_level == "debug"
        )
        self.root = Supervisor(
            ROOT,
            strategy="rest_for_one",
            children=[*children, http],
            recorder=self.recorder,
            clock=clock,
        )
        self._inactive_since = clock.monotonic()

    async def __aenter__(self) -> Self:
        self._ignore_changes = self.monitor.subscribe(self._on_change)
        self._unsubscribe = (
            self.recorder.subscribe(self._counter),
            self.recorder.subscribe(self._feed.sink),
        )
        try:
            await self.root.start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stop()

    def force(self) -> None:
        """End what would outlive this process, at once."""
        for last_resort in self._wiring.last_resorts:
            last_resort()

    async def _stop(self) -> None:
        self._ignore_changes()  # what is lost from here on is lost on purpose
        try:
            await self.root.stop()
        finally:
            for unsubscribe in self._unsubscribe:
                unsubscribe()
            self._feed.close()

    def _give_up(self, error: HoldfastError) -> None:
        if not self.first_active.done():
            self.first_active.set_exception(error)

    def _on_change(self, change: StatusChange[Status]) -> None:
        now = self._clock.monotonic()
        if change.status == change.previous:
            return
        if change.status != "active":
            self._inactive_since = now
            self._say(f"not ready: {change.condition.name} is lost: {change.condition.detail}")
        elif not self.first_active.done():
            self.first_active.set_result(None)
        else:
            self._say(f"ready again after {now - self._inactive_since:.1f} s")

    def __repr__(self) -> str:
        return f"<Service at {self.view.address}: {self.view.status}>"


def address_of(config: Config, sockets: Sequence[socket.socket]) -> str:
    """Where the service is reached, as people type it."""
    port = sockets[0].getsockname()[1] if sockets else config.port
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{port}"
