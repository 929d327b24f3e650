"""The invariants of the pool for threads, under many threads at once."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from tests.logs import silent

from moored.leases import Leases, MemoryStore, Request
from moored.leases import sync as leases_sync
from moored.leases._memory import _StoredLease
from moored.reservoir import ConnectionPool, ReservoirConfig
from moored.reservoir._core import Waiter
from moored.reservoir._item import Item
from moored.reservoir._reservoir import Reservoir
from moored.testing import StressFailed, mutant, scaled, stress_threads

THREADS = 8
MAX_SIZE = 5
CONFIG = ReservoirConfig(
    max_size=MAX_SIZE,
    base_lifetime=0.6,
    lifetime_jitter=0.2,
    guard_window=0.2,
    rate=2000.0,
    scan_every=0.05,
    start_stagger=0.0,
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No log: connections are broken by the hundred."""
    with silent("moored"):
        yield


class Broken(Exception):
    """What a caller's own code raises."""


class Wire:
    """A connection that notices when two use it, and when it is used after its end."""

    def __init__(self) -> None:
        self.user: int | None = None
        self.broken = False
        self.closed = False

    def use(self, thread: int) -> None:
        assert self.user is None, f"in use by {self.user} and {thread}"
        assert not self.closed, "used after its end"
        self.user = thread
        time.sleep(0)  # releases the GIL, so that another thread may enter
        assert self.user == thread, f"in use by {self.user} and {thread}"
        self.user = None


