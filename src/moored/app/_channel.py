"""A gRPC channel as a part of an app."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio  # type: ignore[import-untyped]

from moored.kernel import Clock, Link, Machine, Recorder, Tasks, Tree
from moored.rpc import AsyncConnectionManager, AsyncHandler, ChannelError
from moored.rpc._any_loop import AnyLoopChannel
from moored.rpc._open import config_of
from moored.rpc.prometheus import RpcCollector
from moored.service import Part

from ._parts import Judgement, PartEntry, Shown, system_part

READY = grpc.ChannelConnectivity.READY

__all__ = ["AppChannel", "channel_part"]


class AppChannel(AnyLoopChannel):
    """A `grpc.aio.Channel` that can be given to stubs before the app has started.

    Calls wait for the connection within their timeouts. It closes with the app.
    """

    def __init__(self, target: str, tls: bool, options: dict[str, Any]) -> None:
        super().__init__(config_of(target, tls, options))
        #: The channel of the running app.
        self.live: AsyncHandler | None = None
        #: Calls so far.
        self.calls = 0

    @property
    def current(self) -> AsyncHandler:
        """The channel of the running app."""
        if self.live is None:
            raise ChannelError(
                f"the channel to {self.config.address} is closed: its app does not run"
            )
        return self.live

    def link_machines(self) -> list[tuple[str, str, Machine]]:
        """Return the state machine of its connection, for `LinksCollector`."""
        if self.live is None:
            return []
        return [("rpc", self.config.address, self.live.endpoint.machine)]

    def _method(self, kind: str, *given: Any, **named: Any) -> Callable[..., Any]:
        method = super()._method(kind, *given, **named)

        def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            return method(*args, **options)

        return call

    async def close(self, grace: float | None = None) -> None:
        """Do nothing: the app closes it."""


async def _keep_connected(manager: AsyncConnectionManager, handler: AsyncHandler) -> None:
    """Report a lost connection to the manager, which reconnects, even if no call is made."""
    lost = grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(*lost, details="the connection was lost")
    while True:
        generation, state = handler.generation, handler.get_state()
        if state not in (READY, grpc.ChannelConnectivity.CONNECTING):
            await manager.handle_error(handler, error, generation=generation)
        await handler.wait_for_state_change(state)


def channel_part(entry: PartEntry, channel: AppChannel, recorder: Recorder) -> Part:
    """Return a part that keeps a channel connected."""
    collector = RpcCollector()
    address = channel.config.address
    manager: AsyncConnectionManager | None = None

    def connection() -> dict[str, Any]:
        found = [] if manager is None else manager.get_stats()["connections"]
        return {**(found[0] if found else {}), "calls": channel.calls}

    def tree() -> Tree:
        return Tree("rpc", "stopped", 0.0) if manager is None else manager.tree()

    @asynccontextmanager
    async def running() -> AsyncIterator[None]:
        nonlocal manager
        async with AsyncConnectionManager(recorder=recorder) as manager:
            collector.add(manager)
            channel.live = handler = manager.open_channel(channel.config, channel)
            handler.get_state(try_to_connect=True)
            watching = Tasks()
            watching.start(_keep_connected(manager, handler))
            try:
                yield
            finally:
                channel.live = None
                collector.remove(manager)
                await watching.cancel()

    heard_at: float | None = None

    def links() -> list[Link]:
        nonlocal heard_at
        if channel.live is None:
            return []
        state = channel.get_state()
        if state is READY:
            heard_at = Clock.current().monotonic()
        idle = state in (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.SHUTDOWN)
        if state is READY:
            return [Link(address, True, heard_at, kind="gRPC server")]
        if idle or heard_at is None:
            return [Link(address, None, heard_at, kind="gRPC server")]
        return [Link(address, False, heard_at, "the connection is lost", kind="gRPC server")]

    def judge() -> Judgement:
        if channel.get_state() is READY:
            return "active", f"connected to {connection()['address']}"
        return "starting", f"connecting to {address}"

    return system_part(
        entry,
        "channel",
        running,
        Shown(
            connection,
            lambda: recorder.explain(f"rpc.{address}"),
            tree,
            links=links,
            fact=lambda: "connected",
        ),
        judge,
        collector=lambda: collector,
        links=channel,
        kind="channel",
        ties=[address],
        server="gRPC server",
    )
