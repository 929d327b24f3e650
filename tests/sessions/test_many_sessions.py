"""Many accounts in one process: isolated crashes, and no memory left behind."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from typing import Any

import pytest
from tests.sessions.support import until

from moored.kernel import Backoff
from moored.sessions import Acked, Outgoing, Session, Sessions, Unknown
from moored.testing import Sim, run_one, scaled
from moored.testing.demo import Demo, DemoServer

HOUR = 3600.0
MANY = scaled(1000, least=100)
RECIPIENTS = scaled(50_000, least=1_000)


async def test_crash_of_every_tenth_session_affects_no_other() -> None:
    server = DemoServer()
    async with Sessions(backoff=Backoff(0.01, 0.05), connect_burst=2 * MANY) as sessions:
        connects = [sessions.connect(f"account {number}", Demo(server)) for number in range(MANY)]
        every = await asyncio.gather(*connects)
        crashing, others = every[::10], [each for each in every if each not in every[::10]]

        server.delay = MANY / 100  # long enough for all of them to be in flight at once
        sends = {
            session: asyncio.create_task(session.send("bob", b"hello", outcome=True))
            for session in every
        }
        await until(lambda: len(server.received) == MANY)
        for session in crashing:
            assert session._runtime.connection is not None
            session._runtime.connection.crash(RuntimeError("a defect"))

        for session in others:
            assert isinstance(await sends[session], Acked)
            status = session.status()
            assert (status["state"], status["generation"]) == ("online", 1), status
            assert status["reconnects"] == status["crashes"] == 0, status
            assert status["reason"] == "", status
        for session in crashing:
            assert isinstance(await sends[session], Unknown)

        server.delay = 0
        await asyncio.gather(*[session.online(30) for session in crashing])
        assert all(session.status()["crashes"] == 1 for session in crashing)
        await asyncio.gather(*[session.send("bob", b"again") for session in every])
        assert server.accepted_links == MANY + len(crashing)
        assert sum(session.generation == 1 for session in every) == len(others)


async def _wait(outgoing: Outgoing, session: Any) -> Outgoing:
    """A step that waits for some recipients, which then need a sender task."""
    if outgoing.recipient.endswith(("0", "5")):
        await asyncio.sleep(0)
    return outgoing


async def _send_to(session: Session, numbers: range) -> None:
    """Send to each number, in small batches."""
    for start in range(0, len(numbers), 50):
        batch = numbers[start : start + 50]
        sends = [session.send(f"recipient {each}", b"hello", timeout=HOUR) for each in batch]
        await asyncio.gather(*sends)
    await asyncio.sleep(0)  # the last batch is released in the next loop iteration


@pytest.mark.soak
async def test_former_recipients_use_no_memory() -> None:
    # Debug mode keeps the traceback of each task, which would be measured.
    asyncio.get_running_loop().set_debug(False)
    server = DemoServer(history=0)
    async with Sessions() as sessions:
        session = await sessions.connect("alice", Demo(server), steps=[("wait", _wait)])
        # A send that is never confirmed stays first in the order of deadlines.
        server.drop_acks = 1
        stuck = asyncio.create_task(session.send("nobody", b"", outcome=True, timeout=HOUR))
        await until(lambda: server.dropped_acks)
        tracemalloc.start()
        try:
            await _send_to(session, range(1_000))
            gc.collect()
            before, _ = tracemalloc.get_traced_memory()
            await _send_to(session, range(1_000, 1_000 + RECIPIENTS))
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert session.status()["acked"] == 1_000 + RECIPIENTS
        sends = session._runtime.sends
        assert (len(sends.senders), len(sends.table)) == (0, 1)
        assert len(sends.table._deadlines) < 200
        # Less than one object for each: only the interpreter's own free lists.
        assert after - before < 64 * 1024
    assert isinstance(await stuck, Unknown)


async def test_stopped_sessions_leave_nothing_behind() -> None:
    server = DemoServer()
    async with Sessions(connect_burst=MANY) as sessions:
        for number in range(MANY):
            session = await sessions.connect(f"account {number}", Demo(server))
            await session.send("bob", b"hello")
            await session.stop()
        assert len(sessions) == len(sessions._registry) == len(sessions._root.tree().children) == 0
        assert sessions.recorder.components() == ("sessions",)
        assert server.online == []


def test_links_are_made_at_the_configured_rate() -> None:
    rate, burst = 20, 10

    async def scenario(sim: Sim) -> list[float]:
        times: list[float] = []
        server = DemoServer()
        accept = server.accept

        def counted(transport: Any) -> Any:
            times.append(sim.now)
            return accept(transport)

        server.memory._server = counted
        async with Sessions(connect_rate=rate, connect_burst=burst) as sessions:
            starts = [sessions.start(f"account {number}", Demo(server)) for number in range(MANY)]
            every = await asyncio.gather(*starts)
            await asyncio.gather(*[session.online() for session in every])
        return times

    times = run_one(scenario, 1).result()
    assert len(times) == MANY
    assert sum(at < times[0] + 0.01 for at in times) <= burst + 1
    for begin in times:
        assert sum(begin <= at < begin + 1.0 for at in times) <= burst + rate + 1
    # Nor slower than allowed.
    assert times[-1] - times[0] < (MANY - burst) / rate + 2.0
