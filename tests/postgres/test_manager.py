"""The manager and its children, without a server: replaced children, timers and checks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from moored.kernel import Backoff, Clock, Recorder, Supervisor
from moored.postgres._settings import Settings
from moored.postgres.consume import StateStore
from moored.postgres.manage import Stack, _manager
from moored.postgres.manage._manager import Manager, SubsystemFailed
from moored.postgres.manage._manager_core import Act, Action, Actions, Timer
from moored.postgres.manage._parts import Parts
from moored.postgres.server._faults import Diagnosis
from moored.postgres.stream._replication import ReplicationClient
from moored.testing import Sim, run_one

pytestmark = [pytest.mark.every_loop, pytest.mark.pure]

URL = "postgresql://nobody@127.0.0.1:1/none"


@pytest.fixture
async def manager(tmp_path: Path) -> AsyncIterator[Manager]:
    with made(tmp_path) as manager:
        async with Supervisor("connections", intensity=None) as connections:
            manager._parts = Parts(connections, manager._post_event)
            yield manager


@contextlib.contextmanager
def made(tmp_path: Path) -> Iterator[Manager]:
    clock = Clock.current()
    store = StateStore(tmp_path / "state.db")
    stack = Stack(
        Settings(database_url=URL, replication_url=URL, state_dir=tmp_path),
        clock,
        Recorder(clock=clock),
        store,
        store.load(),
    )
    try:
        yield Manager(stack, lambda: None)
    finally:
        stack.store.close()


async def fail() -> None:
    raise ConnectionError("lost")


def told(diagnosis: Diagnosis) -> Actions:
    return [Action(Act.EMIT, "failed", detail=diagnosis.message)]


async def test_the_failure_of_a_job_is_an_event(manager: Manager) -> None:
    await manager._parts.start("job", fail, told)
    event = await manager._events.get()
    assert event() == [Action(Act.EMIT, "failed", detail="lost")]


async def test_the_failure_of_a_job_that_was_replaced_changes_nothing(manager: Manager) -> None:
    await manager._parts.start("job", fail, told)
    event = await manager._events.get()
    await manager._parts.start("job", partial(asyncio.sleep, 60), told)
    assert event() == []


async def test_a_failure_of_an_owner_is_an_event_and_a_restart_that_waits_for_work(
    manager: Manager,
) -> None:
    parts, ran = manager._parts, asyncio.Event()

    async def run() -> None:
        ran.set()

    await parts.own("owner", fail, told, parts.replace("owner"))
    event = await manager._events.get()
    assert event() == [Action(Act.EMIT, "failed", detail="lost")]
    await _until_restarted(parts, "owner")
    (shown,) = parts._supervisor.tree().children
    assert (shown.state, shown.restarts, shown.last_failure) == ("running", 1, "lost (PartFailed)")
    await parts.own("owner", run, told, parts.replace("owner"))
    await asyncio.wait_for(ran.wait(), 10)


async def _until_restarted(parts: Parts, name: str) -> None:
    tree = parts._supervisor.tree
    while tree().children[0].generation < 2 or not parts.is_running(name):  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_an_event_of_a_client_that_was_replaced_changes_nothing(manager: Manager) -> None:
    manager._core.start()
    post = manager._parts.replace("replication")
    post(lambda: [Action(Act.START_POOL)])
    await manager._start_client()
    events = [manager._events.get_nowait()() for _ in range(manager._events.qsize())]
    assert [Action(Act.START_POOL)] not in events


async def test_a_timer_that_fires_early_waits_for_the_rest(manager: Manager) -> None:
    at = Clock.current().monotonic() + 0.05
    manager._set_timer(Timer.LIVENESS.value, 0.05)
    await manager._events.get()
    assert Clock.current().monotonic() >= at


async def test_a_cancelled_timer_posts_no_event(manager: Manager) -> None:
    manager._set_timer(Timer.LIVENESS.value, 0.0)
    manager._set_timer(Timer.RETRY.value, 0.0)
    manager._timers.cancel(Timer.LIVENESS.value)
    await manager._events.get()
    assert manager._events.empty()


async def test_a_check_is_not_started_while_the_last_one_is_running(manager: Manager) -> None:
    manager._core.start()
    await manager._start_client()
    looks: list[ReplicationClient] = []
    may_end = asyncio.Event()

    async def look(client: ReplicationClient) -> None:
        looks.append(client)
        await may_end.wait()

    await manager._start_check("lock", look)
    await manager._start_check("lock", look)
    assert len(looks) == 1
    may_end.set()
    while manager._parts.is_running("lock"):  # noqa: ASYNC110 (nothing tells when)
        await asyncio.sleep(0)
    await manager._start_check("lock", look)
    assert len(looks) == 2


async def test_a_run_that_ends_by_a_defect_is_restarted_after_the_backoff(manager: Manager) -> None:
    def defect() -> Actions:
        raise ZeroDivisionError("a defect")

    manager._core.backoff = Backoff(0.2, 10.0)
    manager._post_event(defect)
    begun = Clock.current().monotonic()
    with pytest.raises(SubsystemFailed, match="a defect"):
        await manager._process_events()
    assert Clock.current().monotonic() - begun >= 0.2


@pytest.mark.parametrize(("waiting", "longest"), [([], 60.0), (["orders"], 10.0), (None, 10.0)])
def test_tables_are_checked_every_minute_and_sooner_while_some_are_not_published(
    tmp_path: Path, waiting: list[str] | None, longest: float
) -> None:
    """None: the look itself failed."""
    looks: list[float] = []

    async def scenario(sim: Sim) -> None:
        async def look() -> list[str] | None:
            looks.append(sim.now)
            return waiting

        with made(tmp_path) as manager, contextlib.suppress(TimeoutError):
            manager._publish_tables = look  # type: ignore[method-assign]
            async with asyncio.timeout(300.0):
                await manager._keep_published()

    for seed in range(5):
        looks.clear()
        run_one(scenario, seed).result()
        waits = [after - before for before, after in pairwise(looks)]
        assert max(waits) == pytest.approx(longest)


def test_tables_that_consumers_wait_for_are_logged_when_they_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_manager, "MARKER_EVERY", 3600.0)
    names = [f"tenant_{number}.a_table_with_a_long_name" for number in range(100)]

    async def scenario(sim: Sim) -> None:
        async def look() -> list[str]:
            return names if sim.now < 300 else names[:1] if sim.now < 600 else []

        with made(tmp_path) as manager, contextlib.suppress(TimeoutError):
            manager._publish_tables = look  # type: ignore[method-assign]
            async with asyncio.timeout(900.0):
                await manager._keep_published()

    caplog.set_level(logging.INFO, "moored.postgres")
    run_one(scenario, 0).result()
    many, single, none = (each.getMessage() for each in caplog.records)
    assert "and 97 others" in many
    assert len(many) < 300
    assert f"not published yet: {names[0]} (" in single
    assert "all tables of consumers are published" in none


def test_the_stream_is_rewound_at_most_every_five_seconds(tmp_path: Path) -> None:
    begun: list[float] = []

    async def scenario(sim: Sim) -> None:
        with made(tmp_path) as manager:
            while sim.now < 60.0:
                manager._rewind()
                await asyncio.sleep(0.3)
                while not manager._events.empty():
                    manager._events.get_nowait()
                    begun.append(sim.now)

    run_one(scenario, 0).result()
    waits = [after - before for before, after in pairwise(begun)]
    assert begun[0] < 1.0
    assert min(waits) > 4.5  # as exact as this test looks
    assert max(waits) < 6.0