class Server:
    """Counts what is open, from the begin of a connect to the end of a close."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.physical = 0
        self.connects = 0
        self._lock = threading.Lock()

    def connect(self) -> Wire:
        with self._lock:
            self.connects += 1
            self.physical += 1
            self.expect(self.physical <= MAX_SIZE, f"{self.physical} physical connections")
        if self.connects % 50 == 0:
            with self._lock:
                self.physical -= 1
            raise ConnectionError("refused")
        return Wire()

    def close(self, wire: Wire) -> None:
        with self._lock:
            self.expect(not wire.closed, "closed twice")
            self.expect(wire.user is None, "closed under its user")
            wire.closed = True
            self.physical -= 1

    def ping(self, wire: Wire) -> None:
        if wire.broken:
            raise ConnectionError("gone")

    def expect(self, held: bool, what: str) -> None:
        """Note what is wrong: the pool survives what these functions raise."""
        if not held:
            self.wrong.append(what)


class Slow(deque[Any]):
    """Releases the GIL before each change, so that races occur reliably."""

    def append(self, thing: Any) -> None:
        time.sleep(0)
        super().append(thing)

    def popleft(self) -> Any:
        time.sleep(0)
        return super().popleft()


class Ledger(MemoryStore):
    """Counts how often each lease was given, and given back."""

    def __init__(self) -> None:
        super().__init__()
        self.given: Counter[str] = Counter()
        self.given_back: Counter[str] = Counter()

    def _new(self, request: Request) -> _StoredLease:
        self.given[request.id] += 1
        return super()._new(request)

    def _release(self, request: Request) -> bool:
        self.given_back[request.id] += 1
        return super()._release(request)


class Crowd:
    """A pool, its server and its leases; `work` is what each thread does with it."""

    def __init__(self, timeout: float = 30.0) -> None:
        self.server = Server()
        self.ledger = Ledger()
        self.served = Counter[int]()
        self._leases = leases_sync.SyncLeases(Leases(self.ledger))
        self._leases.open()
        self.pool: ConnectionPool[Wire] = ConnectionPool(
            config=CONFIG,
            connect=self.server.connect,
            close_connection=self.server.close,
            is_broken=lambda wire: wire.broken,
            ping=self.server.ping,
            leases=self._leases,
            endpoint="db",
            timeout=timeout,
            check_idle=0.01,
            open=False,
        )
        self.pool._core.ready, self.pool._core.waiting = Slow(), Slow()
        self._watch_order()
        self.pool.open()

    def _watch_order(self) -> None:
        """The queue as it must be; the pool calls these with its lock held."""
        core: Any = self.pool._core
        queue: list[Waiter[Wire]] = []
        enqueue, leave, hand_over = core.enqueue, core.leave, core._hand_over

        def enqueued(waiter: Waiter[Wire]) -> None:
            queue.append(waiter)
            enqueue(waiter)

        def left(waiter: Waiter[Wire], now: float, *, late: bool = False) -> Item[Wire] | None:
            if waiter in queue:
                queue.remove(waiter)
            item: Item[Wire] | None = leave(waiter, now, late=late)
            return item

        def handed_over(item: Item[Wire], now: float) -> Waiter[Wire]:
            waiter: Waiter[Wire] = hand_over(item, now)
            self.server.expect(queue.pop(0) is waiter, "served out of order")
            return waiter

        core.enqueue, core.leave, core._hand_over = enqueued, left, handed_over

    def work(self, thread: int, iteration: int) -> None:
        match (thread + 3 * iteration) % 100:
            case 0:
                self.pool.drain()
            case 1:
                self.pool.check()
            case 2:
                self.pool.resize(iteration % MAX_SIZE, MAX_SIZE)
            case 3 | 4 | 5:
                self._hand_out(thread)
            case 6 | 7 | 8:
                self._clumsy(thread)
            case 9:
                self._break_one(thread)
            case _:
                with self.pool.connection() as wire:
                    self._use(wire, thread)

    def _use(self, wire: Wire, thread: int) -> None:
        self.served[thread] += 1
        item = self.pool._core.items[id(wire)]
        assert item.since < item.expires - CONFIG.guard_window, "within its guard window"
        wire.use(thread)

    def _hand_out(self, thread: int) -> None:
        wire = self.pool.getconn()
        try:
            self._use(wire, thread)
        finally:
            self.pool.putconn(wire)

    def _clumsy(self, thread: int) -> None:
        with suppress(Broken), self.pool.connection() as wire:
            self._use(wire, thread)
            raise Broken

    def _break_one(self, thread: int) -> None:
        with self.pool.connection() as wire:
            self._use(wire, thread)
            wire.broken = True

    def limits(self) -> None:
        """What must hold at any moment."""
        assert not self.server.wrong, self.server.wrong[0]
        assert self.server.physical <= MAX_SIZE

    def end(self) -> None:
        """What must hold when all have gone: nothing is lost, and nothing is left."""
        with self.pool.reservoir.lock:
            assert self.pool._core.out == 0, "connections are in use without a holder"
        self.pool.close(timeout=30.0)
        assert not self.server.wrong, self.server.wrong[0]
        assert self.server.physical == 0, f"{self.server.physical} were never closed"
        assert set(self.ledger.given.values()) == {1}
        assert self.ledger.given_back == self.ledger.given, "a lease was not given back once"

    def leave(self) -> None:
        """Close whatever is left."""
        try:
            self.pool.close(timeout=0.0)
        finally:
            self._leases.close()


def stress(crowd: Crowd, iterations: int) -> None:
    try:
        stress_threads(
            crowd.work,
            threads=THREADS,
            iterations=iterations,
            always=crowd.limits,
            invariant=crowd.end,
            timeout=100.0,
        )
    except StressFailed:
        with suppress(Exception):  # a pool that is broken may not even close
            crowd.leave()
        raise
    crowd.leave()


def test_many_threads_share_a_few_connections() -> None:
    crowd, iterations = Crowd(), scaled(1000, least=150)
    stress(crowd, iterations)
    assert sum(crowd.served.values()) > 0.8 * THREADS * iterations
    assert crowd.server.connects > MAX_SIZE, "none was replaced"


# -- a defect that must be noticed ---------------------------------------------------------------


class NoLock:
    """A lock that excludes no other thread."""

    def __enter__(self) -> None:
        time.sleep(0)

    def __exit__(self, *args: object) -> None:
        pass


def _begins_without_a_lock(self: Reservoir[Any]) -> None:
    """Everybody changes everything at any time."""
    _begin(self)
    self.lock = self.upkeep._lock = NoLock()  # type: ignore[assignment]


_begin = Reservoir._begin


@mutant(Reservoir, "_begin", _begins_without_a_lock, name="a pool without a lock")
def test_a_pool_without_its_lock_is_noticed() -> None:
    with pytest.raises(StressFailed):
        stress(Crowd(timeout=0.5), iterations=1000)
