"""The processes of a fleet: one parent that has imported everything, and its forked children.

`python worker.py URL` reads orders from standard input, one JSON object a line, and answers each
with a number. The children are real processes that start within milliseconds, so that many can be
killed and replaced in a short test. They die with their parent, which ends with its input.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from moored.kernel import Clock
from moored.leases import FenceRejected, Lease, Leases, StoreUnavailable, connect
from moored.leases._connect import open_store

_PR_SET_PDEATHSIG = 1


class Watch(Clock):
    """The system's clock, which remembers when it was last read.

    A client reads the clock when it checks whether a token may still be used. The log uses that
    time: a process that is suspended right after the check would otherwise seem to use it late.
    """

    def __init__(self) -> None:
        self.last = 0.0
        super().__init__(self._read)

    def _read(self) -> float:
        self.last = time.monotonic()
        return self.last


class Log:
    """The event log of this process; each event is written at once, by one system call."""

    def __init__(self, directory: str) -> None:
        path = Path(directory, f"{os.getpid()}-{time.monotonic_ns()}.log")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, what: str, *, at: int | None = None, **data: Any) -> None:
        moment = time.monotonic_ns() if at is None else at
        line = json.dumps({"at": moment, "what": what, "pid": os.getpid(), **data})
        os.write(self._file, f"{line}\n".encode())

    def acquired(self, lease: Lease) -> None:
        self.write("acquired", lease=lease.id, fence=lease.fence, until=_nanos(lease.deadline))


async def hold(leases: Leases, log: Log, order: dict[str, Any]) -> None:
    """Acquire, hold for a while, release, over and over; until killed."""
    chance = random.Random(order["seed"])
    while True:
        lease = await leases.acquire(order["key"], limit=order["limit"], ttl=order["ttl"])
        if lease is None:
            log.write("refused")
            await asyncio.sleep(chance.uniform(0.005, 0.05))
            continue
        log.acquired(lease)
        await _keep(lease, log, chance.uniform(0.0, order["hold"]))
        if lease.live:
            log.write("released", lease=lease.id)
        await lease.release()


async def _keep(lease: Lease, log: Log, seconds: float) -> None:
    """Hold a lease for some seconds, and log when it is renewed or lost."""
    end, until = time.monotonic() + seconds, lease.deadline
    lease.on_lost(lambda error: log.write("lost", lease=lease.id, why=error.reason))
    while lease.live and (left := end - time.monotonic()) > 0:
        await asyncio.sleep(min(left, 0.02))
        if lease.live and lease.deadline != until:
            until = lease.deadline
            log.write("renewed", lease=lease.id, until=_nanos(until))


async def once(leases: Leases, log: Log, order: dict[str, Any]) -> None:
    """Wait for the signal, acquire once, and keep the lease; until killed."""
    go = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, go.set)
    log.write("ready")
    await go.wait()
    lease = await leases.acquire(order["key"], limit=order["limit"], ttl=order["ttl"])
    if lease is None:
        log.write("refused")
    else:
        log.acquired(lease)
    await asyncio.Event().wait()


async def take(leases: Leases, log: Log, order: dict[str, Any]) -> None:
    """Use tokens of a rate limit as fast as possible."""
    watch = leases._clock
    assert isinstance(watch, Watch)
    limit = leases.rate_limit(
        order["key"], rate=order["rate"], burst=order["burst"], batch=order["batch"]
    )
    log.write("ready")
    while True:
        wait = await limit.take(order["tokens"])
        if wait == 0:
            log.write("took", at=_nanos(watch.last), tokens=order["tokens"])
        else:
            await asyncio.sleep(wait)


async def own(leases: Leases, log: Log, order: dict[str, Any]) -> None:
    """Acquire the exclusive lease, then write with its fence, without checking the lease again."""
    write = WRITERS[order["target"].partition(":")[0]]
    lease = await leases.exclusive(order["key"], ttl=order["ttl"], cancel=False).acquire()
    log.acquired(lease)
    while True:
        try:
            await write(order["target"], order["key"], lease.fence)
        except FenceRejected as error:
            log.write("rejected", fence=lease.fence, seen=error.seen, live=lease.live)
            return
        except Exception as error:
            log.write("failed", error=repr(error))
        else:
            log.write("wrote", fence=lease.fence)
        await asyncio.sleep(0.02)


async def _write_postgres(target: str, key: str, fence: int) -> None:
    import psycopg

    from moored.leases.postgres import fenced

    connection = await psycopg.AsyncConnection.connect(target)
    async with connection, connection.transaction():
        await fenced(connection, key, fence)
        await connection.execute("insert into written (fence) values (%s)", [fence])


async def _write_redis(target: str, key: str, fence: int) -> None:
    from redis.asyncio import Redis

    from moored.leases.redis import fenced

    async with Redis.from_url(target) as client:
        await fenced(client, key, fence, "RPUSH", key, fence)


WRITERS: dict[str, Callable[[str, str, int], Awaitable[None]]] = {
    "postgresql": _write_postgres,
    "redis": _write_redis,
}
ROLES: dict[str, Callable[[Leases, Log, dict[str, Any]], Awaitable[None]]] = {
    "hold": hold,
    "once": once,
    "own": own,
    "take": take,
}


async def work(order: dict[str, Any]) -> None:
    """Play a role; after an outage, with a new client."""
    log = Log(order["directory"])
    while True:
        client = connect(order["url"], service_name="fleet", clock=Watch(), **order["connect"])
        try:
            async with client as leases:
                return await play(leases, log, order)
        except StoreUnavailable as error:
            log.write("unavailable", error=str(error))
            await asyncio.sleep(0.05)


async def play(leases: Leases, log: Log, order: dict[str, Any]) -> None:
    """Play a role with one client; repeat it while the store is unavailable."""
    while True:
        try:
            return await ROLES[order["role"]](leases, log, order)
        except StoreUnavailable as error:
            log.write("unavailable", error=str(error))
            await asyncio.sleep(0.05)


def child(order: dict[str, Any]) -> None:
    """Run a forked child; this never returns."""
    try:
        asyncio.run(work(order))
    except BaseException as error:
        Log(order["directory"]).write("crashed", error=repr(error))
        os._exit(1)
    os._exit(0)


def spawn(order: dict[str, Any]) -> int:
    """Fork a child that plays a role, and dies with this process."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        child(order)
    return pid


def kill(pid: int) -> int:
    """Kill a child and reap it. The parent knows that the pid has not been reused."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return time.monotonic_ns()


def answer(value: int) -> None:
    """Write the reply to an order."""
    sys.stdout.write(f"{value}\n")
    sys.stdout.flush()


def main() -> None:
    """Execute orders until standard input ends."""
    # The adapter is imported here, once, for all children; this opens no connection and no thread.
    open_store(sys.argv[1], clock=Clock.system())
    children: set[int] = set()
    answer(os.getpid())
    for line in sys.stdin:
        order = json.loads(line)
        if "kill" in order:
            children.discard(order["kill"])
            answer(kill(order["kill"]))
        else:
            pid = spawn(order)
            children.add(pid)
            answer(pid)
    for pid in children:
        kill(pid)


def _nanos(seconds: float) -> int:
    return int(seconds * 1_000_000_000)


if __name__ == "__main__":
    main()
