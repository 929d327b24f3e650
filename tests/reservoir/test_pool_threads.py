"""The pool for threads, on a real server."""

from __future__ import annotations

import logging
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from tests.reservoir.support import PATIENCE, eventually, through
from tests.servers import free_port

from moored.reservoir import (
    ConnectionPool,
    PoolClosed,
    PoolOverloaded,
    PoolTimeout,
    ReservoirConfig,
)
from moored.testing import FaultProxy

Pool = ConnectionPool


@pytest.fixture
def pool(module_url: str) -> Iterator[Pool]:
    """One connection, ready."""
    with ConnectionPool(module_url, max_size=1, name="shop") as pool:
        pool.wait()
        yield pool


class Caller(threading.Thread):
    """A thread that does something, and remembers what came of it."""

    def __init__(self, work: Callable[[], Any], name: str | None = None) -> None:
        super().__init__(name=name, daemon=True)
        self.work = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:
            self.error = error

    def outcome(self) -> Any:
        self.join(PATIENCE)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


def waiting(pool: Pool, number: int = 1) -> None:
    """Until so many callers wait."""
    eventually(lambda: pool.statistics().waiting == number)


def ctrl_c() -> None:
    """As a terminal does it: a signal that wakes the main thread from whatever it waits for."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


# -- order -----------------------------------------------------------------------------------------


def test_callers_are_served_in_the_order_of_arrival(pool: Pool) -> None:
    served: list[int] = []

    def call(number: int) -> None:
        with pool.connection() as conn:
            served.append(number)
            conn.execute("select 1")

    with pool.connection():
        callers = []
        for number in range(10):
            callers.append(Caller(lambda number=number: call(number)))  # type: ignore[misc]
            waiting(pool, number + 1)
    for caller in callers:
        caller.outcome()
    assert served == list(range(10))


def test_no_caller_overtakes_the_waiters(pool: Pool) -> None:
    conn = pool.getconn()
    first = Caller(pool.getconn)
    waiting(pool)
    pool.putconn(conn)
    with pytest.raises(PoolTimeout):
        pool.getconn(timeout=0.0)
    assert first.outcome() is conn
    pool.putconn(conn)


def test_connections_are_used_in_turn(module_url: str) -> None:
    with ConnectionPool(module_url, max_size=3) as pool:
        pool.wait()
        used = []
        for _ in range(6):
            with pool.connection() as conn:
                used.append(conn)
        assert used[:3] == used[3:]
        assert len(set(used)) == 3


# -- being interrupted -----------------------------------------------------------------------------


def test_ctrl_c_while_waiting_loses_nothing(pool: Pool) -> None:
    conn = pool.getconn()

    def interrupt() -> None:
        waiting(pool)
        ctrl_c()

    Caller(interrupt)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pool.getconn(timeout=60.0)
    assert time.monotonic() - began < PATIENCE
    assert pool.statistics().waiting == 0
    pool.putconn(conn)
    with pool.connection(timeout=1.0) as again:
        assert again is conn


def test_ctrl_c_before_the_wait_begins_leaves_the_queue(
    module_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiter that stays in the queue without its thread would swallow a connection."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    with ConnectionPool(module_url, config=ReservoirConfig(enabled=False, max_size=1)) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(pool.reservoir.upkeep, "nudge", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pool.getconn()
        assert pool.statistics().waiting == 0
        pool.putconn(pool.getconn())


def test_ctrl_c_when_a_thread_is_served_loses_nothing(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection was handed over, and then came the Ctrl-C."""
    from moored.reservoir import _pool_threads

    conn = pool.getconn()
    wait = _pool_threads._ThreadWaiter.wait

    def interrupted(waiter: Any, seconds: float) -> None:
        wait(waiter, seconds)
        assert waiter.item is not None
        raise KeyboardInterrupt

    monkeypatch.setattr(_pool_threads._ThreadWaiter, "wait", interrupted)
    caller = Caller(pool.getconn)
    waiting(pool)
    pool.putconn(conn)
    with pytest.raises(KeyboardInterrupt):
        caller.outcome()
    monkeypatch.undo()
    with pool.connection(timeout=1.0) as again:
        assert again is conn


def test_ctrl_c_in_close_does_not_stop_it_and_the_next_close_waits_for_it() -> None:
    may_close, closing = threading.Event(), threading.Event()

    def close(conn: object) -> None:
        closing.set()
        assert may_close.wait(PATIENCE)

    def interrupt() -> None:
        assert closing.wait(PATIENCE)
        ctrl_c()

    pool: Pool = ConnectionPool(connect=object, max_size=1, close_connection=close)
    pool.wait()
    Caller(interrupt)
    with pytest.raises(KeyboardInterrupt):
        pool.close(timeout=PATIENCE)
    may_close.set()
    pool.close()
    assert pool.reservoir.upkeep._stopped


