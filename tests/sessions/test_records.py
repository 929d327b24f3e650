"""Records that both directions change: no update is lost, and none is told before it is kept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moored.kernel import QueueFull
from moored.sessions._errors import CorruptRecord, StorageError
from moored.sessions.storage._memory import MemoryStorage
from moored.sessions.storage._records import Corruption, Records
from moored.sessions.storage._sealed import Sealed
from moored.sessions.storage._storage import Namespace, open_storage
from moored.testing import Sim, assert_caught, mutant, scaled, simulate

pytestmark = pytest.mark.pure

PLACE = (Namespace.SESSION, "bob")


def add(number: int) -> Callable[[bytes | None], bytes]:
    def change(old: bytes | None) -> bytes:
        return (old or b"") + b"%d," % number

    return change


class Jittery(MemoryStorage):
    """A storage that takes some time for everything, as the simulator likes."""

    def __init__(self, sim: Sim) -> None:
        super().__init__()
        self._sim = sim

    async def get(self, profile: str, namespace: str, key: str) -> bytes | None:
        await asyncio.sleep(self._sim.random(0, 0.01))
        value = await super().get(profile, namespace, key)
        await asyncio.sleep(self._sim.random(0, 0.01))
        return value

    async def put(self, profile: str, namespace: str, key: str, value: bytes) -> None:
        await asyncio.sleep(self._sim.random(0, 0.01))
        await super().put(profile, namespace, key, value)
        await asyncio.sleep(self._sim.random(0, 0.01))


async def a_hundred_changes(sim: Sim) -> None:
    """Two directions change one record a hundred times; others are changed beside it."""
    storage = Jittery(sim)
    records = Records(storage, "alice")

    async def change(number: int) -> None:
        await asyncio.sleep(sim.random(0, 0.1))
        told = await records.update(*PLACE, add(number))
        kept = await MemoryStorage.get(storage, "alice", *PLACE)
        assert b"%d," % number in (told or b""), "not what was made of it"
        assert b"%d," % number in (kept or b""), "told before it was kept"

    async def beside(number: int) -> None:
        for turn in range(3):
            await records.update(Namespace.SESSION, f"other {number}", add(turn))

    await asyncio.gather(*map(change, range(100)), *map(beside, range(10)))
    found = await records.get(*PLACE)
    assert sorted(map(int, (found or b"").split(b",")[:-1])) == list(range(100))
    for number in range(10):
        assert await records.get(Namespace.SESSION, f"other {number}") == b"0,1,2,"
    assert records.busy == 0, "nothing is kept for a record without work"


def test_of_a_hundred_changes_none_is_lost() -> None:
    simulate(a_hundred_changes, scaled(200, least=8))


async def _without_custodian(self: Records, namespace: str, key: str, change: Any) -> bytes | None:
    return await self._changed(namespace, key, change)


async def _told_too_early(self: Records, namespace: str, key: str, value: bytes) -> None:
    task = asyncio.ensure_future(self.storage.put(self.profile, namespace, key, value))
    await asyncio.sleep(0)
    task.add_done_callback(lambda _: None)


def test_without_a_custodian_changes_are_lost() -> None:
    planted = mutant(Records, "update", _without_custodian, name="no custodian")
    caught = assert_caught(a_hundred_changes, planted, within=20, clean=5)
    assert isinstance(caught.error, AssertionError)


def test_a_change_that_is_told_before_it_is_kept_is_noticed() -> None:
    planted = mutant(Records, "_write", _told_too_early, name="told too early")
    assert_caught(a_hundred_changes, planted, within=20, clean=5)


async def test_reading_writing_and_removing() -> None:
    async with Records(MemoryStorage(), "alice") as records:
        assert await records.get(*PLACE) is None
        await records.put(*PLACE, b"one")
        assert await records.get(*PLACE) == b"one"
        assert await records.update(*PLACE, lambda old: (old or b"") + b"!") == b"one!"
        assert await records.storage.get("alice", *PLACE) == b"one!"
        assert await records.update(*PLACE, lambda old: None) is None
        assert await records.get(*PLACE) is None
        await records.put(*PLACE, b"two")
        await records.delete(*PLACE)
        assert await records.storage.keys("alice", "session") == []


async def test_a_change_that_changes_nothing_is_not_written() -> None:
    class Counting(MemoryStorage):
        writes = 0

        async def put(self, profile: str, namespace: str, key: str, value: bytes) -> None:
            self.writes += 1
            await super().put(profile, namespace, key, value)

    storage = Counting()
    records = Records(storage, "alice")
    await records.put(*PLACE, b"same")
    assert await records.update(*PLACE, lambda old: b"same") == b"same"
    assert storage.writes == 1


async def test_a_change_that_fails_fails_its_own_caller_alone() -> None:
    records = Records(MemoryStorage(), "alice")

    def fails(old: bytes | None) -> bytes:
        raise ZeroDivisionError("of its own")

    changes = [add(0), fails, add(2), fails, add(4)]
    outcomes = await asyncio.gather(
        *(records.update(*PLACE, change) for change in changes), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [
        bytes,
        ZeroDivisionError,
        bytes,
        ZeroDivisionError,
        bytes,
    ]
    assert await records.get(*PLACE) == b"0,2,4,"


async def test_a_change_is_no_coroutine() -> None:
    records = Records(MemoryStorage(), "alice")

    async def wrong(old: bytes | None) -> bytes:
        return b""

    with pytest.raises(TypeError, match="not coroutine"):
        await records.update(*PLACE, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not str"):
        await records.put(*PLACE, "text")  # type: ignore[arg-type]
    assert await records.get(*PLACE) is None


async def test_who_gives_up_waiting_does_not_stop_a_change() -> None:
    records = Records(open_storage("memory:"), "alice")
    task = asyncio.create_task(records.update(*PLACE, add(1)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    assert await records.update(*PLACE, add(2)) == b"1,2,"


async def test_a_record_takes_so_many_changes_at_once() -> None:
    records = Records(MemoryStorage(), "alice", max_queue=5)
    outcomes = await asyncio.gather(
        *(records.update(*PLACE, add(number)) for number in range(8)), return_exceptions=True
    )
    assert sum(isinstance(outcome, QueueFull) for outcome in outcomes) == 2
    assert await records.get(*PLACE) == b"0,1,2,3,4,5,"


async def test_a_storage_that_fails_fails_the_change() -> None:
    class Full(MemoryStorage):
        async def put(self, profile: str, namespace: str, key: str, value: bytes) -> None:
            raise StorageError("the disk is full")

    records = Records(Full(), "alice")
    with pytest.raises(StorageError, match="full"):
        await records.update(*PLACE, add(1))
    assert await records.get(*PLACE) is None


# -- records that cannot be read -----------------------------------------------------------------


async def damage(storage: Sealed) -> bytes:
    await storage.put("alice", *PLACE, b"whole")
    envelope = bytearray(await storage.inner.get("alice", *PLACE) or b"")
    envelope[-1] ^= 1
    await storage.inner.put("alice", *PLACE, bytes(envelope))
    return bytes(envelope)


def sealed() -> Sealed:
    storage = open_storage("memory:")
    assert isinstance(storage, Sealed)
    return storage


async def test_a_corrupt_record_is_a_miss_that_is_told_and_kept() -> None:
    told: list[Corruption] = []
    storage = sealed()
    records = Records(storage, "alice", on_corrupt=told.append)
    broken = await damage(storage)
    assert await records.get(*PLACE) is None
    assert records.corrupt == 1
    (corruption,) = told
    assert (corruption.namespace, corruption.key, corruption.kept) == (*PLACE, True)
    assert "checksum" in corruption.reason
    assert "bob" not in corruption.reason
    assert await storage.inner.get("alice", *PLACE) == broken, "it is still where it was"
    assert await records.update(*PLACE, add(1)) == b"1,"
    assert records.corrupt == 2
    assert await records.get(*PLACE) == b"1,"
    assert records.corrupt == 2, "the next write has mended it"
    assert await storage.get("alice", "session.corrupt", "bob") == broken


async def test_a_corrupt_record_can_be_removed_and_written() -> None:
    storage = sealed()
    records = Records(storage, "alice")
    await damage(storage)
    assert await records.update(*PLACE, lambda old: None) is None
    assert await storage.keys("alice", "session") == []
    await damage(storage)
    await records.put(*PLACE, b"new")
    assert await records.get(*PLACE) == b"new"


async def test_nobody_who_is_told_can_break_it(caplog: pytest.LogCaptureFixture) -> None:
    class Worse(MemoryStorage):
        async def get(self, profile: str, namespace: str, key: str) -> bytes | None:
            raise CorruptRecord("noise")

        async def set_aside(self, profile: str, namespace: str, key: str) -> bool:
            raise StorageError("the disk is full")

    def fails(corruption: Corruption) -> None:
        raise ZeroDivisionError

    records = Records(Worse(), "alice", on_corrupt=fails)
    with caplog.at_level(logging.ERROR, "moored.sessions"):
        assert await records.get(*PLACE) is None
    assert [record.message for record in caplog.records] == [
        "a damaged record could not be kept: the disk is full",
        "on_corrupt failed",
    ]


async def test_changes_of_many_records_share_commits(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "accounts.db")
    async with storage, Records(storage, "alice") as records:
        await asyncio.gather(*(records.update("session", f"{n}", add(n)) for n in range(200)))
        assert len(await storage.keys("alice", "session")) == 200
        assert records.busy == 0
        assert repr(records) == "<Records: 0 being changed, 0 corrupt>"
