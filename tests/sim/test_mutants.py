"""The simulator finds five classic defects, each planted, within 1,000 seeds.

Every scenario also passes without its defect.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Awaitable, Callable
from typing import Any

from moored.kernel import Child, Context, Generation, KeyedWorkers, Supervisor, WorkerCrashed
from moored.testing import (
    Caught,
    Deadlock,
    Mutant,
    Scenario,
    Sim,
    assert_caught,
    mutant,
    scaled,
)

WITHIN = 1000
IDLE, GOODBYE = 0.5, 0.01


def caught(scenario: Scenario[Any], planted: Mutant) -> Caught:
    return assert_caught(scenario, planted, within=WITHIN, clean=scaled(500, least=10))


# A lost update across an await


class Ledger:
    """A record that is read and written asynchronously, under a lock."""

    def __init__(self) -> None:
        self.stored = 0
        self._turn = asyncio.Lock()

    async def add(self, amount: int) -> None:
        async with self._turn:
            await self._add(amount)

    async def _add(self, amount: int) -> None:
        value = await self._load()
        await self._store(value + amount)

    async def _load(self) -> int:
        await asyncio.sleep(0)
        return self.stored

    async def _store(self, value: int) -> None:
        await asyncio.sleep(0)
        self.stored = value


async def two_writers(sim: Sim) -> None:
    ledger = Ledger()

    async def writer(amount: int) -> None:
        for _ in range(3):
            await asyncio.sleep(sim.rng.choice((0.1, 0.2)))
            await ledger.add(amount)

    await asyncio.gather(writer(1), writer(10))
    assert ledger.stored == 33


def test_a_lost_update_across_an_await_is_caught() -> None:
    planted = mutant(Ledger, "add", Ledger._add, name="an update without the lock")
    assert isinstance(caught(two_writers, planted).error, AssertionError)


# An idle-stop race in a keyed worker


async def idling_run(
    self: KeyedWorkers[str, int, int], key: str, item: int, future: Future[int], pump: Any
) -> None:
    """Wait for more work, then stop although an item arrived during the last await."""
    pump.started = True
    while True:
        future.set_result(await self._handler(key, item))
        if not pump.queue:
            await asyncio.sleep(IDLE)
        if not pump.queue:
            await asyncio.sleep(GOODBYE)
            self._stop(key)
            return
        item, future = pump.queue.popleft()


async def occasional_senders(sim: Sim) -> None:
    order: dict[str, list[int]] = {}

    async def send(recipient: str, number: int) -> int:
        await asyncio.sleep(sim.random(0, 0.2))
        order.setdefault(recipient, []).append(number)
        return number

    workers = KeyedWorkers[str, int, int](send, name="senders")

    async def sender(recipient: str) -> None:
        for number in range(10):
            await asyncio.sleep(sim.random(0, 2 * IDLE))
            assert await workers.submit(recipient, number) == number

    await asyncio.gather(*(sender(recipient) for recipient in "abc"))
    await workers.drain()
    assert order == {recipient: list(range(10)) for recipient in "abc"}
    assert len(workers) == 0


def test_an_idle_stop_race_in_a_keyed_worker_is_caught() -> None:
    planted = mutant(KeyedWorkers, "_run", idling_run, name="a worker with an idle timeout")
    error = caught(occasional_senders, planted).error
    assert isinstance(error, Deadlock)
    assert "waits on" in str(error)


# A waiter that is not failed when its worker crashes


def forgetful(original: Callable[..., None]) -> Callable[..., None]:
    def crash(self: Any, key: Any, pump: Any, future: Any, error: BaseException) -> None:
        pump.queue = None
        original(self, key, pump, future, error)

    return crash


async def crashing_worker(sim: Sim) -> None:
    async def handle(key: str, fails: bool) -> None:
        await asyncio.sleep(sim.random(0, 0.1))
        if fails:
            raise LookupError(key)

    workers = KeyedWorkers[str, bool, None](handle, name="workers")

    async def caller(key: str) -> str:
        await asyncio.sleep(sim.random(0, 0.5))
        try:
            await workers.submit(key, sim.rng.random() < 0.2)
        except (LookupError, WorkerCrashed) as error:
            return type(error).__name__
        return "done"

    outcomes = await asyncio.gather(*(caller(sim.rng.choice("ab")) for _ in range(20)))
    counts = workers.statistics()
    assert outcomes.count("LookupError") == counts.failed
    assert outcomes.count("WorkerCrashed") == counts.crashed


def test_a_waiter_left_pending_by_a_crashed_worker_is_caught() -> None:
    planted = mutant(
        KeyedWorkers,
        "_crash",
        forgetful(KeyedWorkers._crash),
        name="a crash that does not fail the waiters",
    )
    assert isinstance(caught(crashing_worker, planted).error, Deadlock)


# An event applied from a replaced connection


class Link:
    """Follows a server's counter over a connection that is replaced now and then."""

    def __init__(self) -> None:
        self.generation = Generation()
        self.applied: list[tuple[int, int]] = []
        self._readers: list[asyncio.Task[None]] = []

    async def replace(self) -> None:
        """Open a new connection; the old one may still deliver lines."""
        reader, writer = await asyncio.open_connection("server", 8000)
        token = self.generation.next()
        self._readers.append(asyncio.create_task(self._follow(token, reader, writer)))

    async def _follow(
        self, token: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            while line := await reader.readline():
                if not self.generation.is_current(token):
                    return
                self.applied.append((token, int(line)))
        finally:
            writer.close()


async def replaced_connections(sim: Sim) -> None:
    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(10):
            writer.write(b"%d\n" % number)
            await asyncio.sleep(0.1)
        writer.close()

    await sim.serve(count)
    sim.network.slow("server", latency=(0.05, 0.3))
    link = Link()
    for _ in range(4):
        await link.replace()
        await asyncio.sleep(sim.random(0.2, 1.2))
    await asyncio.sleep(5)
    assert link.applied == sorted(link.applied), "a line of an old connection was applied"


def test_an_event_applied_from_a_replaced_connection_is_caught() -> None:
    planted = mutant(
        Generation, "is_current", lambda self, token: True, name="every connection is current"
    )
    assert isinstance(caught(replaced_connections, planted).error, AssertionError)


# A supervisor that stops children in start order


def in_start_order(original: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def stop_all(self: Any) -> None:
        self._runners = dict(reversed(self._runners.items()))
        await original(self)

    return stop_all


async def order_of_stops(sim: Sim) -> None:
    stopped: list[str] = []

    def child(name: str) -> Child:
        async def run(ctx: Context) -> None:
            ctx.started()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(sim.random(0, 0.1))
                stopped.append(name)

        return Child(name, run)

    names = list("abcde"[: sim.rng.randint(1, 5)])
    async with Supervisor("root", children=[child(name) for name in names]):
        await asyncio.sleep(sim.random(0, 1))
    assert stopped == names[::-1]


def test_a_supervisor_that_stops_children_in_start_order_is_caught() -> None:
    planted = mutant(
        Supervisor,
        "_stop_all",
        in_start_order(Supervisor._stop_all),
        name="stops in start order",
    )
    assert isinstance(caught(order_of_stops, planted).error, AssertionError)
