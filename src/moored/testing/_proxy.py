"""A TCP proxy that can be told to fail, while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Literal, Self, TypeVar

from moored.kernel import LoopThread
from moored.testing._proxy_answer import Answer
from moored.testing._proxy_connection import ProxyConnection
from moored.testing._proxy_desk import Desk
from moored.testing._proxy_faults import Cut, Direction, Mode, ProxyStatistics, Rate
from moored.testing._proxy_listener import ProxyListener

__all__ = ["FaultProxy"]

T = TypeVar("T")
_CALL_TIMEOUT = 30.0


class FaultProxy:
    """A TCP proxy in front of a server, with faults that are switched while it runs.

    `host` and `port` name the server; without a port, `host` is the path of its Unix socket. The
    proxy listens on `listen_host` and `listen_port` (0 takes a free one, and `port` tells which).

    Every method that switches a fault may be called from any thread, and acts on the connections
    that are open and on those to come. Faults add up: one can delay, throttle and limit at once.
    """

    def __init__(
        self,
        host: str | os.PathLike[str],
        port: int | None = None,
        *,
        listen_host: str = "127.0.0.1",
        listen_port: int = 0,
    ) -> None:
        self._desk = Desk(os.fspath(host), port)
        self._listener = ProxyListener(listen_host, listen_port, self._welcome)
        self._refusing = False
        self._links: dict[asyncio.Task[None], ProxyConnection] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: int | None = None

    async def start(self) -> None:
        """Begin to listen."""
        if self._loop is not None:
            raise RuntimeError(f"{self!r} is running already")
        if not self._refusing:
            self._listener.open()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    async def close(self) -> None:
        """Stop listening and close every connection; nothing of the proxy stays behind."""
        self._listener.release()
        tasks = list(self._links)
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
        """Run the proxy on a loop in a thread of its own, for tests without asyncio."""
        with LoopThread("moored-fault-proxy") as thread:
            thread.run(self.start(), _CALL_TIMEOUT)
            try:
                yield self
            finally:
                thread.run(self.close(), _CALL_TIMEOUT)

    def refuse(self, on: bool = True) -> None:
        """Refuse new connections, as a port does that nobody listens on; open ones are kept."""

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
        """Accept so many new connections a second, with `burst` at once (default: one second's).

        Those over the limit are told `answer` (for example `postgres_fatal()`), or reset where
        there is none. None lifts the limit.
        """

        def switch() -> None:
            self._desk.answer = answer
            self._desk.rate = None
            if per_second is not None:
                size = max(1.0, per_second) if burst is None else burst
                self._desk.rate = Rate(per_second, size, self._now())

        self._on_loop(switch)

    def stall(self) -> None:
        """Stop carrying bytes; connections stay open, nothing is lost, senders block in time."""
        self._on_loop(lambda: self._switch("stall"))

    def black_hole(self) -> None:
        """Swallow all bytes and answer nothing, on new connections too.

        What is swallowed is lost: `resume` resets the connections that it was taken from.
        """
        self._on_loop(lambda: self._switch("black_hole"))

    def resume(self) -> None:
        """Carry bytes again, after a stall or a black hole."""
        self._on_loop(lambda: self._switch("forward"))

    def reset(self) -> int:
        """Reset (RST) every open connection now; returns how many there were."""
        return self._on_loop(lambda: self._reset(list(self._links)))

    def cut_after(
        self,
        size: int | None,
        direction: Direction | None = None,
        *,
        how: Literal["reset", "close"] = "reset",
    ) -> None:
        """Cut each connection once it has carried `size` more bytes that way, or either way.

        None lifts it.
        """
        cut = None if size is None else Cut(size, how)
        self._on_loop(lambda: self._desk.faults.set_cut(cut, direction))

    def latency(self, seconds: float, direction: Direction | None = None) -> None:
        """Deliver everything so much later, in order, that way or both ways."""
        self._on_loop(lambda: self._desk.faults.set_latency(seconds, direction))

    def throttle(self, bytes_per_second: float | None, direction: Direction | None = None) -> None:
        """Carry at most so many bytes a second on each connection, that way or both ways.

        None lifts it.
        """
        self._on_loop(lambda: self._desk.faults.set_throttle(bytes_per_second, direction))

    def heal(self) -> None:
        """Lift every fault."""
        self.refuse(False)
        self.limit(None)
        self.cut_after(None)
        self.latency(0.0)
        self.throttle(None)
        self.resume()

    @property
    def host(self) -> str:
        """The address that it listens on."""
        return self._listener.host

    @property
    def port(self) -> int:
        """The port that it listens on; 0 before it is started, if a free one is to be taken."""
        return self._listener.port

    @property
    def upstream(self) -> str:
        """The server behind: host:port, or the path of its socket."""
        host, port = self._desk.server
        return host if port is None else f"{host}:{port}"

    def statistics(self) -> ProxyStatistics:
        """What it has counted."""
        return self._desk.statistics()

    async def wait_until(self, predicate: Callable[[ProxyStatistics], bool]) -> ProxyStatistics:
        """Wait until its counts fulfil a condition, on its own loop; put a timeout around it."""
        await self._desk.wait_until(predicate)
        return self.statistics()

    def __repr__(self) -> str:
        place = f"{self.host}:{self.port}" if self.port else "not started,"
        faults = [str(self._desk.faults)]
        faults += ["refusing"] if self._refusing else []
        faults += [f"limit {self._desk.rate}"] if self._desk.rate else []
        counts = self.statistics()
        return (
            f"<FaultProxy {place} to {self.upstream}: {', '.join(faults)}; "
            f"{counts.open} open, {counts.accepted} accepted>"
        )

    def _welcome(self, client: socket.socket) -> None:
        self._desk.add("accepted")
        self._desk.add("open")
        link = ProxyConnection(client, self._desk, self._desk.over_limit(self._now()))
        task = asyncio.get_running_loop().create_task(link.run())
        self._links[task] = link
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        link = self._links.pop(task)
        link.close()
        self._desk.add("open", -1)
        self._desk.add("resets", int(link.reset))
        if not task.cancelled():
            task.result()

    def _switch(self, mode: Mode) -> None:
        self._desk.switch(mode)
        if mode != "black_hole":
            self._reset([task for task, link in self._links.items() if link.spoiled])

    def _reset(self, tasks: list[asyncio.Task[None]]) -> int:
        for task in tasks:
            self._links[task].reset = True
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
