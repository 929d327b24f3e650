"""One side of session_send.py and session_loss.py, in its own process.

`send`: publishes with a window of them in flight, all confirmed. `lost`: publishes that the broker
receives and does not confirm, and the time from the loss of the connection to their outcome.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable

import aiomqtt

from moored.sessions import Outgoing, Sessions, Unknown
from moored.sessions._protocol import Confirmed, Greeting, Ready
from moored.sessions.mqtt import Mqtt, MqttDialogue

PAYLOAD = b"x" * 100
#: The timeout of one publish of aiomqtt; its callers wait for all of it.
PEER_TIMEOUT = 3.0


def topic(number: int) -> str:
    """Return the topic of one of fifty recipients."""
    return f"to/{number % 50}"


# -- sending ---------------------------------------------------------------------------------------


class BareLink:
    """A minimal client with the same codec and transport, without guarantees or records."""

    def __init__(self, url: str) -> None:
        self.protocol = Mqtt(url, subscribe=(), session_expiry=0)
        self.memory = self.protocol.remember()
        self.dialogue: MqttDialogue = self.protocol.begin("bare", None, self.memory)
        self.waiting: dict[str, asyncio.Future[None]] = {}
        self.ready = asyncio.get_running_loop().create_future()

    async def open(self) -> None:
        """Connect to the broker."""
        self.transport = await self.protocol.endpoint.dial(self)
        self.transport.write(self.dialogue.hello())
        await self.ready

    def received(self, data: bytes) -> None:
        """Handle bytes from the broker."""
        for event in self.dialogue.feed(data):
            if type(event) is Confirmed:
                self.waiting.pop(event.id).set_result(None)
            elif type(event) is Ready:
                self.ready.set_result(None)
            elif type(event) is Greeting:
                self.transport.write(event.data)

    def lost(self, error: BaseException | None) -> None:
        """Ignore the loss of the connection."""

    async def send(self, number: int) -> None:
        """Publish, and wait for the confirmation."""
        name = f"{number:032x}"
        future = self.waiting[name] = asyncio.get_running_loop().create_future()
        self.transport.write(self.dialogue.write(Outgoing(name, topic(number), PAYLOAD)))
        await future


async def windowed(send: Callable[[int], Awaitable[object]], count: int, window: int) -> float:
    """Send `count` messages with `window` in flight; return the seconds."""
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await send(number)

    begin = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(window)))
    return time.perf_counter() - begin


async def measure_send(
    send: Callable[[int], Awaitable[object]], count: int, window: int
) -> dict[str, float]:
    """Measure the CPU time of a send, and the sends per second."""
    await windowed(send, count // 10, window)
    cpu = time.process_time()
    seconds = await windowed(send, count, window)
    return {
        "cpu_us": (time.process_time() - cpu) / count * 1e6,
        "per_second": count / seconds,
    }


async def send(side: str, url: str, count: int, window: int) -> dict[str, float]:
    """Measure one side."""
    if side == "bare":
        link = BareLink(url)
        await link.open()
        return await measure_send(link.send, count, window)
    if side == "ours":
        async with Sessions() as sessions:
            session = await sessions.connect(
                "ours", Mqtt(url, subscribe=(), session_expiry=0), timeout=30
            )
            found = await measure_send(
                lambda number: session.send(topic(number), PAYLOAD), count, window
            )
            assert session.status()["acked"] == count + count // 10
            return found
    host, port = url.removeprefix("mqtt://").split(":")
    async with aiomqtt.Client(
        host,
        int(port),
        protocol=aiomqtt.ProtocolVersion.V5,
        max_inflight_messages=window,
        max_queued_outgoing_messages=window,
    ) as client:
        client.pending_calls_threshold = window + 1
        return await measure_send(
            lambda number: client.publish(topic(number), PAYLOAD, qos=1, timeout=60), count, window
        )


# -- losing the connection -------------------------------------------------------------------------


async def lost(side: str, url: str, count: int, broker: int) -> dict[str, float]:
    """Send messages that the broker does not confirm, then kill the broker."""
    import signal

    ends: list[float] = []

    async def record_end(work: Awaitable[object]) -> None:
        try:
            outcome = await work
            assert isinstance(outcome, Unknown), outcome
        except aiomqtt.MqttError:
            pass
        ends.append(time.perf_counter())

    async def through(publish: Callable[[int], Awaitable[object]]) -> dict[str, float]:
        assert await publish(0) is not None or side == "aiomqtt"
        os.kill(broker, signal.SIGSTOP)  # the kernel receives the bytes, the broker does not reply
        tasks = [asyncio.create_task(record_end(publish(number))) for number in range(1, count + 1)]
        await asyncio.sleep(0.3)
        assert not ends
        os.kill(broker, signal.SIGKILL)
        begin = time.perf_counter()
        await asyncio.gather(*tasks)
        assert len(ends) == count
        return {"ms": sorted(ends)[count // 2] * 1e3 - begin * 1e3}

    if side == "ours":
        async with Sessions() as sessions:
            session = await sessions.connect(
                "ours", Mqtt(url, subscribe=(), session_expiry=0), timeout=30
            )
            return await through(
                lambda number: session.send(topic(number), PAYLOAD, outcome=True, timeout=30)
            )
    host, port = url.removeprefix("mqtt://").split(":")
    try:
        async with aiomqtt.Client(host, int(port), protocol=aiomqtt.ProtocolVersion.V5) as client:
            return await through(
                lambda number: client.publish(topic(number), PAYLOAD, qos=1, timeout=PEER_TIMEOUT)
            )
    except aiomqtt.MqttError:
        return {"ms": sorted(ends)[count // 2] * 1e3}


def run(arguments: list[str]) -> None:
    """`send SIDE URL COUNT WINDOW` or `lost SIDE URL COUNT PID`."""
    what, side, url, count, more = arguments
    work = {"send": send, "lost": lost}[what]
    print(json.dumps(asyncio.run(work(side, url, int(count), int(more)))))


if __name__ == "__main__":
    run(sys.argv[1:])