def test_a_checkout_that_the_garbage_collector_ends_while_the_lock_is_held_is_returned(
    module_url: str,
) -> None:
    pool: Pool = ConnectionPool(module_url, max_size=2)

    def rows() -> Iterator[None]:
        with pool.connection() as conn:
            conn.execute("select 1")
            yield

    def collect() -> None:
        """Abandon two checkouts, as if the collector ran in the pool's own code."""
        generator, conn = rows(), pool.getconn()
        next(generator)
        with pool.reservoir.lock:
            del generator
            pool.putconn(conn)

    pool.wait()
    Caller(collect).outcome()
    eventually(lambda: pool.statistics().size == 2)
    assert pool.statistics().refills == 2
    pool.close()


def test_ctrl_c_in_a_block_rolls_back(pool: Pool, observer: psycopg.Connection[Any]) -> None:
    observer.execute("create table if not exists interrupted (n int)")

    def work() -> None:
        with pool.connection() as conn:
            conn.execute("insert into interrupted values (1)")
            Caller(ctrl_c)
            conn.execute("select pg_sleep(30)")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert observer.execute("select count(*) from interrupted").fetchone() == (0,)
    with pool.connection(timeout=PATIENCE) as conn:
        conn.execute("select 1")


# -- what people read ------------------------------------------------------------------------------


def test_a_timeout_says_where_all_connections_are(module_url: str) -> None:
    with ConnectionPool(module_url, max_size=2, creation_rate=20) as pool:
        pool.wait()
        done = threading.Event()

        def export() -> None:
            with pool.connection():
                done.wait(PATIENCE)

        holder = Caller(export, name="export")
        eventually(lambda: pool.statistics().in_use == 1)
        with pool.connection():
            patient = Caller(pool.getconn)
            waiting(pool)
            with pytest.raises(PoolTimeout) as caught:
                pool.getconn(timeout=0.1)
        assert re.fullmatch(
            r"pool-\d+: no connection within 0\.1 s: 2 of 2 in use, "
            r"1 waiting \(the first for 0\.\d s\); "
            r'longest held \d\.\d s \(checkout of thread "export"\); 0 connects in flight, creation'
            r" limited to 20/s",
            str(caught.value),
        )
        pool.putconn(patient.outcome())
        done.set()
        holder.outcome()


def test_a_timeout_says_why_nothing_could_be_opened() -> None:
    pool: Pool = ConnectionPool(f"host=127.0.0.1 port={free_port()}", max_size=2)
    with pool, pytest.raises(PoolTimeout) as caught:
        pool.getconn(timeout=0.3)
    text = str(caught.value)
    assert text.startswith(f"{pool.name}: no connection within 0.3 s: 0 of 2 in use; ")
    assert re.search(r"connecting has failed for \d\.\d s: .*[Cc]onnection refused", text)


def test_repr(module_url: str) -> None:
    pool = ConnectionPool(module_url, max_size=2, open=False)
    place = re.escape(module_url.rpartition("@")[2])
    assert re.fullmatch(rf"<ConnectionPool {place}: new>", repr(pool))
    with pool:
        pool.wait()
        with pool.connection():
            assert re.fullmatch(
                rf"<ConnectionPool {place}: 2 of 2, 1 ready, 1 in use, 0 waiting, "
                r"next expiry in 1\d m \d+ s>",
                repr(pool),
            )
    assert re.fullmatch(rf"<ConnectionPool {place}: closed>", repr(pool))


