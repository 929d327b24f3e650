"""Concurrent updates of records: none is lost, and none is reported before it is stored."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moored.sessions._errors import CorruptRecord, StorageError
from moored.sessions.storage._memory import MemoryStorage
from moored.sessions.storage._open import open_storage
from moored.sessions.storage._records import Corruption, Records
from moored.sessions.storage._sealed import Sealed
from moored.sessions.storage._storage import Namespace
from moored.testing import Sim, assert_caught, mutant, run_one, scaled, simulate

pytestmark = pytest.mark.pure

RECORD = (Namespace.SESSION, "bob")


def add(number: int) -> Callable[[bytes | None], bytes]:
    def change(old: bytes | None) -> bytes:
        return (old or b"") + b"%d," % number

    return change


class DelayedStorage(MemoryStorage):
    """A storage with a random delay before and after each operation."""

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


async def concurrent_updates(sim: Sim) -> None:
    """Update one record a hundred times concurrently, and ten others update_another it."""
    storage = DelayedStorage(sim)
    records = Records(storage, "alice")

    async def change(number: int) -> None:
        await asyncio.sleep(sim.random(0, 0.1))
        returned = await records.update(*RECORD, add(number))
        stored = await MemoryStorage.get(storage, "alice", *RECORD)
        assert b"%d," % number in (returned or b""), "update() returned another value"
        assert b"%d," % number in (stored or b""), "update() returned before it was stored"

    async def update_another(number: int) -> None:
        for turn in range(3):
            await records.update(Namespace.SESSION, f"other {number}", add(turn))

    await asyncio.gather(*map(change, range(100)), *map(update_another, range(10)))
    found = await records.get(*RECORD)
    assert sorted(map(int, (found or b"").split(b",")[:-1])) == list(range(100))
    for number in range(10):
        assert await records.get(Namespace.SESSION, f"other {number}") == b"0,1,2,"
    assert records.busy == 0
    assert not records._locks, "an idle record must use no memory"


def test_no_concurrent_update_is_lost() -> None:
    simulate(concurrent_updates, scaled(200, least=8))


async def _without_lock(self: Records, namespace: str, key: str, change: Any) -> bytes | None:
    return await self._changed(namespace, key, change)


async def _returned_too_early(self: Records, namespace: str, key: str, value: bytes) -> None:
    task = asyncio.ensure_future(self.storage.put(self.profile, namespace, key, value))
    await asyncio.sleep(0)
    task.add_done_callback(lambda _: None)


def test_mutant_without_a_lock_per_record_is_caught() -> None:
    planted = mutant(
        Records, "update", _without_lock, name="updates of one record run concurrently"
    )
    caught = assert_caught(concurrent_updates, planted, within=20, clean=5)
    assert isinstance(caught.error, AssertionError)


def test_mutant_that_returns_before_the_write_is_caught() -> None:
    planted = mutant(
        Records, "_write", _returned_too_early, name="update() returns before the write"
    )
    assert_caught(concurrent_updates, planted, within=20, clean=5)


async def test_get_put_update_and_delete() -> None:
    async with Records(MemoryStorage(), "alice") as records:
        assert await records.get(*RECORD) is None
        await records.put(*RECORD, b"one")
        assert await records.get(*RECORD) == b"one"
        assert await records.update(*RECORD, lambda old: (old or b"") + b"!") == b"one!"
        assert await records.storage.get("alice", *RECORD) == b"one!"
        assert await records.update(*RECORD, lambda old: None) is None
        assert await records.get(*RECORD) is None
        await records.put(*RECORD, b"two")
        await records.delete(*RECORD)
        assert await records.storage.keys("alice", "session") == []


async def test_update_that_changes_nothing_is_not_written() -> None:
    class Counting(MemoryStorage):
        writes = 0

        async def put(self, profile: str, namespace: str, key: str, value: bytes) -> None:
            self.writes += 1
            await super().put(profile, namespace, key, value)

    storage = Counting()
    records = Records(storage, "alice")
    await records.put(*RECORD, b"same")
    assert await records.update(*RECORD, lambda old: b"same") == b"same"
    assert storage.writes == 1


async def test_failing_update_fails_its_own_caller_only() -> None:
    records = Records(MemoryStorage(), "alice")

    def fails(old: bytes | None) -> bytes:
        raise ZeroDivisionError("a defect of the update")

    changes = [add(0), fails, add(2), fails, add(4)]
    outcomes = await asyncio.gather(
        *(records.update(*RECORD, change) for change in changes), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [
        bytes,
        ZeroDivisionError,
        bytes,
        ZeroDivisionError,
        bytes,
    ]
    assert await records.get(*RECORD) == b"0,2,4,"


async def test_async_update_or_str_value_is_refused() -> None:
    records = Records(MemoryStorage(), "alice")

    async def wrong(old: bytes | None) -> bytes:
        return b""

    with pytest.raises(TypeError, match="not coroutine"):
        await records.update(*RECORD, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not str"):
        await records.put(*RECORD, "text")  # type: ignore[arg-type]
    assert await records.get(*RECORD) is None


async def test_cancelled_caller_does_not_stop_its_update() -> None:
    records = Records(open_storage("memory:"), "alice")
    task = asyncio.create_task(records.update(*RECORD, add(1)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    assert await records.update(*RECORD, add(2)) == b"1,2,"


async def change_that_fails_after_its_caller(sim: Sim) -> None:
    class Full(DelayedStorage):
        async def put(self, profile: str, namespace: str, key: str, value: bytes) -> None:
            await asyncio.sleep(1.0)
            raise StorageError("the disk is full")

    records = Records(Full(sim), "alice")
    task = asyncio.create_task(records.put(*RECORD, b"1"))
    await asyncio.sleep(0.5)
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()
    await records.close()


def test_error_of_a_change_without_a_caller_is_retrieved() -> None:
    run_one(change_that_fails_after_its_caller, 1)


async def test_storage_error_fails_the_update() -> None:
    class Full(MemoryStorage):
        async def put(self, profile: str, namespace: str, key: str, value: bytes) -> None:
            raise StorageError("the disk is full")

    records = Records(Full(), "alice")
    with pytest.raises(StorageError, match="full"):
        await records.update(*RECORD, add(1))
    assert await records.get(*RECORD) is None


# -- records that cannot be read -----------------------------------------------------------------


async def damage(storage: Sealed) -> bytes:
    await storage.put("alice", *RECORD, b"whole")
    envelope = bytearray(await storage.inner.get("alice", *RECORD) or b"")
    envelope[-1] ^= 1
    await storage.inner.put("alice", *RECORD, bytes(envelope))
    return bytes(envelope)


def sealed() -> Sealed:
    storage = open_storage("memory:")
    assert isinstance(storage, Sealed)
    return storage


async def test_corrupt_record_is_reported_kept_and_read_as_missing() -> None:
    reported: list[Corruption] = []
    storage = sealed()
    records = Records(storage, "alice", on_corrupt=reported.append)
    broken = await damage(storage)
    assert await records.get(*RECORD) is None
    assert records.corrupt == 1
    (corruption,) = reported
    assert (corruption.namespace, corruption.key, corruption.kept) == (*RECORD, True)
    assert "checksum" in corruption.reason
    assert "bob" not in corruption.reason
    assert await storage.inner.get("alice", *RECORD) == broken, "reading must not remove it"
    assert await records.update(*RECORD, add(1)) == b"1,"
    assert records.corrupt == 2
    assert await records.get(*RECORD) == b"1,"
    assert records.corrupt == 2, "the update has replaced it"
    assert await storage.get("alice", "session.corrupt", "bob") == broken


async def test_corrupt_record_can_be_removed_and_overwritten() -> None:
    storage = sealed()
    records = Records(storage, "alice")
    await damage(storage)
    assert await records.update(*RECORD, lambda old: None) is None
    assert await storage.keys("alice", "session") == []
    await damage(storage)
    await records.put(*RECORD, b"new")
    assert await records.get(*RECORD) == b"new"


async def test_failing_corruption_callback_does_not_fail_the_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class CorruptStorage(MemoryStorage):
        async def get(self, profile: str, namespace: str, key: str) -> bytes | None:
            raise CorruptRecord("noise")

        async def set_aside(self, profile: str, namespace: str, key: str) -> bool:
            raise StorageError("the disk is full")

    def fails(corruption: Corruption) -> None:
        raise ZeroDivisionError

    records = Records(CorruptStorage(), "alice", on_corrupt=fails)
    with caplog.at_level(logging.ERROR, "moored.sessions"):
        assert await records.get(*RECORD) is None
    assert [record.message for record in caplog.records] == [
        "a damaged record could not be copied: the disk is full",
        "on_corrupt failed",
    ]


async def test_updates_of_many_records_share_commits(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "accounts.db")
    async with storage, Records(storage, "alice") as records:
        await asyncio.gather(*(records.update("session", f"{n}", add(n)) for n in range(200)))
        assert len(await storage.keys("alice", "session")) == 200
        assert records.busy == 0
        assert repr(records) == "<Records: 0 changes in progress, 0 corrupt>"
