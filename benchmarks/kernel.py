"""What do the kernel's primitives cost, and do keyed workers beat a resident task per key?"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Iterable

from _harness import Figure, Report, main, paired, spread
from moored.kernel import Child, Context, KeyedWorkers, Recorder, Registry, Supervisor
from moored.testing import Sim, run_one

DISTINCT_KEYS = 50_000
HOT_KEYS = 100
HOT_ITEMS = 100_000
BATCH = 1_000

Submit = Callable[[int, int], Awaitable[int]]


class Ledger:
    """The work: adds up the items, and checks their order for each key."""

    def __init__(self) -> None:
        self.total = 0
        self.last: dict[int, int] = {}

    async def handle(self, key: int, item: int) -> int:
        if self.last.get(key, -1) >= item:
            raise AssertionError(f"{key}: {item} was handled after {self.last[key]}")
        self.last[key] = item
        self.total += item
        return item


class Resident:
    """The peer: a task and a queue for each key, kept for ever, as in most services."""

    def __init__(self, handler: Callable[[int, int], Awaitable[int]]) -> None:
        self._handler = handler
        self._queues: dict[int, asyncio.Queue[tuple[int, asyncio.Future[int]]]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def submit(self, key: int, item: int) -> asyncio.Future[int]:
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = asyncio.Queue()
            self._tasks.append(asyncio.create_task(self._work(key, queue)))
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        queue.put_nowait((item, future))
        return future

    async def _work(self, key: int, queue: asyncio.Queue[tuple[int, asyncio.Future[int]]]) -> None:
        while True:
            item, future = await queue.get()
            future.set_result(await self._handler(key, item))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def send(submit: Submit, keys: Iterable[int]) -> tuple[float, int]:
    """Submit an item per key, in batches; return the seconds and the sum of the results."""
    answered = 0
    sequence = list(enumerate(keys))
    begin = time.perf_counter()
    for start in range(0, len(sequence), BATCH):
        batch = sequence[start : start + BATCH]
        answers = await asyncio.gather(*[submit(key, number) for number, key in batch])
        answered += sum(answers)
    return time.perf_counter() - begin, answered


def keyed_speed(keys: list[int]) -> float:
    """Return the items per second of keyed workers."""

    async def run() -> float:
        ledger = Ledger()
        workers: KeyedWorkers[int, int, int] = KeyedWorkers(ledger.handle, max_queue=BATCH)
        seconds, answered = await send(workers.submit, keys)
        return checked(ledger, answered, keys) / seconds

    return asyncio.run(run())


def resident_speed(keys: list[int]) -> float:
    """Return the items per second of a resident task per key."""

    async def run() -> float:
        ledger = Ledger()
        resident = Resident(ledger.handle)
        seconds, answered = await send(resident.submit, keys)
        await resident.close()
        return checked(ledger, answered, keys) / seconds

    return asyncio.run(run())


def checked(ledger: Ledger, answered: int, keys: list[int]) -> int:
    """Check that all items were handled; return their number."""
    expected = sum(range(len(keys)))
    if not ledger.total == answered == expected:
        raise AssertionError(f"did {ledger.total}, answered {answered}, expected {expected}")
    return len(keys)


def idle_key_bytes() -> float:
    """Return the bytes kept per idle key: the growth over a second set of keys."""

    async def handle(key: int, item: int) -> int:
        return item

    async def run() -> float:
        workers: KeyedWorkers[int, int, int] = KeyedWorkers(handle)
        tracemalloc.start()
        levels = []
        for start in (0, DISTINCT_KEYS):
            await send(workers.submit, range(start, start + DISTINCT_KEYS))
            await asyncio.sleep(0)  # the last batch is freed in the next turn
            gc.collect()
            levels.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        return max(0, round((levels[1] - levels[0]) / DISTINCT_KEYS))

    return asyncio.run(run())


def restarts_per_s() -> float:
    """Return the restarts per second of a child that fails as soon as it has started."""

    async def run() -> float:
        count = 5_000
        done = asyncio.Event()

        async def fragile(ctx: Context) -> None:
            ctx.started()
            if ctx.generation > count:
                done.set()
                await asyncio.Event().wait()
            raise ValueError

        async with Supervisor(children=[Child("fragile", fragile)], intensity=None) as root:
            begin = time.perf_counter()
            await done.wait()
            seconds = time.perf_counter() - begin
            if root.tree().children[0].restarts != count:
                raise AssertionError("the supervisor lost restarts")
        return count / seconds

    logging.getLogger("moored.supervisor").setLevel(logging.CRITICAL)
    return asyncio.run(run())


def registry_ops_per_s() -> float:
    """Return the pairs of register and unregister per second."""

    async def run() -> float:
        registry: Registry[int, int] = Registry()
        count = 100_000
        begin = time.perf_counter()
        for key in range(count):
            registry.register(key, key).unregister()
        return count / (time.perf_counter() - begin)

    return asyncio.run(run())


def recorder_ns_per_event() -> float:
    """Return the time of recording an event with a cause, without sinks."""
    recorder = Recorder()
    count = 200_000
    cause = recorder.record("server", "closed the connection")
    begin = time.perf_counter_ns()
    for _ in range(count):
        recorder.record("link", "failed", kind="failure", cause=cause)
    spent = time.perf_counter_ns() - begin
    if recorder.statistics().recorded != count + 1:
        raise AssertionError("the recorder lost events")
    return spent / count


async def five_clients(sim: Sim) -> None:
    """Five clients with five requests each, to a server that is killed and restarted."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
            await writer.drain()
        writer.close()

    server = await sim.serve(serve, host="server", port=1)
    sim.at(sim.random(0, 2), server.kill)
    sim.at(2.5, server.restart)
    answers: list[bytes] = []

    async def client(name: int) -> None:
        for number in range(5):
            while True:
                try:
                    reader, writer = await asyncio.open_connection("server", 1)
                    writer.write(f"{name} {number}\n".encode())
                    answer = await reader.readline()
                    writer.close()
                except ConnectionError:
                    answer = b""
                if answer:
                    answers.append(answer)
                    break
                await asyncio.sleep(0.5)

    await asyncio.gather(*(client(name) for name in range(5)))
    if len(answers) != 25:
        raise AssertionError(f"{len(answers)} of 25 answers")


