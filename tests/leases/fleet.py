"""Many processes that share a store, some of which are killed; for any store, by its URL.

::

    with Fleet(url, tmp_path) as fleet:
        storm(fleet, limit=10, seconds=30, seed=1)
        seen = fleet.events()
        assert overfull(beliefs(seen), 10) is None
        fleet.kill_all()
        assert fleet.refill(limit=10) < TTL + SLACK
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from tests.leases import observer
from tests.programs import Program

from moored.leases import connect

__all__ = ["Fleet", "one_shot", "storm"]

KEY = "db/orders"
#: How long a process may take for what it does within milliseconds on an idle machine.
PATIENCE = 60.0


class Fleet:
    """Worker processes of one store; their logs are in a directory."""

    def __init__(self, url: str, directory: Path, *, ttl: float = 1.5, **options: Any) -> None:
        self.url = url
        self.ttl = ttl
        self.directory = directory
        self.directory.mkdir(exist_ok=True)
        #: What `connect` is given, beside the URL.
        self.options: dict[str, Any] = {"on_unavailable": "refuse", **options}
        self.pids: list[int] = []
        self.killed = 0
        self.last_kill = 0
        self._process: Program | None = None

    def spawn(self, role: str, **order: Any) -> int:
        """Start a process that plays a role."""
        defaults = {
            "role": role,
            "url": self.url,
            "directory": str(self.directory),
            "connect": self.options,
            "key": KEY,
            "ttl": self.ttl,
        }
        pid = self._order({**defaults, **order})
        self.pids.append(pid)
        return pid

    def kill(self, pid: int) -> None:
        """End a process by SIGKILL."""
        self.pids.remove(pid)
        self.last_kill = self._order({"kill": pid})
        self.killed += 1

    def kill_all(self) -> None:
        """End all processes by SIGKILL."""
        for pid in list(self.pids):
            self.kill(pid)

    def stop(self, pid: int) -> None:
        """Suspend a process by SIGSTOP."""
        os.kill(pid, signal.SIGSTOP)

    def go_on(self, pid: int) -> None:
        """Resume a suspended process."""
        os.kill(pid, signal.SIGCONT)

    def events(self) -> list[observer.Event]:
        """Return the events that the processes have logged so far."""
        return observer.events(self.directory)

    def wait_for(self, what: str, count: int = 1, **data: Any) -> list[observer.Event]:
        """Wait until `count` events of a kind have been logged, and return them."""
        wanted = {"what": what, **data}
        seen = self._wait(
            lambda seen: sum(wanted.items() <= e.items() for e in seen) >= count,
            f"{count} times {wanted}",
        )
        return [event for event in seen if wanted.items() <= event.items()]

    def wait_until(self, condition: Callable[[Counter[str]], bool]) -> None:
        """Wait until the counts of what has happened fulfil a condition."""
        self._wait(lambda seen: condition(observer.counts(seen)), "a condition")

    def _wait(
        self, condition: Callable[[list[observer.Event]], bool], what: str
    ) -> list[observer.Event]:
        deadline = time.monotonic() + PATIENCE
        while True:
            seen = self.events()
            assert not (crashed := [e for e in seen if e["what"] == "crashed"]), crashed
            if condition(seen):
                return seen
            assert time.monotonic() < deadline, f"not within {PATIENCE} s: {what}; {seen[-20:]}"
            time.sleep(0.03)

    def refill(self, limit: int) -> float:
        """Acquire as many leases as the limit allows; returns the seconds since the last kill."""
        return asyncio.run(self._refill(limit))

    async def _refill(self, limit: int) -> float:
        got = 0
        # The short timeout of the processes is not what this measures.
        patient = {**self.options, "timeout": PATIENCE}
        async with connect(self.url, service_name="refill", **patient) as leases:
            deadline = time.monotonic() + self.ttl + PATIENCE
            while got < limit:
                if await leases.acquire(KEY, limit=limit, ttl=60.0) is not None:
                    got += 1
                else:
                    assert time.monotonic() < deadline, f"stuck: {await leases.held(KEY)}"
                    await asyncio.sleep(0.01)
            took = time.monotonic() - self.last_kill / observer.SECOND
            assert await leases.acquire(KEY, limit=limit, ttl=60.0) is None
        return took

    def __enter__(self) -> Self:
        self._process = Program("tests.leases.worker", self.url)
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        for pid in self.pids:
            self.go_on(pid)
        with self._process as process:
            process.stdin.close()
            process.wait(PATIENCE)

    def _order(self, order: dict[str, Any]) -> int:
        assert self._process is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> int:
        assert self._process is not None
        line = self._process.stdout.readline()
        assert line, "the parent of the workers has ended"
        return int(line)


def storm(
    fleet: Fleet,
    *,
    workers: int = 20,
    limit: int = 10,
    seconds: float,
    seed: int,
    hold: float = 0.6,
    pause: tuple[float, float] = (0.02, 0.2),
    kills: int = 0,
) -> None:
    """Run processes that acquire and release leases; kill and replace one at random intervals.

    With `kills`, each kill waits for an acquire, and on a slow machine the storm lasts until so
    many processes were killed.
    """
    chance = random.Random(seed)
    numbers = itertools.count(seed)

    def start() -> None:
        fleet.spawn("hold", limit=limit, hold=hold, seed=next(numbers))

    for _ in range(workers):
        start()
    end, acquired = time.monotonic() + seconds, 0
    while time.monotonic() < end or fleet.killed < kills:
        time.sleep(chance.uniform(*pause))
        if kills:
            acquired = len(fleet.wait_for("acquired", acquired + 1))
        fleet.kill(chance.choice(fleet.pids))
        start()


def one_shot(fleet: Fleet, *, workers: int = 20, limit: int = 10) -> int:
    """Let processes acquire at the same moment; returns how many get a lease."""
    for _ in range(workers):
        fleet.spawn("once", limit=limit, ttl=60.0)
    fleet.wait_for("ready", workers)
    for pid in fleet.pids:
        os.kill(pid, signal.SIGUSR1)
    fleet.wait_until(lambda seen: seen["acquired"] + seen["refused"] >= workers)
    return observer.counts(fleet.events())["acquired"]
