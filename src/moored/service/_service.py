"""The service: its parts and HTTP in one supervision tree, with view, metrics and live page.

::

    moored          rest_for_one, so that HTTP is stopped before the parts that it shows
    ├─ postgres       calls started() when its start has begun: HTTP then shows what is missing
    │  ├─ server      if it is embedded
    │  └─ manager     with the tree of the connection manager below it
    └─ http
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Self

from moored.kernel import Clock, MooredError, Recorder, StatusChange, StatusMonitor, Supervisor

from . import _http
from ._app import make_app
from ._broker_part import broker_parts
from ._browser_streams import BrowserStreams
from ._config import Config
from ._connections import Connections, max_connections
from ._database import database_part
from ._health import HTTP, READY_STATES, PartHealth, Status
from ._live import Live
from ._metrics import EventCounter, registry_of
from ._part import Part, System, Wiring
from ._part_page import PartPages
from ._truth import Truth
from ._view import View

__all__ = ["Service", "address_of"]

ROOT = "moored"
#: The kinds of parts that keep their place while they wait.
KEEPING = ("stream", "consumer")


class Service:
    """The whole service; made on the event loop that runs it.

    With listening sockets it serves `asgi` itself; without any, another ASGI server must serve it.
    `parts` are the systems that it runs, by default only PostgreSQL. Use it as an async context
    manager: entering starts the tree, leaving stops it, HTTP first.
    """

    def __init__(
        self,
        config: Config,
        sockets: Sequence[socket.socket],
        *,
        say: Callable[[str], None] = lambda text: None,
        recorder: Recorder | None = None,
        parts: Sequence[Part] | None = None,
        name: str = ROOT,
    ) -> None:
        clock = Clock.current()
        parts = [database_part(config), *broker_parts(config)] if parts is None else parts
        #: Done when the service is ready for the first time; fails if a required part aborts the
        #: start.
        self.first_active = _future()
        #: Fails if a required part reports that the service cannot continue.
        self.failed = _future()
        self._has_been_ready = False
        self.recorder = recorder or Recorder(clock=clock)
        conditions = {part.name: part.conditions for part in parts}
        if sockets:
            conditions[_http.NAME] = (_http.READY,)
        self._part_health = PartHealth(conditions, [p.name for p in parts if not p.required])
        self.monitor: StatusMonitor[Status] = StatusMonitor(
            [each for names in conditions.values() for each in names],
            self._part_health.status,
            name=f"{name}/status",
            clock=clock,
            recorder=self.recorder,
        )
        self._say = say
        self._clock = clock
        systems: dict[str, System] = {}
        shown = [part for part in parts if part.shown]
        #: The judgement of all parts and servers, the incidents, and the words for them.
        self.truth = Truth(
            self._part_health,
            self.monitor,
            self.recorder,
            clock,
            ties={part.name: part.ties for part in shown},
            runs={server: part.name for part in shown for server in part.runs},
            systems=systems,
            keeping=[part.name for part in shown if part.kind in KEEPING],
            started=lambda: self._has_been_ready,
        )
        self._wiring = Wiring(
            self.monitor,
            self.recorder,
            clock,
            say,
            self._give_up,
            self._fail,
            self._health,
            self._until,
            systems=systems,
            truth=self.truth,
        )
        # One that is not required reports its health instead.
        optional = replace(self._wiring, give_up=_ignored, fail=_ignored)
        children = [
            Supervisor.child(
                part.name,
                children=part.build(self._wiring if part.required else optional),
                strategy=part.strategy,
                intensity=part.intensity,
            )
            for part in parts
        ]
        self.view = View(
            lambda: self.root.tree(),
            self.monitor,
            self._part_health,
            self.recorder,
            clock,
            machines=self._wiring.machines,
            systems=self._wiring.systems,
            started=lambda: self._has_been_ready,
            shared_truth=self.truth,
            address=address_of(config, sockets),
        )
        streams = BrowserStreams()
        #: Map, history and changes, for the page.
        self.live = Live(self.view, parts, self.truth, streams, name)
        pages = PartPages(self.view, self.live, parts)
        connections = Connections(max_connections(sum(part.streams for part in parts)))
        self._counter = EventCounter()
        self._wiring.collectors.append(self._wiring.links)
        #: The metrics of the service and of all its parts, as in `/metrics`.
        self.registry = registry_of(
            self.view, self._counter, streams, connections, self._wiring.collectors
        )
        #: The HTTP app, with the access checks.
        self.asgi = make_app(
            config,
            self.view,
            self.live,
            pages,
            self.registry,
            mounts={path: app for part in parts for path, app in part.mounts.items()},
            public={path: app for part in parts for path, app in part.public.items()},
        )
        if sockets:
            debug = config.log_level == "debug"
            http = (self.asgi, sockets, streams, self.monitor, connections)
            children.append(_http.http_child(*http, access_log=debug))
        self._streams = streams
        self.root = Supervisor(
            name,
            strategy="rest_for_one",
            children=children,
            recorder=self.recorder,
            clock=clock,
        )

    async def __aenter__(self) -> Self:
        self._ignore_changes = self.monitor.subscribe(self._on_change)
        self._unsubscribe = (
            self.recorder.subscribe(self._counter),
            self.recorder.subscribe(self.live.sink),
        )
        self.truth.subscribe(self.live.changed)
        self.truth.start()
        self.live.start()
        try:
            await self.root.start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    def force(self) -> None:
        """Kill the processes that would outlive this one, without waiting."""
        for last_resort in self._wiring.last_resorts:
            last_resort()

    async def drain(self) -> None:
        """End the streams of all clients: a web server waits for them before it stops an app."""
        self._streams.close()
        await asyncio.gather(*(call() for call in self._wiring.before_stop))

    async def _stop(self) -> None:
        self._ignore_changes()  # conditions that the stop clears are not reported
        self.truth.stop()
        try:
            await self.drain()
            await self.root.stop()
        finally:
            for unsubscribe in self._unsubscribe:
                unsubscribe()
            self.live.close()

    async def _until(self, parts: Sequence[str], states: Collection[Status]) -> Status:
        def now() -> Status:
            return self._part_health.worst_of(parts, self.monitor.conditions())

        await self.monitor.wait_until(lambda _: now() in states)
        return now()

    def _give_up(self, error: MooredError) -> None:
        if not self.first_active.done():
            self.first_active.set_exception(error)

    def _fail(self, error: MooredError) -> None:
        self._give_up(error)
        if not self.failed.done():
            self.failed.set_exception(error)

    def _health(self, part: str, state: Status, detail: str) -> None:
        if state not in HTTP:
            raise ValueError(f"{state!r} is no health: report {', '.join(HTTP)}")
        before = self._part_health.states(self.monitor.conditions())[part]
        self._part_health.report(part, state, self._clock.monotonic())
        # The detail contains the state: a condition with an unchanged detail notifies no one.
        text = detail if state == "active" else ": ".join(filter(None, (state, detail)))
        for name in self._part_health.conditions(part):
            if state in READY_STATES:
                self.monitor.set(name, owner="nobody", detail=text)
            else:
                self.monitor.clear(name, text)
        self.truth.report(part, before, state, detail)
        if state != before:
            self.live.changed()

    def _on_change(self, change: StatusChange[Status]) -> None:
        detail = change.condition.detail
        is_ready, was_ready = change.status in READY_STATES, change.previous in READY_STATES
        if is_ready and not self._has_been_ready:
            self._has_been_ready = True
            if not self.first_active.done():
                self.first_active.set_result(None)
        elif was_ready and not is_ready:
            self._say(f"not ready: {change.condition.name} is lost: {detail}")
        elif is_ready and not was_ready:
            self._say("ready again")
        elif is_ready and change.status != change.previous:
            why = (detail or "").removeprefix(change.status).removeprefix(": ")
            self._say(": ".join(filter(None, (f"{change.status} now", why))))

    def __repr__(self) -> str:
        return f"<Service at {self.view.address}: {self.view.status}>"


def _ignored(error: MooredError) -> None: ...


def _future() -> asyncio.Future[None]:
    made: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    # Mark an error as retrieved: after a stop, no task waits for it.
    made.add_done_callback(lambda done: done.cancelled() or done.exception())
    return made


def address_of(config: Config, sockets: Sequence[socket.socket]) -> str:
    """Return the URL of the service."""
    port = sockets[0].getsockname()[1] if sockets else config.port
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{port}"
