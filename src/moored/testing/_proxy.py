"""The fault proxy: its interface, its listener and its connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Self, TypeVar

from moored.kernel import LoopThread

from ._proxy_answer import Answer
from ._proxy_connection import ProxyConnection
from ._proxy_faults import DIRECTIONS, Cut, Direction, Mode, ProxyStatistics, Rate
from ._proxy_listener import ProxyListener
from ._proxy_state import ProxyState

__all__ = ["FaultProxy"]

T = TypeVar("T")
_CALL_TIMEOUT = 30.0


class FaultProxy:
    """A TCP proxy in front of a server, with faults that are switched while it runs.

    `host` and `port` name the server; without a port, `host` is the path of its Unix socket. The
    proxy listens on `listen_host` and `listen_port`; 0 takes a free port, which `port` returns.

    The methods that switch a fault are thread-safe, and apply to open and to new connections.
    Faults combine: a proxy can delay, throttle and limit at the same time.
    """

    def __init__(
        self,
        host: str | os.PathLike[str],
        port: int | None = None,
        *,
        listen_host: str = "127.0.0.1",
        listen_port: int = 0,
    ) -> None:
        self._state = ProxyState(os.fspath(host), port)
        self._listener = ProxyListener(listen_host, listen_port, self._accept_client)
        self._refusing = False
        self._connections: dict[asyncio.Task[None], ProxyConnection] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: int | None = None

    async def start(self) -> None:
        """Start to listen, on the running event loop."""
        if self._loop is not None:
            raise RuntimeError(f"{self!r} is running already")
        if not self._refusing:
            self._listener.open()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    async def close(self) -> None:
        """Stop listening, close every connection and release the port."""
        self._listener.release()
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @contextlib.contextmanager
    def in_thread(self) -> Iterator[Self]:
        """Run the proxy on an event loop in its own thread, for tests without asyncio."""
        with LoopThread("moored-fault-proxy") as thread:
            thread.run(self.start(), _CALL_TIMEOUT)
            try:
                yield self
            finally:
                thread.run(self.close(), _CALL_TIMEOUT)

    def refuse(self, on: bool = True) -> None:
        """Refuse new connections, as a closed port does; open connections are kept."""

        def switch() -> None:
            self._refusing = on
            if on:
                self._listener.close()
            elif self._loop is not None:
                self._listener.open()

        self._on_loop(switch)

    def limit(
        self, per_second: float | None, burst: float | None = None, *, answer: Answer | None = None
    ) -> None:
        """Accept so many new connections per second, with `burst` at once (default: one second's).

        Connections over the limit are sent `answer` (for example `postgres_fatal()`), or reset
        without one. `per_second=None` removes the limit.
        """

        def switch() -> None:
            self._state.answer = answer
            self._state.rate = None
            if per_second is not None:
                size = max(1.0, per_second) if burst is None else burst
                self._state.rate = Rate(per_second, size, self._now())

        self._on_loop(switch)

    def stall(self) -> None:
        """Stop forwarding; connections stay open, no byte is lost, senders block in the end."""
        self._on_loop(lambda: self._switch("stall"))

    def black_hole(self) -> None:
        """Drop all bytes and reply to nothing, on new connections too.

        `resume` resets the connections that lost bytes.
        """
        self._on_loop(lambda: self._switch("black_hole"))

    def resume(self) -> None:
        """Forward again, after a stall or a black hole."""
        self._on_loop(lambda: self._switch("forward"))

    def reset(self) -> int:
        """Reset (RST) every open connection now; return how many there were."""
        return self._on_loop(lambda: self._reset(list(self._connections)))

    def cut_after(self, size: int | None, direction: Direction | None = None) -> None:
        """Reset each connection after `size` more bytes in one direction, or in either.

        `size=None` removes the cut.
        """
        if size is not None and size < 0:
            raise ValueError(f"the bytes before a cut must be 0 or more, not {size}")
        self._set(self._state.cut, None if size is None else Cut(size), direction)

    def latency(self, seconds: float, direction: Direction | None = None) -> None:
        """Deliver every byte so many seconds later, in order, in one direction or in both."""
        if seconds < 0:
            raise ValueError(f"latency must be 0 or more seconds, not {seconds}")
        self._set(self._state.latency, seconds, direction)

    def throttle(self, bytes_per_second: float | None, direction: Direction | None = None) -> None:
        """Forward at most so many bytes per second on each connection, in one direction or in both.

        None removes the limit.
        """
        if bytes_per_second is not None and bytes_per_second <= 0:
            raise ValueError(
                f"throttle must be more than 0 bytes/s, not {bytes_per_second}: "
                "use stall() to stop, None to remove the limit"
            )
        self._set(self._state.throttle, bytes_per_second or 0.0, direction)

    def heal(self) -> None:
        """Remove every fault."""
        self.refuse(False)
        self.limit(None)
        self.cut_after(None)
        self.latency(0.0)
        self.throttle(None)
        self.resume()

    @property
    def host(self) -> str:
        """The address that the proxy listens on."""
        return self._listener.host

    @property
    def port(self) -> int:
        """The port that the proxy listens on; 0 before `start()` if a free port is to be taken."""
        return self._listener.port

    @property
    def upstream(self) -> str:
        """The server: host:port, or the path of its Unix socket."""
        host, port = self._state.server
        return host if port is None else f"{host}:{port}"

    def statistics(self) -> ProxyStatistics:
        """Return the counters."""
        return self._state.statistics()

    async def wait_until(self, predicate: Callable[[ProxyStatistics], bool]) -> ProxyStatistics:
        """Wait until the counters meet a condition; call it on the proxy's loop, with a timeout."""
        await self._state.wait_until(predicate)
        return self.statistics()

    def __repr__(self) -> str:
        place = f"{self.host}:{self.port}" if self.port else "not started,"
        faults = [str(self._state)]
        faults += ["refusing"] if self._refusing else []
        faults += [f"limit {self._state.rate}"] if self._state.rate else []
        counts = self.statistics()
        return (
            f"<FaultProxy {place} to {self.upstream}: {', '.join(faults)}; "
            f"{counts.open} open, {counts.accepted} accepted>"
        )

    def _accept_client(self, client: socket.socket) -> None:
        self._state.add("accepted")
        self._state.add("open")
        connection = ProxyConnection(client, self._state, self._state.over_limit(self._now()))
        task = asyncio.get_running_loop().create_task(connection.run())
        self._connections[task] = connection
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        connection = self._connections.pop(task)
        connection.close()
        self._state.add("open", -1)
        self._state.add("resets", int(connection.reset))
        if not task.cancelled():
            task.result()

    def _set(self, fault: dict[Direction, T], value: T, direction: Direction | None) -> None:
        if direction not in (None, *DIRECTIONS):
            raise ValueError(f"direction must be 'up' or 'down', not {direction!r}")
        changed = dict.fromkeys(DIRECTIONS if direction is None else (direction,), value)
        self._on_loop(lambda: fault.update(changed))

    def _switch(self, mode: Mode) -> None:
        self._state.switch(mode)
        if mode != "black_hole":
            self._reset(
                [task for task, connection in self._connections.items() if connection.lost_bytes]
            )

    def _reset(self, tasks: list[asyncio.Task[None]]) -> int:
        for task in tasks:
            self._connections[task].reset = True
            task.cancel()
        return len(tasks)

    def _now(self) -> float:
        return self._loop.time() if self._loop is not None else 0.0

    def _on_loop(self, call: Callable[[], T]) -> T:
        if self._loop is None or threading.get_ident() == self._thread:
            return call()

        async def called() -> T:
            return call()

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(_CALL_TIMEOUT)
