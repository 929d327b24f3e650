"""The facade for threads: on the library's own loop thread, in real time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from moored.leases import LeaseError, LeaseLost, LeaseRefused, sync
from moored.leases._memory import _named
from moored.testing import scaled, stress_threads


@pytest.fixture
def leases() -> Iterator[sync.SyncLeases]:
    with sync.connect("memory://", service_name="orders") as leases:
        yield leases


@pytest.fixture
def place() -> Iterator[str]:
    """A store that several clients of this process share."""
    name = f"place-{time.monotonic_ns()}"
    yield f"memory://{name}"
    _named.pop(name, None)


def test_the_sync_classes_have_the_same_methods() -> None:
    from moored import leases as asynchronous

    for name in ("Leases", "Lease", "RateLimit"):
        theirs = {n for n in dir(getattr(asynchronous, name)) if not n.startswith("_")}
        ours = {n for n in dir(getattr(sync, f"Sync{name}")) if not n.startswith("_")}
        assert theirs <= ours, name


def test_a_lease_is_acquired_and_released_by_threads(leases: sync.SyncLeases) -> None:
    lease = leases.acquire("db", limit=1, owner="pool-1")
    assert lease is not None
    assert (lease.key, lease.owner, lease.ttl, lease.local) == ("db", "pool-1", 180.0, False)
    assert lease.fence >= 1
    assert len(lease.id) == 32
    assert lease.live
    assert 170.0 < lease.remaining() <= 175.0
    assert lease.deadline <= time.monotonic() + 175.0
    assert lease.error is None
    assert leases.acquire("db", limit=1) is None
    assert [held.id for held in leases.held("db")] == [lease.id]
    lease.renew()
    assert repr(lease).startswith("<Lease 'db' of pool-1, fence ")
    assert repr(leases) == "<Leases memory://: open, 1 lease>"
    lease.release()
    lease.release()
    assert leases.statistics().released == 1
    assert leases.recorder.events("leases")


def test_blocks_release_their_lease(leases: sync.SyncLeases) -> None:
    with leases.exclusive("report") as lease:
        assert lease.live
        with pytest.raises(LeaseRefused, match=r"within 0.1 s: held by orders of"):
            leases.exclusive("report", wait=0.1).__enter__()
    assert list(leases.held()) == []
    with pytest.raises(ZeroDivisionError), leases.exclusive("report"):
        raise ZeroDivisionError
    assert list(leases.held()) == []


def test_a_lost_lease_is_reported_by_callback_by_lost_and_by_error(leases: sync.SyncLeases) -> None:
    told = threading.Event()

    def use() -> None:
        with leases.exclusive("report") as lease:
            lease.on_lost(lambda _: told.set())
            assert lease.lost(timeout=0.01) is None
            assert leases.revoke(lease.id, "report")
            with pytest.raises(LeaseLost):
                lease.renew()
            assert told.wait(5.0)
            assert lease.lost() is lease.error

    with pytest.raises(LeaseLost) as caught:
        use()
    assert caught.value.reason == "gone"


def test_a_waiting_thread_wakes_when_the_lease_is_released(leases: sync.SyncLeases) -> None:
    lease = leases.acquire("db", limit=1)
    assert lease is not None
    outcome: list[object] = []
    waiter = threading.Thread(target=lambda: outcome.append(lease.lost()))
    waiter.start()
    lease.release()
    waiter.join(5.0)
    assert outcome == [None]


def test_a_rate_limit_works_from_threads(leases: sync.SyncLeases) -> None:
    limit = leases.rate_limit("connects", rate=100.0, burst=10)
    while not limit.take():
        pass
    begin = time.monotonic()
    for _ in range(5):
        limit.wait()
    assert time.monotonic() - begin >= 0.03
    assert repr(limit).startswith("<RateLimit 'connects': 100/s, burst 10, ")


def test_a_blocking_call_in_a_callback_is_refused(leases: sync.SyncLeases) -> None:
    lease = leases.acquire("db", limit=1)
    assert lease is not None
    failures: list[BaseException] = []

    def callback(_: LeaseLost) -> None:
        try:
            leases.held()
        except RuntimeError as error:
            failures.append(error)

    lease.on_lost(callback)
    leases.revoke(lease.id, "db")
    with pytest.raises(LeaseLost):
        lease.renew()
    assert "would wait for itself" in str(failures[0])


def test_the_limit_holds_for_threads(place: str) -> None:
    limit, inside, most = 3, [], 0
    with sync.connect(place) as first, sync.connect(place) as second:

        def worker(thread: int, iteration: int) -> None:
            nonlocal most
            lease = (first, second)[thread % 2].acquire("db", limit=limit)
            if lease is not None:
                with lease:
                    inside.append(lease.id)
                    most = max(most, len(inside))
                    assert lease.live
                    inside.remove(lease.id)

        report = stress_threads(
            worker, threads=8, iterations=scaled(500, least=50), always=lambda: len(inside) <= limit
        )
        assert report.checks > 0
        assert 1 <= most <= limit
        assert list(first.held()) == []
        assert first.statistics().acquired == first.statistics().released


def test_a_lease_granted_after_its_caller_was_interrupted_is_released(
    leases: sync.SyncLeases, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = leases._runner
    run = runner._thread.run

    def interrupted(work: object, timeout: float | None = None) -> object:
        run(work, timeout)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(runner._thread, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        leases.acquire("db", limit=1)
    monkeypatch.undo()
    deadline = time.monotonic() + 5.0
    while leases.held("db") and time.monotonic() < deadline:
        pass
    assert list(leases.held("db")) == []


def test_a_forked_child_can_use_neither_the_client_nor_the_lease() -> None:
    """In a new interpreter: a fork of this one, with its many threads, would prove nothing."""
    code = """
import os, sys, warnings
from moored.leases import LeaseError, sync
warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads is what is tested
with sync.connect("memory://") as leases:
    lease = leases.acquire("db", limit=1)
    child = os.fork()
    if child == 0:
        try:
            leases.acquire("db", limit=2)
        except LeaseError as error:
            assert "belong to the parent process" in str(error), error
        else:
            os._exit(1)
        assert not lease.live
        lease.release()
        leases.close()
        with sync.connect("memory://") as mine:
            assert mine.acquire("db", limit=1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert lease.live and leases.held("db")
sys.exit(code)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_closed_client_raises() -> None:
    with sync.connect("memory://") as leases:
        lease = leases.acquire("db", limit=1)
    assert lease is not None
    error = lease.lost(timeout=5.0)
    assert error is not None
    assert error.reason == "closed"
    with pytest.raises(LeaseError, match="is not open"):
        leases.acquire("db", limit=1)
    leases.close()
    assert os.getpid() == leases._runner._pid
