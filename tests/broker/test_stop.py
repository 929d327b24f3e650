"""A web server with open streams stops at a signal, whatever their clients do."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import websockets
from tests.broker.serving import Reading, reading
from tests.http_client import http_client
from tests.servers import free_port
from tests.service.support import clean_environment

ROOT = Path(__file__).parents[2]
APP, SERVICE = "tests.broker.stop_program:app", "tests.broker.stop_service:service"
#: Three times the five seconds within which a server stops.
STOP = 15.0

SERVERS = {
    "moored serve": ["moored.cli", "serve", SERVICE, "--port", "{port}"],
    "uvicorn": ["uvicorn", APP, "--port", "{port}"],
    "uvicorn --reload": ["uvicorn", APP, "--port", "{port}", "--reload", "--reload-dir", "docs"],
    "uvicorn --workers": ["uvicorn", APP, "--port", "{port}", "--workers", "2"],
    "granian": ["granian", "--interface", "asgi", "--port", "{port}", APP],
    "hypercorn": ["hypercorn", "--bind", "127.0.0.1:{port}", APP],
    "gunicorn asgi": ["gunicorn", "-k", "asgi", "-b", "127.0.0.1:{port}", APP],
    "gunicorn uvicorn": [
        "gunicorn", "-k", "uvicorn.workers.UvicornWorker", "-b", "127.0.0.1:{port}", APP
    ],
}  # fmt: skip


@asynccontextmanager
async def running(command: Sequence[str], log: Path) -> AsyncIterator[tuple[Process, str]]:
    """Run a server in a session of its own, so that all its processes can be ended."""
    port = free_port()
    arguments = [each.format(port=port) for each in command]
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *arguments,
            cwd=ROOT, env=clean_environment(PYTHONPATH=str(ROOT)),
            stdout=PIPE, stderr=errors, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        async with http_client() as client:
            while True:
                try:
                    await client.get(f"{url}/v1/subscribe.js")
                    break
                except httpx.TransportError:
                    assert process.returncode is None, "it has ended"
                    await asyncio.sleep(0.05)
        yield process, url
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def frozen(url: str, *headers: str) -> socket.socket:
    """Open a stream whose client never reads."""
    at = urlsplit(url)
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    line.connect((at.hostname, at.port))
    head = ["GET /v1/subscribe HTTP/1.1", f"Host: {at.netloc}", "X-API-Key: other-key", *headers]
    line.sendall("\r\n".join([*head, "", ""]).encode())
    return line


WEBSOCKET = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)


async def read_to_the_end(stream: Reading) -> str:
    try:
        while await stream.next():
            pass
    except httpx.RemoteProtocolError:
        return "cut"
    return "ended"


@pytest.mark.parametrize("server", SERVERS)
async def test_server_stops_while_clients_read_and_others_do_not(
    server: str, tmp_path: Path
) -> None:
    async with (
        asyncio.timeout(120),
        running(SERVERS[server], tmp_path / "log") as (process, url),
        AsyncExitStack() as stack,
    ):
        with ExitStack() as lines:
            streams = [await stack.enter_async_context(reading(url)) for _ in range(2)]
            address = url.replace("http:", "ws:") + "/v1/subscribe"
            headers = {"X-API-Key": "acme-key"}
            socket = websockets.connect(address, additional_headers=headers)
            await stack.enter_async_context(socket)
            for stream in streams:
                assert await stream.next() is not None
            ends = [asyncio.create_task(read_to_the_end(stream)) for stream in streams]
            lines.enter_context(frozen(url))
            lines.enter_context(frozen(url, *WEBSOCKET))
            assert process.stdout is not None
            async for line in process.stdout:
                if b"stalled" in line:
                    break
            # In a terminal, Ctrl-C reaches the reloader as well as the process that it runs.
            if server.startswith("uvicorn"):
                os.killpg(process.pid, signal.SIGINT)
            else:
                process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(STOP):
                await process.wait()
        # hypercorn's workers get no signal: they cut what is open after three seconds.
        expected = "cut" if server == "hypercorn" else "ended"
        assert [await end for end in ends] == [expected, expected]
        # granian's worker may panic when it drops what it has not sent, and then ends without it;
        # the process of uvicorn's reloader if the SIGTERM of that comes before Ctrl-C.
        if server not in ("moored serve", "granian", "uvicorn --reload"):
            told = await process.stdout.read()
            assert b"the lifespan has ended" in told, (tmp_path / "log").read_text()
