"""The hub and its state file, whose reads and writes take place in threads."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from moored.kernel import Recorder
from moored.postgres import Changes, History, Lsn, Position, Reset, Transaction
from moored.postgres.consume import Hub, StateStore, stored
from moored.postgres.decode import Body, Committed

from .conftest import MakePostgres
from .server import LIMIT, confirm_all, following

HISTORY = History("1", 1)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateStore]:
    opened = StateStore(tmp_path / "state.db")
    yield opened
    opened.close()


@pytest.fixture
def hub(store: StateStore) -> Hub:
    """A hub with a running stream."""
    made = Hub(store, Recorder())
    made.on_tables = lambda: confirm_all(made)
    made.begin(HISTORY, 1000)
    return made


def at(lsn: int) -> Position:
    return Position(HISTORY, Lsn(lsn))


async def acknowledged(hub: Hub, changes: Changes, *ends: int) -> None:
    """Send transactions to a consumer that acknowledges them, and store its position."""
    hub.apply_all([Committed(1, Body(), {}, end - 5, end) for end in ends])
    for _ in ends:
        await (await following(changes)).ack()
    await hub.checkpoint(hub.flushed())


@asynccontextmanager
async def reading(hub: Hub) -> AsyncIterator[None]:
    """Run the body after the stored state was read, and before the hub has taken it."""
    reloading = asyncio.create_task(hub.reload())
    await asyncio.sleep(0)
    for thread in threading.enumerate():
        if thread.name == "moored state file":
            thread.join()
    yield
    await asyncio.wait_for(reloading, LIMIT)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin exclusive")
        yield
        other.execute("rollback")


async def test_a_consumer_that_attaches_while_the_state_is_read_is_not_reset(hub: Hub) -> None:
    async with reading(hub):
        changes = hub.attach("new")
    hub.begin(HISTORY, 1000)
    hub.apply_all([Committed(1, Body(), {}, 1095, 1100)])
    item = await asyncio.wait_for(anext(changes), LIMIT)
    assert isinstance(item, Transaction), item
    assert hub._store.load().consumers.keys() == {"new"}


async def test_a_consumer_that_is_dropped_while_the_state_is_read_retains_nothing(hub: Hub) -> None:
    await hub.attach("old").aclose()
    async with reading(hub):
        dropping = asyncio.create_task(hub.drop("old"))
    await dropping
    assert hub.consumers() == {}
    assert hub._store.load().consumers == {}


async def test_a_start_that_is_given_while_the_state_is_read_is_used(hub: Hub) -> None:
    async with hub.attach("search") as changes:
        await acknowledged(hub, changes, 1100, 1200)
    async with reading(hub):
        changes = hub.attach("search", start=at(1100))
    assert hub.consumers()["search"]["acknowledged"] == str(Lsn(1100))


async def test_an_earlier_start_lowers_the_stored_position(hub: Hub) -> None:
    """Otherwise `follow()` takes the snapshots of its chunks for passed."""
    slow = hub.attach("slow")
    async with hub.attach("search") as changes:
        await acknowledged(hub, changes, 1100, 1200, 1300)
    assert hub.stored("search") == 1300
    changes = hub.attach("search", start=at(1100))
    assert hub.stored("search") == 1100
    hub.begin(HISTORY, 1000)
    await acknowledged(hub, changes, 1200)
    assert hub.stored("search") == hub._store.load().consumers["search"].acknowledged == 1200
    assert slow.name == "slow"


async def test_an_earlier_start_is_stored_although_a_later_position_is_written_meanwhile(
    hub: Hub, store: StateStore
) -> None:
    async with hub.attach("search") as changes:
        await acknowledged(hub, changes, 1100)
        hub.apply_all([Committed(1, Body(), {}, 1195, 1200)])
        await (await following(changes)).ack()
    with locked(store.path):
        other = hub.attach("other")  # a thread waits for the file, and the next one for that thread
        saving = asyncio.create_task(hub.checkpoint(1000))
        await asyncio.sleep(0)
        changes = hub.attach("search", start=at(1050))
    await asyncio.wait_for(saving, LIMIT)
    assert store.load().consumers["search"].acknowledged == 1050
    assert other.name == "other"


async def test_a_consumer_that_attaches_during_a_reset_has_no_position_of_the_old_history(
    hub: Hub,
) -> None:
    resetting = asyncio.create_task(hub.reset("restored"))
    await asyncio.sleep(0)
    changes = hub.attach("new")
    await asyncio.wait_for(resetting, LIMIT)
    hub.begin(HISTORY, 500)
    confirm_all(hub)
    assert isinstance(await asyncio.wait_for(anext(changes), LIMIT), Reset)
    await hub.checkpoint(500)
    assert hub._store.load().consumers["new"].acknowledged == 500


@pytest.mark.parametrize("name", ["bad\ud800", "bad\0", b"bad", None])
async def test_a_name_that_cannot_be_stored_is_refused(make: MakePostgres, name: Any) -> None:
    async with make() as pg:
        for attach in (pg.changes, lambda name: pg.follow("orders", consumer=name)):
            with pytest.raises(ValueError, match="without NUL and surrogates"):
                attach(name)
        assert pg.changes("good").name == "good"


def test_a_posted_write_that_fails_does_not_stop_the_others(
    store: StateStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.post(store.put, "bad\ud800", 5)
    store.post(store.put, "good", 5)
    assert store.load().consumers.keys() == {"good"}
    assert "a write to the state file" in caplog.text


async def test_many_posted_writes_take_few_threads(store: StateStore) -> None:
    with locked(store.path):
        before = threading.active_count()
        for number in range(100):
            store.post(store.put_new, f"consumer {number}", None)
            await asyncio.sleep(0)
        assert threading.active_count() <= before + 2
    await asyncio.wait_for(stored(store.flush), LIMIT)
    assert len(store.load().consumers) == 100


async def test_a_stored_position_is_ready_when_a_stream_has_begun(
    hub: Hub, store: StateStore
) -> None:
    """A follower that continues reads chunks at once: they need the history of the stream."""
    changes = hub.attach("search", tables=("orders",))
    await acknowledged(hub, changes, 1100)
    later = Hub(store, Recorder(), state=store.load())
    later.on_tables = lambda: confirm_all(later)
    again = later.attach("search", tables=("orders",))
    assert not later.is_ready("search")
    later.begin(HISTORY, 1100)
    assert later.is_ready("search")
    await again.aclose()
