"""Open a simulated connection: like TCP, repeat the SYN packet until the target replies."""

from __future__ import annotations

import asyncio
import errno
from contextvars import copy_context
from typing import TYPE_CHECKING

from ._pipe import NETWORK

if TYPE_CHECKING:
    from ._hosts import Host, Process
    from ._network import Network
    from ._transport import SimTransport

__all__ = ["Dial"]

# Seconds from one SYN packet to the next, as in Linux: after 127 s in all the attempt times out.
_TRIES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


class Dial:
    """One attempt to connect to a port of a host."""

    def __init__(self, network: Network, client: Process, target: Host, port: int) -> None:
        self._network = network
        self._client = client
        self._context = copy_context()
        self._target = target
        self._port = port
        self._there = network.path(client.host.name, target.name)
        self._back = network.path(target.name, client.host.name)
        self._answer: asyncio.Future[SimTransport] = network.loop.create_future()
        self._opened: SimTransport | None = None
        self._tries = iter(_TRIES)
        self._timer: asyncio.TimerHandle | None = None

    async def answer(self) -> SimTransport:
        """Wait for the connection; raise the OSError that a real socket would."""
        self._try()
        try:
            return await self._answer
        except asyncio.CancelledError:
            if self._opened is not None:
                self._opened.abort()
            raise
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _try(self) -> None:
        """Send a SYN packet, and schedule the next one."""
        if not self._client.alive:
            return
        wait = next(self._tries, None)
        if wait is None:
            self._fail(TimeoutError(errno.ETIMEDOUT, f"Connect call failed {self._where}"))
            return
        loop = self._network.loop
        loop.call_later(self._network.delay(self._there), self._arrive, context=NETWORK)
        self._timer = loop.call_later(wait, self._try, context=NETWORK)

    def _arrive(self) -> None:
        if self._answer.done() or not self._there.open or not self._client.alive:
            return
        server = self._network.listener(self._target, self._port)
        if self._opened is None and server is not None and not self._there.refuses:
            self._opened = self._network.join(
                self._client, self._context, server, self._target, self._port
            )
        reply = self._refused if self._opened is None else self._accepted
        self._network.loop.call_later(self._network.delay(self._back), reply, context=NETWORK)

    def _accepted(self) -> None:
        assert self._opened is not None
        if self._back.open and not self._answer.done():
            self._mark("connected")
            self._answer.set_result(self._opened)

    def _refused(self) -> None:
        if self._back.open:
            error = ConnectionRefusedError(errno.ECONNREFUSED, f"Connect call failed {self._where}")
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if self._opened is not None:
            self._opened.abort()
        if not self._answer.done():
            self._mark(str(error))
            self._answer.set_exception(error)

    def _mark(self, what: str) -> None:
        self._network.loop.mark(
            self._client.host.name, f"-> {self._target.name} {what}", self._port
        )

    @property
    def _where(self) -> tuple[str, int]:
        return (self._target.ip, self._port)