def sim_schedules_per_s() -> float:
    """Return the schedules per second of `five_clients`, on one core."""
    count = 50
    begin = time.perf_counter()
    for seed in range(count):
        run_one(five_clients, seed)
    return count / (time.perf_counter() - begin)


def measure(report: Report, quick: bool) -> None:
    rounds = 3 if quick else 15
    distinct = list(range(DISTINCT_KEYS))
    hot = [number % HOT_KEYS for number in range(HOT_ITEMS)]
    report.add(
        "keyed_distinct_vs_resident",
        paired(lambda: keyed_speed(distinct), lambda: resident_speed(distinct), rounds + 2),
    )
    report.add(
        "keyed_hot_vs_resident",
        paired(lambda: keyed_speed(hot), lambda: resident_speed(hot), rounds + 2),
    )
    report.add("idle_key_bytes", Figure(idle_key_bytes(), "B"))
    speeds = (restarts_per_s, registry_ops_per_s, recorder_ns_per_event, sim_schedules_per_s)
    for speed in speeds:
        unit = "ns" if speed is recorder_ns_per_event else "/s"
        report.add(speed.__name__, spread([speed() for _ in range(rounds)], unit))
    report.notes.append(
        f"{DISTINCT_KEYS:,} distinct keys; {HOT_ITEMS:,} items over {HOT_KEYS} hot keys; "
        f"batches of {BATCH:,} awaited together; every sum and order checked"
    )


if __name__ == "__main__":
    main("kernel", __doc__ or "", measure)
