"""One connection through the proxy, from its acceptance to its end."""

from __future__ import annotations

import asyncio
import socket
import struct

from moored.testing._proxy_answer import Answer, Caller
from moored.testing._proxy_desk import Desk
from moored.testing._proxy_flow import Flow, WasCut

__all__ = ["ProxyConnection"]

_ANSWER_TIMEOUT = 5.0


class ProxyConnection:
    """A client's socket, the server's, and how they are to end."""

    def __init__(self, client: socket.socket, desk: Desk, answer: Answer | None) -> None:
        self._desk = desk
        self._answer = answer
        self._client = client
        self._server: socket.socket | None = None
        #: Whether bytes were lost on the way, so that the two ends no longer mean the same.
        self.spoiled = False
        #: Whether the end is, or was, a reset.
        self.reset = False

    async def run(self) -> None:
        """Carry the connection to its end; `close` is for the proxy to call, whatever happened."""
        try:
            if self._answer is not None:
                await self._say(self._answer)
            elif self._desk.faults.mode == "black_hole":
                await self._sink()
            else:
                await self._relay()
        except OSError:
            self.reset = True

    async def _say(self, answer: Answer) -> None:
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT):
                await self._desk.forwarding()
                await answer(Caller(self._client))
        except (EOFError, TimeoutError):
            self.reset = True

    async def _sink(self) -> None:
        loop = asyncio.get_running_loop()
        self.spoiled = True
        while data := await loop.sock_recv(self._client, 65536):
            self._swallow(len(data))

    async def _relay(self) -> None:
        try:
            self._server = await self._desk.dial()
        except OSError:
            self._desk.add("refused")
            raise
        desk, swallow = self._desk, self._swallow
        up = Flow("up", self._client, self._server, desk=desk, swallow=swallow)
        down = Flow("down", self._server, self._client, desk=desk, swallow=swallow)
        try:
            async with asyncio.TaskGroup() as group:
                for work in (up.read, up.write, down.read, down.write):
                    group.create_task(work())
        except* WasCut as cuts:
            self.reset = cuts.subgroup(lambda e: isinstance(e, WasCut) and e.resets) is not None
        except* OSError:
            self.reset = True

    def _swallow(self, size: int) -> None:
        self.spoiled = True
        self._desk.add("bytes_swallowed", size)

    def close(self) -> None:
        """Close both sockets, by FIN or by RST."""
        for sock in (self._client, self._server):
            if sock is None:
                continue
            if self.reset:
                # Closing with a linger of zero seconds sends RST instead of FIN.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
