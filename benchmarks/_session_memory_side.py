"""One side of session_memory.py, in its own process, chosen by the first argument.

`serve` runs a server of the demo protocol; the others measure, and print one JSON object.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

from moored.sessions import Acked, Outgoing, Protocol, Session, Sessions, Tcp
from moored.testing.demo import Demo, DemoServer

#: Sessions opened before the first measurement, so that one-time costs do not count.
WARM_UP = 20
#: Sessions opened at once.
BATCH = 50


class IgnoringReceiver:
    """The receiver of a bare transport; ignores all bytes."""

    __slots__ = ()

    def received(self, data: bytes) -> None:
        pass

    def lost(self, error: BaseException | None) -> None:
        raise AssertionError(f"the server closed the transport: {error}")


def protocol_to(where: str) -> Protocol:
    if where.startswith("mqtt:"):
        from moored.sessions.mqtt import Mqtt

        return Mqtt(where, subscribe=())
    return Demo(Tcp("127.0.0.1", int(where)))


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


async def serve() -> None:
    tcp = await DemoServer(history=0).serve()
    print(tcp.port, flush=True)
    await asyncio.get_running_loop().create_future()


async def transports(where: str, count: int) -> dict[str, float]:
    """Measure the memory of a transport without a session."""
    dial = protocol_to(where).endpoint.dial
    kept = [await dial(IgnoringReceiver()) for _ in range(WARM_UP)]
    before = resident_bytes()
    for _ in range(count // BATCH):
        kept += await asyncio.gather(*[dial(IgnoringReceiver()) for _ in range(BATCH)])
    after = resident_bytes()
    return {"kib": (after - before) / 1024 / count, "links": len(kept)}


async def sessions(where: str, count: int) -> dict[str, float]:
    """Measure the memory of an online session after one confirmed send, with its recorder."""
    async with Sessions(connect_rate=10_000, connect_burst=count) as found:
        await _all([_session(found, where, f"warm-{number}") for number in range(WARM_UP)])
        before, begin = resident_bytes(), time.perf_counter()
        kept = []
        for start in range(0, count, BATCH):
            batch = range(start, min(start + BATCH, count))
            kept += await _all([_session(found, where, f"account-{number}") for number in batch])
        seconds = time.perf_counter() - begin
        after = resident_bytes()
        for session in kept:
            status = session.status()
            assert status["state"] == "online", status
            assert status["acked"] == status["generation"] == 1, status
            assert found.recorder.events(session._runtime.name), "the recorder is off"
        return {"kib": (after - before) / 1024 / count, "seconds": seconds}


async def _session(found: Sessions, where: str, profile: str) -> Session:
    session = await found.connect(profile, protocol_to(where))
    assert isinstance(await session.send("somebody", b"hello"), Acked)
    return session


async def _all(starts: list[Any]) -> list[Session]:
    return list(await asyncio.gather(*starts))


async def recipients(where: str, count: int) -> dict[str, float]:
    """Measure the memory that is kept after one send to each recipient."""

    async def encrypt(outgoing: Outgoing, session: Session) -> Outgoing:
        await asyncio.sleep(0)  # yield, as a lookup would
        return outgoing

    tracemalloc.start()
    async with Sessions() as found:
        session = await found.connect("account", protocol_to(where), steps=[("encrypt", encrypt)])

        async def send(begin: int, end: int) -> None:
            for start in range(begin, end, BATCH):
                batch = range(start, min(start + BATCH, end))
                await asyncio.gather(*[session.send(f"to-{each}", b"hello") for each in batch])
            await asyncio.sleep(0)  # the last batch is freed in the next turn

        await send(0, 2_000)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        await send(2_000, 2_000 + count)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        assert session.status()["acked"] == 2_000 + count
        return {"kib": (after - before) / 1024}


async def measure(side: str, where: str, count: int) -> None:
    sides = {"transports": transports, "sessions": sessions, "recipients": recipients}
    print(json.dumps(await sides[side](where, count)))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        asyncio.run(serve())
    else:
        asyncio.run(measure(sys.argv[1], sys.argv[2], int(sys.argv[3])))
