"""A gRPC channel as a part of an app."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio  # type: ignore[import-untyped]

from moored.kernel import Clock, Link, Recorder, Tasks, Tree
from moored.rpc import AsyncConnectionManager, AsyncHandler, ChannelError
from moored.rpc._open import config_of
from moored.rpc.prometheus import RpcCollector
from moored.service import Part

from ._parts import Judgement, PartEntry, Shown, system_part

READY = grpc.ChannelConnectivity.READY

__all__ = ["AppChannel", "channel_part"]


class AppChannel(grpc.aio.Channel):  # type: ignore[misc]
    """A `grpc.aio.Channel` that can be given to stubs before the app has started.

    Calls wait for the connection within their timeouts. It closes with the app.
    """

    def __init__(self, target: str, tls: bool, options: dict[str, Any]) -> None:
        self.config = config_of(target, tls, options)
        self._live: grpc.aio.Channel | None = None
        #: Calls so far.
        self.calls = 0

    @property
    def live(self) -> grpc.aio.Channel:
        """The channel of the running app."""
        if self._live is None:
            raise ChannelError(
                f"the channel to {self.config.address} is closed: its app does not run"
            )
        return self._live

    def _method(self, kind: str, *given: Any, **named: Any) -> Callable[..., Any]:
        made: tuple[grpc.aio.Channel, Callable[..., Any]] | None = None

        def call(*args: Any, **options: Any) -> Any:
            nonlocal made
            self.calls += 1
            if made is None or made[0] is not self._live:
                made = self.live, getattr(self.live, kind)(*given, **named)
            return made[1](*args, **options)

        return call

    def unary_unary(self, *given: Any, **named: Any) -> Callable[..., Any]:
        """Return a method with one request and one response."""
        return self._method("unary_unary", *given, **named)

    def unary_stream(self, *given: Any, **named: Any) -> Callable[..., Any]:
        """Return a method with one request and a stream of responses."""
        return self._method("unary_stream", *given, **named)

    def stream_unary(self, *given: Any, **named: Any) -> Callable[..., Any]:
        """Return a method with a stream of requests and one response."""
        return self._method("stream_unary", *given, **named)

    def stream_stream(self, *given: Any, **named: Any) -> Callable[..., Any]:
        """Return a method with a stream of requests and a stream of responses."""
        return self._method("stream_stream", *given, **named)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the state of the connection."""
        return self.live.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until `get_state` differs."""
        await self.live.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until there is a connection."""
        await self.live.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        """Do nothing: the app closes it."""

    async def __aenter__(self) -> AppChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


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
            channel._live = handler = manager.open_channel(channel.config, channel)
            watching = Tasks()
            watching.start(_keep_connected(manager, handler))
            try:
                yield
            finally:
                channel._live = None
                collector.remove(manager)
                await watching.cancel()

    heard_at: float | None = None

    def links() -> list[Link]:
        nonlocal heard_at
        if channel._live is None:
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
        kind="channel",
        ties=[address],
        server="gRPC server",
    )
