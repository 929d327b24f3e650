"""Real managers whose channels a test feeds, one by one, so that it decides what happens when.

An attempt to connect waits until it is fed: the URI of a server, a channel, or an error. What the
two harnesses do is the same; `AsyncHarness` is awaited.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Self, TypeVar

import grpc  # type: ignore[import-untyped]

from moored.kernel import Clock, LoopThread
from moored.rpc import (
    AsyncConnectionManager,
    AsyncHandler,
    ConnectionConfig,
    ConnectionManager,
    Handler,
)
from moored.rpc._dial import make_aio_channel, make_channel
from moored.rpc._endpoint import PAUSES, Endpoint, Live
from moored.rpc._strategies import ConnectionStrategy

from .handlers import report_broken

__all__ = ["ADDRESS", "AsyncHarness", "FakeAioChannel", "FakeChannel", "Harness"]

H = TypeVar("H", Handler, AsyncHandler)
#: The address of the connection, and of fed channels to no server.
ADDRESS = "north:1"
LIMIT = 10.0

_numbers = itertools.count(1)


class FakeChannel:
    """A channel to no server that counts how often it is closed."""

    def __init__(self, *, connected: bool = True) -> None:
        self.closed = 0
        states = grpc.ChannelConnectivity
        self._state = states.READY if connected else states.IDLE

    def get_state(self) -> grpc.ChannelConnectivity:
        return self._state

    def close(self) -> Any:
        self.closed += 1


class FakeAioChannel(FakeChannel):
    """The same for asyncio."""

    async def close(self, grace: float | None = None) -> None:
        super().close()


class Leaping(Clock):
    """The system's clock, with leaps."""

    def __init__(self) -> None:
        self.ahead = 0.0
        super().__init__(lambda: time.monotonic() + self.ahead)


class _Feed(ConnectionStrategy):
    """Makes the channels that it is fed; while there is none, the attempt waits."""

    always_recovers = True

    def __init__(self) -> None:
        self.queue: asyncio.Queue[tuple[Any, str]] = asyncio.Queue()

    async def create_handler(self, config: ConnectionConfig) -> Any:
        channel, self.address = await self.queue.get()
        if isinstance(channel, BaseException):
            raise channel
        return channel

    async def on_unavailable(self, managed: Any) -> bool:
        return True

    def close(self, managed: Any) -> None:
        pass


class _Harness(Generic[H]):
    """What both harnesses have: a manager, and a handler that rests until it is called or fed.

    :param credentials: the credentials of the connection; the other options are the manager's.
    """

    _manager_type: ClassVar[Callable[..., Any]]
    _make_channel: ClassVar[Callable[[ConnectionConfig, int], Any]]

    def __init__(self, *, credentials: Any = None, **options: Any) -> None:
        self.clock = Leaping()
        self._strategy = _Feed()
        self.manager = self._manager_type(
            strategy=lambda config: self._strategy,
            credentials=lambda config: credentials,
            clock=self.clock,
            **options,
        )
        config = ConnectionConfig.from_uri(f"http://{ADDRESS}")
        self.handler: H = self.manager.open_channel(config)
        #: The errors of calls that were reported, each with its generation.
        self.reported: list[tuple[Any, int]] = []
        self._report = self.handler.gate.background.call_failed
        self.handler.gate.background.call_failed = self._call_failed  # type: ignore[method-assign]

    def _call_failed(self, endpoint: Endpoint, error: Any, live: Live, credential: int) -> None:
        self.reported.append((error, live.number))
        self._report(endpoint, error, live, credential)

    @property
    def endpoint(self) -> Endpoint:
        return self.handler.endpoint

    @property
    def live(self) -> Live:
        """The current generation."""
        assert self.endpoint.live is not None
        return self.endpoint.live

    def _fed(self, channel: Any, address: str | None) -> tuple[Any, str]:
        if not isinstance(channel, str):
            return channel, address or ADDRESS
        config = ConnectionConfig.from_uri(channel)
        made = type(self)._make_channel(config, next(_numbers))
        return made, address or config.address

    def _ask(self) -> None:
        """Make the manager connect, or connect again, as soon as it is fed."""
        self.clock.ahead += PAUSES.proven
        if self.handler.gate.live is not None:
            assert self.manager.renew(self.handler)
        else:
            self.handler.gate.tell(self.endpoint.connect)

    def _break(self, error: BaseException | None) -> None:
        self.clock.ahead += PAUSES.proven  # it connects again at once
        report_broken(self.handler, error or OSError("lost"), self.handler.generation)

    def _leap(self, seconds: float) -> None:
        self.clock.ahead += seconds
        background = self.handler.gate.background
        background.tell(self.endpoint, lambda now: [])  # sets the timer anew
        background.sweep()


class Harness(_Harness[Handler]):
    """For threads."""

    _manager_type, _make_channel = ConnectionManager, make_channel

    def feed(self, channel: Any, address: str | None = None) -> None:
        """Give the current or next attempt to connect a URI, a channel or an error."""
        LoopThread.shared().run(self._strategy.queue.put(self._fed(channel, address)))

    def swap(self, channel: Any, address: str | None = None) -> Live:
        """Connect, or replace the connection; return the new generation."""
        before = self.handler.gate.live
        self._ask()
        self.feed(channel, address)
        assert self.handler.gate.await_change(before, LIMIT)
        return self.live

    def lose(self, error: BaseException | None = None) -> None:
        """Lose the connection; calls wait until the attempt to connect is fed."""
        self._break(error)
        self.until(lambda: self.handler.gate.live is None)

    def leap(self, seconds: float) -> None:
        """Let time pass for the manager, which then looks for unused connections."""

        async def leap() -> None:
            self._leap(seconds)

        LoopThread.shared().run(leap())

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition about the connection holds."""
        changed = self.handler.gate.changed
        with changed:
            assert changed.wait_for(holds, LIMIT)

    def wait_closed(self) -> None:
        """Wait until all replaced channels are closed."""
        self.until(lambda: not self.endpoint.old)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.close()
        assert self.handler.calls == 0


class AsyncHarness(_Harness[AsyncHandler]):
    """For asyncio."""

    _manager_type, _make_channel = AsyncConnectionManager, make_aio_channel

    def feed(self, channel: Any, address: str | None = None) -> None:
        """Give the current or next attempt to connect a URI, a channel or an error."""
        self._strategy.queue.put_nowait(self._fed(channel, address))

    async def swap(self, channel: Any, address: str | None = None) -> Live:
        """Connect, or replace the connection; return the new generation."""
        before = self.handler.gate.live
        self._ask()
        self.feed(channel, address)
        assert await self.handler.gate.await_change(before, LIMIT)
        return self.live

    def lose(self, error: BaseException | None = None) -> None:
        """Lose the connection; calls wait until the attempt to connect is fed."""
        self._break(error)
        assert self.handler.generation == 0

    def leap(self, seconds: float) -> None:
        """Let time pass for the manager, which then looks for unused connections."""
        self._leap(seconds)

    async def wait_closed(self) -> None:
        """Wait until all replaced channels are closed."""
        assert await self.handler.gate.until(lambda: not self.endpoint.old, LIMIT)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.manager.close()
        assert self.handler.calls == 0
