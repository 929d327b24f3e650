"""One connection through the proxy, from accept to close."""

from __future__ import annotations

import asyncio
import socket
import struct

from ._proxy_answer import Answer, Caller
from ._proxy_flow import Flow
from ._proxy_state import ProxyState

__all__ = ["ProxyConnection"]

_ANSWER_TIMEOUT = 5.0


class ProxyConnection:
    """The client's and the server's socket of one connection."""

    def __init__(self, client: socket.socket, state: ProxyState, answer: Answer | None) -> None:
        self._state = state
        self._answer = answer
        self._client = client
        self._server: socket.socket | None = None
        #: Whether a black hole dropped bytes, so that client and server disagree on the stream.
        self.lost_bytes = False
        #: Whether `close` resets the sockets (RST instead of FIN).
        self.reset = False

    async def run(self) -> None:
        """Forward until the connection ends; the caller must call `close` in any case."""
        try:
            if self._answer is not None:
                await self._reject(self._answer)
            elif self._state.mode == "black_hole":
                await self._swallow_all()
            else:
                await self._relay()
        except OSError:
            self.reset = True

    async def _reject(self, answer: Answer) -> None:
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT):
                await self._state.forwarding()
                await answer(Caller(self._client))
        except (EOFError, TimeoutError):
            self.reset = True

    async def _swallow_all(self) -> None:
        loop = asyncio.get_running_loop()
        self.lost_bytes = True
        while data := await loop.sock_recv(self._client, 65536):
            self._swallow(len(data))

    async def _relay(self) -> None:
        try:
            self._server = await self._state.dial()
        except OSError:
            self._state.add("refused")
            raise
        state, swallow = self._state, self._swallow
        up = Flow("up", self._client, self._server, state, swallow)
        down = Flow("down", self._server, self._client, state, swallow)
        try:
            async with asyncio.TaskGroup() as group:
                for work in (up.read, up.write, down.read, down.write):
                    group.create_task(work())
        except* OSError:
            self.reset = True

    def _swallow(self, size: int) -> None:
        self.lost_bytes = True
        self._state.add("bytes_swallowed", size)

    def close(self) -> None:
        """Close both sockets, by FIN or by RST."""
        for sock in (self._client, self._server):
            if sock is None:
                continue
            if self.reset:
                # Closing with a linger of zero seconds sends RST instead of FIN.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
