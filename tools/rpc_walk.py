"""Walk through one recovery of a gRPC channel: which functions of `moored.rpc` run, in which files.

A reader who follows a recovery meets each of these calls. The connection is reset under a call, and
the next call waits for the new one. Run it with `python tools/rpc_walk.py`; `--calls` prints them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import grpc  # type: ignore[import-untyped]

import moored
from moored.rpc import AsyncConnectionManager, ConnectionConfig
from moored.testing import FaultProxy

__all__ = ["Walk", "main", "walk"]

PACKAGE = Path(moored.__file__).parent
#: What a recovery may take of a reader.
MOST = {"files": 11, "calls": 110, "returns": 60}
SERVER = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
import grpc

def wait(request, context):
    yield request
    time.sleep(60)

server = grpc.server(ThreadPoolExecutor(8))
methods = {
    "Echo": grpc.unary_unary_rpc_method_handler(lambda request, context: request),
    "Wait": grpc.unary_stream_rpc_method_handler(wait),
}
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("walk", methods),))
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
sys.stdin.read()
"""


class Walk:
    """The calls of a recovery, in their order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self._frames: list[FrameType] = []

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note a call of a function in `moored`, but not that a coroutine goes on.

        A comprehension is read where it stands; Python counts it as a function.
        """
        name, function = frame.f_code.co_filename, frame.f_code.co_qualname
        if event != "call" or not name.startswith(str(PACKAGE)) or function.endswith(">"):
            return
        if not any(frame is each for each in self._frames):
            self._frames.append(frame)
            self.calls.append((os.path.relpath(name, PACKAGE), function))

    def of(self, package: str) -> dict[str, int]:
        """Return the number of files, of calls, and of returns to a file that was left before."""
        files = [name for name, _ in self.calls if name.startswith(f"{package}/")]
        seen: set[str] = set()
        returns, last = 0, ""
        for name in files:
            returns += name != last and name in seen
            seen.add(name)
            last = name
        return {"files": len(seen), "calls": len(files), "returns": returns}


async def walk() -> Walk:
    """Return the walk of one recovery, on asyncio."""
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVER),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert server.stdout is not None
    try:
        port = int(await server.stdout.readline())
        with FaultProxy("127.0.0.1", port).in_thread() as proxy:
            return await _recover(proxy)
    finally:
        server.kill()
        await server.wait()


async def _recover(proxy: FaultProxy) -> Walk:
    walked = Walk()
    config = ConnectionConfig.from_uri(f"http://127.0.0.1:{proxy.port}")
    async with AsyncConnectionManager() as manager:
        channel = await manager.get_or_create(config)
        echo, endpoint = channel.unary_unary("/walk/Echo"), channel.endpoint
        assert await echo(b"before") == b"before"
        stream, live = channel.unary_stream("/walk/Wait")(b"begun"), endpoint.live
        assert await stream.read() == b"begun"
        with _profiled(walked.note):
            proxy.reset()
            with suppress(grpc.RpcError):
                await stream.read()
            while endpoint.live is live:  # noqa: ASYNC110 - the connection is being checked
                await asyncio.sleep(0.001)
            assert await echo(b"after", timeout=30) == b"after"
        assert endpoint.generation == 2
    return walked


class _profiled:  # noqa: N801 - a context manager
    def __init__(self, note: Callable[[FrameType, str, Any], None]) -> None:
        self._note = note

    def __enter__(self) -> None:
        sys.setprofile(self._note)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def main() -> None:
    """Print the figures, and fail if they are too large."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", action="store_true", help="print each call")
    options = parser.parse_args()
    walked = asyncio.run(walk())
    if options.calls:
        for name, function in walked.calls:
            print(f"{name:32} {function}")
    for package in ("rpc", "kernel"):
        print(package, *(f"{number} {what}" for what, number in walked.of(package).items()))
    for name, number in Counter(name for name, _ in walked.calls).most_common():
        print(f"  {number:4} {name}")
    if any(walked.of("rpc")[what] > most for what, most in MOST.items()):
        sys.exit(f"a recovery of a channel is hard to follow: at most {MOST}")


if __name__ == "__main__":
    main()
