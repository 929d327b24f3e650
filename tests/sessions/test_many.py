"""Many accounts in one process: a crash stays with its own, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from typing import Any

from tests.sessions.support import until

from moored.kernel import Backoff
from moored.sessions import Acked, Outgoing, Session, Sessions, Unknown
from moored.testing import Sim, run_one, scaled
from moored.testing.demo import Demo, DemoServer

HOUR = 3600.0
MANY = scaled(1000, least=100)
RECIPIENTS = scaled(50_000, least=5_000)


async def test_a_tenth_that_crash_at_once_leave_the_others_without_an_error() -> None:
    server = DemoServer()
    async with Sessions(backoff=Backoff(0.01, 0.05), connect_burst=2 * MANY) as sessions:
        connects = [sessions.connect(f"account {number}", Demo(server)) for number in range(MANY)]
        every = await asyncio.gather(*connects)
        crashing, others = every[::10], [each for each in every if each not in every[::10]]

        server.delay = MANY / 100  # long enough for all of them to be under way at once
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
    """A step that gives some of the recipients a worker."""
    if outgoing.recipient.endswith(("0", "5")):
        await asyncio.sleep(0)
    return outgoing


async def _send_to(session: Session, numbers: range) -> None:
    """One send to each, in small batches."""
    for start in range(0, len(numbers), 50):
        batch = numbers[start : start + 50]
        sends = [session.send(f"recipient {each}", b"hello", timeout=HOUR) for each in batch]
        await asyncio.gather(*sends)
    await asyncio.sleep(0)  # the last batch is let go in the next turn


async def test_recipients_leave_no_memory_behind() -> None:
    # Where a task was made is kept for a while, and would be measured.
    asyncio.get_running_loop().set_debug(False)
    server = DemoServer(history=0)
    async with Sessions() as sessions:
        session = await sessions.connect("alice", Demo(server), steps=[("wait", _wait)])
        # One that is never confirmed stands before all others in the order of deadlines.
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
        assert (len(sends.senders), sends.table.recipients) == (0, 1)
        assert sum(map(len, sends.table._queues.values())) < 200
        # Not one whole object for each of them, but what the interpreter keeps to use again.
        assert after - before < 64 * 1024
    assert isinstance(await stuck, Unknown)


async def test_sessions_that_were_stopped_leave_nothing_behind() -> None:
    server = DemoServer()
    async with Sessions(connect_burst=MANY) as sessions:
        for number in range(MANY):
            session = await sessions.connect(f"account {number}", Demo(server))
            await session.send("bob", b"hello")
            await session.stop()
        assert len(sessions) == len(sessions._registry) == len(sessions._root.tree().children) == 0
        assert sessions.recorder.components() == ("sessions",)
        assert server.online == []


def test_links_are_made_at_the_rate_that_was_asked_for() -> None:
    rate, burst = 20, 10

    async def scenario(sim: Sim) -> list[float]:
        times: list[float] = []
        server = DemoServer()
        accept = server.accept

        def counted(transport: Any) -> Any:
            times.append(sim.now)
            return accept(transport)

        server._memory._server = counted
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
    # Neither slower than it may be.
    assert times[-1] - times[0] < (MANY - burst) / rate + 2.0
