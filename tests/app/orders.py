"""`examples/orders_service.py` in processes of its own, and the gRPC server that it calls."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import grpc  # type: ignore[import-untyped]
import httpx
import psutil
from tests.http_client import http_client
from tests.programs import Program
from tests.servers import free_port
from tests.service.support import clean_environment

__all__ = ["LIMIT", "OrdersService", "Prices"]

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
#: Seconds within which a start, a stop or an event happens on a busy machine.
LIMIT = 120.0


class Prices:
    """A gRPC server in this process that can hold its calls."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._held = threading.Semaphore(0)
        method = grpc.unary_unary_rpc_method_handler(self._get)
        self._server = grpc.server(ThreadPoolExecutor(16))
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("shop.Prices", {"Get": method})]
        )
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def _get(self, item: bytes, context: object) -> bytes:
        self._held.release()
        self._open.wait(LIMIT)
        return b"9.90"

    def hold(self) -> None:
        """Let the next calls wait for `release()`."""
        self._held = threading.Semaphore(0)
        self._open.clear()

    async def holds(self, number: int) -> None:
        """Wait until so many calls were made since `hold()`."""
        for _ in range(number):
            assert await asyncio.to_thread(self._held.acquire, timeout=LIMIT)

    def release(self) -> None:
        """Answer the calls."""
        self._open.set()

    def close(self) -> None:
        self.release()
        self._server.stop(0).wait()


class OrdersService:
    """The example, served by uvicorn on one port, from start to start."""

    def __init__(self, url: str, folder: Path, prices: Prices) -> None:
        self.url = url
        self.base = f"http://127.0.0.1:{free_port()}"
        self.log = folder / "log"
        self._environment = clean_environment(
            DATABASE_URL=url,
            STATE_DIR=str(folder),
            PRICES=f"127.0.0.1:{prices.port}",
            MOORED_NO_TOKEN="1",
        )
        self.process: Program | None = None

    def start(self, *options: str) -> None:
        """Start it; `running()` also waits until it is ready."""
        self.process = Program(
            *("uvicorn", "orders_service:api", "--port", self.base.rpartition(":")[2]),
            *("--log-level", "warning", *options),
            log=self.log,
            cwd=EXAMPLES,
            environ=self._environment,
        )

    @asynccontextmanager
    async def running(self, *options: str) -> AsyncIterator[httpx.AsyncClient]:
        """Start it, and wait until every part is active."""
        self.start(*options)
        async with http_client(self.base) as asking:
            await self.until_health(asking, {"active"})
            yield asking

    async def until_health(self, asking: httpx.AsyncClient, wanted: set[str]) -> None:
        """Wait until it has reported each of these; workers share the port, and differ."""
        deadline, seen, answer = time.monotonic() + LIMIT, set[str](), "nothing"
        while not wanted <= seen:
            assert time.monotonic() < deadline, f"{answer}\n{self.log.read_text()}"
            await asyncio.sleep(0.05)
            try:
                # A connection of its own, which any worker may accept.
                answer = (
                    await asking.get("/moored/v1/health", headers={"Connection": "close"})
                ).text
            except httpx.TransportError as error:
                answer = repr(error)
            else:
                seen.update(state for state in wanted if f'"status":"{state}"' in answer)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, and return the exit code; no process is left behind."""
        assert self.process is not None
        family = psutil.Process(self.process.pid).children(recursive=True)
        with self.process:
            self.process.send_signal(number)
            code = self.process.wait(LIMIT)
        _, left = psutil.wait_procs(family, timeout=LIMIT)
        assert left == []
        return code

    def kill(self) -> None:
        """Kill what is left of it."""
        if self.process is not None and self.process.returncode is None:
            for each in psutil.Process(self.process.pid).children(recursive=True):
                each.kill()
            with self.process:
                self.process.kill()