def test_a_leak_is_logged_with_the_stack_of_its_checkout(
    module_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = ReservoirConfig(max_size=1, scan_every=0.02)
    with ConnectionPool(module_url, config=config, leak_after=0.05, name="shop") as pool:
        with pool.connection():
            eventually(lambda: "leak_after" in caplog.text)
            time.sleep(0.1)
        (text,) = [r.getMessage() for r in caplog.records if "leak_after" in r.getMessage()]
        assert re.match(
            r"shop: a connection has been in use for 0\.\d s \(leak_after=0\.05 s\)", text
        )
        assert 'checkout of thread "MainThread"' in text
        assert "test_a_leak_is_logged_with_the_stack_of_its_checkout" in text
        assert "with pool.connection()" in text


# -- open ------------------------------------------------------------------------------------------


def test_open_with_wait_waits_for_the_low_watermark(module_url: str) -> None:
    config = ReservoirConfig(max_size=3, low_watermark=2, start_stagger=0.0)
    pool: Pool = ConnectionPool(module_url, config=config, open=False)
    pool.open(wait=True)
    assert pool.statistics().size >= 2
    pool.close()


def test_open_with_wait_warns_after_its_timeout_and_reports_progress(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[str] = []
    pool: Pool = ConnectionPool(
        f"host=127.0.0.1 port={free_port()}", max_size=2, name="shop", open=False
    )
    pool.open(wait=True, timeout=3.0, progress=told.append)
    assert not pool.closed
    assert told[0].startswith("shop: filling, 0 of 2 connections; the last connect failed: ")
    (warning,) = [r.getMessage() for r in caplog.records if "starting anyway" in r.getMessage()]
    assert warning.startswith("shop has 0 of 2 connections after 3 s: ")
    pool.close()


def test_concurrent_callers_open_a_pool_once(module_url: str) -> None:
    pool: Pool = ConnectionPool(module_url, max_size=2, open=False)
    start = threading.Barrier(8)

    def use() -> None:
        start.wait()
        pool.open()
        with pool.connection() as conn:
            conn.execute("select 1")

    for caller in [Caller(use) for _ in range(8)]:
        caller.outcome()
    pool.wait()
    assert pool.statistics().refills == 2
    pool.close()


# -- close -----------------------------------------------------------------------------------------


def test_waiters_get_pool_closed_when_the_pool_is_closed(pool: Pool) -> None:
    conn = pool.getconn()
    patient = Caller(pool.getconn)
    waiting(pool)
    pool.close()
    pool.close()
    with pytest.raises(PoolClosed, match="shop was closed while this caller waited"):
        patient.outcome()
    assert pool.statistics().timeouts == 0
    with pytest.raises(PoolClosed, match="shop is not open: it is closed"):
        pool.getconn()
    assert not conn.closed
    pool.putconn(conn)
    eventually(lambda: conn.closed)


def test_a_block_that_outlives_its_pool_commits(
    pool: Pool, observer: psycopg.Connection[Any]
) -> None:
    observer.execute("create table if not exists outlived (n int)")
    with pool.connection() as conn:
        pool.close()
        conn.execute("insert into outlived values (1)")
    assert observer.execute("select n from outlived").fetchall() == [(1,)]
    eventually(lambda: conn.closed)


def test_close_ends_in_time_although_a_connect_hangs(
    module_url: str, thread_proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread that connects cannot be stopped: it is left, and what it opens is closed."""
    thread_proxy.stall()
    pool: Pool = ConnectionPool(through(thread_proxy, module_url), max_size=1, name="shop")
    eventually(lambda: thread_proxy.statistics().open == 1)
    began = time.monotonic()
    pool.close(timeout=1.0)
    assert time.monotonic() - began < 10.0
    assert "shop: 1 connection did not close within 1 s" in caplog.text
    thread_proxy.heal()
    eventually(lambda: thread_proxy.statistics().open == 0)


def test_close_ends_in_time_although_a_connection_does_not_close(
    module_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()

    def close(conn: psycopg.Connection[Any]) -> None:
        go_on.wait(PATIENCE)
        conn.close()

    pool: Pool = ConnectionPool(module_url, max_size=1, close_connection=close, name="shop")
    pool.wait()
    with pool.connection() as conn:
        pass
    began = time.monotonic()
    pool.close(timeout=1.0)
    assert time.monotonic() - began < 10.0
    assert "shop: 1 connection did not close within 1 s" in caplog.text
    go_on.set()
    eventually(lambda: conn.closed)


@pytest.mark.parametrize("closed", [False, True])
def test_a_broken_return_is_a_warning_only_while_the_pool_is_open(
    pool: Pool, caplog: pytest.LogCaptureFixture, closed: bool
) -> None:
    caplog.set_level(logging.INFO)
    with pool.connection() as conn:
        if closed:
            pool.close(timeout=0.0)
        conn.close()
    (record,) = [each for each in caplog.records if "that came back broken" in each.message]
    assert record.levelno == (logging.INFO if closed else logging.WARNING)


def test_a_pool_may_be_closed_by_its_own_callback() -> None:
    closed = threading.Event()

    def give_up(pool: Pool) -> None:
        pool.close()
        closed.set()

    pool: Pool = ConnectionPool(
        f"host=127.0.0.1 port={free_port()}",
        max_size=1,
        reconnect_timeout=0.0,
        reconnect_failed=give_up,
    )
    began = time.monotonic()
    assert closed.wait(PATIENCE)
    assert time.monotonic() - began < 10.0
    with pytest.raises(PoolClosed):
        pool.getconn()


# -- limits ----------------------------------------------------------------------------------------


def test_too_many_waiting(module_url: str) -> None:
    with ConnectionPool(module_url, max_size=1, max_waiting=2) as pool:
        with pool.connection():
            patient = [Caller(lambda: pool.putconn(pool.getconn())) for _ in range(2)]
            waiting(pool, 2)
            with pytest.raises(PoolOverloaded, match=r"2 callers wait already \(max_waiting=2\)"):
                pool.getconn()
        for caller in patient:
            caller.outcome()
        assert pool.statistics().refused == 1


def test_resize(module_url: str) -> None:
    with ConnectionPool(module_url, max_size=1) as pool:
        pool.wait()
        pool.resize(3)
        pool.wait()
        assert (pool.min_size, pool.max_size, pool.statistics().size) == (3, 3, 3)
        held = pool.getconn()
        pool.resize(1, 2)
        assert pool.statistics().size == 1
        pool.resize(1)
        assert pool.statistics().size == 0
        pool.putconn(held)
        assert pool.statistics().size == 1
        assert pool.statistics().discards == {"reservoir_full": 2}


def test_drain_replaces_all(module_url: str) -> None:
    with ConnectionPool(module_url, max_size=2) as pool:
        pool.wait()
        held = pool.getconn()
        before = {item.conn for item in pool.reservoir.core.items.values()}
        pool.drain()
        assert not held.closed
        pool.putconn(held)
        pool.wait()
        eventually(lambda: all(conn.closed for conn in before))
        assert not before & {item.conn for item in pool.reservoir.core.items.values()}
        assert pool.statistics().discards == {"drained": 2}


def test_two_pools_to_one_server_share_the_rate(module_url: str, thread_proxy: FaultProxy) -> None:
    """A burst of 5 and 10 a second: 16 connections are not there before a second has passed."""
    url = through(thread_proxy, module_url)
    config = ReservoirConfig(max_size=8, rate=10.0, burst=5, start_stagger=0.0)
    began = time.monotonic()
    with ConnectionPool(url, config=config) as first, ConnectionPool(url, config=config) as second:
        time.sleep(0.5)
        seen = thread_proxy.statistics().accepted
        assert 5 <= seen <= 5 + 10 * (time.monotonic() - began) + 1
        first.wait()
        second.wait()
        assert time.monotonic() - began >= (16 - 5) / 10.0 - 0.1


def test_a_disabled_reservoir_connects_on_demand(module_url: str, thread_proxy: FaultProxy) -> None:
    config = ReservoirConfig(enabled=False, max_size=2)
    with ConnectionPool(through(thread_proxy, module_url), config=config) as pool:
        pool.open(wait=True, timeout=0.0)
        assert thread_proxy.statistics().accepted == 0
        with pool.connection() as first:
            first.execute("select 1")
        with pool.connection() as again, pool.connection() as second:
            assert again is first
            assert second is not first
        assert thread_proxy.statistics().accepted == 2


def test_a_check_that_always_fails_does_not_hammer_the_server(
    module_url: str, thread_proxy: FaultProxy
) -> None:
    """Each failed check would cost a connection: with the rate of 100, thirty in this time."""

    def check(conn: psycopg.Connection[Any]) -> None:
        raise psycopg.OperationalError("not good enough")

    with ConnectionPool(through(thread_proxy, module_url), max_size=1, check=check) as pool:
        began = time.monotonic()
        with pytest.raises(PoolTimeout):
            pool.getconn(timeout=1.0)
        assert time.monotonic() - began < 10.0
        assert thread_proxy.statistics().accepted < 10
        stats = pool.get_stats()
        assert (stats["requests_num"], stats["requests_errors"]) == (1, 1)


# -- misuse ----------------------------------------------------------------------------------------


def test_putconn_within_a_block_is_refused(pool: Pool) -> None:
    """Otherwise another caller would get the connection while the block still uses it."""
    with pool.connection() as conn:
        with pytest.raises(ValueError, match=r"was not handed out by getconn\(\)"):
            pool.putconn(conn)
        assert pool.statistics().in_use == 1
    assert pool.statistics().size == 1


def test_of_two_threads_that_return_the_same_connection_one_succeeds(pool: Pool) -> None:
    for _ in range(20):
        conn = pool.getconn()
        start = threading.Barrier(2)

        def put(conn: Any = conn, start: threading.Barrier = start) -> str:
            start.wait()
            try:
                pool.putconn(conn)
            except ValueError:
                return "refused"
            return "given back"

        assert sorted(caller.outcome() for caller in [Caller(put), Caller(put)]) == [
            "given back",
            "refused",
        ]
        assert pool.statistics().size == 1
