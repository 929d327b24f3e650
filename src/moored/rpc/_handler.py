"""The channels that users hold: they stay valid while the connections below them are replaced.

Generated stubs and `grpc.intercept_channel` accept them. A handler has no state of its own: its
`Gate` lets calls begin, and its `Endpoint` knows the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, Generic, NoReturn, TypeVar

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from moored.kernel import first_of

from ._channel_pool import Connectivity
from ._endpoint import Endpoint
from ._errors import uncopied
from ._gate import AsyncGate, BaseGate, Gate
from .calls._kinds import FourKinds
from .calls._methods import async_method, thread_method

__all__ = ["AsyncHandler", "Handler"]

G = TypeVar("G", bound=BaseGate)


class _Handler(FourKinds, Generic[G]):
    """What both handlers show."""

    def __init__(self, gate: G) -> None:
        #: Where its calls begin; for the manager.
        self.gate = gate

    @property
    def endpoint(self) -> Endpoint:
        """The state of its connection."""
        return self.gate.endpoint

    @property
    def generation(self) -> int:
        """The number of the current connection; 0 while there is none."""
        live = self.endpoint.live
        return 0 if live is None else live.number

    @property
    def address(self) -> str:
        """The address of the current, or else of the last, connection."""
        return self.endpoint.address

    @property
    def calls(self) -> int:
        """The number of calls in flight, also over replaced connections."""
        return self.gate.calls

    def __reduce__(self) -> NoReturn:
        raise uncopied(self)

    def __repr__(self) -> str:
        endpoint = self.endpoint
        state = f"generation {self.generation}" if self.generation else "no connection"
        state = "asleep" if endpoint.resting else "closed" if endpoint.closed else state
        return f"<{type(self).__name__} to {self.address}: {state}, {self.calls} calls>"


class Handler(_Handler[Gate], grpc.Channel):  # type: ignore[misc]
    """A channel over the current connection of a manager, for threads."""

    def _method(self, kind: str, *given: Any, **named: Any) -> Any:
        return thread_method(self.gate, kind, *given, **named)

    def subscribe(self, callback: Connectivity, try_to_connect: bool | None = False) -> None:
        """Add a connectivity callback, for the current connection and for those that follow it."""
        self.gate.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Connectivity) -> None:
        """Remove a connectivity callback."""
        self.gate.unsubscribe(callback)

    def close(self) -> None:
        """Release the channel: a shared one stays open for its other clients."""
        self.gate.background.release(self.gate, None)

    def __enter__(self) -> Handler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncHandler(_Handler[AsyncGate], grpc.aio.Channel):  # type: ignore[misc]
    """A channel over the current connection of a manager, for one event loop."""

    def _method(self, kind: str, *given: Any, **named: Any) -> Any:
        return async_method(self.gate, kind, *given, **named)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the state of the connection: CONNECTING while there is none, IDLE if asleep."""
        if self.endpoint.closed:
            return grpc.ChannelConnectivity.SHUTDOWN
        if self.endpoint.resting:
            if not try_to_connect:
                return grpc.ChannelConnectivity.IDLE
            self.gate.tell(self.endpoint.connect)
        if (live := self.gate.live) is None:
            return grpc.ChannelConnectivity.CONNECTING
        return live.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until `get_state` differs, also because the connection was replaced."""
        while self.get_state() is last_observed_state:
            waits: list[Awaitable[Any]] = [asyncio.shield(self.gate.changed)]
            if (live := self.gate.live) is not None:
                waits.append(live.channel.wait_for_state_change(last_observed_state))
            with suppress(Exception):  # the channel may be closed meanwhile
                await first_of(*waits)

    async def channel_ready(self) -> None:
        """Wait until there is a connection."""
        while True:
            state = self.get_state(try_to_connect=True)
            if state is grpc.ChannelConnectivity.READY:
                return
            if self.endpoint.closed:
                raise self.gate.closed_error()
            await self.wait_for_state_change(state)

    async def close(self, grace: float | None = None) -> None:
        """Release the channel: a shared one stays open for its other clients."""
        endpoint = self.endpoint
        if not endpoint.closed:
            self.gate.background.release(self.gate, None)
        if endpoint.closed:
            await self.gate.until(lambda: not endpoint.old, None)

    async def __aenter__(self) -> AsyncHandler:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
